"""Path refresh: the second block's layout, and the rebuilt tree against a search over all candidates."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_specflow.tree import build_tree
from sgl_specflow.tree.refresh import rebuild_tree, refresh_block
from sgl_specflow.tree.token_tree import unpack_bits

VALUES = [0.0, -0.25, -0.5, -0.5, -1.0, -3.0, -torch.inf]


def first_tree(draw, budget):
    generator = torch.Generator().manual_seed(draw)
    log_probs = -torch.rand(1, 4, 5, generator=generator).cumsum(2)
    tokens = torch.stack([torch.randperm(9, generator=generator)[:5] for _ in range(4)])[None]
    return build_tree(torch.tensor([7]), log_probs, tokens, budget)


def naive_rebuild(tree, own, log_probs, tokens, budget, max_depth):
    """All candidates as (score, depth, order, path of tokens), best first; each path's score is summed from the root."""
    parent, depth, token = tree.parent[0].tolist(), tree.depth[0].tolist(), tree.token[0].tolist()
    score, path, candidates = {}, {}, []
    for node in range(int(tree.node_count)):
        above = score[parent[node]] if node else torch.tensor(0.0)
        score[node] = above + (own[0, node] if node else 0.0)
        path[node] = (path[parent[node]] if node else ()) + (token[node],)
        candidates.append((score[node].item(), depth[node], node, path[node]))
    children = {n: {token[c] for c in range(1, int(tree.node_count)) if parent[c] == n} for n in path}
    for order, (node, k) in enumerate(itertools.product(range(int(tree.node_count)), range(tokens.shape[2]))):
        candidate = tokens[0, node, k].item()
        if depth[node] < max_depth and candidate not in children[node]:
            value = (score[node] + log_probs[0, node, k]).item()
            candidates.append((value, depth[node] + 1, 1000 + order, path[node] + (candidate,)))
    alive = [c for c in candidates if c[0] > -torch.inf]
    return {c[3] for c in sorted(alive, key=lambda c: (-c[0], c[1], c[2]))[:budget]}


def paths(tree):
    found = []
    for node in range(int(tree.node_count)):
        above = found[tree.parent[0, node]] if node else ()
        found.append(above + (tree.token[0, node].item(),))
    return found


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 12), budget=st.integers(1, 40), max_depth=st.integers(4, 6))
def test_rebuilt_tree_holds_the_best_paths(seed, nodes, budget, max_depth):
    tree = first_tree(seed, nodes)
    generator = torch.Generator().manual_seed(seed + 1)
    # Powers of two: sums are exact in float32 in any order.
    pick = torch.tensor(VALUES)
    own = pick[torch.randint(len(VALUES), (1, nodes), generator=generator)]
    log_probs = pick[torch.randint(len(VALUES), (1, nodes, 4), generator=generator)]
    tokens = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(nodes)])[None]
    rebuilt = rebuild_tree(tree, own, log_probs, tokens, budget, max_depth)
    rebuilt.check()
    assert rebuilt.budget == budget
    found = paths(rebuilt)
    assert len(set(found)) == len(found)
    assert set(found) == naive_rebuild(tree, own, log_probs, tokens, budget, max_depth)


def test_a_mask_sees_its_branch_and_itself_only():
    tree = first_tree(3, 9)
    tokens, depth, bits = refresh_block(tree, mask_token=8)
    sees = unpack_bits(bits, 18)[0]
    own = tree.ancestor_mask()[0]
    assert (tokens[0, 9:] == 8).all() and (tokens[0, :9] == tree.token[0]).all()
    assert (depth[0, 9:] == tree.depth[0] + 1).all()
    assert (sees[:9, :9] == own).all() and not sees[:9, 9:].any()
    assert (sees[9:, :9] == own).all() and (sees[9:, 9:] == torch.eye(9, dtype=torch.bool)).all()


def test_a_candidate_that_the_tree_holds_is_not_doubled():
    tree = build_tree(torch.tensor([5]), torch.tensor([[[-0.1, -2.0]]]), torch.tensor([[[3, 4]]]), 2)
    rebuilt = rebuild_tree(
        tree,
        torch.tensor([[0.0, -0.5]]),
        torch.tensor([[[-0.5, -1.0], [-9.0, -9.0]]]),
        torch.tensor([[[3, 6], [1, 2]]]),
        4,
        2,
    )
    rebuilt.check()
    assert rebuilt.token[0].tolist() == [5, 3, 6, 1]


@pytest.mark.parametrize("budget", [1, 2, 5, 100])
def test_padding_is_inert(budget):
    tree = first_tree(1, 3)
    dead = torch.full((1, 3, 2), -torch.inf)
    rebuilt = rebuild_tree(
        tree, torch.full((1, 3), -torch.inf), dead, torch.zeros(1, 3, 2, dtype=torch.int64), budget, 3
    )
    rebuilt.check()
    assert rebuilt.node_count.tolist() == [1]


def test_a_requests_own_depth_limit_holds():
    """As in a tree from marginals: a request that may not go below its anchor keeps the anchor alone."""
    limits = torch.tensor([0, 4])
    log_probs = torch.tensor([[-0.1, -0.2], [-0.1, -0.3]]).expand(2, -1, -1)
    candidates = torch.tensor([[3, 4], [5, 6]]).expand(2, -1, -1).contiguous()
    first = build_tree(torch.tensor([7, 7]), log_probs.contiguous(), candidates, 3, limits)
    own = torch.zeros(2, 3)
    rebuilt = rebuild_tree(first, own, torch.full((2, 3, 2), -0.5), torch.tensor([1, 2]).expand(2, 3, -1), 8, 4, limits)
    rebuilt.check()
    assert rebuilt.node_count[0] == 1
    assert rebuilt.node_count[1] == 8
