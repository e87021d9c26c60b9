"""The CUDA kernel: it compiles for each architecture, its errors are named, and on a GPU it holds to float64."""

import copy
import json

import pytest
import torch
from compiled import NVCC, assert_no_spills, compile_for_gpu, need_nvrtc
from gdn_cases import TREE_SHAPES, accept_leaf, make_layer, parents, relative_error
from sgl_specflow.eval import gdn as benchmark
from sgl_specflow.kernels import nvrtc
from sgl_specflow.kernels.gdn_tree import (
    CudaCompileError,
    CudaToolsMissing,
    TreeStash,
    UnsupportedGdnTree,
    cuda_kernel,
    gdn_tree_flush,
    gdn_tree_verify,
)

LIMITS = {"sm_80": 166912, "sm_90a": 232448, "sm_100a": 232448}


def gpu(test):
    reason = "CUDA is not available"
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)(test))


@pytest.mark.skipif(NVCC is None, reason="nvcc is missing")
@pytest.mark.parametrize(
    "target, nodes, dim, state_bf16",
    [
        ("sm_80", 64, 128, False),
        ("sm_90a", 16, 128, False),
        ("sm_90a", 64, 128, False),
        ("sm_90a", 128, 128, False),
        ("sm_90a", 176, 128, False),
        ("sm_90a", 256, 128, False),
        ("sm_100a", 64, 128, False),
        ("sm_90a", 16, 64, True),
    ],
)
def test_compiles_with_nvcc(target, nodes, dim, state_bf16, tmp_path):
    shape = cuda_kernel.select_shape(nodes, dim, dim, state_bf16, LIMITS[target])
    report = compile_for_gpu(cuda_kernel.SOURCE, shape.defines(), target, tmp_path / "kernel.cubin")
    if target == "sm_90a":
        assert_no_spills(report, kernels=3)


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_shapes_of_every_node_count(limit):
    """Hopper serves 256 nodes, Ampere's shared memory 240."""
    served = [nodes for nodes in range(1, 257) if cuda_kernel.select_shape(nodes, 128, 128, False, limit)]
    assert served == list(range(1, (256 if limit == LIMITS["sm_90a"] else 240) + 1))
    slices = {cuda_kernel.select_shape(nodes, 128, 128, False, LIMITS["sm_90a"]).value_slice for nodes in range(1, 257)}
    assert slices == {64}


def test_whole_heads_where_blocks_wait_for_a_multiprocessor():
    """One request's 96 blocks run at once on 132; two take 96 whole heads at once instead of 192 halves in two turns; of
    four's 192 heads 132 are whole and the others' halves follow; many requests are whole altogether."""
    whole = [cuda_kernel.whole_key_heads(16, 3 * requests, 2, 132) for requests in (1, 2, 4, 8, 64)]
    assert whole == [0, 16, 11, 16, 16]
    assert cuda_kernel.whole_key_heads(2, 3 * 32, 2, 132) == 0  # a ninth of them whole would be no sooner done
    shapes = {nodes: cuda_kernel.select_shape(nodes, 128, 128, False, LIMITS["sm_90a"]) for nodes in (64, 65, 144, 145)}
    assert {nodes: shape.computes_whole_heads for nodes, shape in shapes.items()} == {64: 0, 65: 1, 144: 1, 145: 0}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sgl_specflow" / "kernels"


@pytest.fixture
def compiler():
    need_nvrtc()


def test_compiled_once_by_nvrtc_and_kept_on_disk(cache, compiler, monkeypatch):
    shape = cuda_kernel.select_shape(16, 64, 64, False, LIMITS["sm_90a"])
    cubin = cuda_kernel.compile_for(shape, "sm_90a")
    assert cubin[:4] == b"\x7fELF" and b"gdn_tree_verify" in cubin and b"gdn_tree_flush" in cubin
    (stored,) = cache.iterdir()
    assert stored.name.startswith("gdn_tree-sm_90a-") and stored.read_bytes() == cubin
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert cuda_kernel.compile_for(shape, "sm_90a") == cubin


def test_other_source_headers_defines_or_architecture_compile_anew(cache, compiler):
    source, headers = '#include "h"\n__global__ void f() { int x = X; }', {"h": ""}
    for arguments in [
        (source, headers, {"X": 1}, "sm_90a"),
        (source + " ", headers, {"X": 1}, "sm_90a"),
        (source, {"h": " "}, {"X": 1}, "sm_90a"),
        (source, headers, {"X": 2}, "sm_90a"),
        (source, headers, {"X": 1}, "sm_80"),
    ]:
        nvrtc.compile_cubin("f", *arguments)
    assert len(list(cache.iterdir())) == 5


def test_an_unwritable_cache_costs_only_time(tmp_path, monkeypatch, compiler):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert nvrtc.compile_cubin("f", "__global__ void f() {}", {}, {}, "sm_90a")


def test_a_refused_source_gives_the_compilers_log(cache, compiler):
    with pytest.raises(CudaCompileError, match="(?s)could not compile f.cu.*undefined"):
        nvrtc.compile_cubin("f", "__global__ void f() { missing(); }", {}, {}, "sm_90a")
    assert not cache.exists()


def test_a_wrong_size_of_shared_memory_does_not_compile(cache, compiler):
    shape = cuda_kernel.select_shape(16, 64, 64, False, LIMITS["sm_90a"])
    defines = shape.defines() | {"GDN_SHARED_BYTES": shape.shared_bytes + 16}
    with pytest.raises(CudaCompileError, match="another amount of shared memory"):
        nvrtc.compile_cubin("gdn_tree", cuda_kernel.SOURCE.read_text(), cuda_kernel.headers(), defines, "sm_90a")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA driver")
def test_a_missing_driver_is_named(cache, compiler):
    nvrtc._driver.cache_clear()
    with pytest.raises(CudaToolsMissing, match="the CUDA driver cannot be used"):
        nvrtc.LoadedKernels(b"")


def test_cpu_tensors_do_not_reach_the_cuda_kernel():
    layer = make_layer(0, [parents("wide", 5)], 1, 1, 64)
    with pytest.raises(ValueError, match="needs CUDA tensors"):
        gdn_tree_verify(*layer.arguments(), implementation="cuda")


def test_the_benchmark_keeps_the_shapes_that_it_measured_before_a_stop(monkeypatch, tmp_path):
    row = dict.fromkeys(benchmark.COLUMNS, 1.0)
    left = [row, row]
    monkeypatch.setattr(benchmark, "need_gpu", lambda parser: None)
    monkeypatch.setattr(benchmark, "measure", lambda *given, **options: left.pop())
    with pytest.raises(IndexError):
        benchmark.main(["--out", f"{tmp_path}/new/rows.json", "--commit", "abc"])
    kept = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert kept["rows"] == [row, row] and kept["meta"]["commit"] == "abc"


def in_float64(layer):
    exact = copy.deepcopy(layer)
    for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state"):
        setattr(exact, name, getattr(layer, name).double())
    exact.stash = TreeStash(layer.stash.u.double(), layer.stash.k.double(), layer.stash.g.clone())
    return exact


def flush(layer, **options):
    stash = TreeStash(layer.stash.u[None], layer.stash.k[None], layer.stash.g[None])
    gdn_tree_flush(layer.state[None], layer.slots, stash, layer.rows, layer.pending, **options)


def check_on_gpu(trees, heads, dims, steps=3, **options):
    layer = make_layer(2, trees, *heads, *dims, device="cuda", **options)
    exact = in_float64(layer)
    bf16 = layer.state.dtype == torch.bfloat16
    for step in range(steps):
        out = torch.full(layer.v.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        gdn_tree_verify(*layer.arguments(), out=out)
        expected = gdn_tree_verify(*exact.arguments(), implementation="naive")
        assert relative_error(out, expected) < (1e-2 if bf16 else 2e-3)
        assert relative_error(layer.state, exact.state) < (1e-2 if bf16 else 5e-6)
        for each in (layer, exact):
            accept_leaf(each, step)
            each.new_nodes(20 + step)
        exact.q, exact.k, exact.v, exact.a, exact.b = (
            x.double() for x in (layer.q, layer.k, layer.v, layer.a, layer.b)
        )
    flush(layer)
    flush(exact, implementation="naive")
    assert relative_error(layer.state, exact.state) < (1e-2 if bf16 else 5e-6)


@gpu
@pytest.mark.parametrize("nodes", [1, 2, 16, 17, 33, 64, 100, 128, 200, 256])
@pytest.mark.parametrize("shape", TREE_SHAPES)
def test_nodes_and_trees_on_the_gpu(nodes, shape):
    check_on_gpu([parents(shape, nodes), parents("wide", max(1, nodes // 3))], (2, 6), (128, 128))


@gpu
@pytest.mark.parametrize("heads", [(16, 48), (16, 32), (8, 24), (4, 12)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_and_states_on_the_gpu(heads, dim, state_dtype):
    check_on_gpu([parents("recent", 40), parents("chain", 7), [-1]], heads, (dim, dim), state_dtype=state_dtype)


@gpu
@pytest.mark.parametrize(
    "options",
    [
        {"decay": "one"},
        {"decay": "zero"},
        {"beta": "one", "repeated_keys": True},
        {"beta": "zero"},
    ],
    ids=str,
)
def test_extreme_gates_on_the_gpu(options):
    check_on_gpu([parents("chain", 128), parents("recent", 128)], (1, 3), (128, 128), **options)


@gpu
def test_many_requests_on_the_gpu():
    trees = [parents("recent", 1 + 5 * r % 64, seed=r) for r in range(33)]
    check_on_gpu(trees, (2, 4), (128, 128), steps=2, nodes=64)


@gpu
@pytest.mark.parametrize("requests", [2, 4, 8])
def test_whole_heads_on_the_gpu(requests):
    """Two and eight requests: whole heads alone; four: some in halves, all in one launch."""
    trees = [parents("recent", 70 + 50 * r // requests, seed=r) for r in range(requests)]
    check_on_gpu(trees, (16, 48), (128, 128), steps=2)


@gpu
def test_a_cuda_graph_replays_verify():
    layer = make_layer(2, [parents("recent", 40)], 2, 6, 128, device="cuda")
    layer.stash = layer.rows = layer.pending = None
    expected = gdn_tree_verify(*layer.arguments())
    out = torch.empty_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gdn_tree_verify(*layer.arguments(), out=out)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


@gpu
def test_the_kernel_gives_the_same_bits_each_time():
    layer = make_layer(2, [parents("recent", 128)] * 4, 16, 48, 128, device="cuda")
    first = gdn_tree_verify(*layer.arguments())
    stash = layer.stash.u.clone()
    for _ in range(20):
        assert torch.equal(gdn_tree_verify(*layer.arguments()), first) and torch.equal(layer.stash.u, stash)


@gpu
@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.float16}, "q in bfloat16"),
        ({"state": torch.float16}, "a state in"),
        ({"k": torch.float32}, "k in bfloat16"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_serve_is_named(change, message):
    layer = make_layer(2, [parents("recent", 8)], 1, 1, 64, device="cuda")
    for name, dtype in change.items():
        setattr(layer, name, getattr(layer, name).to(dtype))
    with pytest.raises(UnsupportedGdnTree, match=message):
        gdn_tree_verify(*layer.arguments())
