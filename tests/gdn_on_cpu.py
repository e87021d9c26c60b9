"""Runs kernels/gdn_tree/gdn_tree.cu itself on the CPU: g++ builds it against tests/cuda_on_cpu.h."""

import ctypes
import functools

import torch
from compiled import build_for_cpu
from sgl_specflow.kernels.gdn_tree import cuda_kernel


@functools.cache
def build(shape: cuda_kernel.KernelShape) -> ctypes.CDLL:
    return build_for_cpu("gdn_tree_on_cpu.cpp", cuda_kernel.SOURCE.parent, shape.defines())


def verify_on_cpu(shape, layer, scale: float, order: int = 0, whole: int = 0) -> torch.Tensor:
    """Output of the kernel, poisoned before; state and stash of `layer` change as on the GPU. order: in which the warps
    run (run_cluster in cuda_on_cpu.h). whole: key heads whose blocks compute all slices of a head."""
    out = torch.full(layer.v.shape, float("nan"), dtype=torch.bfloat16)
    arguments = cuda_kernel.verify_arguments(*layer.arguments(), scale, out)
    arguments.whole = whole
    requests = layer.ancestors.shape[0]
    _run(
        build(shape).verify_on_cpu,
        arguments,
        shape.shared_bytes,
        cuda_kernel.verify_grid(shape, arguments, requests),
        order,
    )
    return out


def flush_on_cpu(shape, state, slots, destination, stash, rows, pending, length, order: int = 0) -> None:
    arguments = cuda_kernel.flush_arguments(state, slots, destination, stash, rows, pending, length)
    grid = (shape.slices * state.shape[2], len(slots), state.shape[0])
    _run(build(shape).flush_on_cpu, arguments, shape.flush_bytes, grid, order)


def _run(function, arguments, shared_bytes: int, grid, order: int) -> None:
    function(ctypes.byref(arguments), ctypes.c_size_t(shared_bytes), (ctypes.c_int * 3)(*grid), order)
