"""Runs kernels/tree_step/top_pool.cu itself on the CPU: g++ builds it against tests/cuda_on_cpu.h."""

import ctypes
import functools

import torch
from compiled import build_for_cpu
from sgl_specflow.kernels.tree_step import top_pool

GUARD = 64  # words


@functools.cache
def build(dtype: torch.dtype, capped: bool) -> ctypes.CDLL:
    return build_for_cpu("top_pool_on_cpu.cpp", top_pool.SOURCE.parent, top_pool.defines(dtype, capped))


def pool_on_cpu(logits: torch.Tensor, width: int, scale: float = 1.0, cap: float = 0.0, reversed_order: bool = False):
    """`top_pool` on the CPU; reversed_order: the warps and lanes of a block run backwards."""
    arguments, outputs, scratch = top_pool.pool_arguments(logits, width, scale, cap)
    # What the kernels write lies between guards.
    written = {}
    for name, tensor in zip(("keys", "sums", "values", "tokens", "total"), (*scratch, *outputs)):
        words = tensor.view(torch.int32).numel()
        written[name] = torch.full((words + 2 * GUARD,), -77, dtype=torch.int32)
        setattr(arguments, name, written[name][GUARD:].data_ptr())
    shared = ctypes.c_size_t(top_pool.PICK_SHARED_BYTES)
    build(logits.dtype, cap != 0.0).pool_on_cpu(ctypes.byref(arguments), shared, logits.shape[0], reversed_order)
    for name, words in written.items():
        assert (words[:GUARD] == -77).all() and (words[-GUARD:] == -77).all(), f"{name} is overrun"
    inside = [written[name][GUARD:-GUARD] for name in ("values", "tokens", "total")]
    return [words.view(tensor.dtype).view(tensor.shape) for words, tensor in zip(inside, outputs)]
