"""Losses of draft heads over the whole vocabulary, without ever holding all logits."""

import torch
from torch import Tensor


class _ForwardKL(torch.autograd.Function):
    """The gradient with respect to the draft's hidden states is formed in the forward, chunk by chunk: w (q - p) W."""

    @staticmethod
    def forward(ctx, draft_hidden, teacher_hidden, lm_head, weights, chunk):
        gradient = torch.empty_like(draft_hidden)
        wide = torch.promote_types(draft_hidden.dtype, torch.float32)
        losses = torch.empty(len(draft_hidden), device=draft_hidden.device, dtype=wide)
        for first in range(0, len(draft_hidden), chunk):
            part = slice(first, first + chunk)
            teacher = (teacher_hidden[part].to(lm_head.dtype) @ lm_head.T).to(wide).log_softmax(-1)
            draft = (draft_hidden[part].to(lm_head.dtype) @ lm_head.T).to(wide).log_softmax(-1)
            p = teacher.exp()
            losses[part] = (p * (teacher - draft)).sum(-1)
            slope = (draft.exp() - p) * weights[part, None]
            gradient[part] = (slope.to(lm_head.dtype) @ lm_head).to(gradient.dtype)
        total = weights.sum()
        ctx.save_for_backward(gradient, total)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum() / total, losses

    @staticmethod
    def backward(ctx, upstream, _):
        gradient, total = ctx.saved_tensors
        return gradient * (upstream / total), None, None, None, None


def forward_kl(draft_hidden: Tensor, teacher_hidden: Tensor, lm_head: Tensor, weights: Tensor, chunk: int = 4096):
    """JetFlow's loss at T = 1: sum_n w_n KL(p_n || q_n) / sum_n w_n, p the target's distribution and q the head's.

    Args:
        draft_hidden, teacher_hidden: [N, H] final-normed; logits are these times `lm_head` [V, H], in its dtype.
        weights: [N] float32, not all zero.
        chunk: rows whose logits are held at once, V * 4 bytes each, several times.
    Returns:
        (the loss, a differentiable scalar; the N single KLs, detached), in nats, float32 or wider.
    """
    return _ForwardKL.apply(draft_hidden, teacher_hidden, lm_head, weights, chunk)
