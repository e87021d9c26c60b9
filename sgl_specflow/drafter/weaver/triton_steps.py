"""The functions of `steps` as one Triton kernel each, for the few rows of a round: what counts there is the number of
kernels. Same contracts; see `steps` for shapes.

Programs of one launch may not read what others of it write: `attend` makes the keys of its own call anew from qkv.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_specflow.drafter.weaver.reference import EPS
from sgl_specflow.kernels.tree_step import expansion

tree_builder = expansion

KEY_BLOCK = 32
CANDIDATE_BLOCK = 16
RANK_BLOCK = 256


# The round's place must not make a variant of the kernel a round.
@triton.jit(do_not_specialize=["count", "first", "places"])
def _attend_kernel(
    qkv, turn, keys, values, visible, out, count, first, places, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
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
    cos = tl.load(turn + entry * 2 * DIM + half, mask=inside, other=0.0)
    sin = tl.load(turn + entry * 2 * DIM + DIM + DIM // 2 + half, mask=inside, other=0.0)
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
        seen = tl.load(visible + entry * places + place, mask=place < first, other=0) != 0
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
        seen = tl.load(visible + entry * places + first + other, mask=other < count, other=0) != 0
        seen = seen & (first + other != own)
        wanted = seen[:, None] & inside[None, :]
        tile = (call + other)[:, None] * 3 * HEADS * DIM + head * DIM + half[None, :]
        plain1 = tl.load(qkv + HEADS * DIM + tile, mask=wanted, other=0.0).to(tl.float32)
        plain2 = tl.load(qkv + HEADS * DIM + DIM // 2 + tile, mask=wanted, other=0.0).to(tl.float32)
        tile_turn = (call + other)[:, None] * 2 * DIM + half[None, :]
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
    query, depth, tokens, scores, table, out, count, depths, pool, rank, BLOCK: tl.constexpr, RANK: tl.constexpr
):
    entry = tl.program_id(0)
    candidate = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = candidate < pool
    level = tl.minimum(tl.load(depth + entry), depths - 1)
    place = ((entry // count) * depths + level) * pool + candidate
    token = tl.load(tokens + place, mask=inside, other=0)
    total = tl.load(scores + place, mask=inside, other=0.0)
    for start in range(0, rank, RANK):
        column = start + tl.arange(0, RANK)
        part = tl.load(query + entry * rank + column, mask=column < rank, other=0.0).to(tl.float32)
        wanted = inside[:, None] & (column < rank)[None, :]
        rows = tl.load(table + token[:, None] * rank + column[None, :], mask=wanted, other=0.0).to(tl.float32)
        total += tl.sum(rows * part[None, :], 1)
    tl.store(out + entry * pool + candidate, total, mask=inside)


def attend(qkv: Tensor, turn: Tensor, keys: Tensor, values: Tensor, first: int, visible: Tensor) -> Tensor:
    """`steps.attend`; qkv in keys' dtype."""
    requests, count, _, heads, dim = qkv.shape
    out = torch.empty(requests, count, heads * dim, dtype=keys.dtype, device=qkv.device)
    half = triton.next_power_of_2(dim // 2)
    _attend_kernel[(requests * count, heads)](
        qkv, turn, keys, values, visible.view(torch.uint8), out, count, first, keys.shape[2], dim**-0.5,
        HEADS=heads, DIM=dim, HALF=half, BLOCK=KEY_BLOCK, num_warps=2,
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


def pool_logits(query: Tensor, depth: Tensor, pool_tokens: Tensor, pool_scores: Tensor, table: Tensor) -> Tensor:
    """`steps.pool_logits`."""
    requests, count, rank = query.shape
    _, depths, pool = pool_tokens.shape
    out = torch.empty(requests, count, pool, dtype=torch.float32, device=query.device)
    _pool_logits_kernel[(requests * count, triton.cdiv(pool, CANDIDATE_BLOCK))](
        query, depth, pool_tokens, pool_scores, table, out, count, depths, pool, rank,
        BLOCK=CANDIDATE_BLOCK, RANK=min(RANK_BLOCK, triton.next_power_of_2(rank)), num_warps=4,
    )  # fmt: skip
    return out
