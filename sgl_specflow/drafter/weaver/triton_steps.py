"""The functions of `steps` as one Triton kernel each, for the few rows of a round: what counts there is the number of
kernels. Same contracts; see `steps` for shapes.

Programs of one launch may not read what others of it write: `attend` makes the keys of its own call anew from qkv.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sgl_specflow.drafter.weaver.reference import EPS
from sgl_specflow.drafter.weaver.steps import before_attention, states_of
from sgl_specflow.kernels.tree_step import expansion
from sgl_specflow.tree import Expansion

__all__ = [
    "add_norm",
    "after_attention",
    "attend",
    "before_attention",
    "enter",
    "mlp",
    "pool_logits",
    "silu_mul",
    "states_of",
    "tree_builder",
    "unset_places",
]
tree_builder = expansion

KEY_BLOCK = 32
CANDIDATE_BLOCK = 16
RANK_BLOCK = 256


# The round's place must not make a variant of a kernel a round.
@triton.jit(do_not_specialize=["count", "first", "prefix", "places"])
def _enter_kernel(
    token, depth, above, within, table, turn, visible, x, normed, own_turn, rows, count, first, slots, prefix, places, eps,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, TURN: tl.constexpr, TURN_BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    request, number = entry // count, entry % count
    column = tl.arange(0, RANK_BLOCK)
    inside = column < RANK
    row = tl.load(table + tl.load(token + entry) * RANK + column, mask=inside, other=0.0)
    tl.store(x + entry * RANK + column, row, mask=inside)
    value = row.to(tl.float32)
    root = tl.sqrt(tl.sum(value * value, 0) / RANK + eps)
    tl.store(normed + entry * RANK + column, (value / root).to(normed.dtype.element_ty), mask=inside)

    column = tl.arange(0, TURN_BLOCK)
    inside = column < TURN
    turned = tl.load(turn + (tl.load(depth + entry) + 1) * TURN + column, mask=inside, other=0.0)
    tl.store(own_turn + entry * TURN + column, turned, mask=inside)

    place = tl.arange(0, PLACES)
    own = place - prefix - first
    seen = tl.load(within + entry * count + own, mask=(own >= 0) & (own < count), other=0)
    # An ancestor's row of an earlier round; this one's rows are other programs' to write.
    earlier = visible + (request * slots + tl.load(above + entry)) * places + place
    seen = tl.where((own < 0) & (first > 0), tl.load(earlier, mask=(own < 0) & (first > 0), other=0), seen)
    seen = tl.where(place < prefix, 1, seen).to(tl.uint8)
    tl.store(rows + entry * places + place, seen, mask=place < places)
    tl.store(visible + (request * slots + first + number) * places + place, seen, mask=place < places)


@triton.jit(do_not_specialize=["count", "first", "places"])
def _attend_kernel(
    qkv, turn, keys, values, visible, out, count, first, places, turn_stride, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    entry, head = tl.program_id(0), tl.program_id(1)
    request, own = entry // count, first + entry % count
    half = tl.arange(0, HALF)
    inside = half < DIM // 2
    row = qkv + entry * 3 * HEADS * DIM + head * DIM + half
    q1 = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    q2 = tl.load(row + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    k1 = tl.load(row + HEADS * DIM, mask=inside, other=0.0).to(tl.float32)
    k2 = tl.load(row + HEADS * DIM + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    v1 = tl.load(row + 2 * HEADS * DIM, mask=inside, other=0.0)
    v2 = tl.load(row + 2 * HEADS * DIM + DIM // 2, mask=inside, other=0.0)
    turn += request * turn_stride
    own_turn = turn + (own - first) * 2 * DIM + half
    cos = tl.load(own_turn, mask=inside, other=0.0)
    sin = tl.load(own_turn + DIM + DIM // 2, mask=inside, other=0.0)
    kept = keys.dtype.element_ty
    # Rounded as a kept key is.
    turned_q1, turned_q2 = (q1 * cos - q2 * sin).to(kept).to(tl.float32), (q2 * cos + q1 * sin).to(kept).to(tl.float32)
    turned_k1, turned_k2 = (k1 * cos - k2 * sin).to(kept), (k2 * cos + k1 * sin).to(kept)
    base = (request * HEADS + head) * places * DIM
    tl.store(keys + base + own * DIM + half, turned_k1, mask=inside)
    tl.store(keys + base + own * DIM + DIM // 2 + half, turned_k2, mask=inside)
    tl.store(values + base + own * DIM + half, v1, mask=inside)
    tl.store(values + base + own * DIM + DIM // 2 + half, v2, mask=inside)

    highest = scale * tl.sum(turned_q1 * turned_k1.to(tl.float32) + turned_q2 * turned_k2.to(tl.float32), 0)
    weight = highest * 0.0 + 1.0
    sum1, sum2 = v1.to(tl.float32), v2.to(tl.float32)
    for start in range(0, first, BLOCK):
        place = start + tl.arange(0, BLOCK)
        seen = place < first
        if not CAUSAL:
            seen = tl.load(visible + entry * places + place, mask=seen, other=0) != 0
        tile = base + place[:, None] * DIM + half[None, :]
        wanted = seen[:, None] & inside[None, :]
        key1 = tl.load(keys + tile, mask=wanted, other=0.0).to(tl.float32)
        key2 = tl.load(keys + tile + DIM // 2, mask=wanted, other=0.0).to(tl.float32)
        score = scale * tl.sum(key1 * turned_q1[None, :] + key2 * turned_q2[None, :], 1)
        score = tl.where(seen, score, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(score, 0))
        part = tl.exp(score - new_highest)
        old = tl.exp(highest - new_highest)
        value1 = tl.load(values + tile, mask=wanted, other=0.0).to(tl.float32)
        value2 = tl.load(values + tile + DIM // 2, mask=wanted, other=0.0).to(tl.float32)
        weight = weight * old + tl.sum(part, 0)
        sum1 = sum1 * old + tl.sum(part[:, None] * value1, 0)
        sum2 = sum2 * old + tl.sum(part[:, None] * value2, 0)
        highest = new_highest

    call = request * count
    for start in range(0, count, BLOCK):
        other = start + tl.arange(0, BLOCK)
        if CAUSAL:
            seen = first + other < own
        else:
            seen = tl.load(visible + entry * places + first + other, mask=other < count, other=0) != 0
            seen = seen & (first + other != own)
        wanted = seen[:, None] & inside[None, :]
        tile = (call + other)[:, None] * 3 * HEADS * DIM + head * DIM + half[None, :]
        plain1 = tl.load(qkv + HEADS * DIM + tile, mask=wanted, other=0.0).to(tl.float32)
        plain2 = tl.load(qkv + HEADS * DIM + DIM // 2 + tile, mask=wanted, other=0.0).to(tl.float32)
        tile_turn = other[:, None] * 2 * DIM + half[None, :]
        other_cos = tl.load(turn + tile_turn, mask=wanted, other=0.0)
        other_sin = tl.load(turn + DIM + DIM // 2 + tile_turn, mask=wanted, other=0.0)
        key1 = (plain1 * other_cos - plain2 * other_sin).to(kept).to(tl.float32)
        key2 = (plain2 * other_cos + plain1 * other_sin).to(kept).to(tl.float32)
        score = scale * tl.sum(key1 * turned_q1[None, :] + key2 * turned_q2[None, :], 1)
        score = tl.where(seen, score, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(score, 0))
        part = tl.exp(score - new_highest)
        old = tl.exp(highest - new_highest)
        value1 = tl.load(qkv + 2 * HEADS * DIM + tile, mask=wanted, other=0.0).to(tl.float32)
        value2 = tl.load(qkv + 2 * HEADS * DIM + DIM // 2 + tile, mask=wanted, other=0.0).to(tl.float32)
        weight = weight * old + tl.sum(part, 0)
        sum1 = sum1 * old + tl.sum(part[:, None] * value1, 0)
        sum2 = sum2 * old + tl.sum(part[:, None] * value2, 0)
        highest = new_highest
    place_out = out + entry * HEADS * DIM + head * DIM + half
    tl.store(place_out, (sum1 / weight).to(kept), mask=inside)
    tl.store(place_out + DIM // 2, (sum2 / weight).to(kept), mask=inside)


@triton.jit
def _add_norm_kernel(x, delta, total, normed, rank, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0) * rank
    column = tl.arange(0, BLOCK)
    inside = column < rank
    kept = total.dtype.element_ty
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(delta + row + column, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(kept)
    tl.store(total + row + column, rounded, mask=inside)
    value = rounded.to(tl.float32)
    root = tl.sqrt(tl.sum(value * value, 0) / rank + eps)
    tl.store(normed + row + column, (value / root).to(kept), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inner + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pool_logits_kernel(
    query, depth, tokens, scores, table, bias, out, count, depths, pool, rank, eps,
    BLOCK: tl.constexpr, RANK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    candidate = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = candidate < pool
    level = tl.minimum(tl.load(depth + entry), depths - 1)
    place = ((entry // count) * depths + level) * pool + candidate
    token = tl.load(tokens + place, mask=inside, other=0)
    own = tl.load(scores + place, mask=inside, other=0.0) + tl.load(bias + token, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((RANK,), tl.float32)
    for start in range(0, rank, RANK):
        column = start + tl.arange(0, RANK)
        part = tl.load(query + entry * rank + column, mask=column < rank, other=0.0).to(tl.float32)
        wanted = inside[:, None] & (column < rank)[None, :]
        rows = tl.load(table + token[:, None] * rank + column[None, :], mask=wanted, other=0.0).to(tl.float32)
        total += tl.sum(rows * part[None, :], 1)
        squares += part * part
    if not NORMED:
        total /= tl.sqrt(tl.sum(squares, 0) / rank + eps)
    tl.store(out + entry * pool + candidate, own + total, mask=inside)


def unset_places(shape: tuple[int, ...], dtype: torch.dtype, device) -> Tensor:
    """Room for keys or values; unwritten places are never read."""
    return torch.empty(shape, dtype=dtype, device=device)


def enter(
    nodes: Expansion, table: Tensor, turn: Tensor, visible: Tensor, prefix: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`steps.enter`."""
    (requests, count), rank, device = nodes.token.shape, table.shape[1], table.device
    _, slots, places = visible.shape
    x, normed = (torch.empty(requests, count, rank, dtype=table.dtype, device=device) for _ in range(2))
    own_turn = torch.empty(requests, count, *turn.shape[1:], dtype=turn.dtype, device=device)
    rows = torch.empty(requests, count, places, dtype=torch.bool, device=device)
    numbers = turn[0].numel()
    _enter_kernel[(requests * count,)](
        nodes.token, nodes.depth, nodes.above, nodes.inside.view(torch.uint8), table, turn, visible.view(torch.uint8),
        x, normed, own_turn, rows.view(torch.uint8), count, nodes.first_slot, slots, prefix, places, EPS,
        RANK=rank, RANK_BLOCK=triton.next_power_of_2(rank), TURN=numbers, TURN_BLOCK=triton.next_power_of_2(numbers),
        PLACES=triton.next_power_of_2(places), num_warps=4,
    )  # fmt: skip
    return x, normed, own_turn, rows


def attend(qkv: Tensor, turn: Tensor, keys: Tensor, values: Tensor, first: int, visible: Tensor | None) -> Tensor:
    """`steps.attend`; qkv in keys' dtype."""
    requests, count, _, heads, dim = qkv.shape
    out = torch.empty(requests, count, heads * dim, dtype=keys.dtype, device=qkv.device)
    half = triton.next_power_of_2(dim // 2)
    causal = visible is None
    _attend_kernel[(requests * count, heads)](
        qkv, turn, keys, values, None if causal else visible.view(torch.uint8), out, count, first, keys.shape[2],
        0 if turn.shape[0] == 1 else turn.stride(0), dim**-0.5,
        HEADS=heads, DIM=dim, HALF=half, BLOCK=KEY_BLOCK, CAUSAL=causal, num_warps=2,
    )  # fmt: skip
    return out


def add_norm(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """`steps.add_norm`."""
    rank = x.shape[-1]
    total, normed = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(rank)
    _add_norm_kernel[(x.numel() // rank,)](x, delta, total, normed, rank, EPS, BLOCK=block, num_warps=4)
    return total, normed


def silu_mul(gate_up: Tensor) -> Tensor:
    """`steps.silu_mul`."""
    inner = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(out.numel() // inner, triton.cdiv(inner, 1024))](gate_up, out, inner, BLOCK=1024, num_warps=4)
    return out


def after_attention(states: Sequence[Tensor], mixed: Tensor, block: dict) -> tuple[Tensor, Tensor]:
    """`steps.after_attention`."""
    return add_norm(states[0], F.linear(mixed, block["o"]))


def mlp(states: Sequence[Tensor], block: dict) -> tuple[Tensor, Tensor]:
    """`steps.mlp`."""
    inner = silu_mul(F.linear(states[1], *block["gate_up"]))
    return add_norm(states[0], F.linear(inner, *block["down"]))


def pool_logits(
    query: Tensor,
    depth: Tensor,
    pool_tokens: Tensor,
    pool_scores: Tensor,
    table: Tensor,
    bias: Tensor,
    normed: bool = True,
) -> Tensor:
    """`steps.pool_logits`; normed: False where query is yet to be divided by its root mean square."""
    requests, count, rank = query.shape
    _, depths, pool = pool_tokens.shape
    out = torch.empty(requests, count, pool, dtype=torch.float32, device=query.device)
    _pool_logits_kernel[(requests * count, triton.cdiv(pool, CANDIDATE_BLOCK))](
        query, depth, pool_tokens, pool_scores, table, bias, out, count, depths, pool, rank, EPS,
        BLOCK=CANDIDATE_BLOCK, RANK=min(RANK_BLOCK, triton.next_power_of_2(rank)), NORMED=normed, num_warps=4,
    )  # fmt: skip
    return out
