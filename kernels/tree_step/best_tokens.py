"""The likeliest tokens of each row of logits, and the row's log-sum-exp, in two launches.

The first launch gives each program a part of one row: its best tokens, its maximum and its sum of exponentials. The
second merges the parts of a row. A token is ranked by one integer: the logit's bits, ordered as the floats are, above
the complement of its index, so equal logits go to the smaller token on every device and every tensor-parallel rank.
"""

import torch
import triton
import triton.language as tl

MAX_KERNEL_WIDTH = 64
_BLOCK = 1024
_MOST_KEYS = 8192
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
    # The kernels take a pass over their keys for each token: many are better selected by torch's radix sort.
    if width > MAX_KERNEL_WIDTH or (logits.device.type == "cpu" and not _interpreting()):
        return _best_tokens_torch(logits, width, scale, cap)
    rows, vocabulary = logits.shape
    # Fewer, longer parts where the merge would have to hold too many candidates.
    block = _BLOCK
    while triton.cdiv(vocabulary, block) * width > _MOST_KEYS:
        block *= 2
    parts = triton.cdiv(vocabulary, block)
    kept = min(width, block)
    device = logits.device
    keys = torch.empty(rows, parts, kept, dtype=torch.int64, device=device)
    summary = torch.empty(rows, parts, 2, dtype=torch.float32, device=device)
    values = torch.empty(rows, width, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, width, dtype=torch.int64, device=device)
    total = torch.empty(rows, dtype=torch.float32, device=device)
    _best_of_part[(rows, parts)](
        logits, keys, summary, vocabulary, logits.stride(0), parts, scale, cap, kept, cap != 0.0, block, num_warps=4
    )
    _merge_parts[(rows,)](
        keys,
        summary,
        values,
        tokens,
        total,
        parts,
        width,
        parts * kept,
        triton.next_power_of_2(parts * kept),
        triton.next_power_of_2(parts),
        num_warps=8,
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


def _interpreting() -> bool:
    return type(_merge_parts).__name__ == "InterpretedFunction"


@triton.jit
def _key(value, index):
    """int64 that sorts as (value, then smaller index first)."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    # Negative floats sort backwards by their bits: flip all but the sign.
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _best_of_part(
    logits,
    keys,
    summary,
    vocabulary,
    row_stride,
    parts,
    scale,
    cap,
    KEPT: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    index = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * row_stride + index, mask=index < vocabulary, other=-float("inf"))
    value = value.to(tl.float32) * scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        value = cap * (1.0 - 2.0 / (tl.exp(2.0 * value / cap) + 1.0))
    value = tl.where((value == value) & (index < vocabulary), value, -float("inf"))
    most = tl.max(value, 0)
    shift = tl.where(most == -float("inf"), 0.0, most)
    place = row * parts + part
    tl.store(summary + place * 2, most)
    tl.store(summary + place * 2 + 1, tl.sum(tl.exp(value - shift), 0))
    key = _key(value, index)
    for k in range(KEPT):
        best = tl.max(key, 0)
        tl.store(keys + place * KEPT + k, best)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)


@triton.jit
def _merge_parts(
    keys,
    summary,
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
    shift = tl.load(summary + (row * parts + part) * 2, mask=part < parts, other=-float("inf"))
    summed = tl.load(summary + (row * parts + part) * 2 + 1, mask=part < parts, other=0.0)
    most = tl.max(shift, 0)
    safe = tl.where(most == -float("inf"), 0.0, most)
    tl.store(total + row, most + tl.log(tl.sum(tl.exp(shift - safe) * summed, 0)))
    index = tl.arange(0, COUNT)
    key = tl.load(keys + row * count + index, mask=index < count, other=-0x7FFFFFFFFFFFFFFF)
    for k in range(width):
        best = tl.max(key, 0)
        ordered = (best >> 32).to(tl.int32)
        bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
        tl.store(values + row * width + k, bits.to(tl.float32, bitcast=True))
        tl.store(tokens + row * width + k, 0x7FFFFFFF - (best & 0xFFFFFFFF))
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
