"""Trees from a conditional drafter equal a plain search over dictionaries, node for node, and strict best-first search
where rounds expand one node each."""

import heapq
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_specflow.tree import Expansion, build_conditional_tree, build_tree, expansion_rounds

ROOT = 1000


class TableDrafter:
    """Random conditional distributions: a path of tokens decides the children's log-probabilities.

    levels: few distinct values, so that many tie. broken: the share of candidates of -inf or NaN.
    """

    def __init__(self, requests, depths, pool, seed, levels=None, broken=0.0):
        self.shape, self.seed, self.levels, self.broken = (requests, depths, pool), seed, levels, broken
        draw = torch.Generator().manual_seed(seed)
        # The tokens of a depth are distinct; depths share tokens.
        self.pool_tokens = torch.stack(
            [
                torch.stack([torch.randperm(pool + 3, generator=draw)[:pool] for _ in range(depths)])
                for _ in range(requests)
            ]
        )
        self.marginals = torch.tensor(
            [[self._row(f"marginals {seed} {r} {d}") for d in range(depths)] for r in range(requests)]
        )
        self.paths: list[list[tuple]] = [[] for _ in range(requests)]  # a slot's path of tokens
        self.asked: list[int] = []

    def _row(self, name: str) -> list[float]:
        draw = random.Random(name)
        row = [draw.gauss(0, 1.5) for _ in range(self.shape[2])]
        if self.levels:
            row = [round(value * self.levels) / self.levels for value in row]
        row = torch.tensor(row).log_softmax(0).tolist()
        return [draw.choice((math.nan, -math.inf)) if draw.random() < self.broken else value for value in row]

    def log_probs(self, request: int, path: tuple) -> list[float]:
        return self._row(f"{self.seed} {request} {path}")

    def __call__(self, nodes: Expansion) -> torch.Tensor:
        width = nodes.token.shape[1]
        self.asked.append(width)
        out = torch.zeros(*nodes.token.shape, self.shape[2])
        for r, paths in enumerate(self.paths):
            assert len(paths) == nodes.first_slot
            for i in range(width):
                root = nodes.first_slot + i == 0 or (nodes.depth[r, i] == 0)
                paths.append((*(() if root else paths[nodes.parent[r, i]]), nodes.token[r, i].item()))
                out[r, i] = torch.tensor(self.log_probs(r, paths[-1]))
                if len(paths[-1]) == nodes.depth[r, i] + 1:  # so it is of every node that lives
                    self.check_ancestors(nodes, r, i)
        return out

    def check_ancestors(self, nodes: Expansion, r: int, i: int) -> None:
        """`above` and `inside` are the path: what they name are the prefixes of the node's own."""
        paths, first = self.paths[r], nodes.first_slot
        inside = [paths[first + j] for j in range(i + 1) if nodes.inside[r, i, j]]
        assert not nodes.inside[r, i, i + 1 :].any() and inside[-1] == paths[-1]
        lengths = [len(path) for path in inside]
        assert all(paths[-1][:length] == path for length, path in zip(lengths, inside))
        assert lengths == list(range(lengths[0], lengths[-1] + 1))
        if lengths[0] > 1:
            assert nodes.above[r, i] < first and paths[nodes.above[r, i]] == inside[0][:-1]


def rounded(log_prob: float) -> float:
    """A log-probability as scores count it: NaN is -inf, else a multiple of 2^-20."""
    if math.isnan(log_prob) or log_prob == -math.inf:
        return -math.inf
    return round(max(min(log_prob, 0.0), -(2.0**20)) * 2**20) / 2**20


def by_dictionaries(drafter, request, budget, width, rounds, children, last_depth):
    """Paths of the tree in node order: the rule of `build_conditional_tree`, one node at a time.

    `known` maps a path to its score, in the order of ties; its first `budget` by score are the tree.
    """
    depths, size = drafter.shape[1:]
    pool = drafter.pool_tokens[request].tolist()
    known, expanded = {(ROOT + request,): 0.0}, set()

    def tree():
        return sorted((path for path in known if known[path] > -math.inf), key=lambda path: -known[path])[:budget]

    for _ in range(rounds if budget > 1 else 0):
        best = tree()
        known = {path: known[path] for path in best}
        entries = []  # negative estimate, place of the open node, place of the guess, path
        for place, path in enumerate(p for p in best if p not in expanded and len(p) - 1 < last_depth):
            for number, (guess, estimate) in enumerate(guesses_behind(drafter, request, path, width)):
                if len(guess) - 1 < last_depth:
                    entries.append((-(known[path] + estimate), place, number, guess))
        chosen = [guess for *_, guess in sorted(entries)[:width]]
        true = {path: [rounded(v) for v in drafter.log_probs(request, path)] for path in chosen}
        guesses = [path for path in chosen if path not in known]
        for path in guesses:
            known[path] = known[path[:-1]] + true[path[:-1]][pool[len(path) - 2].index(path[-1])]
        raw = {path: drafter.log_probs(request, path) for path in chosen}
        for path in chosen:
            tokens = pool[len(path) - 1]
            others = [c for c in range(size) if (*path, tokens[c]) not in guesses and true[path][c] > -math.inf]
            for candidate in sorted(others, key=lambda c: -raw[path][c])[: min(children, budget - 1)]:
                known[(*path, tokens[candidate])] = known[path] + true[path][candidate]
        expanded |= set(chosen)
    return sorted(tree(), key=len)


def guesses_behind(drafter, request, path, width):
    """(path, summed marginals) of the best-first tree of `width` nodes over the marginals of the depths behind path,
    which is its first node; none deeper than what can be expanded."""
    depth, (_, depths, _) = len(path) - 1, drafter.shape
    behind = [0.0]
    paths = [path]
    if depth + 1 < depths and width > 1:
        marginals = drafter.marginals[request, depth : depths - 1][None].nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        tokens = drafter.pool_tokens[request, depth : depths - 1][None]
        tree = build_tree(torch.tensor([path[-1]]), marginals, tokens, width)
        for node in range(1, int(tree.node_count[0])):
            parent, token, level = int(tree.parent[0, node]), int(tree.token[0, node]), int(tree.depth[0, node]) - 1
            paths.append((*paths[parent], token))
            behind.append(behind[parent] + rounded(marginals[0, level][tokens[0, level] == token].item()))
    return list(zip(paths, behind))


def best_first(drafter, request, budget, children, last_depth):
    """Strict best-first search with a heap: paths in node order. On ties the earlier parent, then the smaller rank."""
    pool = drafter.pool_tokens[request].tolist()
    heap, taken = [(0.0, 0, 0, (ROOT + request,))], []
    while heap and len(taken) < budget:
        score, _, _, path = heapq.heappop(heap)
        taken.append(path)
        if len(path) - 1 < last_depth:
            row = [(place, v) for place, v in enumerate(drafter.log_probs(request, path)) if v > -math.inf]
            for rank, (place, log_prob) in enumerate(sorted(row, key=lambda pair: -pair[1])[:children]):
                entry = (score - rounded(log_prob), len(taken), rank, (*path, pool[len(path) - 1][place]))
                heapq.heappush(heap, entry)
    return sorted(taken, key=len)


def paths_of(tree, request):
    """Each real node's path of tokens, in node order."""
    paths = []
    for node in range(int(tree.node_count[request])):
        parent = int(tree.parent[request, node])
        paths.append((*(paths[parent] if parent >= 0 else ()), int(tree.token[request, node])))
    return paths


@st.composite
def cases(draw):
    requests, depths, pool = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 9))
    limits = st.none() | st.lists(st.integers(0, depths + 1), min_size=requests, max_size=requests)
    drafter = TableDrafter(
        requests,
        depths,
        pool,
        draw(st.integers(0, 10**6)),
        draw(st.sampled_from([None, None, 2, 4])),
        draw(st.sampled_from([0.0, 0.0, 0.2, 0.7])),
    )
    return drafter, draw(st.integers(1, 40)), draw(st.integers(1, 10)), draw(limits)


def build(drafter, budget, width, rounds, children, limits=None):
    root = torch.arange(drafter.shape[0]) + ROOT
    limits = None if limits is None else torch.tensor(limits)
    tree = build_conditional_tree(
        root, drafter.pool_tokens, drafter.marginals, drafter, budget, width, rounds, children, limits
    )
    tree.check()
    assert tree.token.shape[1] == budget
    return tree


def last_depth(drafter, limits, request):
    return drafter.shape[1] if limits is None else min(limits[request], drafter.shape[1])


@settings(max_examples=400, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(1, 5))
def test_the_tree_is_that_of_a_plain_search(case, width, rounds):
    drafter, budget, children, limits = case
    tree = build(drafter, budget, width, rounds, children, limits)
    for r in range(drafter.shape[0]):
        last = last_depth(drafter, limits, r)
        assert paths_of(tree, r) == by_dictionaries(drafter, r, budget, width, rounds, children, last)
    assert drafter.asked == [width] * (rounds if budget > 1 else 0)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_one_node_a_round_is_strict_best_first_search(case):
    drafter, budget, children, limits = case
    tree = build(drafter, budget, 1, max(1, budget - 1), children, limits)
    for r in range(drafter.shape[0]):
        assert paths_of(tree, r) == best_first(drafter, r, budget, children, last_depth(drafter, limits, r))


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 9))
def test_enough_rounds_of_any_width_find_the_best_first_tree(case, width):
    """Where a node's candidates are all considered, what was guessed does not matter in the end."""
    drafter, budget, _, limits = case
    tree = build(drafter, budget, width, max(1, budget - 1), 10, limits)
    for r in range(drafter.shape[0]):
        expected = best_first(drafter, r, budget, 10, last_depth(drafter, limits, r))
        if drafter.levels is None:
            assert paths_of(tree, r) == expected
        else:
            assert len(paths_of(tree, r)) == len(expected)


def test_the_first_round_expands_the_tree_of_the_marginals():
    """A drafter whose branches do not differ: one round of B nodes is the whole tree of its marginals."""
    drafter = TableDrafter(3, 5, 6, seed=4)

    def marginals(nodes):
        return drafter.marginals.gather(1, nodes.depth[:, :, None].expand(-1, -1, 6))

    root = torch.arange(3) + ROOT
    tree = build_conditional_tree(root, drafter.pool_tokens, drafter.marginals, marginals, 20, 20, 1, 6)
    expected = build_tree(root, drafter.marginals, drafter.pool_tokens, 20)
    for r in range(3):
        assert set(paths_of(tree, r)) == set(paths_of(expected, r))


def test_a_guess_that_cannot_be_is_dead_with_all_below_it():
    """The marginals are sure of one path; on its branch the second token has probability 0."""
    pool = torch.arange(4).expand(1, 4, 4).contiguous()
    marginals = torch.tensor([0.97, 0.01, 0.01, 0.01]).log().expand(1, 4, 4)
    asked = []

    def log_probs(nodes):
        asked.append(nodes)
        rows = marginals.gather(1, nodes.depth[:, :, None].expand(-1, -1, 4)).clone()
        rows[nodes.depth == 1] = torch.tensor([-torch.inf, -0.5, -1.0, -math.inf])
        return rows

    tree = build_conditional_tree(torch.tensor([9]), pool, marginals, log_probs, 12, 4, 1, 4)
    tree.check()
    assert asked[0].token[0].tolist() == [9, 0, 0, 0]
    paths = paths_of(tree, 0)
    assert (9, 0, 1) in paths and not any(path[:3] == (9, 0, 0) for path in paths)


@pytest.mark.parametrize("budget, width", [(1, 1), (1, 8), (2, 8), (16, 8), (64, 8), (65, 8), (256, 8), (17, 300)])
def test_the_default_number_of_rounds(budget, width):
    rounds = expansion_rounds(budget, width)
    assert rounds >= 1 and build(TableDrafter(1, 6, 9, 7), budget, width, rounds, 8).token.shape == (1, budget)


def test_a_request_does_not_depend_on_the_others():
    pools = TableDrafter(4, 5, 8, seed=3)
    together = build(pools, 24, 8, 3, 8)
    for r in range(4):
        paths = []

        def alone(nodes, r=r, paths=paths):
            for p, t, d in zip(nodes.parent[0].tolist(), nodes.token[0].tolist(), nodes.depth[0].tolist()):
                paths.append((*(() if d == 0 else paths[p]), t))
            return torch.tensor([[pools.log_probs(r, path) for path in paths[nodes.first_slot :]]])

        one = slice(r, r + 1)
        root = torch.tensor([ROOT + r])
        single = build_conditional_tree(root, pools.pool_tokens[one], pools.marginals[one], alone, 24, 8, 3, 8)
        assert torch.equal(single.token[0], together.token[r]) and torch.equal(single.parent[0], together.parent[r])


def test_nan_and_minus_infinity_are_never_chosen():
    pool = torch.arange(4).expand(1, 3, 4).contiguous()
    rows = torch.tensor([-0.5, math.nan, -math.inf, 0.7])
    for marginals in (rows.expand(1, 3, 4), torch.zeros(1, 3, 4), torch.full((1, 3, 4), math.nan)):
        tree = build_conditional_tree(
            torch.tensor([9]), pool, marginals, lambda nodes: rows.expand(1, nodes.token.shape[1], 4), 16, 2, 15, 4
        )
        tree.check()
        real = tree.token[0, 1 : int(tree.node_count[0])].tolist()
        assert int(tree.node_count[0]) == 15 and set(real) == {0, 3}


def test_values_above_zero_count_as_zero():
    """Else a path would score above its own beginning, and 0.3 below 0.7."""
    draw = torch.Generator().manual_seed(3)
    pool = torch.arange(4).expand(1, 3, 4).contiguous()
    table, marginals = torch.randn(3, 4, generator=draw), torch.randn(1, 3, 4, generator=draw)

    def tree(rows, marginals):
        log_probs = lambda nodes: rows[nodes.depth]
        return build_conditional_tree(torch.tensor([9]), pool, marginals, log_probs, 12, 3, 3, 4)

    given, clamped = tree(table, marginals), tree(table.clamp(max=0), marginals.clamp(max=0))
    assert (table > 0).sum() > 3 and (marginals > 0).sum() > 3
    assert all(torch.equal(left, right) for left, right in zip(vars(given).values(), vars(clamped).values()))


@pytest.mark.parametrize(
    "change",
    [
        {"budget": 0},
        {"width": 0},
        {"rounds": 0},
        {"children": 0},
        {"pool_tokens": torch.zeros(1, 2, 3)},
        {"marginals": torch.zeros(1, 2, 4)},
        {"root_token": torch.zeros(2, dtype=torch.int64)},
        {"max_depth": torch.zeros(1)},
    ],
)
def test_wrong_arguments_are_named(change):
    given = dict(
        root_token=torch.tensor([9]),
        pool_tokens=torch.zeros(1, 2, 3, dtype=torch.int64),
        marginals=torch.zeros(1, 2, 3),
        budget=4,
        width=2,
        rounds=1,
        children=2,
    )
    with pytest.raises(ValueError, match=next(iter(change))):
        build_conditional_tree(log_probs_of=lambda nodes: None, **{**given, **change})
