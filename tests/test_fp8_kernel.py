"""Products with FP8 weights for few rows: kernels/fp8_linear.cu against float64.

It runs on the CPU through tests/cuda_on_cpu.h, and on the GPU where there is one.
"""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from compiled import GXX, NVCC, assert_no_spills, compile_for_gpu, need_nvrtc
from fp8_on_cpu import converted_on_cpu, linear_on_cpu
from sgl_specflow.eval import fp8_linear as benchmark
from sgl_specflow.kernels import fp8_linear_cuda, nvrtc
from sgl_specflow.kernels.fp8_linear import FP8, fp8_linear, fp8_linear_triton, quantise_rows
from sgl_specflow.kernels.fp8_linear_cuda import (
    CLUSTERS,
    HOPPERS_SHARED_BYTES,
    MOST_STAGES,
    Variant,
    alternatives,
    block_time,
    choose,
    fits,
    row_tiles_of,
    serves,
    steps_of,
)

launch = fp8_linear_cuda.fp8_linear_cuda
BFLOAT, HALF = torch.bfloat16, torch.float16
on_cpu = pytest.mark.skipif(GXX is None, reason="g++ is missing")

CASES = [  # rows, features, depth, dtype, cluster, clusters that run together
    (1, 1, 16, BFLOAT, 1, 1),
    (1, 128, 512, BFLOAT, 1, 1),
    (15, 130, 272, BFLOAT, 1, 1),
    (16, 300, 1600, BFLOAT, 1, 2),  # several tiles a block, and four steps a tile
    (16, 129, 2064, HALF, 1, 2),
    (7, 97, 80, BFLOAT, 2, 1),
    (16, 257, 1104, BFLOAT, 2, 1),
    (16, 256, 64, BFLOAT, 4, 2),  # less depth than warps
    (9, 150, 4176, BFLOAT, 4, 1),
    (17, 40, 144, BFLOAT, 1, 1),
    (32, 260, 592, HALF, 1, 2),
    (31, 129, 1040, BFLOAT, 2, 1),
    (32, 128, 2064, BFLOAT, 4, 1),
    (33, 65, 528, BFLOAT, 1, 1),
    (48, 130, 576, HALF, 1, 2),
    (64, 64, 1040, BFLOAT, 2, 1),
    (63, 70, 2064, BFLOAT, 4, 1),
]
FORMS = [  # rows, features, depth, dtype, cluster, clusters that run together, tile, stages, whether x is kept, dependent
    (16, 70, 2064, BFLOAT, 1, 1, 32, 6, False, True),  # fewer steps than stages
    (5, 100, 4176, HALF, 1, 2, 32, 3, True, True),  # steps end inside a turn of the ring
    (16, 150, 3088, BFLOAT, 2, 1, 64, 4, True, False),
    (9, 130, 1040, BFLOAT, 2, 1, 64, 4, False, True),
    (16, 257, 2064, BFLOAT, 2, 2, 128, 2, True, True),
    (16, 140, 4176, BFLOAT, 4, 1, 128, 2, True, True),
    (13, 65, 6160, BFLOAT, 4, 1, 64, 4, True, True),
    (16, 33, 2064, HALF, 4, 1, 32, 3, False, False),
    (32, 90, 2064, BFLOAT, 2, 1, 32, 3, True, True),
    (31, 130, 1040, BFLOAT, 1, 1, 128, 2, False, True),
    (64, 70, 2064, BFLOAT, 4, 1, 32, 2, True, True),
    (50, 65, 1040, HALF, 2, 1, 64, 2, False, True),
]
SHAPES = [(4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)]  # Qwen3-8B's head and LM head: features, depth


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")(test))


def problem(rows, features, depth, dtype, device="cpu", apart=8):
    """x, whose rows lie `apart` numbers further apart than they are long, with NaN between; FP8 weights of rows of very
    different size; and their scales."""
    generator = torch.Generator(device).manual_seed(rows + features + depth)
    normal = {"generator": generator, "device": device}
    wide = torch.full((rows, depth + apart), torch.nan, dtype=dtype, device=device)
    x = wide[:, :depth]
    x.copy_(torch.randn(rows, depth, **normal))
    size = torch.logspace(-4, 1, features, device=device)[:, None]
    return x, *quantise_rows((torch.randn(features, depth, **normal) * size).to(dtype))


def assert_product(out, x, weight, scale):
    """out is the float64 product rounded once, but for what float32 sums lose."""
    assert out.dtype == x.dtype and out.shape == (x.shape[0], weight.shape[0])
    x = x.double()
    for place in range(0, weight.shape[0], 16384):
        part = slice(place, place + 16384)
        real = weight[part].double() * scale[part].double()[:, None]
        exact, size = x @ real.T, x.norm(dim=1)[:, None] * real.norm(dim=1)
        allowed = exact.abs() * torch.finfo(out.dtype).eps / 2 + 1e-5 * size
        assert ((out[:, part].double() - exact).abs() <= allowed).all()


def variant_of(rows, dtype, cluster):
    return Variant(dtype, row_tiles_of(rows), cluster, 128 if rows <= 32 else 64)


def form_of(case):
    rows, _, depth, dtype, cluster, _, tile, stages, keeps, dependent = case
    kept_steps = steps_of(depth, cluster) if keeps else 0
    return Variant(dtype, row_tiles_of(rows), cluster, tile, stages, kept_steps, dependent)


@on_cpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cuda_source_multiplies(case):
    rows, features, depth, dtype, cluster, clusters = case
    x, weight, scale = problem(rows, features, depth, dtype)
    variant = variant_of(rows, dtype, cluster)
    out = linear_on_cpu(x, weight, scale, variant, clusters)
    assert_product(out, x, weight, scale)
    # The order in which warps and lanes run shows nowhere, nor does how many blocks there are.
    backwards = linear_on_cpu(x, weight, scale, variant, -(-features // variant.tile), reversed_order=True)
    assert torch.equal(out.view(torch.int16), backwards.view(torch.int16))


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_every_form_here_fits_a_blocks_shared_memory(case):
    assert form_of(case).shared_bytes <= fp8_linear_cuda.HOPPERS_SHARED_BYTES


@on_cpu
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_every_form_of_the_cuda_source_gives_the_same_bits(case):
    rows, features, depth, dtype, cluster, clusters, *_ = case
    x, weight, scale = problem(rows, features, depth, dtype)
    wanted = linear_on_cpu(x, weight, scale, variant_of(rows, dtype, cluster), 1)
    assert_product(wanted, x, weight, scale)
    for backwards in (False, True):  # the runner stops where x is read, or out written, before a dependent form's wait
        out = linear_on_cpu(x, weight, scale, form_of(case), clusters, reversed_order=backwards)
        assert torch.equal(out.view(torch.int16), wanted.view(torch.int16))


def every_code(dtype, device="cpu"):
    """x and weights whose product's rows are each the values of all FP8 codes but NaN, and these values."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(FP8)
    codes = codes[~codes.float().isnan()]
    weight = codes.view(torch.uint8)[:, None].expand(-1, 64).contiguous().view(FP8)
    x = torch.eye(64, device=device).to(dtype)[[*range(0, 64, 5), 62, 63]]
    return x, weight, torch.ones(len(codes), device=device), codes.to(dtype).expand(len(x), -1)


@on_cpu
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_every_fp8_code_is_exact(dtype):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    wanted = codes.view(FP8).float()
    wanted = torch.where(wanted.isnan(), torch.where(codes < 128, 480.0, -480.0), wanted)
    got = converted_on_cpu(codes, dtype)
    assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))
    x, weight, scale, values = every_code(dtype)
    assert torch.equal(linear_on_cpu(x, weight, scale, Variant(dtype, 1, 1, 128), 1), values)


def test_quantised_rows_hold_no_nan():
    weight = torch.tensor([448.0, 449.0, 463.9, 1e-30, 3.4e38, 0.0])[:, None] * torch.linspace(-1, 1, 48)
    assert not quantise_rows(weight)[0].float().isnan().any()


@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize("features, depth", SHAPES, ids=str)
def test_a_hopper_gpus_multiprocessors_are_shared_evenly(rows, features, depth):
    variant = choose(BFLOAT, rows, depth, features, 132)
    tiles, together = -(-features // variant.tile), 132 // variant.cluster
    turns = -(-tiles // together)
    # At least 96 percent of them work at a time, each on whole steps of the depth.
    assert features * depth >= 0.96 * 132 * turns * variant.tile * depth / variant.cluster
    assert depth % (variant.cluster * fp8_linear_cuda.WARPS * fp8_linear_cuda.CHUNK) == 0


@pytest.mark.parametrize(
    "features, depth, forms",  # (cluster, tile) at 16, 32 and 64 rows
    [
        (4096, 4096, [(1, 32), (4, 128), (2, 64)]),
        (24576, 4096, [(1, 64), (2, 128), (1, 64)]),
        (4096, 12288, [(1, 32), (4, 128), (2, 64)]),
        (151936, 4096, [(1, 128), (1, 128), (1, 64)]),
    ],
)
def test_an_h200_gets_the_forms_that_were_found_fastest_on_one(features, depth, forms):
    """Qwen3-8B's products. Whoever changes how forms are chosen has measured again: `eval fp8_linear --sweep`."""
    chosen = [choose(BFLOAT, rows, depth, features, 132) for rows in (16, 32, 64)]
    assert [(variant.cluster, variant.tile) for variant in chosen] == forms


def test_x_that_is_kept_is_copied_once():
    once, again = (Variant(BFLOAT, 1, 1, 128, 2, kept) for kept in (steps_of(4096, 1), 0))
    turns = -(-151936 // 128 // 132)
    difference = block_time(again, 4096, 151936, 132) - block_time(once, 4096, 151936, 132)
    assert difference == (turns - 1) * 16 * 2 * 4096


def test_what_cannot_be_copied_in_whole_vectors_is_left_to_the_other_kernel():
    x, weight, scale = problem(16, 40, 64, BFLOAT)
    assert fits(x, weight, scale) and not serves(x, weight, scale)  # on the CPU
    assert fits(x[:1], weight, scale) and fits(x[3:5], weight, scale)
    assert not fits(x.float(), weight, scale)
    assert not fits(x[:0], weight, scale)
    assert not fits(problem(65, 40, 64, BFLOAT)[0], weight, scale)
    assert not fits(problem(16, 40, 64, BFLOAT, apart=4)[0], weight, scale)
    assert not fits(problem(16, 40, 72, BFLOAT)[0][:, 4:68], weight, scale)
    assert not fits(*problem(16, 40, 72, BFLOAT))
    assert not fits(x, weight, scale.repeat_interleave(2)[::2])
    shifted = torch.zeros(40 * 64 + 8, dtype=torch.uint8)[8:].view(FP8).view(40, 64)
    assert not fits(x, shifted, scale)
    assert not fits(x.T.contiguous().T, weight, scale)


@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize("features, depth", SHAPES, ids=str)
def test_alternatives_fit_a_block_and_hold_the_choice(rows, features, depth):
    found = alternatives(BFLOAT, rows, depth, features, 132)
    assert len(set(found)) == len(found) and choose(BFLOAT, rows, depth, features, 132) in found
    assert {variant.dependent for variant in found} == {False, True}
    for variant in found:
        assert variant.shared_bytes <= HOPPERS_SHARED_BYTES and 2 <= variant.stages <= MOST_STAGES
        assert variant.kept_steps in (0, steps_of(depth, variant.cluster))


def test_a_variant_of_another_shape_is_refused():
    x, weight, scale = problem(16, 40, 1088, BFLOAT)
    fine = Variant(BFLOAT, 1, 2, 64, kept_steps=2)
    fp8_linear_cuda._check(fine, x)
    for changes in ({"dtype": HALF}, {"row_tiles": 2}, {"kept_steps": 1}, {"cluster": 1}):
        with pytest.raises(ValueError, match="is not what"):
            launch(x, weight, scale, dataclasses.replace(fine, **changes))


@pytest.mark.skipif(NVCC is None, reason="nvcc is missing")
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_the_cuda_source_compiles(target, dtype, rows, tmp_path):
    for cluster in CLUSTERS if target == "sm_90a" else (2,):
        defines = variant_of(rows, dtype, cluster).defines()
        assert_no_spills(compile_for_gpu(fp8_linear_cuda.SOURCE, defines, target, tmp_path / "kernel.cubin"))


@pytest.mark.skipif(NVCC is None, reason="nvcc is missing")
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_every_form_of_the_cuda_source_compiles(case, tmp_path):
    defines = form_of(case).defines()
    assert_no_spills(compile_for_gpu(fp8_linear_cuda.SOURCE, defines, "sm_90a", tmp_path / "kernel.cubin"))


def test_nvrtc_compiles_it(tmp_path, monkeypatch):
    need_nvrtc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variant in (variant_of(16, BFLOAT, 4), variant_of(64, HALF, 1), form_of(FORMS[0])):
        assert variant.shared_bytes <= HOPPERS_SHARED_BYTES
        assert b"fp8_linear" in fp8_linear_cuda.compile_for(variant, "sm_90a")


class RecordingDriver:
    """cuda-python's driver module without a driver: its structures, and launches that are noted."""

    def __init__(self, driver):
        self.driver, self.launches = driver, []

    def __getattr__(self, name):
        return getattr(self.driver, name)

    def cuLaunchKernel(self, function, x, y, z, threads, *rest):
        self.launches.append(((x, y, z), threads, []))
        return (0,)

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        attributes = [
            (attribute.id, attribute.value.programmaticStreamSerializationAllowed) for attribute in config.attrs
        ]
        assert int(config.hStream) == 7 and config.sharedMemBytes == 1024 and pointers and config.numAttrs == 1
        self.launches.append((grid, config.blockDimX, attributes))
        return (0,)


def test_a_launch_ahead_has_the_attribute_and_others_have_not():
    driver = RecordingDriver(pytest.importorskip("cuda.bindings.driver"))
    kernels = object.__new__(nvrtc.LoadedKernels)
    kernels._driver, kernels.function = driver, lambda name, shared_bytes: None
    argument = fp8_linear_cuda.LinearArguments()
    for ahead in (False, True):
        kernels.launch("fp8_linear", (12, 1, 1), 256, 1024, 7, argument, ahead)
    serialization = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert driver.launches == [((12, 1, 1), 256, []), ((12, 1, 1), 256, [(serialization, 1)])]


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("capturing", [False, True])
def test_only_dependent_variants_inside_a_graph_are_launched_ahead(dependent, capturing, monkeypatch):
    launches = []
    kernels = SimpleNamespace(launch=lambda *arguments: launches.append(arguments))
    monkeypatch.setattr(fp8_linear_cuda, "_load", lambda variant, device: (kernels, 3))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    x, weight, scale = problem(16, 300, 64, BFLOAT)
    launch(x, weight, scale, Variant(BFLOAT, 1, 2, 64, dependent=dependent))
    ((name, grid, threads, _, stream, _, ahead),) = launches
    assert (name, grid, threads, stream) == ("fp8_linear", (6, 1, 1), 256, 7)
    assert ahead is (dependent and capturing)


def test_the_benchmark_measures_each_kernel_and_sums_a_step(monkeypatch):
    def microseconds(calls):
        for call in calls:
            assert call().shape == (3, 48)
        return float(len(calls))

    monkeypatch.setattr(benchmark, "microseconds", microseconds)
    monkeypatch.setattr(benchmark, "fp8_linear_triton", fp8_linear)
    monkeypatch.setattr(benchmark, "ROTATED_BYTES", 4 * 48 * 32)
    monkeypatch.setattr(benchmark, "LEAST_CALLS", 4)
    monkeypatch.setattr(benchmark, "SHAPES", {"o_proj": (48, 32), "lm_head": (48, 32)})
    rows = [row for layer in benchmark.SHAPES for row in benchmark.measure(layer, (3,), "cpu")]
    assert [set(row) for row in rows] == [set(benchmark.COLUMNS)] * 2
    assert all(row["ours_us"] == row["triton_us"] == row["bf16_us"] == 4.0 for row in rows)
    assert all(0 < row["max_error"] < 0.01 for row in rows)
    rows[0]["scaled_mm_us"] = None
    (step,) = benchmark.steps(rows)
    assert step["ours_us"] == 6 * 4.0 and step["scaled_mm_us"] is None and step["rows"] == 3


def test_the_sweep_measures_each_variant_and_holds_them_to_the_same_bits(monkeypatch):
    asked = []

    def microseconds(calls):
        assert len(calls) == benchmark.LEAST_CALLS and calls[-1]().shape == (16, 4096)
        return float(asked[-1].stages)

    def launched(x, weight, scale, variant):
        asked.append(variant)
        return fp8_linear(x, weight, scale) * (2 if variant == wrong else 1)

    monkeypatch.setattr(benchmark, "microseconds", microseconds)
    monkeypatch.setattr(benchmark, "ROTATED_BYTES", 1)
    monkeypatch.setattr(benchmark, "SHAPES", {"o_proj": (4096, 64)})
    monkeypatch.setattr(fp8_linear_cuda, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(fp8_linear_cuda, "fp8_linear_cuda", launched)
    wrong, wanted = None, benchmark.variants(16, 4096, 64)
    rows = benchmark.sweep("o_proj", (16,), "cpu")
    assert len(rows) == len(wanted) and set(asked) == set(wanted)
    assert all(set(row) == set(benchmark.SWEEP_COLUMNS) for row in rows) and sum(row["now"] for row in rows) == 1
    assert [row["behind_us"] for row in rows] == sorted(float(variant.stages) for variant in wanted)
    wrong = wanted[-1]
    with pytest.raises(AssertionError):
        benchmark.sweep("o_proj", (16,), "cpu")


def test_the_benchmark_asks_for_a_gpu_and_a_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, reason in (([], "--out"), (["--out", str(tmp_path / "x.json")], "needs a CUDA GPU")):
        with pytest.raises(SystemExit):
            benchmark.main(arguments)
        assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_on_the_gpu(case):
    rows, features, depth, dtype, cluster, _ = case
    x, weight, scale = problem(rows, features, depth, dtype, "cuda")
    assert serves(x, weight, scale)
    assert_product(launch(x, weight, scale, variant_of(rows, dtype, cluster)), x, weight, scale)


@gpu
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_every_form_gives_the_same_bits_on_the_gpu(case):
    rows, features, depth, dtype, cluster, *_ = case
    x, weight, scale = problem(rows, features, depth, dtype, "cuda")
    wanted = launch(x, weight, scale, variant_of(rows, dtype, cluster))
    assert_product(wanted, x, weight, scale)
    assert torch.equal(launch(x, weight, scale, form_of(case)), wanted)


def chain(x, layers, dependent, plain_between):
    """Products of products, whose outs the allocator gives each other's memory; plain_between: PyTorch's kernels between."""
    for weight, scale in layers:
        variant = choose(x.dtype, *x.shape, len(weight), 132)
        x = launch(x, weight, scale, dataclasses.replace(variant, dependent=dependent))
        if plain_between:
            x = x * 0.5
    return x


@gpu
@pytest.mark.parametrize("plain_between", [False, True], ids=["one after another", "other kernels between"])
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_dependent_launches_in_a_graph_read_what_came_before(rows, plain_between):
    sizes = [4096, 4096, 1024, 12288, 4096, 128, 4096]
    layers = [problem(1, n, k, BFLOAT, "cuda")[1:] for k, n in zip(sizes, sizes[1:])]
    layers = [(weight, scale / (scale.mean() * 448 * len(weight) ** 0.5)) for weight, scale in layers]
    x, written = torch.zeros(rows, sizes[0], device="cuda", dtype=BFLOAT), torch.zeros(rows, sizes[0], device="cuda")
    chain(x, layers, True, plain_between)  # compiles; outside a graph it is launched like any kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(written)
        last = chain(x, layers, True, plain_between).clone()
    for turn in range(20):
        written.normal_(generator=torch.Generator("cuda").manual_seed(turn))
        graph.replay()
        wanted = chain(written.to(BFLOAT), layers, False, plain_between)
        assert wanted.isfinite().all() and wanted.count_nonzero() > 0.9 * wanted.numel() and torch.equal(last, wanted)


@gpu
def test_a_graph_has_programmatic_edges_between_dependent_launches():
    from cuda.bindings import runtime

    x, weight, scale = problem(16, 4096, 4096, BFLOAT, "cuda")
    variant = dataclasses.replace(choose(BFLOAT, 16, 4096, 4096, 132), dependent=True)
    launch(x, weight, scale, variant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        launch(launch(x, weight, scale, variant), weight, scale, variant)
    raw = runtime.cudaGraph_t(graph.raw_cuda_graph())
    edges_of = getattr(runtime, "cudaGraphGetEdges_v2", runtime.cudaGraphGetEdges)
    _, _, _, data, count = edges_of(raw, 8)
    programmatic = runtime.cudaGraphDependencyType.cudaGraphDependencyTypeProgrammatic
    assert count == 1 and int(data[0].type) == int(programmatic)


@gpu
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("features, depth", SHAPES, ids=str)
def test_the_heads_products_on_the_gpu(rows, features, depth):
    x, weight, scale = problem(rows, features, depth, BFLOAT, "cuda")
    assert serves(x, weight, scale)
    out = fp8_linear(x, weight, scale)
    assert_product(out, x, weight, scale)
    for _ in range(3):
        assert torch.equal(fp8_linear(x, weight, scale), out)


@gpu
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_every_fp8_code_is_exact_on_the_gpu(dtype):
    x, weight, scale, values = every_code(dtype, "cuda")
    assert serves(x, weight, scale) and torch.equal(fp8_linear(x, weight, scale), values)


@gpu
def test_both_kernels_of_the_gpu_agree():
    x, weight, scale = problem(16, 1000, 4096, BFLOAT, "cuda")
    ours, triton = fp8_linear(x, weight, scale), fp8_linear_triton(x, weight, scale)
    torch.testing.assert_close(ours, triton, rtol=2**-7, atol=1e-5 * 64 * 64)
    assert_product(fp8_linear(x[:, :4088], weight[:, :4088].contiguous(), scale), x[:, :4088], weight[:, :4088], scale)


@gpu
@pytest.mark.parametrize("rows", [15, 32, 64])
def test_a_cuda_graph_holds_products(rows):
    problems = [problem(rows, features, depth, BFLOAT, "cuda") for features, depth in SHAPES[:3]]
    for arguments in problems:
        fp8_linear(*arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [fp8_linear(*arguments) for arguments in problems]
    for turn in range(2):
        for x, _, _ in problems:
            x.copy_(torch.randn_like(x) * (turn + 1))
        graph.replay()
        for out, arguments in zip(outs, problems):
            assert_product(out, *arguments)
