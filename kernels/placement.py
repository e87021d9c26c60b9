"""Which of a function's two forms runs: torch or Triton."""

import torch
import triton


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether `tensor` lies where Triton runs: off the CPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1)."""
    return tensor.device.type != "cpu" or triton.knobs.runtime.interpret
