"""Attention of blocks over a packed row: dense and readable, and block-sparse through FlexAttention on a GPU."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sgl_specflow.training.blocks import Visibility

TILE = 128


@dataclass
class DensePattern:
    """mask: [N, T + N] bool."""

    mask: Tensor


def dense_pattern(visible: Visibility, context: int) -> DensePattern:
    return DensePattern(visible.dense(context))


def sparse_pattern(visible: Visibility, context: int) -> BlockMask:
    """The FlexAttention mask of N queries over T + N keys, both multiples of 128, without testing N x (T + N) pairs.

    A tile of 128 queries gets every key tile between the smallest and the greatest key that one of them may see, in
    the context and in the blocks: a superset of the occupied tiles (blocks of a row ascend, so barely larger), and
    the mask itself decides inside a tile. No host synchronisation.
    """
    queries = len(visible.own_first)
    if context % TILE or queries % TILE:
        raise ValueError(f"{context} context and {queries} block positions; give multiples of {TILE}")
    keys = context + queries

    def tiles(lowest: Tensor, highest: Tensor, offset: int) -> Tensor:
        """[query tiles, key tiles] bool: the tiles of keys offset + lowest .. offset + highest (inclusive)."""
        low = (lowest.view(-1, TILE).amin(1) + offset) // TILE
        high = (highest.view(-1, TILE).amax(1) + offset) // TILE
        tile = torch.arange(keys // TILE, device=low.device)
        return (tile >= low[:, None]) & (tile <= high[:, None])

    # A query without context (an anchor at the document's start) has context_end == context_first: its tile may be
    # listed, the mask leaves it out.
    occupied = tiles(visible.context_first, (visible.context_end - 1).clamp(min=0), 0)
    occupied = occupied | tiles(visible.own_first, visible.own_last, context)
    count = occupied.sum(1, dtype=torch.int32)
    order = occupied.int().argsort(dim=1, descending=True, stable=True).int()
    context_first, context_end = visible.context_first, visible.context_end
    own_first, own_last = visible.own_first, visible.own_last

    def sees(_batch, _head, query, key):
        in_context = (key >= context_first[query]) & (key < context_end[query])
        own = key - context
        return in_context | ((own >= own_first[query]) & (own <= own_last[query]))

    return BlockMask.from_kv_blocks(
        count[None, None].contiguous(),
        order[None, None].contiguous(),
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(queries, keys),
    )


def attend(queries: Tensor, keys: Tensor, values: Tensor, pattern: DensePattern | BlockMask) -> Tensor:
    """Grouped-query attention at scale head_dim^-1/2.

    Args:
        queries: [N, heads, D]. keys, values: [T + N, kv heads, D], context first.
    Returns:
        [N, heads, D].
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
    if isinstance(pattern, DensePattern):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=pattern.mask)
    else:
        mixed = flex_attention(q, k, v, block_mask=pattern, enable_gqa=True)
    return mixed[0].transpose(0, 1)
