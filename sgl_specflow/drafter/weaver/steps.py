"""The pieces of one Weaver round in plain PyTorch. `triton_steps` has the same functions as single GPU kernels, and
`cuda_steps` has fewer launches for a layer.

R requests, n entries each, h heads of d numbers, all contiguous. Arithmetic that loses by it is in float32 at least.

What goes from layer to layer is called states: here x [R, n, d_rank], and the same divided by its root mean square, which
`states_of` makes of x and `enter` of a round's nodes. A block's maps are those of `FoldedWeaver.blocks`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_specflow.drafter.weaver.reference import EPS
from sgl_specflow.tree import Expansion, expansion

tree_builder = expansion


def unset_places(shape: tuple[int, ...], dtype: torch.dtype, device) -> Tensor:
    """Room for keys or values. Unwritten places are multiplied with weight 0, so they are finite."""
    return torch.zeros(shape, dtype=dtype, device=device)


def enter(
    nodes: Expansion, table: Tensor, turn: Tensor, visible: Tensor, prefix: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a round's nodes bring along.

    Args:
        nodes: depths below the rows of turn less one.
        table: [V, d_rank], a row a token. turn: [positions, 2, d]; a node's position is its depth + 1.
        visible: bool [R, slots, places], row s the places that the node in slot s attends to: the `prefix` first, and its
            ancestors' and its own, which stand behind the prefix by slot. The rows of the nodes' slots are written.
    Returns:
        The nodes' states, of their rows of table [R, w, d_rank], and behind these their rows of turn [R, w, 2, d] and of
        visible [R, w, places].
    """
    first, (requests, count) = nodes.first_slot, nodes.token.shape
    if first == 0:
        place = torch.arange(visible.shape[2], device=visible.device)
        rows = (place < prefix).repeat(requests, count, 1)
    else:
        rows = visible.gather(1, nodes.above[:, :, None].expand(-1, -1, visible.shape[2]))
    rows[:, :, prefix + first :] = False
    rows[:, :, prefix + first : prefix + first + count] = nodes.inside
    visible[:, first : first + count] = rows
    return *states_of(F.embedding(nodes.token, table)), turn[nodes.depth + 1], rows


def states_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """States of x."""
    return x, F.rms_norm(x, x.shape[-1:], eps=EPS)


def before_attention(states: Sequence[Tensor], block: dict) -> Tensor:
    """Queries, keys and values [R, n, 3 h d]."""
    return F.linear(states[1], *block["qkv"])


def after_attention(states: Sequence[Tensor], mixed: Tensor, block: dict) -> tuple[Tensor, Tensor]:
    """States behind attention, whose result is mixed [R, n, h d]."""
    return add_norm(states[0], F.linear(mixed, block["o"]))


def mlp(states: Sequence[Tensor], block: dict) -> tuple[Tensor, Tensor]:
    """States behind the layer."""
    inner = silu_mul(F.linear(states[1], *block["gate_up"]))
    return add_norm(states[0], F.linear(inner, *block["down"]))


def attend(qkv: Tensor, turn: Tensor, keys: Tensor, values: Tensor, first: int, visible: Tensor | None) -> Tensor:
    """Rotate queries and keys, keep keys and values at places first .. first + n - 1, and attend.

    Args:
        qkv: [R, n, 3, h, d].
        turn: float32 at least, [R or 1, n, 2, d]: what a head is multiplied with, and what its swapped halves are (the first
            half of the latter negated).
        keys, values: [R, h, places, d], places a multiple of 8; written at n places. Unwritten places are finite.
        visible: bool [R, n, places], what each entry attends to: itself, and places that are written (by this call too).
            None: all places before it, and itself.
    Returns:
        [R, n, h * d].
    """
    count, head_dim = qkv.shape[1], qkv.shape[-1]
    # Attention kernels want whole eights of a mask's columns.
    end = -(-(first + count) // 8) * 8
    cos, sin = (turn[:, :, part, None, None] for part in (0, 1))
    qk = qkv[:, :, :2]
    q, k = torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), sin).transpose(1, 3).unbind(2)
    keys[:, :, first : first + count] = k
    values[:, :, first : first + count] = qkv[:, :, 2].transpose(1, 2)
    if visible is None:
        place = torch.arange(end, device=qkv.device)
        visible = (place <= place[first : first + count, None])[None]
    mixed = F.scaled_dot_product_attention(
        q.to(keys.dtype), keys[:, :, :end], values[:, :, :end], attn_mask=visible[:, None, :, :end]
    )
    return mixed.transpose(1, 2).flatten(2)


def add_norm(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """(x + delta, the same divided by its root mean square), both [R, n, d_rank]."""
    total = x + delta
    return total, F.rms_norm(total, total.shape[-1:], eps=EPS)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 m], gate first: [..., m]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def pool_logits(
    query: Tensor, depth: Tensor, pool_tokens: Tensor, pool_scores: Tensor, table: Tensor, bias: Tensor
) -> Tensor:
    """Scores of the candidates one deeper than each node: pool_scores plus bias plus query times the table's rows.

    Args:
        query: [R, n, d_rank], the last of the states. depth: int64 [R, n]; D and deeper are read as D - 1.
        pool_tokens: int64 [R, D, P]. pool_scores: float32 at least, [R, D, P].
        table: [V, d_rank]. bias: float32 at least, [V].
    Returns:
        [R, n, P] in the wider dtype of pool_scores and bias.
    """
    _, depths, pool = pool_tokens.shape
    level = depth.clamp(max=depths - 1)[:, :, None].expand(-1, -1, pool)
    tokens = pool_tokens.gather(1, level)
    rows = F.embedding(tokens, table)
    return pool_scores.gather(1, level) + bias[tokens] + (rows @ query[..., None])[..., 0]
