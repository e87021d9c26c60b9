"""Training blocks: many random anchors of a sequence, each with its block, all in one forward of the head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_specflow.drafter.config import HeadConfig

DEPTH_DECAY = 7.0


@dataclass
class Blocks:
    """A blocks of S positions for each of N sequences; position i of a block stands at anchor + i.

    Attributes:
        tokens: [N, A, S] int64, [anchor, revealed path tokens, mask, ...].
        positions: [N, A, S] int64 in the sequence.
        weights: [N, A, S] float32 of the loss at each position; 0 at anchors, revealed tokens and past the sequence's
            end.
    """

    tokens: Tensor
    positions: Tensor
    weights: Tensor

    @property
    def teacher_rows(self) -> Tensor:
        """[N, A, S]: where the target's hidden state predicts the same token, a position earlier; 0 without weight."""
        return torch.where(self.weights > 0, self.positions - 1, 0)

    def context_mask(self, length: int) -> Tensor:
        """[N, A * S, length] bool: a block sees the tokens before its anchor, whose own state is not there yet."""
        anchors = self.positions[:, :, :1].expand(-1, -1, self.positions.shape[-1]).flatten(1)
        return torch.arange(length, device=anchors.device) < anchors[:, :, None]

    def block_mask(self, causal: bool) -> Tensor:
        """[A * S, A * S] bool: a position sees its own block, all of it or up to itself."""
        _, anchors, size = self.tokens.shape
        inside = torch.ones(size, size, dtype=torch.bool, device=self.tokens.device)
        return torch.kron(
            torch.eye(anchors, dtype=torch.bool, device=inside.device), inside.tril() if causal else inside
        )


def sample_blocks(
    tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor, config: HeadConfig, anchors: int, reveal: float
) -> Blocks:
    """Draw anchors spread over each response, and how many tokens of the true path each block reveals.

    Args:
        tokens: [N, T] int64, padded on the right; prompt_lengths, lengths: [N] int64, tokens of the prompt and in all.
        reveal: probability that a block reveals tokens (then 1 to S - 2 of them, evenly). A head that only ever drafts
            from masks, DFlash, wants 0; one that also drafts below tree nodes, JetFlow, a part.

    The weight falls with the distance from the last known token, exp(-(i - revealed - 1) / 7), since a deep position
    counts only when all before it were accepted.
    """
    device, size = tokens.device, config.block_size
    count = tokens.shape[0]
    # Stratified: one anchor in each of `anchors` equal parts of the response, the last token excluded.
    place = (torch.arange(anchors, device=device) + torch.rand(count, anchors, device=device)) / anchors
    span = (lengths - 1 - prompt_lengths).clamp(min=1)
    anchor = prompt_lengths[:, None] + (place * span[:, None]).long().clamp(max=span[:, None] - 1)
    offset = torch.arange(size, device=device)
    positions = anchor[..., None] + offset
    true = tokens.gather(1, positions.flatten(1).clamp(max=tokens.shape[1] - 1)).view_as(positions)
    revealed = torch.randint(1, max(size - 1, 2), (count, anchors, 1), device=device)
    revealed = torch.where(torch.rand(count, anchors, 1, device=device) < reveal, revealed, 0)
    known = offset <= revealed
    weights = torch.exp(-(offset - revealed - 1) / DEPTH_DECAY)
    weights = weights.masked_fill(known | (positions >= lengths[:, None, None]), 0.0)
    return Blocks(torch.where(known, true, config.mask_token_id), positions, weights)
