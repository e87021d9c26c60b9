"""The draft head's context keys and values: from the projections of all layers to the layers' KV buffers, in one launch.

A key is normed in float32 and cast to the model's dtype, turned in float32 and cast again, then converted to the buffers'
dtype: the casts of SGLang 0.5.23's kernels (RMSNorm, rotary embedding, set_kv_buffer), one after the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from sgl_specflow.kernels.placement import runs_triton

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
FP8 = torch.float8_e4m3fn
BUFFER_DTYPES = (*_TRITON_DTYPES, FP8)
# What PyTorch makes of a number beyond FP8's largest, by its version: the largest or NaN.
_OVERFLOW = tl.constexpr(int(torch.tensor(1000.0).to(FP8).view(torch.uint8)))


@dataclass(frozen=True)
class LayerBuffers:
    """Where the keys and values of L layers lie.

    keys, values: L tensors [S, Hkv, D] each, of one shape and stride, the last stride 1; uint8 where `dtype` is
    float8_e4m3fn, as SGLang keeps it. dtype: what their bytes mean, one of BUFFER_DTYPES. addresses: int64 [L, 2] on their
    device, of each layer's keys and values; alignment: bytes, at most 16, that divide them all.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    addresses: torch.Tensor
    alignment: int

    @classmethod
    def of(cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], dtype: torch.dtype) -> "LayerBuffers":
        first, stored = keys[0], torch.uint8 if dtype == FP8 else dtype
        for buffer in (*keys, *values):
            alike = buffer.shape == first.shape and buffer.stride() == first.stride() and buffer.stride(2) == 1
            if dtype not in BUFFER_DTYPES or buffer.dtype != stored or not alike:
                raise ValueError(
                    f"context buffers of {dtype} are alike, have last stride 1 and hold {stored}; got {buffer.dtype} "
                    f"{tuple(buffer.shape)} {buffer.stride()} beside {tuple(first.shape)} {first.stride()}"
                )
        addresses = [[key.data_ptr(), value.data_ptr()] for key, value in zip(keys, values, strict=True)]
        table = torch.tensor(addresses, dtype=torch.int64, device=first.device)
        return cls(tuple(keys), tuple(values), dtype, table, math.gcd(16, *sum(addresses, [])))


def write_context_rows(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    neox: bool,
    positions: torch.Tensor,
    slots: torch.Tensor,
    buffers: LayerBuffers,
) -> None:
    """Norm and turn the keys of T tokens, and write keys and values of all layers to their slots.

    Args:
        kv: [T, L, 2, Hkv, D], contiguous, in the model's dtype (bfloat16, float16 or float32): keys, then values.
        norm_weight: float32 [L, D], of the keys' RMS norm. eps: added to the mean square.
        cos_sin: [positions, R], contiguous, any float dtype: cosines, then sines, of the R / 2 angles of a position. The
            first R dimensions of a key are turned, R even and at most D.
        neox: the two numbers of angle i are dimensions i and i + R / 2 (True) or 2 i and 2 i + 1.
        positions, slots: integers [T], contiguous. A slot given several times keeps any one of its rows.
        buffers: of L layers, whose rows `slots` are written.

    A CUDA graph may hold it: it allocates nothing and synchronises with nothing.
    """
    tokens, layers, _, heads, dim = kv.shape
    rotary = cos_sin.shape[1]
    if not kv.is_contiguous() or not cos_sin.is_contiguous() or kv.dtype not in _TRITON_DTYPES:
        raise ValueError(f"write_context_rows: kv and cos_sin must be contiguous, kv in float; got {kv.dtype}")
    if (
        norm_weight.shape != (layers, dim)
        or len(buffers.keys) != layers
        or buffers.keys[0].shape[1:] != (heads, dim)
        or rotary % 2
        or not 0 < rotary <= dim
    ):
        raise ValueError(
            f"write_context_rows: kv {tuple(kv.shape)} wants a norm [L, D], {layers} layers of buffers [S, Hkv, D] and an "
            f"even number of turned dimensions; got {tuple(norm_weight.shape)}, {len(buffers.keys)} of "
            f"{tuple(buffers.keys[0].shape)} and {rotary}"
        )
    if not runs_triton(kv):
        _in_torch(kv, norm_weight, eps, cos_sin, neox, positions, slots, buffers)
        return
    lanes = triton.next_power_of_2
    _write[(tokens, layers)](
        kv,
        norm_weight,
        eps,
        cos_sin,
        positions,
        slots,
        buffers.addresses,
        *buffers.keys[0].stride()[:2],
        buffers.alignment,
        _TRITON_DTYPES.get(buffers.dtype, tl.uint8),
        heads,
        dim,
        rotary,
        neox,
        lanes(heads),
        lanes(dim),
        lanes(rotary // 2),
        lanes(dim - rotary) if rotary < dim else 0,
    )


def _in_torch(kv, norm_weight, eps, cos_sin, neox, positions, slots, buffers) -> None:
    keys, values = kv.unbind(2)
    wide = keys.contiguous().float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = (wide * norm_weight[:, None]).to(kv.dtype)
    rotary = cos_sin.shape[1]
    cos, sin = cos_sin[positions].float()[:, None, None].chunk(2, dim=-1)
    turned = normed[..., :rotary].float()
    first, second = turned.chunk(2, dim=-1) if neox else (turned[..., ::2], turned[..., 1::2])
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.cat(pair, dim=-1) if neox else torch.stack(pair, dim=-1).flatten(-2)
    keys = torch.cat([turned.to(kv.dtype), normed[..., rotary:]], dim=-1)
    for layer, (key, value) in enumerate(zip(buffers.keys, buffers.values)):
        key[slots] = keys[:, layer].to(buffers.dtype).view(key.dtype)
        value[slots] = values[:, layer].to(buffers.dtype).view(value.dtype)


@triton.jit
def _write(
    kv,
    norm_weight,
    eps,
    cos_sin,
    positions,
    slots,
    addresses,
    stride_slot,
    stride_head,
    ALIGNMENT: tl.constexpr,
    STORED: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    DIM_LANES: tl.constexpr,
    ANGLE_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
):
    token, layer, layers = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = kv + (token * layers + layer) * (2 * HEADS * DIM)
    weight = norm_weight + layer * DIM
    position, slot = tl.load(positions + token).to(tl.int64), tl.load(slots + token).to(tl.int64)
    # Unless the compiler is told of the addresses' alignment, it writes number by number.
    keys = tl.multiple_of(tl.load(addresses + 2 * layer).to(tl.pointer_type(STORED)), ALIGNMENT)
    values = tl.multiple_of(tl.load(addresses + 2 * layer + 1).to(tl.pointer_type(STORED)), ALIGNMENT)
    keys, values = keys + slot * stride_slot, values + slot * stride_slot
    head = tl.arange(0, HEAD_LANES)[:, None]
    has_head = head < HEADS

    every = tl.arange(0, DIM_LANES)[None, :]
    inside = has_head & (every < DIM)
    value = tl.load(row + HEADS * DIM + head * DIM + every, mask=inside, other=0.0)
    tl.store(values + head * stride_head + every, _stored(value, STORED), mask=inside)

    angle = tl.arange(0, ANGLE_LANES)[None, :]
    is_angle = angle < ROTARY // 2
    turns = has_head & is_angle
    # The two dimensions that an angle turns.
    first = angle if NEOX else 2 * angle
    second = first + (ROTARY // 2 if NEOX else 1)
    x = tl.load(row + head * DIM + first, mask=turns, other=0.0).to(tl.float32)
    y = tl.load(row + head * DIM + second, mask=turns, other=0.0).to(tl.float32)
    squares = tl.sum(x * x + y * y, 1)
    if REST_LANES > 0:
        beyond = ROTARY + tl.arange(0, REST_LANES)[None, :]
        stays = has_head & (beyond < DIM)
        rest = tl.load(row + head * DIM + beyond, mask=stays, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
    scale = tl.rsqrt(squares / DIM + eps)[:, None]

    model = kv.dtype.element_ty
    x = x * scale * tl.load(weight + first, mask=is_angle, other=0.0)
    y = y * scale * tl.load(weight + second, mask=is_angle, other=0.0)
    x, y = x.to(model).to(tl.float32), y.to(model).to(tl.float32)
    angles = cos_sin + position * ROTARY + angle
    cos = tl.load(angles, mask=is_angle, other=0.0).to(tl.float32)
    sin = tl.load(angles + ROTARY // 2, mask=is_angle, other=0.0).to(tl.float32)
    tl.store(keys + head * stride_head + first, _stored((x * cos - y * sin).to(model), STORED), mask=turns)
    tl.store(keys + head * stride_head + second, _stored((y * cos + x * sin).to(model), STORED), mask=turns)
    if REST_LANES > 0:
        rest = rest * scale * tl.load(weight + beyond, mask=beyond < DIM, other=0.0)
        tl.store(keys + head * stride_head + beyond, _stored(rest.to(model), STORED), mask=stays)


@triton.jit
def _stored(x, STORED: tl.constexpr):
    return _e4m3(x.to(tl.float32)) if STORED == tl.uint8 else x.to(STORED)


@triton.jit
def _e4m3(x):
    """float32 -> the byte of float8_e4m3fn that PyTorch makes of it: nearest, ties to even. On any GPU."""
    bits = x.to(tl.uint32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # Below 2^-6 the steps are 2^-9 each: the last bits of a float32 of size 2^14.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - (141 << 23)
    large = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    byte = tl.where(size < (121 << 23), small, tl.minimum(large, _OVERFLOW))
    return (tl.where(size > 0x7F800000, 0x7F, byte) | sign).to(tl.uint8)
