"""Losses without whole logits: value and gradient equal to autograd's."""

import pytest
import torch
import torch.nn.functional as F

from sgl_specflow.training.losses import KINDS, distillation_loss, teacher_log_probs


def naive(kind, logits, log_p, labels):
    log_q = logits.log_softmax(-1)
    return {
        "forward_kl": lambda: F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1),
        "reverse_kl": lambda: F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1),
        "cross_entropy": lambda: F.cross_entropy(logits, labels, reduction="none"),
    }[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_and_its_gradient_equal_autograd(kind):
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    hidden, final, lm_head, weights = make(7, 5).requires_grad_(), make(4, 5), make(11, 5), make(7).abs()
    rows, labels = torch.tensor([0, 3, 1, 1, 2, 0, 3]), torch.tensor([0, 10, 4, 4, 7, 1, 2])
    table = teacher_log_probs(final, lm_head, chunk=3)
    torch.testing.assert_close(table, (final @ lm_head.T).log_softmax(-1))
    loss, single = distillation_loss(hidden, kind, lm_head, table, rows, labels, weights, chunk=3)
    (gradient,) = torch.autograd.grad(2 * loss, hidden)
    expected = naive(kind, hidden @ lm_head.T, table[rows], labels)
    mean = (expected * weights).sum() / weights.sum()
    torch.testing.assert_close(single, expected)
    torch.testing.assert_close(loss, mean)
    torch.testing.assert_close(gradient, torch.autograd.grad(2 * mean, hidden)[0])


def test_a_teacher_in_bfloat16_moves_the_forward_kl_little():
    """The table keeps log-probabilities in the LM head's dtype; likely tokens, which weigh most, are the most exact."""
    generator = torch.Generator().manual_seed(1)
    final, lm_head = torch.randn(64, 32, generator=generator) * 1.5, torch.randn(999, 32, generator=generator)
    exact = teacher_log_probs(final, lm_head)
    draft = (final + 0.3 * torch.randn(64, 32, generator=generator)) @ lm_head.T
    losses = [naive("forward_kl", draft, table, None) for table in (exact, exact.bfloat16().float())]
    assert (losses[0] - losses[1]).abs().mean() < 0.005 * losses[0].mean()


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="forward_kl, reverse_kl, cross_entropy"):
        distillation_loss(torch.zeros(1, 2), "kl", torch.zeros(3, 2), None, *(torch.zeros(1, dtype=int),) * 3)
