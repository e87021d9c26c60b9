"""Runs kernels/tree_attention/tree_attention.cu itself on the CPU: g++ builds it against tests/cuda_on_cpu.h."""

import ctypes
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from compiled import build_for_cpu
from sgl_specflow.kernels.tree_attention import cuda_kernel

RUNNER = "tree_attention_on_cpu.cpp"


class Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


@functools.cache
def build(variant: cuda_kernel.Variant, source: str = "") -> ctypes.CDLL:
    """source: the kernel's text where it is not the file's."""
    if not source:
        return build_for_cpu(RUNNER, cuda_kernel.SOURCE.parent, variant.defines())
    with tempfile.TemporaryDirectory(prefix="tree_attention_source_") as folder:
        (Path(folder) / cuda_kernel.SOURCE.name).write_text(source)
        return build_for_cpu(RUNNER, Path(folder), variant.defines())


def _range(tensor: torch.Tensor) -> Range:
    """From the first element to the last, whatever lies between."""
    numbers = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return Range(tensor.data_ptr(), numbers * tensor.element_size())


class Scratch:
    """Parts of a variant's launches, between guards; each launch leaves all as it is here."""

    GUARD = 4096

    def __init__(self, variant: cuda_kernel.Variant, grid: tuple[int, int, int]):
        size = cuda_kernel.scratch_bytes(variant, grid)
        self.wide = torch.full((size + 2 * self.GUARD,), 255, dtype=torch.uint8)
        self.parts = self.wide[self.GUARD : -self.GUARD]

    def check(self) -> None:
        assert (self.wide == 255).all(), "scratch is overrun, or parts are left"


def attention_on_cpu(
    inputs: dict,
    variant: cuda_kernel.Variant,
    warps: int = 0,
    source: str = "",
    order: Callable[[int], list[int]] = range,
    scratch: Scratch | None = None,
):
    """`tree_attention_cuda` on the CPU; warps: the order in which those of a block run (run_cluster in cuda_on_cpu.h).

    order: of so many that share their rows, how they run one after another. scratch: of a launch before, or new.
    """
    inputs = {"logit_cap": 0.0, "sinks": None, "k_scale": 1.0, "v_scale": 1.0} | inputs
    names = ("q", "k_pool", "v_pool", "prefix_indptr", "prefix_slots", "node_slots", "ancestors")
    tensors = [inputs[name] for name in names]
    assert cuda_kernel.fits(*tensors, sinks=inputs["sinks"], out=inputs["out"])
    options = [inputs[name] for name in ("scale", "logit_cap", "sinks", "k_scale", "v_scale", "out")]
    grid = cuda_kernel.grid_of(variant, *inputs["ancestors"].shape[:2], inputs["k_pool"].shape[1])
    scratch = scratch or Scratch(variant, grid)
    arguments = cuda_kernel.attention_arguments(*tensors, *options, scratch.parts)
    row_blocks = math.prod(grid) // variant.splits
    readable = (Range * 4)(*(_range(tensor) for tensor in (*tensors[:3], tensors[-1])))
    build(variant, source).tree_attention_on_cpu(
        ctypes.byref(arguments),
        ctypes.c_size_t(variant.shared_bytes),
        (ctypes.c_int * 3)(*grid),
        (ctypes.c_int * row_blocks)(*order(row_blocks)),
        readable,
        len(readable),
        warps,
    )
    scratch.check()
    return inputs["out"]
