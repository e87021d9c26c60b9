"""Losses of draft heads over the whole vocabulary, without ever holding all logits.

With z the draft's logits, q = softmax(z) and p the target's distribution, at one position:

    forward_kl     KL(p || q) = sum p (log p - log q),    gradient in z: q - p
    reverse_kl     KL(q || p) = sum q (log q - log p),    gradient in z: q (log q - log p - KL)
    cross_entropy  -log q(true token),                    gradient in z: q - onehot(true token)

The gradient in the draft's hidden state is that times the LM head, which is frozen: it is formed in the forward, a
chunk of blocks at a time, so no logits are kept for the backward.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

KINDS = ("forward_kl", "reverse_kl", "cross_entropy")


def teacher_log_probs(final: Tensor, lm_head: Tensor, temperature: float = 1.0, chunk: int = 4096) -> Tensor:
    """The target's log-probabilities [T, V] in the LM head's dtype, once a token, from final-normed hidden [T, H].

    temperature: of the teacher alone. Below 1 it comes closer to what greedy decoding chooses, and a tree of the
    draft's marginals then spends its nodes on that path. In bfloat16 the likeliest tokens are the most exact ones: a
    relative error of 2^-9 in log p.
    """
    table = torch.empty(len(final), len(lm_head), dtype=lm_head.dtype, device=lm_head.device)
    log_softmax = _compiled(_log_softmax) if lm_head.is_cuda else _log_softmax
    for first in range(0, len(final), chunk):
        part = slice(first, first + chunk)
        table[part] = log_softmax(final[part].to(lm_head.dtype) @ lm_head.T, temperature)
    return table


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide / temperature).log_softmax(-1).to(logits.dtype)


def _chunk(kind: str, logits: Tensor, table: Tensor | None, rows: Tensor, labels: Tensor, weights: Tensor):
    """(single losses [N], w times the gradient in the logits, in their dtype)."""
    log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    q = log_q.exp()
    if kind == "cross_entropy":
        loss = -log_q.gather(1, labels[:, None])[:, 0]
        slope = q - (torch.arange(logits.shape[1], device=logits.device) == labels[:, None]).to(q.dtype)
    elif kind == "forward_kl":
        log_p = table[rows].to(q.dtype)
        p = log_p.exp()
        loss = (p * (log_p - log_q)).sum(-1)
        slope = q - p
    else:
        difference = log_q - table[rows].to(q.dtype)
        loss = (q * difference).sum(-1)
        slope = q * (difference - loss[:, None])
    return loss, (slope * weights[:, None]).to(logits.dtype)


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, draft_hidden, kind, lm_head, table, rows, labels, weights, chunk):
        gradient = torch.empty_like(draft_hidden)
        wide = torch.promote_types(draft_hidden.dtype, torch.float32)
        losses = torch.empty(len(draft_hidden), device=draft_hidden.device, dtype=wide)
        evaluate = _compiled(_chunk) if draft_hidden.is_cuda else _chunk
        for first in range(0, len(draft_hidden), chunk):
            part = slice(first, first + chunk)
            logits = draft_hidden[part].to(lm_head.dtype) @ lm_head.T
            losses[part], slope = evaluate(kind, logits, table, rows[part], labels[part], weights[part])
            gradient[part] = (slope @ lm_head).to(gradient.dtype)
        total = weights.sum()
        ctx.save_for_backward(gradient, total)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum() / total, losses

    @staticmethod
    def backward(ctx, upstream, _):
        gradient, total = ctx.saved_tensors
        return (gradient * (upstream / total)).to(gradient.dtype), *(None,) * 7


def distillation_loss(
    draft_hidden: Tensor,
    kind: str,
    lm_head: Tensor,
    table: Tensor | None,
    rows: Tensor,
    labels: Tensor,
    weights: Tensor,
    chunk: int = 6144,
) -> tuple[Tensor, Tensor]:
    """sum_n w_n loss_n / sum_n w_n.

    Args:
        draft_hidden: [N, H], final-normed; logits are these times `lm_head` [V, H], in its dtype.
        kind: one of KINDS.
        table: [T, V] from `teacher_log_probs`; None for cross_entropy.
        rows: int64 [N], the row of the table at which the target predicts the same token. labels: int64 [N], that token.
        weights: float [N], not all zero.
        chunk: positions whose logits are held at once; on a GPU N should be a multiple (else the rest compiles anew).
    Returns:
        (the loss, a differentiable scalar; the N single losses, detached), in nats, float32 or wider.
    """
    if kind not in KINDS:
        raise ValueError(f"loss is {kind!r}; give one of {', '.join(KINDS)}")
    return _Distillation.apply(draft_hidden, kind, lm_head, table, rows, labels, weights, chunk)
