"""Commit: the accepted path's cache rows move into consecutive slots of the verify window."""

from dataclasses import dataclass

import torch

from ..verify.acceptance import Accepted


@dataclass
class CommitPlan:
    """Index plan of one commit, for R requests of P path entries; all int64 [R, P].

    Entry j < length moves the rows of node path[j] to the window's slot j. Every entry past the length repeats entry
    0, which copies node 0's slot onto itself: the plan has a fixed shape and the repeats write what is there already.
    After the move, window[r, :length] holds the committed prefix's continuation and window[r, length:] is free.

    Attributes:
        node: the node of each entry (rows of the verify pass's hidden states, for the draft cache).
        source: its cache slot before the commit.
        destination: its cache slot after the commit.
        position: its RoPE position in the committed context.
    """

    node: torch.Tensor
    source: torch.Tensor
    destination: torch.Tensor
    position: torch.Tensor


def plan_commit(window: torch.Tensor, accepted: Accepted, committed_length: torch.Tensor) -> CommitPlan:
    """Plan the commit of `accepted`, without host synchronisation.

    Args:
        window: int64 [R, B], the cache slot of each node during the verify pass, in node order. Slots are distinct
            inside a request, and no two requests share one (padding requests may all use one dummy slot).
        accepted: what `accept` returned for the same trees.
        committed_length: int64 [R] before the pass, hence the anchor's position.
    """
    entry = torch.arange(accepted.path.shape[1], device=window.device)
    entry = torch.where(entry < accepted.length[:, None], entry, 0)
    node = accepted.path.clamp(min=0)
    return CommitPlan(
        node=node,
        source=window.gather(1, node),
        destination=window.gather(1, entry),
        position=committed_length[:, None] + entry,
    )


def move_rows(buffer: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """buffer[destination] = buffer[source] in place, for buffer [S, ...] and int64 indices of one shape.

    All sources are read before anything is written: a slot may be the source of one entry and the destination of
    another. Entries that share a destination must share their source, as the repeats of a CommitPlan do.
    """
    rows = buffer.index_select(0, source.flatten())
    buffer.index_copy_(0, destination.flatten(), rows)
