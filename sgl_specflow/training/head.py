"""The draft head as it is trained: one forward over all blocks of a packed row. Held to `drafter.reference` by a test."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.reference import ReferenceHead, rms_norm
from sgl_specflow.training.attention import attend, dense_pattern, sparse_pattern
from sgl_specflow.training.blocks import Blocks

LAYER_TENSORS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def rope_table(positions: Tensor, config: HeadConfig) -> Tensor:
    """[2, N, 1, rotary_dim / 2] float32, cosines and sines at positions [N]: one table for all layers."""
    exponents = torch.arange(0, config.rotary_dim, 2, device=positions.device) / config.rotary_dim
    angles = positions.float()[:, None, None] * config.rope_theta**-exponents
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """`drafter.reference.rope` of x [N, heads, D] by a `rope_table`."""
    (cos, sin), half = table, table.shape[-1]
    first, second, plain = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), plain), dim=-1)


def draft_layer(x, context, table, pattern, weights: tuple[Tensor, ...], head_dim: int, eps: float) -> Tensor:
    """One draft layer over N block positions.

    Args:
        x: [N, H]. context: [T, H], after fc and hidden_norm. table: `rope_table` of T + N positions, context first.
        pattern: from `attention`. weights: in the order of LAYER_TENSORS, in any float dtype; used in x's.
    """
    norm_in, q_proj, k_proj, v_proj, o_proj, q_norm, k_norm, norm_out, gate, up, down = (w.to(x.dtype) for w in weights)
    normed = rms_norm(x, norm_in, eps)
    both = torch.cat((context, normed))
    queries = rms_norm(F.linear(normed, q_proj).unflatten(-1, (-1, head_dim)), q_norm, eps)
    keys = rms_norm(F.linear(both, k_proj).unflatten(-1, (-1, head_dim)), k_norm, eps)
    values = F.linear(both, v_proj).unflatten(-1, (-1, head_dim))
    mixed = attend(rotate(queries, table[:, len(context) :]), rotate(keys, table), values, pattern)
    x = x + F.linear(mixed.flatten(-2), o_proj)
    normed = rms_norm(x, norm_out, eps)
    return x + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)


@cache
def compiled_draft_layer() -> Callable:
    """`draft_layer` through torch.compile: compiled once, since all layers share its shapes."""
    return torch.compile(draft_layer, dynamic=False)


class TrainingHead:
    """A head over a dictionary of tensors (`drafter.checkpoint.expected_shapes`), differentiable in them.

    Args:
        tensors: float32 masters (or any float dtype).
        dtype: of the arithmetic; norms are float32 inside.
        fast: FlexAttention and torch.compile, for CUDA. The row and the blocks then come in multiples of 128.
    """

    def __init__(self, config: HeadConfig, tensors: dict[str, Tensor], dtype: torch.dtype, fast: bool):
        self.config, self.tensors, self.dtype, self.fast = config, tensors, dtype, fast

    def forward(self, target_hidden: Tensor, row_positions: Tensor, embeddings: Tensor, blocks: Blocks) -> Tensor:
        """The final-normed hidden states [A, S, H] at all blocks.

        Args:
            target_hidden: [T, L * H], target hidden states of the row. row_positions: [T].
            embeddings: [A, S, H], the target's embedding of `blocks.tokens`.
        """
        config = self.config
        outer = ("fc.weight", "hidden_norm.weight", "norm.weight")
        tensors = {name: self.tensors[name].to(self.dtype) for name in outer}
        context = ReferenceHead(config, tensors).project_context(target_hidden.to(self.dtype))
        table = rope_table(torch.cat((row_positions, blocks.positions.flatten())), config)
        layer_forward = compiled_draft_layer() if self.fast else draft_layer
        x, patterns = embeddings.flatten(0, 1).to(self.dtype).detach(), {}
        # So that all layers are alike to the compiler.
        x.requires_grad_(torch.is_grad_enabled())
        for layer in range(config.num_hidden_layers):
            kind = (config.layer_is_causal(layer), config.layer_window(layer))
            if kind not in patterns:
                make = sparse_pattern if self.fast else dense_pattern
                patterns[kind] = make(blocks.visibility(*kind), len(context))
            weights = tuple(self.tensors[f"layers.{layer}.{name}.weight"] for name in LAYER_TENSORS)
            x = layer_forward(x, context, table, patterns[kind], weights, config.head_dim, config.rms_norm_eps)
        return rms_norm(x, tensors["norm.weight"], config.rms_norm_eps).unflatten(0, blocks.tokens.shape)
