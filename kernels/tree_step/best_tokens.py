"""The likeliest tokens of each row of logits, and the row's log-sum-exp, in three launches; above 64 tokens, and to 2048, in
the two of `top_pool`.

The first launch gives each program a part of one row: its best token and its sum of exponentials. The `width` likeliest
tokens lie in the `width` parts with the best best token, so the second takes the best tokens of these parts alone, and
the third merges them. A token is ranked by one integer: the logit's bits, ordered as the floats are, above
the complement of its index, so equal logits go to the smaller token on every device and every tensor-parallel rank.
"""

import torch
import triton
import triton.language as tl
from sgl_specflow.kernels.placement import runs_triton
from sgl_specflow.kernels.tree_step import top_pool

MAX_KERNEL_WIDTH = 64
_BLOCK = 1024
_ROWS_AT_ONCE = 128


def best_tokens(
    logits: torch.Tensor, width: int, *, scale: float = 1.0, cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `width` greatest logits of each row.

    Args:
        logits: [N, V] bfloat16, float16 or float32, rows contiguous. They count as cap * tanh(scale * x / cap), or
            scale * x where cap is 0.
        width: 1 to V.

    Returns:
        values float32 [N, width], descending; tokens int64 [N, width], the smaller first where values are equal; and the
        rows' log-sum-exp, float32 [N]. A NaN counts as -inf. No host synchronisation.
    """
    # The kernels below take a pass over their keys for each token.
    if width > MAX_KERNEL_WIDTH and top_pool.serves(logits, width):
        return top_pool.top_pool(logits, width, scale, cap)
    if width > MAX_KERNEL_WIDTH or not runs_triton(logits):
        return _best_tokens_torch(logits, width, scale, cap)
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, _BLOCK)
    chosen, kept = min(width, parts), min(width, _BLOCK)
    device = logits.device
    best = torch.empty(rows, parts, dtype=torch.int64, device=device)
    summed = torch.empty(rows, parts, dtype=torch.float32, device=device)
    keys = torch.empty(rows, chosen, kept, dtype=torch.int64, device=device)
    values = torch.empty(rows, width, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, width, dtype=torch.int64, device=device)
    total = torch.empty(rows, dtype=torch.float32, device=device)
    block_parts = triton.next_power_of_2(parts)
    source = (logits, vocabulary, logits.stride(0), scale, cap)
    _best_of_parts[(rows, parts)](*source, best, summed, parts, cap != 0.0, _BLOCK, num_warps=4)
    _best_of_chosen[(rows, chosen)](*source, best, keys, parts, kept, cap != 0.0, _BLOCK, block_parts, num_warps=4)
    _merge_parts[(rows,)](
        best,
        summed,
        keys,
        values,
        tokens,
        total,
        parts,
        width,
        chosen * kept,
        triton.next_power_of_2(chosen * kept),
        block_parts,
        num_warps=4,
    )
    return values, tokens, total


def _best_tokens_torch(logits, width, scale, cap):
    # In pieces: the keys of a row take 12 bytes a token and more.
    pieces = [_best_of_rows(rows, width, scale, cap) for rows in logits.split(_ROWS_AT_ONCE)]
    return tuple(torch.cat(parts) for parts in zip(*pieces))


def _best_of_rows(logits, width, scale, cap):
    logits = logits.float() * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    # Adding 0.0 turns -0.0 into 0.0.
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    bits = logits.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    # All keys differ, so that topk has no ties to leave open.
    keys = ordered << 32 | 0x7FFFFFFF - torch.arange(logits.shape[1], device=logits.device)
    tokens = keys.topk(width, dim=1).indices
    return logits.gather(1, tokens), tokens, logits.logsumexp(1)


@triton.jit
def _key(value, index):
    """int64 that sorts as (value, then smaller index first)."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    # Negative floats sort backwards by their bits: flip all but the sign.
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _value_of(key):
    """The float32 that `_key` was made of."""
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load_part(logits, vocabulary, row_stride, scale, cap, row, part, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """A part's logits, scaled and capped, float32 [BLOCK], and their tokens."""
    index = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * row_stride + index, mask=index < vocabulary, other=-float("inf"))
    value = value.to(tl.float32) * scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        value = cap * (1.0 - 2.0 / (tl.exp(2.0 * value / cap) + 1.0))
    return tl.where((value == value) & (index < vocabulary), value, -float("inf")), index


@triton.jit
def _best_of_parts(
    logits, vocabulary, row_stride, scale, cap, best, summed, parts, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """Each part's greatest key, and its sum of exponentials over the exponential of its maximum."""
    row, part = tl.program_id(0), tl.program_id(1)
    value, index = _load_part(logits, vocabulary, row_stride, scale, cap, row, part, CAPPED, BLOCK)
    most = tl.max(value, 0)
    shift = tl.where(tl.abs(most) == float("inf"), 0.0, most)
    tl.store(summed + row * parts + part, tl.sum(tl.exp(value - shift), 0))
    tl.store(best + row * parts + part, tl.max(_key(value, index), 0))


@triton.jit
def _best_of_chosen(
    logits,
    vocabulary,
    row_stride,
    scale,
    cap,
    best,
    keys,
    parts,
    KEPT: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The KEPT greatest keys of one of the parts with the greatest best keys."""
    row, rank = tl.program_id(0), tl.program_id(1)
    part = tl.arange(0, PARTS)
    of_parts = tl.load(best + row * parts + part, mask=part < parts, other=-0x7FFFFFFFFFFFFFFF)
    for _ in range(rank):
        of_parts = tl.where(of_parts == tl.max(of_parts, 0), -0x7FFFFFFFFFFFFFFF, of_parts)
    chosen = tl.argmax(of_parts, 0)
    value, index = _load_part(logits, vocabulary, row_stride, scale, cap, row, chosen, CAPPED, BLOCK)
    key = _key(value, index)
    for k in range(KEPT):
        greatest = tl.max(key, 0)
        tl.store(keys + (row * tl.num_programs(1) + rank) * KEPT + k, greatest)
        key = tl.where(key == greatest, -0x7FFFFFFFFFFFFFFF, key)


@triton.jit
def _merge_parts(
    best,
    summed,
    keys,
    values,
    tokens,
    total,
    parts,
    width,
    count,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    of_parts = tl.load(best + row * parts + part, mask=part < parts, other=0)
    shift = tl.where(part < parts, _value_of(of_parts), -float("inf"))
    exponentials = tl.load(summed + row * parts + part, mask=part < parts, other=0.0)
    most = tl.max(shift, 0)
    safe = tl.where(tl.abs(most) == float("inf"), 0.0, most)
    summed_up = most + tl.log(tl.sum(tl.exp(shift - safe) * exponentials, 0))
    tl.store(total + row, tl.where(most == float("inf"), most, summed_up))
    index = tl.arange(0, COUNT)
    key = tl.load(keys + row * count + index, mask=index < count, other=-0x7FFFFFFFFFFFFFFF)
    for k in range(width):
        greatest = tl.max(key, 0)
        tl.store(values + row * width + k, _value_of(greatest))
        tl.store(tokens + row * width + k, 0x7FFFFFFF - (greatest & 0xFFFFFFFF))
        key = tl.where(key == greatest, -0x7FFFFFFFFFFFFFFF, key)
