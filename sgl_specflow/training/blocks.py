"""Training blocks: many anchors of a packed row of documents, each with its block, all in one forward of the head.

A row is flat: T context tokens of several documents one after another (or right-padded, flattened), then A blocks of S
positions. Which keys a query sees is four integers a query (`Visibility`): the same description serves documents,
causal and bidirectional blocks, sliding windows, the fast attention and the dense one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_specflow.drafter.config import HeadConfig


@dataclass
class PackedRow:
    """T tokens of several documents, flat; a document is contiguous.

    Attributes:
        tokens: [T] int64. Places that no document owns hold any token.
        positions: [T] int64, place inside the document.
        first: [T] int64, row index of the document's first token.
        last: [T] int64, row index of the document's last token.
        response: [T] bool, whether a block may be anchored here: a response token (or the prompt's last) with a
            successor in the document.
    """

    tokens: Tensor
    positions: Tensor
    first: Tensor
    last: Tensor
    response: Tensor

    def to(self, device) -> "PackedRow":
        return PackedRow(*(getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__))

    def pin(self) -> "PackedRow":
        return PackedRow(*(getattr(self, name).pin_memory() for name in self.__dataclass_fields__))


@dataclass
class Blocks:
    """A blocks of S positions in one row; position i of a block stands at anchor + i.

    Attributes:
        anchors: [A] int64, row indices of the anchors.
        tokens: [A, S] int64, [anchor, revealed path tokens, mask, ...].
        positions: [A, S] int64 in the document.
        first: [A] int64, row index of the document's first token.
        targets: [A, S] int64, row index of the token each position predicts (its own place); clamped into the document.
        weights: [A, S] float32 of the loss at each position; 0 at anchors, revealed tokens, past the document's end
            and in blocks that only fill up the shape.
    """

    anchors: Tensor
    tokens: Tensor
    positions: Tensor
    first: Tensor
    targets: Tensor
    weights: Tensor

    def visibility(self, causal: bool, window: int | None = None) -> "Visibility":
        """Who sees whom: a position sees its document before its anchor, and its block, all of it or up to itself.

        window: keys that a query sees, itself included (a sliding layer), or None.
        """
        count, size = self.tokens.shape
        index = torch.arange(count * size, device=self.tokens.device).view(count, size)
        own_first = index[:, :1].expand_as(index)
        own_last = index if causal else index[:, -1:].expand_as(index)
        context_first = self.first[:, None].expand_as(index)
        if window is not None:
            offset = index - own_first
            own_first = torch.maximum(own_first, index - (window - 1))
            context_first = torch.maximum(context_first, self.anchors[:, None] + offset - (window - 1))
        context_end = self.anchors[:, None].expand_as(index)
        fields = (context_first, context_end, own_first, own_last)
        return Visibility(*(field.flatten().int() for field in fields))


@dataclass
class Visibility:
    """Keys of each of N queries, all int32 [N]: context rows context_first <= t < context_end, and block positions
    own_first <= n <= own_last. A query always sees itself."""

    context_first: Tensor
    context_end: Tensor
    own_first: Tensor
    own_last: Tensor

    def dense(self, context: int) -> Tensor:
        """[N, context + N] bool: the naive form."""
        device, count = self.own_first.device, len(self.own_first)
        place, own = torch.arange(context, device=device), torch.arange(count, device=device)
        seen = (place >= self.context_first[:, None]) & (place < self.context_end[:, None])
        inside = (own >= self.own_first[:, None]) & (own <= self.own_last[:, None])
        return torch.cat((seen, inside), dim=1)


def sample_blocks(
    row: PackedRow, config: HeadConfig, count: int, reveal: float, decay: float, generator: torch.Generator
) -> Blocks:
    """Draw `count` anchors spread evenly over the row's response tokens, and how many path tokens each block reveals.

    Stratified: response tokens are cut into `count` equal parts and each part gives one anchor, so a document's anchors
    ascend. No host synchronisation, fixed shapes.

    Args:
        reveal: probability that a block reveals tokens (then 1 to S - 2 of them, evenly). A head that only ever drafts
            from masks, DFlash, wants 0; one that also drafts below tree nodes, JetFlow, a part.
        decay: the weight falls with the distance from the last known token, exp(-(i - revealed - 1) / decay), since a
            deep position counts only when all before it were accepted.
        generator: on the row's device.
    """
    device = row.tokens.device
    rank = row.response.cumsum(0)
    total = rank[-1]
    place = (torch.arange(count, device=device) + torch.rand(count, device=device, generator=generator)) / count
    wanted = (place * total).long().clamp(max=(total - 1).clamp(min=0))
    anchors = torch.searchsorted(rank, wanted + 1).clamp(max=len(rank) - 1)
    shape = (count, 1)
    revealed = torch.randint(1, max(config.block_size - 1, 2), shape, device=device, generator=generator)
    revealed = torch.where(torch.rand(shape, device=device, generator=generator) < reveal, revealed, 0)
    return make_blocks(row, config, anchors, revealed, decay)


def make_blocks(row: PackedRow, config: HeadConfig, anchors: Tensor, revealed: Tensor, decay: float) -> Blocks:
    """The blocks at given anchors [A], each revealing `revealed` [A, 1] tokens of its path."""
    offset = torch.arange(config.block_size, device=row.tokens.device)
    targets = anchors[:, None] + offset
    last = row.last[anchors][:, None]
    inside = targets <= last
    targets = torch.minimum(targets, last)
    known = offset <= revealed
    weights = torch.exp(-(offset - revealed - 1) / decay)
    weights = weights.masked_fill(known | ~inside | ~row.response[anchors][:, None], 0.0)
    return Blocks(
        anchors=anchors,
        tokens=torch.where(known, row.tokens[targets], config.mask_token_id),
        positions=row.positions[anchors][:, None] + offset,
        first=row.first[anchors],
        targets=targets,
        weights=weights,
    )
