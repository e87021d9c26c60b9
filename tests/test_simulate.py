"""Simulated acceptance forces the accept length it is asked for, where the tree is deep enough."""

import pytest
import torch

from sgl_specflow.runtime import simulate
from sgl_specflow.tree import build_tree
from sgl_specflow.verify import accept


def tree(budget: int):
    generator = torch.Generator().manual_seed(budget)
    log_probs = -torch.rand(3, 6, 5, generator=generator).cumsum(2)
    tokens = torch.stack([torch.randperm(9, generator=generator)[:5] for _ in range(18)]).view(3, 6, 5)
    return build_tree(torch.tensor([1, 2, 3]), log_probs, tokens, budget)


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("budget", [8, 64])
def test_accept_length_is_forced(monkeypatch, length, budget):
    monkeypatch.setattr(simulate, "SIMULATE_ACC_LEN", float(length))
    monkeypatch.setattr(simulate, "SIMULATE_ACC_METHOD", "match-expected")
    trees = tree(budget)
    choice = simulate.simulated_choice(trees, torch.zeros_like(trees.token))
    accepted = accept(trees, choice, 6)
    assert accepted.length.tolist() == [min(length, int(depth) + 1) for depth in trees.depth.amax(1)]
    assert (accepted.tokens >= 0).all() and (accepted.bonus >= 0).all()


def test_without_the_variable_nothing_changes(monkeypatch):
    monkeypatch.setattr(simulate, "SIMULATE_ACC_LEN", -1.0)
    choice = torch.zeros(3, 8, dtype=torch.int64)
    assert simulate.simulated_choice(tree(8), choice) is choice
