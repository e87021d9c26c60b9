"""The GPU's builder of conditional trees equals the plain one in all that is alive, piece by piece and in whole trees: in
Triton's interpreter on the CPU, compiled on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import INTERPRETING, run_interpreted
from test_conditional_tree import ROOT, TableDrafter, cases

from sgl_specflow.tree import build_conditional_tree
from sgl_specflow.tree import expansion as plain

CUDA = torch.cuda.is_available() and not INTERPRETING
DEVICE = "cuda" if CUDA else "cpu"
EXAMPLES = 200 if CUDA else 10


@pytest.mark.skipif(INTERPRETING or CUDA, reason="this is the child process, or there is a GPU")
def test_in_the_interpreter():
    """This file again, in a child process: Triton reads the variable when it is imported."""
    done = run_interpreted(__file__, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{COMPILED} passed" in done.stdout


def compiled(test):
    return pytest.mark.skipif(not (INTERPRETING or CUDA), reason="runs in a child process with TRITON_INTERPRET=1")(
        test
    )


def same(got, expected, alive=None):
    for name, right in vars(expected).items():
        left = getattr(got, name)
        if isinstance(right, torch.Tensor):
            assert left.dtype == right.dtype and left.shape == right.shape, name
            if alive is not None:
                left, right = left[alive], right[alive]
            assert torch.equal(left, right), (name, left, right)


class Both:
    """A builder that asks both for each piece. What the plain one says goes on."""

    def __init__(self):
        from sgl_specflow.kernels.tree_step import expansion

        self.fast = expansion

    def root(self, *given):
        same(self.fast.root(*given), plain.root(*given))
        return plain.root(*given)

    def guess(self, *given):
        got, expected = self.fast.guess(*given), plain.guess(*given)
        assert torch.equal(got.score, expected.score)
        alive = expected.score > -torch.inf
        alive[:, :, 0] = False
        same(got, expected, alive)
        assert torch.equal(got.parent, expected.parent) and torch.equal(got.ancestors, expected.ancestors)
        return expected

    def choose(self, *given):
        got, expected = self.fast.choose(*given), plain.choose(*given)
        alive = expected.score > -torch.inf
        budget, depths = given[0].score.shape[1], given[2].shape[1]
        same(got.nodes, expected.nodes, alive)
        guess, candidate = expected.guess, expected.candidate
        assert torch.equal(got.guess, guess) and torch.equal(got.candidate, candidate)
        assert torch.equal(got.node, expected.node)
        assert torch.equal(got.score > -torch.inf, alive) and torch.equal(
            got.score[alive & ~guess], expected.score[alive & ~guess]
        )
        # What is dead is within bounds.
        dead = got.nodes.depth[~alive], got.nodes.parent[~alive], got.nodes.above[~alive]
        first, width = got.nodes.first_slot, alive.shape[1]
        assert all(
            (part >= 0).all() and (part < most).all() for part, most in zip(dead, (depths, *2 * [first + width]))
        )
        assert (expected.node <= budget).all()
        return expected

    def absorb(self, known, *given):
        before = known.fields.clone(), known.score.clone(), given[1].clone()
        got, expected = self.fast.absorb(known, *given), plain.absorb(known, *given)
        after = known.fields, known.score, given[1]
        assert all(torch.equal(left.nan_to_num(), right.nan_to_num()) for left, right in zip(after, before))
        assert torch.equal(got.score, expected.score)
        alive = expected.score > -torch.inf
        assert torch.equal(got.fields[:, alive], expected.fields[:, alive])
        return expected

    def lay_out(self, *given):
        got, expected = self.fast.lay_out(*given), plain.lay_out(*given)
        same(got, expected)
        return expected


def grow(drafter, budget, width, rounds, children, limits, builder):
    requests = drafter.shape[0]
    drafter.paths = [[] for _ in range(requests)]
    limits = None if limits is None else torch.tensor(limits, device=DEVICE)
    return build_conditional_tree(
        torch.arange(requests, device=DEVICE) + ROOT,
        drafter.pool_tokens.to(DEVICE),
        drafter.marginals.to(DEVICE),
        lambda nodes: drafter(_on_cpu(nodes)).to(DEVICE),
        budget,
        width,
        rounds,
        children,
        limits,
        builder,
    )


def _on_cpu(nodes):
    parts = {name: part.cpu() if isinstance(part, torch.Tensor) else part for name, part in vars(nodes).items()}
    return type(nodes)(**parts)


def check(drafter, budget, width, rounds, children, limits=None):
    from sgl_specflow.kernels.tree_step import expansion

    expected = grow(drafter, budget, width, rounds, children, limits, Both())
    expected.check()
    # And with its own dead entries.
    same(grow(drafter, budget, width, rounds, children, limits, expansion), expected)


@compiled
@settings(max_examples=EXAMPLES, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(1, 4))
def test_drawn_trees(case, width, rounds):
    drafter, budget, children, limits = case
    check(drafter, budget, width, rounds, children, limits)


SIZES = [  # requests, depths, pool, levels of values, broken, budget, width, rounds, children
    (1, 1, 1, None, 0.0, 1, 1, 1, 1),
    (2, 1, 3, 2, 0.3, 5, 4, 2, 2),
    (2, 4, 9, 2, 0.2, 17, 33, 1, 16),
    (1, 7, 40, None, 0.0, 64, 32, 2, 16),
    (1, 5, 70, 1, 0.0, 256, 32, 2, 8),
    (2, 4, 5, 1, 1.0, 9, 3, 2, 5),
    (1, 3, 6, None, 0.0, 12, 70, 1, 6),  # wider than a program serves
]


@compiled
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_trees_of_serving_sizes(size):
    requests, depths, pool, levels, broken, *rest = size
    check(TableDrafter(requests, depths, pool, 5, levels, broken), *rest)


@compiled
def test_values_at_the_ends():
    """What log-probabilities may not be: above 0, minus zero, endless, so small that they count as LOWEST."""
    rows = torch.tensor([-0.0, 0.7, -3e38, -1e6, -1.1e6, torch.nan, -torch.inf, torch.inf, -1e-9, -(2.0**-21), 0.0])
    drafter = TableDrafter(2, 3, len(rows), 1)
    drafter.marginals = rows.flip(0).expand(2, 3, -1)
    drafter.log_probs = lambda request, path: rows.roll(len(path)).tolist()
    check(drafter, 40, 6, 3, 11, [3, 2])


@pytest.mark.skipif(INTERPRETING, reason="the plain builder's own")
def test_scores_that_float32_cannot_tell_apart_are_told_apart():
    """Two children of two nodes, 2^-20 apart at 33 nats: the better one is the later."""
    step = 2.0**-20
    known = plain.Known(
        torch.zeros(4, 1, 4, dtype=torch.int64), torch.tensor([[0.0, -3.0, -3.0 - step, -torch.inf]]).double()
    )
    known.score[0, 2] = -3.0 - step
    one = torch.ones(1, 2, dtype=torch.int64)
    inside = torch.eye(2, dtype=torch.bool)[None]
    nodes = plain.Expansion(1, 10 * one, 0 * one, one, 0 * one, inside)
    chosen = plain.Chosen(nodes, torch.tensor([[1, 2]]), known.score[:, 1:3].clone(), inside[:, 0] & False, 2 * one)
    log_probs = torch.tensor([[[-30.0 - 2 * step], [-30.0]]])
    after = plain.absorb(known, chosen, log_probs, torch.full((1, 2, 1), 7), keep=1)
    assert after.score[0].tolist() == [0.0, -3.0, -3.0 - step, -33.0 - step]
    assert after.fields[:, 0, 3].tolist() == [7, 2, 2, -1]


COMPILED = len(SIZES) + 2
