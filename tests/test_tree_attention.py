"""Every implementation of tree_attention against a float64 softmax written out node by node.

The Triton kernel runs on the GPU where there is one, and in Triton's interpreter, in a child process (the interpreter
must be chosen before Triton is imported).
"""

from dataclasses import replace

import pytest
import torch
from attention_cases import NAN, Case, make_inputs
from interpreted import INTERPRETING, run_interpreted
from sgl_specflow.kernels.tree_attention import (
    TreeAttentionConfig,
    TreeAttentionScratch,
    UnsupportedTreeAttention,
    ancestor_matrix,
    select_config,
    tree_attention,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def small(pieces: int, block_m: int = 16, block_n: int = 16) -> TreeAttentionConfig:
    return TreeAttentionConfig(block_m, block_n, num_warps=4, num_stages=2, pieces=pieces, min_tiles=1)


CASES = [
    Case("ragged_prefixes", prefix=(70, 1, 33), config=small(6)),
    Case("empty_prefix", prefix=(0, 40), config=small(4)),
    Case("all_prefixes_empty", prefix=(0, 0), config=small(4)),
    Case("one_node", prefix=(18,), nodes=1, config=small(2)),
    Case("more_pieces_than_tiles", prefix=(3, 20), config=small(64)),
    Case("pieces_of_three_tiles_at_least", prefix=(150, 3, 40), config=replace(small(9), min_tiles=3)),
    Case("one_piece_each", prefix=(50, 9), config=small(1)),
    Case("one_long_request_among_short", prefix=(2, 90, 0, 4), nodes=3, heads=(2, 1), config=small(5)),
    Case("padding_nodes_see_themselves", prefix=(21, 0), nodes=12, padding=5, config=small(4)),
    Case("bit_31", prefix=(9,), nodes=34, heads=(1, 1), shape="chain", config=small(3, 32, 32)),
    Case("bidirectional", prefix=(19, 4), nodes=16, shape="bidirectional", config=small(3)),
    Case("group_1", heads=(2, 2), config=small(3)),
    Case("group_3", heads=(9, 3), nodes=6, config=small(3)),
    Case("group_16", prefix=(20,), heads=(16, 1), nodes=3, config=small(2)),
    Case("strided_pool", strided=True, config=small(3)),
    Case("int32_indices", index_dtype=torch.int32, config=small(3)),
    Case("value_dim_differs", head_dim=64, value_dim=128, config=small(3)),
    Case("soft_cap", options={"logit_cap": 2.0}, config=small(3)),
    Case("soft_cap_split", prefix=(80,), options={"logit_cap": 2.0}, config=small(5)),
    Case("sinks_unsplit", sinks=True, config=small(1)),
    Case("sinks_once_across_pieces", prefix=(80, 3), sinks=True, config=small(9)),
    Case(
        "sinks_and_nothing_else_in_some_pieces",
        prefix=(0,),
        nodes=34,
        heads=(1, 1),
        padding=17,
        sinks=True,
        config=small(3),
    ),
    Case(
        "window_by_depth",
        prefix=(60, 7),
        nodes=20,
        heads=(2, 1),
        shape="chain",
        options={"sliding_window": 12},
        config=small(5),
    ),
    Case("window_inside_the_tree", prefix=(3,), nodes=24, heads=(2, 1), options={"sliding_window": 2}, config=small(3)),
    Case(
        "window_with_whole_tiles_inside",
        prefix=(100,),
        nodes=9,
        heads=(1, 1),
        options={"sliding_window": 70},
        config=small(2),
    ),
    Case("window_0", prefix=(20,), nodes=9, shape="chain", options={"sliding_window": 0}, config=small(3)),
    Case(
        "window_bidirectional",
        prefix=(30,),
        nodes=9,
        shape="bidirectional",
        options={"sliding_window": 3},
        config=small(3),
    ),
    Case(
        "window_sinks_cap",
        prefix=(44, 2),
        nodes=11,
        sinks=True,
        options={"sliding_window": 20, "logit_cap": 3.0},
        config=small(6),
    ),
    Case("scales", options={"k_scale": 0.5, "v_scale": 3.0}, config=small(4)),
    Case("fp8_pool", pool_dtype=torch.float8_e4m3fn, options={"k_scale": 0.25, "v_scale": 2.0}, config=small(4)),
    Case("bfloat16", dtype=torch.bfloat16, config=small(4)),
    Case("float16", dtype=torch.float16, config=small(4)),
    Case("the_table_picks", prefix=(100, 12), nodes=9),
]
# The interpreter multiplies the raw bits of bfloat16 operands in a dot (triton 3.8, interpreter.py:create_dot).
INTERPRETED = [case for case in CASES if case.dtype != torch.bfloat16]
NAIVE_ONLY = [
    Case("head_dim_96", head_dim=96, value_dim=80),
    Case("float64", dtype=torch.float64),
    Case("float32_query_bfloat16_pool", pool_dtype=torch.bfloat16),
    Case("bfloat16_query_fp8_pool", dtype=torch.bfloat16, pool_dtype=torch.float8_e4m3fn),
]
ON_THE_GPU = [
    *(
        Case(
            f"table_{str(dtype)[6:]}_d{dim}_n{nodes}_g{heads[0] // heads[1]}",
            prefix=(517, 0, 3000),
            nodes=nodes,
            heads=heads,
            head_dim=dim,
            value_dim=dim,
            dtype=dtype,
            padding=nodes // 5,
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for dim, heads in ((64, (9, 3)), (128, (32, 8)), (256, (16, 2)))
        for nodes in (1, 16, 64, 129, 256)
    ),
    Case("long_prefix", prefix=(33001,), nodes=64, heads=(32, 8), head_dim=128, value_dim=128, dtype=torch.bfloat16),
    Case("long_prefix_float32", prefix=(33001,), nodes=64, heads=(8, 2), head_dim=128, value_dim=128),
    Case("many_requests", prefix=tuple(range(0, 900, 23)), nodes=31, heads=(8, 2), dtype=torch.bfloat16),
    Case(
        "draft_block_window",
        prefix=(4097, 300),
        nodes=16,
        heads=(32, 8),
        head_dim=128,
        value_dim=128,
        dtype=torch.bfloat16,
        shape="bidirectional",
        options={"sliding_window": 2048},
    ),
    Case(
        "sinks_group_8",
        prefix=(2500, 64),
        nodes=64,
        heads=(64, 8),
        dtype=torch.bfloat16,
        sinks=True,
        options={"sliding_window": 128},
    ),
    Case(
        "fp8_table",
        prefix=(2500, 64),
        nodes=64,
        heads=(32, 8),
        head_dim=128,
        value_dim=128,
        dtype=torch.bfloat16,
        pool_dtype=torch.float8_e4m3fn,
        options={"k_scale": 0.25, "v_scale": 2.0},
    ),
]


def reference(inputs: dict) -> torch.Tensor:
    """Node by node: list the keys it may see, softmax over exactly those, in float64."""
    q, ancestors, depth = inputs["q"].double(), inputs["ancestors"].tolist(), inputs["depth"].tolist()
    bounds, prefix_slots = inputs["prefix_indptr"].tolist(), inputs["prefix_slots"].tolist()
    node_slots = inputs["node_slots"].tolist()
    window, cap = inputs.get("sliding_window", -1), inputs.get("logit_cap", 0.0)
    group = q.shape[1] // inputs["k_pool"].shape[1]
    rows = []
    for r, request_ancestors in enumerate(ancestors):
        prefix = prefix_slots[bounds[r] : bounds[r + 1]]
        for i, words in enumerate(request_ancestors):
            position = len(prefix) + depth[r][i]
            keys = list(enumerate(prefix))
            for j in range(len(request_ancestors)):
                if words[j // 32] & 0xFFFFFFFF & (1 << j % 32):
                    keys.append((len(prefix) + depth[r][j], node_slots[r * len(request_ancestors) + j]))
            seen = torch.tensor([slot for at, slot in keys if window < 0 or position - at <= window], device=q.device)
            k = inputs["k_pool"][seen].double().repeat_interleave(group, 1) * inputs.get("k_scale", 1.0)
            v = inputs["v_pool"][seen].double().repeat_interleave(group, 1) * inputs.get("v_scale", 1.0)
            logits = torch.einsum("hd,lhd->hl", q[r * len(request_ancestors) + i], k) * inputs["scale"]
            if cap > 0:
                logits = cap * torch.tanh(logits / cap)
            if inputs["sinks"] is not None:
                logits = torch.cat([logits, inputs["sinks"].double()[:, None]], 1)
            weights = torch.softmax(logits, 1)[:, : len(seen)]
            rows.append(torch.einsum("hl,lhd->hd", weights, v))
    return torch.stack(rows)


def poisoned_scratch(case: Case, config: TreeAttentionConfig | None, device: str) -> TreeAttentionScratch:
    requests = len(case.prefix)
    config = config or select_config(
        requests, case.nodes, *case.heads, case.head_dim, case.value_dim, case.dtype, torch.device(device)
    )
    rows = (config.pieces + requests - 1) * case.nodes * case.heads[0]
    return TreeAttentionScratch(
        torch.full((rows * case.value_dim,), NAN, device=device), torch.full((rows,), NAN, device=device)
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert not actual.isnan().any(), "NaN: an element was not written, or a masked value leaked"
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}, allowed {TOLERANCE[dtype]:.0e}"


def check(case: Case, implementation: str, device: str, config: TreeAttentionConfig | None = None) -> None:
    inputs = make_inputs(case, device)
    extra = {}
    if implementation == "triton":
        extra = dict(config=config, scratch=poisoned_scratch(case, config, device))
    result = tree_attention(**inputs, implementation=implementation, **extra)
    assert result is inputs["out"]
    assert_close(result, reference(inputs), case.dtype)


def named(cases: list[Case]):
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


interpreter = pytest.mark.skipif(not INTERPRETING, reason="runs in a child process with TRITON_INTERPRET=1")


def gpu(test):
    reason = "needs CUDA; the interpreter covers the algorithm, not the compiled kernel"
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETING, reason=reason)(test))


kernels = pytest.mark.parametrize("implementation", ["triton", "cuda"])


@named(CASES + NAIVE_ONLY)
def test_naive_is_softmax_over_prefix_and_ancestors(case):
    check(case, "naive", "cpu")


@interpreter
@named(INTERPRETED)
def test_interpreted_kernel_is_softmax_over_prefix_and_ancestors(case):
    check(case, "triton", "cpu", case.config)


@pytest.mark.skipif(INTERPRETING, reason="this is the child process")
def test_the_kernel_holds_in_the_interpreter():
    run = run_interpreted(__file__, "-x", "-k", "interpreted")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert f"{len(INTERPRETED)} passed" in run.stdout


@gpu
@named(CASES)
def test_compiled_kernel_is_softmax_over_prefix_and_ancestors(case):
    check(case, "triton", "cuda", case.config)


@gpu
@named(ON_THE_GPU)
def test_compiled_kernel_with_the_tables_tiles(case):
    check(case, "triton", "cuda")


@gpu
@kernels
def test_a_captured_graph_follows_prefix_lengths(implementation):
    case = Case("graph", prefix=(900, 40), nodes=33, heads=(8, 2), head_dim=128, value_dim=128, dtype=torch.bfloat16)
    inputs = make_inputs(case, "cuda")
    scratch = TreeAttentionScratch.allocate(2, (33,), 8, 2, 128, 128, torch.bfloat16, "cuda")
    tree_attention(**inputs, scratch=scratch, implementation=implementation)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_attention(**inputs, scratch=scratch, implementation=implementation)
    for bounds in ([0, 900, 940], [0, 1, 1], [0, 0, 700], [0, 512, 513]):
        inputs["prefix_indptr"].copy_(torch.tensor(bounds, dtype=torch.int32))
        inputs["out"].fill_(NAN)
        graph.replay()
        assert_close(inputs["out"], reference(inputs), case.dtype)


@gpu
@kernels
@pytest.mark.parametrize("prefix", [100, 30])
def test_what_follows_in_a_graph_sees_the_whole_output(prefix, implementation):
    """Where nothing is cut into pieces, the merge kernel, which starts early, has nothing to do and must still wait."""
    case = Case("short", prefix=(prefix,), nodes=64, heads=(32, 8), head_dim=128, value_dim=128, dtype=torch.bfloat16)
    inputs = make_inputs(case, "cuda")
    copy = torch.empty_like(inputs["out"])
    tree_attention(**inputs, implementation=implementation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_attention(**inputs, implementation=implementation)
        copy.copy_(inputs["out"])
    expected = None
    for _ in range(1000):
        inputs["out"].fill_(NAN)
        graph.replay()
        expected = copy.clone() if expected is None else expected
        assert torch.equal(copy, expected)
    assert_close(expected, reference(inputs), case.dtype)


@gpu
@kernels
def test_repeated_calls_give_the_same_bits(implementation):
    inputs = make_inputs(
        Case("repeat", prefix=(4000, 17), nodes=64, heads=(32, 8), head_dim=128, value_dim=128, dtype=torch.bfloat16),
        "cuda",
    )
    first = tree_attention(**inputs, implementation=implementation).clone()
    for _ in range(20):
        inputs["out"].fill_(NAN)
        assert torch.equal(tree_attention(**inputs, implementation=implementation), first)


def test_a_row_that_sees_nothing_gives_zero():
    inputs = make_inputs(Case("nothing", prefix=(0, 6)), "cpu")
    inputs["ancestors"][0, 2] = 0
    result = tree_attention(**inputs)
    assert (result[2] == 0).all() and not result.isnan().any()


def test_bits_beyond_the_nodes_are_ignored():
    inputs = make_inputs(Case("spare"), "cpu")
    expected = tree_attention(**inputs).clone()
    inputs["ancestors"] = torch.nn.functional.pad(inputs["ancestors"] | (-1 << 20), (0, 3), value=-1)
    assert torch.equal(tree_attention(**inputs), expected)


def test_ancestor_matrix_reads_the_sign_bit():
    matrix = ancestor_matrix(torch.tensor([[[-(2**31), 1]]], dtype=torch.int32), 33)
    assert matrix.nonzero().tolist() == [[0, 0, 31], [0, 0, 32]]


def test_scratch_covers_every_batch_up_to_its_maximum():
    device = torch.device("cpu")
    scratch = TreeAttentionScratch.allocate(40, (7, 64), 32, 8, 128, 128, torch.bfloat16, device)
    for requests in range(1, 41):
        for nodes in (7, 64):
            config = select_config(requests, nodes, 32, 8, 128, 128, torch.bfloat16, device)
            assert scratch.partial_lse.numel() >= (config.pieces + requests - 1) * nodes * 32


def test_what_breaks_the_contract_is_refused_by_name():
    inputs = make_inputs(Case("refused"), "cpu")
    for change, message in (
        ({"ancestors": inputs["ancestors"].long()}, "int32"),
        ({"depth": inputs["depth"][:, :-1]}, r"depth is \[R, N\]"),
        ({"node_slots": inputs["node_slots"][:-1]}, r"node_slots is \[R \* N\]"),
        ({"q": inputs["q"][:, :3]}, "multiple of kv heads"),
        ({"scale": 0.0}, "positive"),
        ({"out": inputs["out"].bfloat16()}, "q's dtype"),
        ({"implementation": "flash"}, "implementation is 'flash'"),
    ):
        with pytest.raises(ValueError, match=message):
            tree_attention(**inputs | change)


def test_what_the_kernels_cannot_serve_is_refused_by_name():
    with pytest.raises(UnsupportedTreeAttention, match="the CUDA kernel of tree_attention needs a device"):
        tree_attention(**make_inputs(Case("cpu"), "cpu"), implementation="cuda")
    for case, message in (
        (Case("dim", head_dim=96, value_dim=96), "head dimensions"),
        (Case("pool", dtype=torch.bfloat16, pool_dtype=torch.float16), "float8_e4m3fn, not torch.float16"),
        (Case("query", dtype=torch.float64), "not torch.float64"),
    ):
        with pytest.raises(UnsupportedTreeAttention, match=message):
            tree_attention(**make_inputs(case, "cpu"), implementation="triton")
