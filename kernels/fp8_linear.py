"""Linear layers whose weights are FP8 and whose activations are not: for few rows, where reading the weights is the time.

Each output feature has a scale of its own: weight = scale * fp8 (e4m3). The product sums in float32.
"""

import torch
import triton
import triton.language as tl
from sgl_specflow.kernels import fp8_linear_cuda
from sgl_specflow.kernels.placement import runs_triton

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_MOST_ROWS = 128  # of one program
_FEATURES_AT_ONCE = 8192


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] float -> (FP8 [N, K], scale float32 [N]) with the largest entry of each row at FP8's largest."""
    quantised = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = []
    for rows, out in zip(weight.split(_FEATURES_AT_ONCE), quantised.split(_FEATURES_AT_ONCE)):
        wide = rows.float()
        scale = wide.abs().amax(1).clamp(min=1e-12) / LARGEST
        out.copy_((wide / scale[:, None]).to(FP8))
        scales.append(scale)
    return quantised, torch.cat(scales)


def dequantise_rows(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights that `fp8_linear` multiplies with, [N, K] in dtype."""
    return (weight.float() * scale[:, None]).to(dtype)


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x @ (scale * weight).T.

    Args:
        x: [M, K] bfloat16, float16 or float32, last stride 1. weight: float8_e4m3fn [N, K], contiguous. scale: float32 [N].

    Returns:
        [M, N] in x's dtype.

    On CUDA bfloat16 and float16 are one launch: of `fp8_linear.cu` to 64 rows where `fp8_linear_cuda.serves` says so
    (compute capability 9.0 on, K a multiple of 16, x and weight at 16-byte addresses, rows of x a multiple of 8 numbers
    apart), which compiles at first use, so call once before a CUDA graph is captured; else of the Triton kernel, which
    is slower for few rows. All else multiplies dequantised weights.
    """
    rows, depth = x.shape
    features = weight.shape[0]
    if weight.shape != (features, depth) or weight.dtype != FP8 or scale.shape != (features,):
        raise ValueError(
            f"fp8_linear: x {tuple(x.shape)} wants weight float8_e4m3fn [N, {depth}] and scale [N]; got "
            f"{weight.dtype} {tuple(weight.shape)} and {tuple(scale.shape)}"
        )
    if fp8_linear_cuda.serves(x, weight, scale):
        return fp8_linear_cuda.fp8_linear_cuda(x, weight, scale)
    if not runs_triton(x) or x.dtype == torch.float32:
        parts = zip(weight.split(_FEATURES_AT_ONCE), scale.split(_FEATURES_AT_ONCE))
        return torch.cat([x @ dequantise_rows(*part, x.dtype).T for part in parts], dim=1)
    return fp8_linear_triton(x, weight, scale)


def fp8_linear_triton(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`fp8_linear` of bfloat16 or float16 in one Triton launch, whatever the rows and the alignment."""
    rows, depth = x.shape
    features = weight.shape[0]
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    block_m = min(max(16, triton.next_power_of_2(rows)), _MOST_ROWS)
    block_n = 32 if features <= 8192 else 64
    block_k = 256 if block_m <= 32 else 128
    _fp8_linear[(triton.cdiv(features, block_n), triton.cdiv(rows, block_m))](
        x,
        weight,
        scale,
        out,
        rows,
        features,
        depth,
        x.stride(0),
        block_m,
        block_n,
        block_k,
        depth % block_k == 0,
        num_warps=4 if block_m <= 64 else 8,
        num_stages=6 if block_m <= 32 else 4,
    )
    return out


@triton.jit
def _fp8_linear(
    x,
    weight,
    scale,
    out,
    rows,
    features,
    depth,
    stride_x,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    has_row, has_feature = row < rows, feature < features
    x_tile = x + row[:, None] * stride_x + column[None, :]
    weight_tile = weight + feature[None, :].to(tl.int64) * depth + column[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, depth, BLOCK_K):
        if WHOLE:
            left = tl.load(x_tile + first, mask=has_row[:, None], other=0.0)
            right = tl.load(weight_tile + first, mask=has_feature[None, :], other=0.0)
        else:
            inside = first + column < depth
            left = tl.load(x_tile + first, mask=has_row[:, None] & inside[None, :], other=0.0)
            right = tl.load(weight_tile + first, mask=has_feature[None, :] & inside[:, None], other=0.0)
        total = tl.dot(left, right.to(left.dtype), total)
    total = total * tl.load(scale + feature, mask=has_feature, other=0.0)[None, :]
    place = out + row[:, None].to(tl.int64) * features + feature[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_feature[None, :])
