"""The many likeliest tokens: kernels/tree_step/top_pool.cu against an exact sort.

It runs on the CPU through tests/cuda_on_cpu.h, and on the GPU where there is one.
"""

import pytest
import torch
from compiled import GXX, NVCC, assert_no_spills, compile_for_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_on_cpu import pool_on_cpu
from sgl_specflow.kernels.tree_step import best_tokens, top_pool
from sgl_specflow.kernels.tree_step.best_tokens import _best_tokens_torch

on_cpu = pytest.mark.skipif(GXX is None, reason="g++ is missing")


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")(test))


FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
KINDS = (
    "random",
    "rounded",
    "equal",
    "masked",
    "nothing",
    "signed zeros",
    "faulty",
    "infinite",
    "low",
    "crowded",
    "tiny",
)
CASES = [  # rows, vocabulary, width, dtype, scale, cap, kind
    (2, 151936, 512, BFLOAT, 1.0, 0.0, "random"),
    (1, 300000, 2048, BFLOAT, 1.0, 0.0, "random"),
    (1, 248077, 65, BFLOAT, 1.0, 0.0, "random"),
    (1, 151937, 2048, FLOAT, 1.0, 0.0, "rounded"),
    (3, 30001, 512, FLOAT, 0.5, 30.0, "random"),
    (2, 49152, 100, BFLOAT, 0.25, 30.0, "random"),
    (2, 9999, 100, HALF, 0.125, 50.0, "random"),
    (40, 301, 65, FLOAT, 1.0, 0.0, "rounded"),
    (1, 65, 65, HALF, 1.0, 0.0, "random"),
    (2, 512, 512, BFLOAT, 1.0, 0.0, "rounded"),
    (2, 2048, 2048, FLOAT, 1.0, 0.0, "random"),
    (1, 2051, 2048, BFLOAT, 1.0, 0.0, "faulty"),
    (1, 20000, 2048, BFLOAT, 1.0, 0.0, "random"),  # fewer groups than tokens
    (1, 34567, 2048, HALF, 2.0, 0.0, "random"),
    (1, 70001, 512, BFLOAT, 1.0, 0.0, "equal from the middle on"),
    *((2, 4099, 100, dtype, 1.0, 0.0, kind) for kind in KINDS for dtype in (FLOAT, BFLOAT, HALF)),
    *((1, 70001, 512, BFLOAT, 1.0, 0.0, kind) for kind in KINDS),
    *((1, 70001, 512, FLOAT, 1.0, 0.0, kind) for kind in ("rounded", "crowded", "faulty", "one short")),
]


def make_logits(rows, vocabulary, dtype, kind, seed=0):
    generator = torch.Generator().manual_seed(seed + vocabulary)
    logits = 5 * torch.randn(rows, vocabulary, generator=generator) - 3
    chance = torch.rand(rows, vocabulary, generator=generator)
    if kind == "rounded":
        logits = logits.round()
    if kind == "equal":
        logits[:] = -2.5
    if kind == "equal from the middle on":  # the tokens wanted lie in the groups that a block looks at last
        logits[:] = 2.5
        logits[:, :20000] = -2.5
    if kind == "masked":
        logits[chance > 0.01] = -torch.inf
    if kind == "nothing":
        logits[:] = -torch.inf
    if kind == "signed zeros":
        logits = torch.where(chance < 0.5, 0.0, -0.0)
        logits[chance < 0.01], logits[chance > 0.99] = 1.0, -1.0
    if kind == "faulty":
        logits[chance < 0.3], logits[chance > 0.9] = torch.nan, -torch.inf
    if kind == "infinite":
        logits[chance < 0.001] = torch.inf
    if kind == "low":
        logits = logits - 200
    if kind == "crowded":  # a few groups hold most of the greatest
        logits[:, torch.arange(vocabulary) // 8 % 512 < 10] += 40
    if kind == "one short":  # of 512 groups with a far greater logit
        logits[:, :: vocabulary // 511][:, :511] += 100
    if kind == "tiny":
        logits = logits * 2.0**-24  # float16's smallest
    return logits.to(dtype)


def exact_pool(logits, width, scale, cap):
    """Values, tokens and log-sum-exp: a stable sort of the logits as float32 counts them, NaN as -inf."""
    counted = logits.float() * scale
    counted = cap * torch.tanh(counted / cap) if cap else counted
    counted = torch.where(counted.isnan(), -torch.inf, counted) + 0.0
    values, tokens = counted.sort(dim=1, descending=True, stable=True)
    return values[:, :width], tokens[:, :width], counted.double().logsumexp(1)


def assert_exact(pool, logits, width, scale, cap):
    """The expected tokens in the expected order; under a soft cap, whose last bits are the device's own, in an order that
    the values bear out."""
    values, tokens, total = (tensor.cpu() for tensor in pool)
    wanted_values, wanted, wanted_total = exact_pool(logits.cpu(), width, scale, cap)
    assert values.dtype == total.dtype == FLOAT and tokens.dtype == torch.int64
    if cap:
        torch.testing.assert_close(values, wanted_values, rtol=1e-6, atol=1e-6)
        ties = values[:, 1:] == values[:, :-1]
        assert (values[:, 1:] <= values[:, :-1]).all() and (tokens.diff(dim=1)[ties] > 0).all()
        counted = cap * torch.tanh(logits.cpu().float() * scale / cap)
        torch.testing.assert_close(counted.gather(1, tokens), values, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(tokens, wanted)
        assert torch.equal(values.view(torch.int32), wanted_values.contiguous().view(torch.int32))
    torch.testing.assert_close(total.double(), wanted_total, rtol=1e-6, atol=1e-5)


@on_cpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cuda_source_finds_the_exact_pool(case):
    rows, vocabulary, width, dtype, scale, cap, kind = case
    logits = make_logits(rows, vocabulary, dtype, kind)
    pool = pool_on_cpu(logits, width, scale, cap)
    assert_exact(pool, logits, width, scale, cap)
    # The order in which warps and lanes run shows nowhere.
    for here, there in zip(pool, pool_on_cpu(logits, width, scale, cap, reversed_order=True)):
        assert torch.equal(here.view(torch.int32), there.view(torch.int32))


@on_cpu
@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([FLOAT, BFLOAT, HALF]),
    st.integers(1, 3),
    st.integers(1, 600),
    st.integers(0, 9000),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 2**20),
)
def test_the_cuda_source_finds_any_pool(kind, dtype, rows, width, more, before, behind, seed):
    # A slice of wider rows: they begin and end anywhere in 16 bytes.
    vocabulary = width + more
    wide = torch.full((rows, before + vocabulary + behind), 1e4, dtype=dtype)
    logits = wide[:, before : before + vocabulary]
    logits.copy_(make_logits(rows, vocabulary, dtype, kind, seed))
    assert_exact(pool_on_cpu(logits, width), logits, width, 1.0, 0.0)


@pytest.mark.parametrize("width", [1, 65, 512, 2048])
@pytest.mark.parametrize("size", [2, 4])
def test_groups_cover_a_row_and_fit_the_kernel(width, size):
    for vocabulary in (*range(width, width + 70), 32000, 65536, 151936, 248077, 300000, 2**20):
        groups, depth = top_pool.grouping(vocabulary, width, size)
        lanes = 16 // size
        assert groups * depth * lanes >= vocabulary + lanes - 1
        assert groups <= 16 * top_pool.PICK_THREADS


def test_wrong_arguments_are_named():
    logits = torch.zeros(2, 300)
    with pytest.raises(ValueError, match="torch.float64"):
        top_pool.pool_arguments(logits.double(), 100, 1.0, 0.0)
    with pytest.raises(ValueError, match="contiguous rows"):
        top_pool.pool_arguments(logits.T, 2, 1.0, 0.0)
    with pytest.raises(ValueError, match="301 of 300 logits"):
        top_pool.pool_arguments(logits, 301, 1.0, 0.0)
    with pytest.raises(ValueError, match="2049 of 3000 logits"):
        top_pool.pool_arguments(torch.zeros(2, 3000), 2049, 1.0, 0.0)


def test_wide_pools_stay_with_torch_on_the_cpu():
    logits = make_logits(2, 5000, BFLOAT, "random")
    assert not top_pool.serves(logits, 512)
    for got, wanted in zip(best_tokens(logits, 512), _best_tokens_torch(logits, 512, 1.0, 0.0)):
        assert torch.equal(got, wanted)


@pytest.mark.skipif(NVCC is None, reason="nvcc is missing")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype, capped", [(BFLOAT, False), (BFLOAT, True), (HALF, True), (FLOAT, False)], ids=str)
def test_the_cuda_source_compiles(target, dtype, capped, tmp_path):
    defines = top_pool.defines(dtype, capped)
    assert_no_spills(compile_for_gpu(top_pool.SOURCE, defines, target, tmp_path / "kernel.cubin"), kernels=2)


@gpu
@pytest.mark.parametrize("case", [*CASES, (960, 5000, 100, BFLOAT, 1.0, 0.0, "random")], ids=str)
def test_pools_on_the_gpu(case):
    rows, vocabulary, width, dtype, scale, cap, kind = case
    logits = make_logits(rows, vocabulary, dtype, kind)
    assert_exact(best_tokens(logits.cuda(), width, scale=scale, cap=cap), logits, width, scale, cap)


@gpu
@pytest.mark.parametrize("offset", range(9))
def test_rows_that_begin_anywhere_on_the_gpu(offset):
    wide = make_logits(3, 60007, BFLOAT, "rounded").cuda()
    logits = wide[:, offset : offset + 59990]
    assert_exact(best_tokens(logits, 512), logits, 512, 1.0, 0.0)


@gpu
def test_a_cuda_graph_holds_a_pool():
    logits = make_logits(15, 151936, BFLOAT, "random").cuda()
    best_tokens(logits, 512)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool = best_tokens(logits, 512)
    for seed in (1, 2):
        logits.copy_(make_logits(15, 151936, BFLOAT, "rounded", seed))
        graph.replay()
        assert_exact(pool, logits, 512, 1.0, 0.0)
