"""Drafting with FP8 weights (option `fp8_draft`): half the bytes that a draft reads. Only which tokens are proposed depends
on it, never what is accepted.

The head's o_proj, gate_up_proj and down_proj are replaced after loading; `fc` and the key and value projections, which
also read whole prompts, stay as they are.
"""

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.kernels.fp8_linear import fp8_linear, quantise_rows

LEAST_CAPABILITY = (9, 0)  # GPUs before convert no FP8, or have too little shared memory for the kernel's stages


class Fp8Weights(LinearMethodBase):
    """SGLang's linear method over a layer whose weight is FP8 with a scale a row."""

    def create_weights(self, *arguments, **more):
        raise NotImplementedError("weights are quantised after loading, by quantise_head")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = fp8_linear(x, layer.weight, layer.weight_scale)
        return out if bias is None else out + bias


def quantise_head(model: torch.nn.Module) -> None:
    """Replace the large matrices of SGLang's DFLASH draft model, in place. Raises SpecflowConfigError where they are
    quantised already, or where the GPU has no FP8."""
    device = next(model.parameters()).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise SpecflowConfigError(
            given=f"fp8_draft on {torch.cuda.get_device_name(device)}",
            allowed="GPUs of compute capability 9.0 and above",
            todo="leave fp8_draft out",
        )
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            if linear.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise SpecflowConfigError(
                    given=f"fp8_draft with a head whose weights are {linear.weight.dtype}",
                    allowed="a head in float32, bfloat16 or float16",
                    todo="leave fp8_draft out",
                )
            weight, scale = quantise_rows(linear.weight.data)
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            linear.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
            linear.quant_method = Fp8Weights()
