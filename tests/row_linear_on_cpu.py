"""Runs kernels/row_linear.cu itself on the CPU: g++ builds it against tests/cuda_on_cpu.h."""

import ctypes
import functools

import torch
from compiled import build_for_cpu
from sgl_specflow.kernels import row_linear

GUARD = 64  # numbers


@functools.cache
def build(variant: row_linear.Variant) -> ctypes.CDLL:
    return build_for_cpu("row_linear_on_cpu.cpp", row_linear.SOURCE.parent, variant.defines())


def row_linear_on_cpu(
    variant: row_linear.Variant, x, weight, bias=None, residual=None, reversed_order: bool = False
) -> torch.Tensor:
    """`row_linear` on the CPU, by the variant's ends; reversed_order: the warps and lanes of a block run backwards."""
    row_linear.check(x, weight, bias, residual, variant.ends.gated)
    outputs = len(weight) // 2 if variant.ends.gated else len(weight)
    written = torch.full((len(x) * outputs + 2 * GUARD,), float("nan"), dtype=x.dtype)
    out = written[GUARD:-GUARD].view(len(x), outputs)
    arguments = row_linear.row_linear_arguments(x, weight, bias, residual, out)
    across, along, _ = row_linear.grid_of(variant, *out.shape)
    shared = ctypes.c_size_t(variant.shared_bytes)
    build(variant).row_linear_on_cpu(ctypes.byref(arguments), shared, across, along, reversed_order)
    assert written[:GUARD].isnan().all() and written[-GUARD:].isnan().all(), "out is overrun"
    return out
