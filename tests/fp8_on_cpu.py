"""Runs kernels/fp8_linear.cu itself on the CPU: g++ builds it against tests/cuda_on_cpu.h."""

import ctypes
import functools

import torch
from compiled import build_for_cpu
from sgl_specflow.kernels import fp8_linear_cuda

GUARD = 64  # numbers


@functools.cache
def build(variant: fp8_linear_cuda.Variant) -> ctypes.CDLL:
    return build_for_cpu("fp8_linear_on_cpu.cpp", fp8_linear_cuda.SOURCE.parent, variant.defines())


def linear_on_cpu(x, weight, scale, variant, clusters: int, reversed_order: bool = False) -> torch.Tensor:
    """`fp8_linear_cuda` on the CPU; reversed_order: the warps and lanes of a block run backwards."""
    assert fp8_linear_cuda.fits(x, weight, scale)
    size = x.shape[0] * weight.shape[0]
    written = torch.full((size + 2 * GUARD,), float("nan"), dtype=x.dtype)
    out = written[GUARD:-GUARD].view(x.shape[0], weight.shape[0])
    arguments = fp8_linear_cuda.linear_arguments(x, weight, scale, out)
    shared, blocks = ctypes.c_size_t(variant.shared_bytes), clusters * variant.cluster
    build(variant).fp8_linear_on_cpu(ctypes.byref(arguments), shared, blocks, reversed_order)
    assert written[:GUARD].isnan().all() and written[-GUARD:].isnan().all(), "out is overrun"
    return out


def converted_on_cpu(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 codes (uint8 [4 n]) as the kernel multiplies them, float32."""
    library, out = build(fp8_linear_cuda.Variant(dtype, 1, 1, 128)), torch.empty(len(codes))
    for i, word in enumerate(codes.view(torch.int32).tolist()):
        library.convert_on_cpu(ctypes.c_uint(word & 0xFFFFFFFF), ctypes.c_void_p(out[4 * i :].data_ptr()))
    return out
