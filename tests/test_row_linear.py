"""Products of few rows with their ends: kernels/row_linear.cu against float64.

It runs on the CPU through tests/cuda_on_cpu.h, and on the GPU where there is one.
"""

import dataclasses
import re
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import triton
from compiled import GXX, NVCC, assert_no_spills, compile_for_gpu, need_nvrtc
from row_linear_on_cpu import row_linear_on_cpu
from sgl_specflow.eval import row_linear as benchmark
from sgl_specflow.eval.shapes import WEAVER_27B
from sgl_specflow.kernels import row_linear
from sgl_specflow.kernels.row_linear import (
    EPSILON,
    HOPPERS_SHARED_BYTES,
    Ends,
    Variant,
    alternatives,
    choose,
    grid_of,
    row_groups_of,
    steps_of,
)

launch = row_linear.row_linear
BFLOAT, HALF = torch.bfloat16, torch.float16
on_cpu = pytest.mark.skipif(GXX is None, reason="g++ is missing")

# A Weaver layer's products, and the ends that none of them has alone.
QKV, OUT, GATE_UP, DOWN = Ends(True, True), Ends(residual=True), Ends(True, True, True), Ends(bias=True, residual=True)
PLAIN, ALL = Ends(), Ends(True, True, True, True)
CASES = [  # ends, rows, features, depth, dtype, warps, tile, dependent
    (PLAIN, 1, 8, 8, BFLOAT, 4, 8, False),
    (QKV, 7, 96, 200, BFLOAT, 8, 24, True),
    (QKV, 8, 40, 1024, BFLOAT, 8, 24, True),  # a tile that is mostly behind the last feature
    (QKV, 33, 40, 104, HALF, 4, 16, True),
    (OUT, 1, 24, 264, BFLOAT, 8, 8, True),
    (OUT, 16, 40, 136, HALF, 8, 16, False),
    (OUT, 130, 24, 40, BFLOAT, 4, 8, True),  # three blocks' rows, most warps without depth
    (GATE_UP, 8, 80, 64, BFLOAT, 8, 48, True),
    (GATE_UP, 17, 112, 328, BFLOAT, 8, 16, False),
    (GATE_UP, 64, 48, 72, HALF, 4, 32, True),
    (DOWN, 8, 16, 2088, BFLOAT, 8, 8, True),  # nine steps a warp
    (DOWN, 31, 24, 1040, BFLOAT, 4, 8, True),  # more steps than lie in registers
    (DOWN, 64, 40, 552, HALF, 4, 32, False),
    (ALL, 9, 32, 536, BFLOAT, 16, 16, True),
]
SHAPES = {  # ends, depth, features
    "qkv": (QKV, 1024, 3072),
    "o": (OUT, 1024, 1024),
    "gate_up": (GATE_UP, 1024, 6144),
    "down": (DOWN, 3072, 1024),
}


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")(test))


def problem(ends, rows, features, depth, dtype, device="cpu"):
    """x, whose rows are of very different size; weight; bias and residual where the ends have them."""
    generator = torch.Generator(device).manual_seed(rows + features + depth)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)
    x = (normal(rows, depth) * torch.logspace(-2, 1, rows, device=device)[:, None]).to(dtype)
    weight = (normal(features, depth) / depth**0.5).to(dtype)
    outputs = features // 2 if ends.gated else features
    bias, residual = normal(features).to(dtype), normal(rows, outputs).to(dtype)
    return x, weight, bias if ends.bias else None, residual if ends.residual else None


def assert_outputs(out, ends, x, weight, bias=None, residual=None):
    """out is the float64 result rounded once, but for what float32 sums lose: a hundred-thousandth of |x| |weight row| for
    each feature, and what comes of it behind a gate, of which silu's slope is below 1.1."""
    assert out.dtype == x.dtype
    x, weight = x.double(), weight.double()
    if ends.norm:
        x = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    exact = x @ weight.T + (bias.double() if ends.bias else 0)
    lost = 1e-5 * (x.norm(dim=-1)[..., None] * weight.norm(dim=-1) + exact.abs())
    if ends.gated:
        (gate, up), (gate_lost, up_lost) = exact.chunk(2, -1), lost.chunk(2, -1)
        exact = torch.nn.functional.silu(gate) * up
        lost = 1.1 * gate_lost * (up.abs() + up_lost) + gate.abs() * up_lost
    if ends.residual:
        exact = exact + residual.double()
    smallest = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
    allowed = exact.abs() * torch.finfo(out.dtype).eps / 2 + smallest + 1.01 * lost
    assert out.shape == exact.shape and ((out.double() - exact).abs() <= allowed).all()


def variant_of(case):
    ends, rows, _, depth, dtype, warps, tile, dependent = case
    return Variant(dtype, ends, steps_of(depth, warps), warps, row_groups_of(rows), tile, dependent)


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@on_cpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cuda_source_multiplies_between_its_ends(case):
    """The runner stops where x or the residual is read, or out written, before a dependent form's wait."""
    tensors, variant = problem(*case[:5]), variant_of(case)
    out = row_linear_on_cpu(variant, *tensors)
    assert_outputs(out, variant.ends, *tensors)
    # The order in which warps and lanes run shows nowhere.
    assert same_bits(row_linear_on_cpu(variant, *tensors, reversed_order=True), out)


@on_cpu
def test_a_rows_bits_depend_on_no_other_row_and_on_no_tile():
    x, weight, bias, _ = problem(GATE_UP, 64, 96, 200, BFLOAT)
    wanted = row_linear_on_cpu(Variant(BFLOAT, GATE_UP, 1, 8, 8, 32), x, weight, bias)
    for groups, tile, dependent in ((1, 16, False), (2, 48, True), (4, 32, False)):
        variant = Variant(BFLOAT, GATE_UP, 1, 8, groups, tile, dependent)
        for first, count in ((0, 8 * groups), (5, 8 * groups - 3), (30, 34)):  # the last are more than one block's
            part = slice(first, first + count)
            assert same_bits(row_linear_on_cpu(variant, x[part].clone(), weight, bias), wanted[part])


@on_cpu
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_rows_of_zeros_and_far_gates(dtype):
    """A row without a direction is normed to itself, and a gate's exponential may overflow."""
    x, weight, bias, _ = problem(GATE_UP, 3, 16, 64, dtype)
    x[1] = 0
    bias[:4] = torch.tensor([300.0, -300.0, 90.0, -90.0])
    out = row_linear_on_cpu(Variant(dtype, GATE_UP, 1, 4, 1, 16), x, weight, bias)
    assert_outputs(out, GATE_UP, x, weight, bias)
    assert out.isfinite().all()


def test_what_is_not_taken_is_refused_by_name():
    x, weight, bias, residual = problem(DOWN, 3, 24, 40, BFLOAT)
    row_linear.check(x, weight, bias, residual)
    row_linear.check(x.view(1, 3, 40), weight, bias, residual.view(1, 3, 24))
    odd = torch.zeros(3 * 40 + 4, dtype=BFLOAT)[4:].view(3, 40)
    for named, arguments in {
        "x is torch.float32": (x.float(), weight),
        r"x is \(0, 40\)": (x[:0], weight),
        "multiples of 8": (x[:, :36].clone(), weight[:, :36].clone()),
        r"weight \(20, 40\)": (x, weight[:20]),
        "features .first. of 16": (x, weight, bias, None, True),
        r"x is torch.bfloat16 \(3, 32\)": (x[:, :32].clone(), weight),
        "weight is torch.float16": (x, weight.half()),
        r"bias is torch.bfloat16 \(16,\)": (x, weight, bias[:16]),
        r"residual is torch.bfloat16 \(2, 24\)": (x, weight, bias, residual[:2]),
        "on meta": (x, weight, bias.to("meta")),
        "x must be contiguous": (x.T.contiguous().T, weight),
        "x must be contiguous, at": (odd, weight),
        "weight must be contiguous": (x, weight.T.contiguous().T),
    }.items():
        with pytest.raises(ValueError, match=f"row_linear: .*{named}"):
            launch(*arguments[:4], gated=len(arguments) > 4)
    with pytest.raises(ValueError, match="depth 131072 do not fit"):
        choose(BFLOAT, PLAIN, 8, 1 << 17, 1024, 132, True)


@pytest.mark.parametrize(
    "changes", [{"dtype": HALF}, {"ends": PLAIN}, {"steps": 2}, {"warps": 4}, {"steps": 1000}], ids=str
)
def test_a_variant_of_another_shape_or_device_is_refused(changes, monkeypatch):
    properties = SimpleNamespace(shared_memory_per_block_optin=99 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    variant = Variant(BFLOAT, OUT, 4, 8, 1, 8)
    row_linear._check_variant(variant, BFLOAT, OUT, 1024, 0)
    wrong = dataclasses.replace(variant, **changes)
    depth = 1024 if wrong.steps < 1000 else wrong.steps * 8 * 32
    with pytest.raises(ValueError, match="is not what|bytes of shared memory, 101376 are there"):
        row_linear._check_variant(wrong, BFLOAT, OUT, depth, 0)


@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_a_layers_products_spread_over_an_h200(name, rows):
    ends, depth, features = SHAPES[name]
    chosen = choose(BFLOAT, ends, rows, depth, features, 132, True)
    across, along, _ = grid_of(chosen, rows, features // 2 if ends.gated else features)
    assert (across, along) == (128, 1) if rows <= 64 else across * along >= 128
    found = alternatives(BFLOAT, ends, rows, depth, features, 132, True)
    assert chosen in found and len(set(found)) == len(found) and {form.dependent for form in found} == {False, True}
    assert {form.warps for form in found} >= {4, 8}
    for form in found:
        assert form.shared_bytes <= HOPPERS_SHARED_BYTES and form.steps * form.warps * 32 >= depth


@pytest.mark.skipif(NVCC is None, reason="nvcc is missing")
@pytest.mark.parametrize(
    "target, rows, dtype, names",
    [
        ("sm_80", 8, HALF, ["gate_up", "down"]),
        ("sm_90a", 8, BFLOAT, list(SHAPES)),
        ("sm_90a", 16, HALF, ["gate_up"]),
        ("sm_90a", 64, BFLOAT, ["gate_up", "down"]),
        ("sm_100a", 32, BFLOAT, ["gate_up", "down"]),
    ],
)
def test_the_cuda_source_compiles(target, rows, dtype, names, tmp_path):
    for name in names:
        ends, depth, features = SHAPES[name]
        variant = choose(dtype, ends, rows, depth, features, 132, target != "sm_80")
        report = compile_for_gpu(row_linear.SOURCE, variant.defines(), target, tmp_path / "kernel.cubin")
        assert_no_spills(report)


@pytest.mark.skipif(NVCC is None, reason="nvcc is missing")
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_the_machine_code_asks_for_all_it_reads_ahead(name, tmp_path):
    """Weights before the wait for the kernel before, and x behind it, all of it before the first product."""
    ends, depth, features = SHAPES[name]
    variant = choose(BFLOAT, ends, 8, depth, features, 132, True)
    cubin = tmp_path / "kernel.cubin"
    compile_for_gpu(row_linear.SOURCE, variant.defines(), "sm_90a", cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", cubin]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    order = re.findall(r"LDGSTS|ACQBULK|LDG\.E\.128|HMMA", code)
    waited, first = order.index("ACQBULK"), order.index("HMMA")
    assert order[:waited] == ["LDGSTS"] * (1 + variant.steps * variant.tile // 8)  # biases first
    assert [part for part in order[waited:first] if part != "LDGSTS"] == ["ACQBULK"] + ["LDG.E.128"] * variant.steps
    assert "LDG.E.128" not in order[first:]


def test_nvrtc_compiles_it(tmp_path, monkeypatch):
    need_nvrtc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for case in (CASES[1], CASES[-1]):
        assert b"row_linear" in row_linear.compile_for(variant_of(case), "sm_90a")
    assert len(list(tmp_path.rglob("row_linear-sm_90a-*.cubin"))) == 2


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("capturing", [False, True])
def test_only_dependent_variants_inside_a_graph_are_launched_ahead(dependent, capturing, monkeypatch):
    launches = []
    kernels = SimpleNamespace(launch=lambda *arguments: launches.append(arguments))
    properties = SimpleNamespace(shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(row_linear, "_load", lambda variant, device: kernels)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    x, weight, bias, _ = problem(GATE_UP, 70, 80, 64, BFLOAT)
    variant = Variant(BFLOAT, GATE_UP, 1, 4, 8, 32, dependent)
    out = launch(x.view(2, 35, 64), weight, bias, norm=True, gated=True, variant=variant)
    ((name, grid, threads, shared, stream, _, ahead),) = launches
    assert out.shape == (2, 35, 40) and (name, grid, threads, stream) == ("row_linear", (3, 2, 1), 128, 7)
    assert shared == variant.shared_bytes and ahead is (dependent and capturing)


def test_the_benchmarks_products_are_the_weavers():
    assert benchmark.products(WEAVER_27B) == SHAPES


@gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_on_the_gpu(case):
    tensors, variant = problem(*case[:5], "cuda"), variant_of(case)
    ends = variant.ends
    out = launch(*tensors, norm=ends.norm, gated=ends.gated, variant=variant)
    assert_outputs(out, ends, *tensors)
    for _ in range(3):
        assert same_bits(launch(*tensors, norm=ends.norm, gated=ends.gated, variant=variant), out)


@gpu
@pytest.mark.parametrize("rows", [1, 7, 8, 16, 17, 33, 64, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_a_layers_products_on_the_gpu(name, rows):
    ends, depth, features = SHAPES[name]
    tensors = problem(ends, rows, features, depth, BFLOAT, "cuda")
    out = launch(*tensors, norm=ends.norm, gated=ends.gated)
    assert_outputs(out, ends, *tensors)
    x, weight, bias, residual = tensors
    first = launch(x[:1], weight, bias, residual[:1] if ends.residual else None, ends.norm, ends.gated)
    assert same_bits(first, out[:1])


def layer(x, weights, dependent):
    """A layer's products one behind the other, whose outs the allocator gives each other's memory."""
    (_, qkv, qkv_bias, _), (_, o, _, _), (_, gate_up, gate_up_bias, _), (_, down, down_bias, _) = weights

    def product(x, weight, bias=None, residual=None, norm=False, gated=False):
        ends = Ends(norm, bias is not None, gated, residual is not None)
        variant = choose(x.dtype, ends, len(x), x.shape[1], len(weight), 132, dependent)
        return launch(x, weight, bias, residual, norm, gated, variant)

    mixed = product(x, qkv, qkv_bias, norm=True)[:, -x.shape[1] :].contiguous()
    x = product(mixed, o, residual=x)
    return product(product(x, gate_up, gate_up_bias, norm=True, gated=True), down, down_bias, x)


@gpu
@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_dependent_launches_in_a_graph_read_what_came_before(rows):
    weights = [problem(ends, 1, features, depth, BFLOAT, "cuda") for ends, depth, features in SHAPES.values()]
    x, written = torch.zeros(rows, 1024, device="cuda", dtype=BFLOAT), torch.zeros(rows, 1024, device="cuda")
    layer(x, weights, True)  # compiles; outside a graph it is launched like any kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(written)
        last = layer(layer(layer(x, weights, True), weights, True), weights, True).clone()
    for turn in range(20):
        written.normal_(generator=torch.Generator("cuda").manual_seed(turn))
        graph.replay()
        wanted = written.to(BFLOAT)
        for _ in range(3):
            wanted = layer(wanted, weights, False)
        assert wanted.isfinite().all() and wanted.count_nonzero() > 0.9 * wanted.numel() and torch.equal(last, wanted)


@gpu
def test_the_benchmark_runs_on_the_gpu():
    rows = benchmark.measure("o", *SHAPES["o"], 8, forms=2)
    assert len(rows) == 2 and all(row["us"] > 0 and row["torch_us"] > 0 for row in rows)
