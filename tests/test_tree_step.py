"""The step's small kernels against the torch functions that they stand for.

tree_build.cu runs on the CPU through tests/cuda_on_cpu.h; the Triton kernels in Triton's interpreter, in a child process;
all of them on the GPU where there is one.
"""

import ctypes
import functools
from dataclasses import fields

import pytest
import torch
from compiled import GXX, NVCC, assert_no_spills, build_for_cpu, compile_for_gpu, ends_well
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import INTERPRETING, run_interpreted
from random_trees import choices_near, token_trees
from sgl_specflow.kernels.tree_step import (
    accept_and_plan,
    best_tokens,
    empty_tree,
    force_path,
    pack_rows,
    stage_bits,
    tree_from_marginals,
    window_slots,
)
from sgl_specflow.kernels.tree_step import force as force_module
from sgl_specflow.kernels.tree_step import tree_build as tree_build_module
from test_tree import marginals

from sgl_specflow.commit import plan_commit
from sgl_specflow.tree import TokenTree, build_tree
from sgl_specflow.verify import accept

interpreter = pytest.mark.skipif(not INTERPRETING, reason="runs in a child process with TRITON_INTERPRET=1")
parent_process = pytest.mark.skipif(INTERPRETING, reason="this is the child process")


def gpu(test):
    reason = "needs CUDA"
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETING, reason=reason)(test))


# --- tree building ---

BUILD_CASES = [
    ("smooth", 3, 15, 16, 64, False),
    ("smooth", 2, 15, 16, 256, False),
    ("smooth", 2, 7, 256, 33, True),
    ("smooth", 1, 1, 4, 16, False),
    ("tied", 5, 4, 4, 20, True),
    ("tied", 3, 6, 16, 200, False),
    ("faulty", 6, 5, 5, 17, True),
    ("smooth", 4, 15, 2, 2, False),
    ("smooth", 4, 15, 1, 16, True),
    ("smooth", 5, 15, 16, 1, True),
    ("flat", 2, 15, 16, 256, False),
    ("flat", 2, 15, 16, 64, False),
    ("equal", 2, 15, 16, 256, False),
    ("equal", 2, 3, 256, 256, False),
    ("zero", 2, 4, 3, 256, False),
    ("chain", 17, 15, 16, 256, True),
    ("chain", 2, 15, 16, 64, False),
    ("chain", 2, 15, 256, 256, False),
    ("chain", 2, 255, 4, 256, False),
    ("chain", 1, 255, 1, 256, False),
    ("crowded", 2, 15, 16, 256, False),
    ("crowded", 2, 6, 256, 256, False),
    ("crowded", 2, 15, 16, 128, False),
    ("tied", 2, 255, 8, 256, False),
    ("tied", 2, 15, 256, 256, True),
    ("faulty", 8, 15, 16, 256, True),
    ("few", 3, 15, 16, 256, False),
]


def shaped(kind, requests, depths, width, seed):
    """Log-probabilities [R, D, K] that make trees of one shape; None for a kind of `marginals`."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(requests, depths, width, generator=generator)
    if kind == "flat":
        return -7 - 1e-4 * noise
    if kind == "equal":
        return torch.full_like(noise, -1.5)
    if kind == "zero":
        return torch.where(noise < 0.5, 0.0, -0.0)
    if kind == "chain":  # the first candidate is nearly certain
        log_probs = -4 - 6 * noise
        log_probs[:, :, 0] = -1e-3 * noise[:, :, 0]
        return log_probs
    if kind == "crowded":  # more than distributions allow: nearly every pair of a depth counts
        return -1e-3 * noise
    if kind == "few":
        return torch.where(noise < 0.85, -torch.inf, -noise)
    return None


def build_inputs(kind, requests, depths, width, budget, limited, seed=0):
    special = shaped(kind, requests, depths, width, seed)
    log_probs, tokens = marginals("smooth" if special is not None else kind, requests, depths, width, seed)
    log_probs = log_probs if special is None else special
    # The kernel takes what best_tokens gives: sorted candidates, here NaN and +inf as build_tree counts them.
    clean = log_probs.nan_to_num(nan=-torch.inf, posinf=0.0, neginf=-torch.inf)
    order = clean.clamp(max=0.0).sort(dim=2, descending=True, stable=True).indices
    log_probs, tokens = log_probs.gather(2, order), tokens.gather(2, order)
    limits = torch.arange(requests) % (depths + 2) if limited else None
    return torch.arange(requests) + 7, log_probs.contiguous(), tokens.contiguous(), budget, limits


def assert_same_tree(tree, expected):
    for field in fields(TokenTree):
        assert torch.equal(getattr(tree, field.name).cpu(), getattr(expected, field.name)), field.name


@functools.cache
def build_library(slots: int) -> ctypes.CDLL:
    return build_for_cpu("tree_build_on_cpu.cpp", tree_build_module.SOURCE.parent, {"SLOTS": slots})


def build_on_cpu(root, log_probs, tokens, budget, limits, committed=None, library=None):
    tree = empty_tree(len(root), budget, torch.device("cpu"))
    for field in fields(TokenTree):
        getattr(tree, field.name).fill_(-77)
    positions = None if committed is None else torch.empty_like(tree.depth)
    arguments = tree_build_module.build_arguments(root, log_probs, tokens, budget, limits, tree, committed, positions)
    shared = tree_build_module.shared_bytes(budget, *log_probs.shape[1:])
    library = library or build_library(tree.ancestors.shape[2])
    library.build_on_cpu(ctypes.byref(arguments), ctypes.c_size_t(shared), len(root))
    return tree, positions


@parent_process
@pytest.mark.skipif(GXX is None, reason="g++ is missing")
@pytest.mark.parametrize("case", BUILD_CASES, ids=str)
def test_the_cuda_source_builds_the_same_tree(case):
    inputs = build_inputs(*case)
    committed = torch.arange(len(inputs[0])) * 11
    tree, positions = build_on_cpu(*inputs, committed)
    expected = build_tree(*inputs)
    assert_same_tree(tree, expected)
    assert torch.equal(positions, expected.positions(committed))
    tree.check()


@parent_process
@pytest.mark.skipif(GXX is None, reason="g++ is missing")
@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["smooth", "tied", "faulty", "flat", "chain", "crowded", "few"]),
    st.integers(1, 3),
    st.integers(1, 17),
    st.integers(1, 17),
    st.integers(1, 256),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_the_cuda_source_builds_any_tree(kind, requests, depths, width, budget, limited, seed):
    inputs = build_inputs(kind, requests, depths, width, budget, limited, seed)
    assert_same_tree(build_on_cpu(*inputs)[0], build_tree(*inputs))


BROKEN_BUILDS = {  # what becomes of the source, and the case that shows it
    "equals as if they came behind": ("0, block, order - 1)", "0, block, order)", ("equal", 2, 3, 16, 256, False)),
    "equals of a block in any order": ("equals & lanes_before", "0", ("tied", 2, 4, 4, 32, False)),
    "equals before kept nodes": ("above + 16, order - 1)", "above + 16, order)", ("tied", 2, 4, 4, 32, False)),
    "one rank too few": ("nodes / (place + 1) - 1", "nodes / (place + 1) - 2", ("smooth", 2, 4, 16, 256, False)),
    "a first rank too few": ("place == 0 ? nodes :", "place == 0 ? nodes - 1 :", ("flat", 1, 1, 40, 32, False)),
    "nodes that stay counted": (
        "(nodes[thread] >> 24), -1)",
        "(nodes[thread] >> 24), 0)",
        ("chain", 2, 9, 9, 32, False),
    ),
    "one array for kept nodes": ("kept_orders + depth % 2 * KEPT", "(unsigned*)orders", ("chain", 2, 9, 9, 64, False)),
    "no zeros behind the pairs": (
        "if (thread < 31) pair_orders",
        "if (thread < 0) pair_orders",
        ("chain", 2, 9, 9, 32, False),
    ),
    "no barrier behind the list": (
        "if (thread < 31) pair_orders[pairs + thread] = 0;\n        __syncthreads();",
        "if (thread < 31) pair_orders[pairs + thread] = 0;",
        ("chain", 2, 9, 9, 64, False),
    ),
    "no barrier behind a depth": (
        "            }\n        }\n        __syncthreads();\n    }",
        "            }\n        }\n    }",
        ("chain", 2, 9, 9, 64, False),
    ),
    "one array for all sums": (
        "sums_of_threads(by_warp + WARPS",
        "sums_of_threads(by_warp",
        ("equal", 2, 9, 4, 64, False),
    ),
}


@parent_process
@pytest.mark.skipif(GXX is None, reason="g++ is missing")
@pytest.mark.parametrize("name", BROKEN_BUILDS)
def test_a_broken_tree_building_is_found(name, tmp_path):
    old, new, case = BROKEN_BUILDS[name]
    text = tree_build_module.SOURCE.read_text()
    assert text.count(old) == 1
    (tmp_path / "tree_build.cu").write_text(text.replace(old, new))
    inputs = build_inputs(*case)
    expected = build_tree(*inputs)
    slots = -(-inputs[3] // 32)
    broken = build_for_cpu("tree_build_on_cpu.cpp", tmp_path, {"SLOTS": slots})

    def builds(library):
        assert_same_tree(build_on_cpu(*inputs, library=library)[0], expected)

    builds(build_library(slots))
    assert not ends_well(lambda: builds(broken), seconds=5)


@parent_process
@pytest.mark.skipif(NVCC is None, reason="nvcc is missing")
@pytest.mark.parametrize("target, slots", [("sm_80", 8), ("sm_90a", 1), ("sm_90a", 2), ("sm_90a", 8), ("sm_100a", 8)])
def test_tree_building_compiles(target, slots, tmp_path):
    source, cubin = tree_build_module.SOURCE, tmp_path / "kernel.cubin"
    assert_no_spills(compile_for_gpu(source, {"SLOTS": slots}, target, cubin))


@parent_process
def test_wrong_arguments_of_tree_building_are_named():
    root, log_probs, tokens, budget, _ = build_inputs("smooth", 2, 3, 4, 16, False)
    tree = empty_tree(2, 16, torch.device("cpu"))
    arguments = functools.partial(tree_build_module.build_arguments, committed=None, positions=None)
    with pytest.raises(ValueError, match="log_probs is torch.float64"):
        arguments(root, log_probs.double(), tokens, budget, None, tree)
    with pytest.raises(ValueError, match="budget 300"):
        arguments(root, log_probs, tokens, 300, None, empty_tree(2, 300, torch.device("cpu")))
    with pytest.raises(ValueError, match="do not fit into a block"):
        arguments(root, torch.zeros(2, 100, 128), torch.zeros(2, 100, 128, dtype=torch.int64), budget, None, tree)
    with pytest.raises(ValueError, match="out.parent"):
        arguments(
            root,
            log_probs,
            tokens,
            17,
            None,
            empty_tree(2, 17, torch.device("cpu")).__class__(
                **{**vars(empty_tree(2, 17, torch.device("cpu"))), "parent": tree.parent}
            ),
        )


@gpu
@pytest.mark.parametrize("case", BUILD_CASES, ids=str)
def test_trees_on_the_gpu(case):
    root, log_probs, tokens, budget, limits = build_inputs(*case)
    committed = torch.arange(len(root)) * 11
    positions = torch.empty(len(root), budget, dtype=torch.int64, device="cuda")
    moved = [None if x is None else x.cuda() for x in (root, log_probs, tokens, limits, committed)]
    tree = tree_from_marginals(*moved[:3], budget, moved[3], committed=moved[4], positions=positions)
    expected = build_tree(root, log_probs, tokens, budget, limits)
    assert_same_tree(tree, expected)
    assert torch.equal(positions.cpu(), expected.positions(committed))


# --- likeliest tokens ---

TOKEN_CASES = [  # rows, vocabulary, width, dtype, scale, cap, kind
    (3, 50, 5, torch.float32, 1.0, 0.0, "random"),
    (2, 3000, 16, torch.float32, 1.0, 0.0, "random"),
    (2, 3000, 16, torch.float32, 0.5, 30.0, "random"),
    (2, 2500, 8, torch.float32, 1.0, 0.0, "tied"),
    (2, 2048, 4, torch.float32, 1.0, 0.0, "edges"),
    (1, 20, 20, torch.float32, 1.0, 0.0, "random"),
    (2, 1500, 256, torch.float32, 1.0, 0.0, "random"),
    (1, 150000, 64, torch.float32, 1.0, 0.0, "random"),
    (2, 2500, 8, torch.bfloat16, 1.0, 0.0, "random"),
]


def token_logits(rows, vocabulary, dtype, kind):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 5 * torch.randn(rows, vocabulary, generator=generator) - 3
    if kind == "tied":
        logits = logits.round()
    if kind == "edges":
        logits = -1000 + logits
        logits[0, ::3], logits[0, 7], logits[1, 1400], logits[1, :1024] = -torch.inf, torch.nan, -0.0, -torch.inf
        logits[1, 1500], logits[1, 1600] = 0.0, -999.0
    return logits.to(dtype)


def assert_best(case, device):
    rows, vocabulary, width, dtype, scale, cap, kind = case
    logits = token_logits(rows, vocabulary, dtype, kind)
    values, tokens, total = best_tokens(logits.to(device), width, scale=scale, cap=cap)
    exact = logits.double() * scale
    exact = cap * torch.tanh(exact / cap) if cap else exact
    exact = exact.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    wanted_values, wanted = exact.sort(dim=1, descending=True, stable=True)
    assert torch.equal(tokens.cpu(), wanted[:, :width])
    torch.testing.assert_close(values.cpu().double(), wanted_values[:, :width], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.cpu().double(), exact.logsumexp(1), rtol=1e-6, atol=1e-5)


@parent_process
@pytest.mark.parametrize("case", TOKEN_CASES, ids=str)
def test_best_tokens_in_torch(case):
    assert_best(case, "cpu")


@interpreter
@pytest.mark.parametrize("case", TOKEN_CASES, ids=str)
def test_interpreted_best_tokens(case):
    assert_best(case, "cpu")


@gpu
@pytest.mark.parametrize("case", [*TOKEN_CASES, (15, 151936, 16, torch.bfloat16, 1.0, 0.0, "random")], ids=str)
def test_best_tokens_on_the_gpu(case):
    assert_best(case, "cuda")


# --- acceptance and commit ---


def assert_accepts(tree, seed, max_depth, device):
    choice = choices_near(tree, seed)
    requests, budget = tree.token.shape
    window = torch.randperm(requests * budget, generator=torch.Generator().manual_seed(seed)).view(requests, budget) + 5
    committed = torch.arange(requests) * 13 + 2
    moved = TokenTree(*(getattr(tree, field.name).to(device) for field in fields(TokenTree)))
    commit = accept_and_plan(moved, choice.to(device), max_depth, window.to(device), committed.to(device))
    expected = accept(tree, choice, max_depth)
    plan = plan_commit(window, expected, committed)
    for got, wanted in ((commit.accepted, expected), (commit.plan, plan)):
        for name, value in vars(wanted).items():
            assert torch.equal(getattr(got, name).cpu(), value), name
    assert torch.equal(commit.new_length.cpu(), committed + expected.length)


@interpreter
@settings(max_examples=60, deadline=None)
@given(token_trees(), st.integers(0, 2**20), st.integers(0, 12))
def test_interpreted_acceptance(tree, seed, max_depth):
    assert_accepts(tree, seed, max_depth, "cpu")


@gpu
@settings(max_examples=60, deadline=None)
@given(token_trees(max_budget=256), st.integers(0, 2**20), st.integers(0, 12))
def test_acceptance_on_the_gpu(tree, seed, max_depth):
    assert_accepts(tree, seed, max_depth, "cuda")


# --- a forced choice ---


def assert_forces(tree, length, device):
    moved = TokenTree(*(getattr(tree, field.name).to(device) for field in fields(TokenTree)))
    choice = force_path(moved, length)
    assert torch.equal(choice.cpu(), force_module._force_torch(tree, length))
    accepted = accept(tree, choice.cpu(), 300)
    assert accepted.length.tolist() == [min(length, int(depth) + 1) for depth in tree.depth.amax(1)]


@interpreter
@settings(max_examples=60, deadline=None)
@given(token_trees(), st.integers(1, 12))
def test_interpreted_forced_choice(tree, length):
    assert_forces(tree, length, "cpu")


@gpu
@settings(max_examples=60, deadline=None)
@given(token_trees(max_budget=256), st.integers(1, 12))
def test_forced_choice_on_the_gpu(tree, length):
    assert_forces(tree, length, "cuda")


# --- staging ---

STAGE_CASES = [(1, 1), (3, 33), (5, 64), (2, 200)]  # requests, nodes


def assert_stages(requests, nodes, device):
    generator = torch.Generator().manual_seed(nodes)
    table = torch.randint(1, 10**6, (9, 5000), generator=generator, dtype=torch.int32)
    rows = torch.randperm(9, generator=generator)[:requests]
    lengths = torch.randint(0, 4700, (requests,), generator=generator)
    on = [tensor.to(device) for tensor in (table, rows, lengths)]
    window = [table[row, length : length + nodes].tolist() for row, length in zip(rows, lengths)]
    assert window_slots(*on, nodes).tolist() == window

    prefix = torch.cat([table[row, :length] for row, length in zip(rows, lengths)])
    indptr = torch.full((requests + 1,), -1, dtype=torch.int32, device=device)
    slots = torch.full((prefix.numel() + 8,), -1, dtype=torch.int32, device=device)
    pack_rows(*on, indptr, slots)
    assert indptr.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert torch.equal(slots.cpu(), torch.cat([prefix, torch.full((8,), -1, dtype=torch.int32)]))

    words = -(-nodes // 32)
    ancestors = torch.randint(-(2**31), 2**31, (requests, nodes, words), generator=generator).to(torch.int32)
    depth = torch.randint(0, 16, (nodes,), generator=generator).expand(requests, -1)
    out = torch.zeros(2, requests + 2, nodes, words, dtype=torch.int32, device=device)
    levels = torch.full((requests + 2, nodes), -1, device=device)
    stage_bits(ancestors.to(device), depth.to(device), out[0], out[1], levels)
    bit = torch.arange(nodes)
    seen = ((out[..., bit // 32] >> (bit % 32).to(device)) & 1).bool().cpu()
    given_bits = ((ancestors[..., bit // 32] >> (bit % 32)) & 1).bool()
    wanted = torch.cat([given_bits, torch.eye(nodes, dtype=torch.bool).expand(2, -1, -1)])
    assert torch.equal(seen[0], wanted) and torch.equal(seen[1], wanted.tril())
    assert torch.equal(levels.cpu(), torch.cat([depth, torch.zeros(2, nodes, dtype=torch.int64)]))


@pytest.mark.parametrize("case", STAGE_CASES, ids=str)
def test_interpreted_or_torch_staging(case):
    assert_stages(*case, "cpu")


@gpu
@pytest.mark.parametrize("case", STAGE_CASES, ids=str)
def test_staging_on_the_gpu(case):
    assert_stages(*case, "cuda")


@parent_process
def test_the_triton_kernels_hold_in_the_interpreter():
    run = run_interpreted(__file__, "-x", "-k", "interpreted")
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(TOKEN_CASES) + len(STAGE_CASES) + 2} passed" in run.stdout, run.stdout
