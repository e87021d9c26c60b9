"""Trees from a conditional drafter equal a plain best-first search with a heap, node for node."""

import ctypes
import heapq
import math
import random

import pytest
import torch

from sgl_specflow.tree import Expansion, build_conditional_tree, expansion_rounds

ROOT = 1000


class TableDrafter:
    """Random conditional distributions: a path of pool places decides the children's log-probabilities."""

    def __init__(self, requests, depths, pool, seed, levels=None):
        self.shape, self.seed, self.levels = (requests, depths, pool), seed, levels
        draw = torch.Generator().manual_seed(seed)
        # The tokens of a depth are distinct; depths share tokens.
        self.pool_tokens = torch.stack(
            [
                torch.stack([torch.randperm(pool + 3, generator=draw)[:pool] for _ in range(depths)])
                for _ in range(requests)
            ]
        )
        self.paths: list[list[tuple]] = [[] for _ in range(requests)]  # a slot's path of tokens
        self.asked: list[int] = []

    def log_probs(self, request: int, path: tuple) -> list[float]:
        draw = random.Random(f"{self.seed} {request} {path}")
        row = [draw.gauss(0, 1.5) for _ in range(self.shape[2])]
        if self.levels:  # few distinct values: many ties
            row = [round(value * self.levels) / self.levels for value in row]
        return torch.tensor(row).log_softmax(0).tolist()

    def __call__(self, nodes: Expansion) -> torch.Tensor:
        self.asked.append(nodes.token.shape[1])
        out = torch.zeros(nodes.token.shape[0], nodes.token.shape[1], self.shape[2])
        for r, paths in enumerate(self.paths):
            assert len(paths) == nodes.first_slot
            new = []
            for i in range(nodes.token.shape[1]):
                above = () if nodes.first_slot == 0 else paths[nodes.parent[r, i]]
                new.append((*above, nodes.token[r, i].item()))
                out[r, i] = torch.tensor(self.log_probs(r, new[-1]))
            paths += new
        return out


def float32(value):
    return ctypes.c_float(value).value


def by_heap(drafter, request, budget, width, children, last_depth):
    """Paths and parents' paths in the order of selection."""
    pool = drafter.pool_tokens[request].tolist()
    heap, taken = [], []

    def push(slot, score, path):
        depth = len(path) - 1
        if depth >= last_depth:
            return
        ranked = sorted(enumerate(drafter.log_probs(request, path)), key=lambda pair: -pair[1])[:children]
        for rank, (place, log_prob) in enumerate(ranked):
            heapq.heappush(heap, (-float32(score + log_prob), slot, rank, (*path, pool[depth][place])))

    taken.append((ROOT + request,))
    push(0, 0.0, taken[0])
    places = 1  # a round uses up `width` places even where the frontier holds fewer
    while heap and places < budget:
        now = [heapq.heappop(heap) for _ in range(min(width, budget - places, len(heap)))]
        places += width
        for _, _, _, path in now:
            taken.append(path)
        for place, (score, _, _, path) in enumerate(now):
            push(len(taken) - len(now) + place, -score, path)
    return taken


def paths_of(tree, request):
    """Each real node's path of tokens, in node order."""
    paths = []
    for node in range(int(tree.node_count[request])):
        parent = int(tree.parent[request, node])
        paths.append((*(paths[parent] if parent >= 0 else ()), int(tree.token[request, node])))
    return paths


def check(seed, width, budget=None, levels=None, limits=False):
    draw = random.Random(seed)
    requests, depths, pool = draw.randint(1, 3), draw.randint(1, 6), draw.randint(1, 9)
    budget = budget or draw.randint(1, 40)
    children = draw.randint(1, 10)
    drafter = TableDrafter(requests, depths, pool, seed, levels)
    max_depth = torch.tensor([draw.randint(0, depths) for _ in range(requests)]) if limits else None
    root = torch.arange(requests) + ROOT
    tree = build_conditional_tree(root, drafter.pool_tokens, drafter, budget, width, children, max_depth)
    tree.check()
    for r in range(requests):
        last = depths if max_depth is None else int(max_depth[r])
        expected = by_heap(drafter, r, budget, width, children, last)
        # Node order is depth, then the order of selection.
        assert paths_of(tree, r) == sorted(expected, key=len)
    assert len(drafter.asked) == expansion_rounds(budget, width)
    return tree


@pytest.mark.parametrize("seed", range(300))
def test_width_one_is_exact_best_first(seed):
    check(seed, width=1, levels=2 if seed % 3 == 0 else None, limits=seed % 4 == 0)


@pytest.mark.parametrize("seed", range(300, 420))
@pytest.mark.parametrize("width", [2, 5, 8])
def test_several_at_once_is_the_same_search_by_rounds(seed, width):
    check(seed, width, levels=2 if seed % 3 == 0 else None, limits=seed % 4 == 0)


@pytest.mark.parametrize("budget, width", [(1, 1), (1, 8), (2, 8), (64, 8), (65, 8), (256, 8), (64, 16), (17, 300)])
def test_rounds_are_at_most_ceil_of_budget_over_width(budget, width):
    tree = check(7, width, budget)
    assert tree.token.shape[1] == budget
    assert expansion_rounds(budget, width) <= math.ceil(budget / width)


def test_a_request_does_not_depend_on_the_others():
    pools = TableDrafter(4, 5, 8, seed=3)
    root = torch.arange(4) + ROOT
    together = build_conditional_tree(root, pools.pool_tokens, pools, 24, 8, 8)
    for r in range(4):

        def alone(nodes, r=r, state={}):  # noqa: B006
            paths = state.setdefault(r, [])
            new = [
                (*(() if nodes.first_slot == 0 else paths[p]), t)
                for p, t in zip(nodes.parent[0].tolist(), nodes.token[0].tolist())
            ]
            paths += new
            return torch.tensor([[pools.log_probs(r, path) for path in new]])

        single = build_conditional_tree(root[r : r + 1], pools.pool_tokens[r : r + 1], alone, 24, 8, 8)
        assert torch.equal(single.token[0], together.token[r]) and torch.equal(single.parent[0], together.parent[r])


def test_nan_and_minus_infinity_are_never_chosen():
    pool = torch.arange(4).expand(1, 3, 4).contiguous()
    rows = torch.tensor([-0.5, math.nan, -math.inf, 0.7])
    tree = build_conditional_tree(
        torch.tensor([9]), pool, lambda nodes: rows.expand(1, nodes.token.shape[1], 4), 16, 2, 4
    )
    tree.check()
    real = tree.token[0, 1 : int(tree.node_count[0])].tolist()
    assert int(tree.node_count[0]) == 15 and set(real) == {0, 3}


@pytest.mark.parametrize(
    "change",
    [
        {"budget": 0},
        {"width": 0},
        {"children": 0},
        {"pool_tokens": torch.zeros(1, 2, 3)},
        {"root_token": torch.zeros(2, dtype=torch.int64)},
    ],
)
def test_wrong_arguments_are_named(change):
    given = dict(
        root_token=torch.tensor([9]), pool_tokens=torch.zeros(1, 2, 3, dtype=torch.int64), budget=4, width=2, children=2
    )
    with pytest.raises(ValueError, match=next(iter(change))):
        build_conditional_tree(log_probs_of=lambda nodes: None, **{**given, **change})
