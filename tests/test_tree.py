"""The tree's layout, and the depth-by-depth builder held to the heap, element for element."""

import itertools
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import token_trees

from sgl_specflow.tree import TokenTree, ancestor_bits, build_tree, build_tree_by_heap, chain, pack_bits, unpack_bits

TIED_VALUES = torch.tensor([0.0, -0.0, -0.5, -0.5, -1.0, -2.0, -torch.inf])
FAULTY_VALUES = torch.tensor([torch.nan, torch.inf, 1e-7, 0.0, -1.0, -3e38, -torch.inf, -1e-45])


def marginals(kind, requests, depths, candidates, seed):
    """log_probs float32 and tokens int64, both [R, D, K]; tokens are distinct inside a depth."""
    generator = torch.Generator().manual_seed(seed)
    shape = (requests, depths, candidates)
    if kind == "smooth":
        log_probs = (4 * torch.randn(shape, generator=generator)).log_softmax(-1).sort(dim=-1, descending=True).values
    else:
        values = TIED_VALUES if kind == "tied" else FAULTY_VALUES
        log_probs = values[torch.randint(len(values), shape, generator=generator)]
    tokens = torch.rand(requests, depths, 4 * candidates, generator=generator).argsort(-1)[..., :candidates]
    return log_probs, tokens.contiguous()


def assert_same_as_heap(log_probs, tokens, budget, max_depth=None):
    root_token = torch.arange(len(tokens)) + 7
    tree = build_tree(root_token, log_probs, tokens, budget, max_depth)
    for request in range(len(tokens)):
        limit = None if max_depth is None else int(max_depth[request])
        expected = build_tree_by_heap(request + 7, log_probs[request].tolist(), tokens[request].tolist(), budget, limit)
        for field in fields(TokenTree):
            actual = getattr(tree, field.name)[request : request + 1]
            wanted = getattr(expected, field.name)
            assert actual.dtype == wanted.dtype and torch.equal(actual, wanted), (field.name, request)
    return tree


def first_nodes_by_definition(log_probs, tokens, budget):
    """The tree of one request from the definition alone: enumerate every path, sort all nodes, keep the first B."""
    depths, candidates = log_probs.shape
    levels = [[(0.0, 0, None, None)]]  # score, rank, parent's place, token
    for depth in range(depths):
        ranked = sorted(range(candidates), key=lambda candidate: -float(log_probs[depth, candidate]))
        nodes = [
            (float(torch.tensor(above[0]) + log_probs[depth, candidate]), rank, place, int(tokens[depth, candidate]))
            for place, above in enumerate(levels[-1])
            for rank, candidate in enumerate(ranked)
        ]
        levels.append(sorted(nodes, key=lambda node: (-node[0], node[2], node[1])))
    every = [(-node[0], depth, place) for depth, level in enumerate(levels) for place, node in enumerate(level)]
    kept = sorted(sorted(every)[:budget], key=lambda node: node[1:])
    number = {node[1:]: index for index, node in enumerate(kept)}
    return [
        (depth, levels[depth][place][3], number[depth - 1, levels[depth][place][2]] if depth else -1)
        for _, depth, place in kept
    ]


@pytest.mark.parametrize("kind", ["smooth", "tied", "faulty"])
@settings(max_examples=200, deadline=None)
@given(
    depths=st.integers(1, 6),
    candidates=st.integers(1, 5),
    budget=st.integers(1, 40),
    limited=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_depth_by_depth_equals_the_heap(kind, depths, candidates, budget, limited, seed):
    requests = 16
    log_probs, tokens = marginals(kind, requests, depths, candidates, seed)
    max_depth = torch.arange(requests) % (depths + 2) if limited else None
    tree = assert_same_as_heap(log_probs, tokens, budget, max_depth)
    tree.check()
    if limited:
        assert (tree.depth.amax(1) <= max_depth).all()


@pytest.mark.parametrize("kind", ["smooth", "tied", "faulty"])
@pytest.mark.parametrize(
    "depths, candidates, budget", [(15, 64, 256), (16, 1, 256), (3, 2, 256), (5, 40, 2), (9, 7, 64)]
)
def test_depth_by_depth_equals_the_heap_at_serving_sizes(kind, depths, candidates, budget):
    assert_same_as_heap(*marginals(kind, 2, depths, candidates, seed=1), budget).check()


@pytest.mark.parametrize("seed", range(20))
def test_heap_selects_the_first_nodes_of_the_documented_order(seed):
    log_probs, tokens = marginals("tied", 1, 3, 3, seed)
    log_probs.clamp_(min=-8.0)
    budget = 2 + seed
    tree = build_tree_by_heap(7, log_probs[0].tolist(), tokens[0].tolist(), budget)
    expected = first_nodes_by_definition(log_probs[0], tokens[0], budget)
    actual = list(zip(tree.depth[0].tolist(), [None, *tree.token[0, 1:].tolist()], tree.parent[0].tolist()))
    assert actual == expected


def test_certain_candidates_make_a_chain_before_any_other_node():
    log_probs = torch.tensor([[[0.0, -1.0], [0.0, -1.0], [0.0, -1.0]]])
    tree = build_tree(torch.tensor([9]), log_probs, torch.tensor([[[1, 2], [3, 4], [5, 6]]]), budget=4)
    assert tree.token.tolist() == [[9, 1, 3, 5]]
    assert tree.parent.tolist() == [[-1, 0, 1, 2]]


def test_one_candidate_a_depth_gives_a_chain_and_padding():
    tokens = torch.tensor([[[4], [5], [6]]])
    tree = build_tree(torch.tensor([3]), torch.full((1, 3, 1), -2.0), tokens, budget=6)
    path = chain(torch.tensor([[3, 4, 5, 6]]))
    assert tree.node_count.tolist() == [4]
    assert torch.equal(tree.token, torch.tensor([[3, 4, 5, 6, 3, 3]]))
    for name in ("token", "parent", "depth", "ancestors"):
        assert torch.equal(getattr(tree, name)[:, :4], getattr(path, name)), name


def test_nothing_eligible_leaves_the_root_alone():
    log_probs = torch.tensor([[[-torch.inf, torch.nan]], [[-1.0, -1.0]]])
    tokens = torch.tensor([[[1, 2]], [[1, 2]]])
    tree = build_tree(torch.tensor([9, 9]), log_probs, tokens, budget=3, max_depth=torch.tensor([1, 0]))
    tree.check()
    assert tree.node_count.tolist() == [1, 1]


def test_build_tree_reads_no_value_on_the_host():
    # Meta tensors carry no values: a shape or a branch that depends on one raises.
    tokens = torch.empty(4, 3, 8, dtype=torch.int64, device="meta")
    root_token = torch.empty(4, dtype=torch.int64, device="meta")
    tree = build_tree(root_token, torch.empty(4, 3, 8, device="meta"), tokens, 33, max_depth=root_token)
    assert [tuple(getattr(tree, field.name).shape) for field in fields(tree)] == [(4, 33)] * 3 + [(4, 33, 2), (4,)]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"log_probs": torch.zeros(1, 2, 3, dtype=torch.float64)}, "log_probs is torch.float64"),
        ({"log_probs": torch.zeros(1, 0, 3)}, "D >= 1"),
        ({"tokens": torch.zeros(1, 2, 4, dtype=torch.int64)}, "tokens is"),
        ({"root_token": torch.zeros(2, dtype=torch.int64)}, "root_token is"),
        ({"max_depth": torch.zeros(1, dtype=torch.int32)}, "max_depth is torch.int32"),
        ({"budget": 0}, "budget is 0"),
    ],
)
def test_build_tree_refuses_wrong_arguments_by_name(change, message):
    tokens = torch.arange(6).reshape(1, 2, 3)
    arguments = dict(root_token=torch.tensor([0]), log_probs=torch.zeros(1, 2, 3), tokens=tokens, budget=4)
    with pytest.raises(ValueError, match=message):
        build_tree(**arguments | change)


@settings(max_examples=100, deadline=None)
@given(token_trees())
def test_ancestor_mask_and_positions_follow_the_parents(tree):
    tree.check()
    mask = tree.ancestor_mask()
    for request, parents in enumerate(tree.parent.tolist()):
        for node in range(tree.budget):
            path, at = set(), node
            while at >= 0:
                path.add(at)
                at = parents[at]
            assert mask[request, node].nonzero().flatten().tolist() == sorted(path)
            assert tree.depth[request, node] == len(path) - 1
    committed_length = torch.arange(len(tree.token)) * 100
    assert torch.equal(tree.positions(committed_length), committed_length[:, None] + mask.sum(2) - 1)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 256])
def test_chain_is_a_path_across_word_borders(length):
    tree = chain(torch.arange(2 * length).reshape(2, length))
    tree.check()
    assert torch.equal(tree.ancestor_mask(), torch.ones(length, length, dtype=torch.bool).tril().expand(2, -1, -1))
    assert tree.node_count.tolist() == [length, length]


def test_bit_31_makes_the_word_negative():
    assert chain(torch.arange(33)[None]).ancestors[0, 31:].tolist() == [[-1, 0], [-1, 1]]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_unpack_bits_inverts_pack_bits(count):
    flags = torch.rand(5, count, generator=torch.Generator().manual_seed(count)) < 0.5
    assert torch.equal(unpack_bits(pack_bits(flags), count), flags)


@pytest.mark.parametrize("budget, max_depth", list(itertools.product([5, 40], [1, 2, 3, 7])))
def test_ancestor_bits_with_a_depth_bound_equals_without(budget, max_depth):
    log_probs, tokens = marginals("smooth", 3, max_depth, 2, seed=budget)
    parent = build_tree(torch.zeros(3, dtype=torch.int64), log_probs, tokens, budget).parent
    assert torch.equal(ancestor_bits(parent, max_depth), ancestor_bits(parent))


# Nodes: 0 root; 1, 2 its children; 3 below 1; 4 padding.
def small_tree():
    parent = torch.tensor([[-1, 0, 0, 1, -1]])
    return TokenTree(
        token=torch.tensor([[5, 6, 7, 6, 5]]),
        parent=parent,
        depth=torch.tensor([[0, 1, 1, 2, 0]]),
        ancestors=ancestor_bits(parent),
        node_count=torch.tensor([4]),
    )


@pytest.mark.parametrize(
    "field, index, value, message",
    [
        ("node_count", (0,), 0, "node_count lies in 1..B"),
        ("node_count", (0,), 6, "node_count lies in 1..B"),
        ("node_count", (0,), 5, "a parent comes before its child .request 0, node 4"),
        ("parent", (0, 0), 0, "the root has parent -1"),
        ("depth", (0, 0), 1, "the root has depth 0"),
        ("parent", (0, 4), 0, "padding has parent -1"),
        ("depth", (0, 4), 1, "padding has depth 0"),
        ("token", (0, 4), 6, "padding has the root's token"),
        ("parent", (0, 2), 3, "a parent comes before its child"),
        ("parent", (0, 1), -1, "a parent comes before its child"),
        ("depth", (0, 3), 1, "a child is one deeper than its parent"),
        ("token", (0, 2), 6, "siblings carry distinct tokens"),
        ("ancestors", (0, 3, 0), 0b1001, "ancestors agree with parents .request 0, node 3"),
        ("ancestors", (0, 2, 0), 0b10101, "ancestors agree with parents"),
    ],
)
def test_check_names_the_broken_invariant(field, index, value, message):
    tree = small_tree()
    tree.check()
    getattr(tree, field)[index] = value
    with pytest.raises(ValueError, match=message):
        tree.check()


def test_check_names_a_depth_out_of_order():
    parent = torch.tensor([[-1, 0, 1, 0]])
    tree = TokenTree(
        token=torch.tensor([[0, 1, 2, 3]]),
        parent=parent,
        depth=torch.tensor([[0, 1, 2, 1]]),
        ancestors=ancestor_bits(parent),
        node_count=torch.tensor([4]),
    )
    with pytest.raises(ValueError, match="nodes are ordered by depth .request 0, node 3"):
        tree.check()


@pytest.mark.parametrize("word", [0, 1])
def test_check_names_one_wrong_word_of_several(word):
    tree = chain(torch.arange(40)[None])
    tree.ancestors[0, 39, word] ^= 1
    with pytest.raises(ValueError, match="ancestors agree with parents .request 0, node 39"):
        tree.check()


def test_check_names_a_wrong_layout():
    tree = chain(torch.arange(4)[None])
    with pytest.raises(ValueError, match="ancestors is torch.int64"):
        replace(tree, ancestors=tree.ancestors.long()).check()
    with pytest.raises(ValueError, match="node_count is .*must be torch.int64 .1,"):
        replace(tree, node_count=torch.tensor([4, 4])).check()
