"""The captured commit does what the eager one does: for every batch size, padding included, batch after batch."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import choices_near, token_trees
from sgl_specflow.kernels.tree_step import accept_and_plan

from sgl_specflow.commit import move_rows
from sgl_specflow.runtime.commit_graph import CommitGraphs, cuda_recorder
from sgl_specflow.tree import TokenTree, ancestor_bits

SIZES, DEPTH, SLOTS, WIDTH = [1, 2, 4], 5, 4 * 70 + 1, 3
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
    ),
]


class Caches:
    """One target layer's rows and one context row a slot of the draft pool, as functions of what was written."""

    def __init__(self, device):
        self.target = torch.arange(SLOTS, device=device, dtype=torch.float64)
        self.context = torch.zeros(SLOTS, WIDTH + 1, dtype=torch.float64, device=device)

    def move(self, destination, source):
        move_rows(self.target, source, destination)

    def write_context(self, hidden, slots, positions):
        self.context[slots] = torch.cat([hidden, positions[:, None].double()], dim=1)


@functools.cache
def graphs(budget: int, device: str, in_place: bool):
    caches = Caches(device)
    hidden = torch.zeros(max(SIZES) * budget, WIDTH, dtype=torch.float64, device=device)
    commits = CommitGraphs(SIZES, budget, DEPTH, hidden, caches.move, caches.write_context)
    commits.capture(cuda_recorder() if device == "cuda" else lambda body: body)
    return caches, hidden if in_place else None, commits


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40, deadline=None)
@given(token_trees(max_requests=4, max_budget=20), st.integers(0, 2**20), st.booleans())
def test_captured_commits_equal_eager_ones(device, tree, seed, in_place):
    requests, budget = tree.token.shape
    caches, buffer, commits = graphs(budget, device, in_place)
    caches.target.copy_(torch.arange(SLOTS))
    caches.context.zero_()
    generator = torch.Generator().manual_seed(seed)
    window = torch.randperm(SLOTS - 1, generator=generator)[: requests * budget].view(requests, budget) + 1
    committed = torch.randint(1, 1000, (requests,), generator=generator)
    hidden = torch.randn(requests * budget, WIDTH, generator=generator, dtype=torch.float64)
    choice = choices_near(tree, seed)

    expected = accept_and_plan(tree, choice, DEPTH, window, committed)
    plan, eager = expected.plan, Caches("cpu")
    eager.move(plan.destination.flatten(), plan.source.flatten())
    rows = (torch.arange(requests)[:, None] * budget + plan.node).flatten()
    eager.write_context(hidden[rows], plan.destination.flatten(), plan.position.flatten())

    given_hidden = hidden.to(device)
    if buffer is not None:
        buffer[: len(hidden)].copy_(given_hidden)
        given_hidden = buffer[: len(hidden)]
    on_device = [x.to(device) for x in (choice, window, committed)]
    moved = type(tree)(**{name: value.to(device) for name, value in vars(tree).items()})
    commit = commits.run(moved, *on_device, given_hidden)
    for name, value in vars(expected.accepted).items():
        assert torch.equal(getattr(commit.accepted, name).cpu(), value), name
    assert torch.equal(commit.new_length.cpu(), expected.new_length)
    # Slot 0 is the pools' dummy: padding requests write there.
    assert torch.equal(caches.target[1:].cpu(), eager.target[1:])
    assert torch.equal(caches.context[1:].cpu(), eager.context[1:])


@pytest.mark.parametrize("device", DEVICES)
def test_results_outlive_the_next_batch(device):
    _, _, commits = graphs(7, device, False)
    tree, chosen = _root_only(2, 7, device), torch.full((2, 7), 9, device=device)
    window = torch.arange(1, 15, device=device).view(2, 7)
    hidden = torch.zeros(14, WIDTH, dtype=torch.float64, device=device)
    first = commits.run(tree, chosen, window, torch.tensor([5, 6], device=device), hidden)
    commits.run(tree, chosen + 1, window, torch.tensor([50, 60], device=device), hidden)
    assert first.accepted.bonus.tolist() == [9, 9] and first.new_length.tolist() == [6, 7]


def test_which_batches_fit():
    _, _, commits = graphs(7, "cpu", False)
    assert commits.fits(4) and not commits.fits(5)


def _root_only(requests: int, budget: int, device: str) -> TokenTree:
    parent = torch.full((requests, budget), -1, device=device)
    zeros = torch.zeros_like(parent)
    return TokenTree(
        zeros, parent, zeros.clone(), ancestor_bits(parent), torch.ones(requests, dtype=torch.int64, device=device)
    )
