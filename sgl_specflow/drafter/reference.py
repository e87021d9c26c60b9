"""The draft head in plain PyTorch: slow, readable, any float dtype. Faster heads are held to this one.

Sources (SGLang 0.5.23, `srt/models/dflash.py`, and the public heads' files):
- context: `fc` then `hidden_norm` over the concatenated target hidden states (`project_target_hidden`); each layer's
  k_proj and v_proj read that directly, without `input_layernorm` (`prepare_context_hidden_for_kv` returns it
  unchanged); k then takes k_norm and RoPE at the context token's position, v neither (`kv_proj_only`, `apply_k_norm`,
  `apply_k_rope`);
- block: pre-norm Qwen3 layers; q_norm and k_norm over head_dim before RoPE, which is of the neox kind (first half of
  the rotated dimensions against the second); scale head_dim^-1/2; `norm` at the end. Queries come from the block alone;
- a sliding layer of window w lets position p see keys at positions > p - w (HF counts the query's own position; SGLang
  stores w - 1 as `window_left`), and is causal inside the block unless `is_causal` says otherwise.

The same functions serve one block, a batch of them (leading dimensions), and arbitrary tree nodes: the block mask
says who sees whom. Training (`sgl_specflow.training`) differentiates through them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_specflow.drafter.config import HeadConfig


@dataclass
class ContextKV:
    """Keys and values of committed tokens: a [..., T, kv heads, head_dim] pair a draft layer; `positions` [..., T]."""

    keys: list[Tensor]
    values: list[Tensor]
    positions: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rope(x: Tensor, positions: Tensor, config: HeadConfig) -> Tensor:
    """Rotate x [..., N, heads, head_dim] by positions [..., N] (neox style, the first `rotary_dim` dimensions)."""
    rotated, plain = x[..., : config.rotary_dim], x[..., config.rotary_dim :]
    wide = torch.promote_types(x.dtype, torch.float32)
    exponents = torch.arange(0, config.rotary_dim, 2, device=x.device, dtype=wide) / config.rotary_dim
    angles = positions.to(wide)[..., None, None] * config.rope_theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    first, second = rotated.to(wide).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), plain), dim=-1)


class ReferenceHead:
    """The head's forward over a dictionary of tensors (`sgl_specflow.drafter.checkpoint.load_tensors`).

    All tensors share one dtype and device, and so do the inputs. `...` are equal leading batch dimensions, or none.
    """

    def __init__(self, config: HeadConfig, tensors: dict[str, Tensor]):
        self.config, self.tensors = config, tensors

    def project_context(self, target_hidden: Tensor) -> Tensor:
        """Target hidden states [..., T, L * H], in the order of `target_layer_ids` -> context [..., T, H]."""
        return self._norm(F.linear(target_hidden, self.tensors["fc.weight"]), "hidden_norm")

    def context_kv(self, context: Tensor, positions: Tensor) -> ContextKV:
        """Context [..., T, H] at token positions [..., T] -> what the draft KV cache holds for it, all layers."""
        pairs = [self._keys_values(layer, context, positions) for layer in range(self.config.num_hidden_layers)]
        return ContextKV([keys for keys, _ in pairs], [values for _, values in pairs], positions)

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        context: ContextKV,
        block_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Run the block's tokens and return their final-normed hidden states [..., N, H].

        Logits are these times the target's LM head; position i >= 1 of [anchor, mask, ...] predicts the token at
        anchor + i, and a mask below a path of revealed tokens predicts that path's next token.

        Args:
            embeddings: [..., N, H], the target's embedding of [anchor, mask, ..., mask] or of any tree nodes.
            positions: [..., N] integer, committed length + depth.
            context: from `context_kv`, T may be 0.
            block_mask: [..., N, N] bool, row may attend to column; None: causal or not, a layer, as the config says.
                A given mask is used in every layer as it is (only windows are cut from it): 'own ancestors and self'
                of a tree.
            context_mask: [..., N, T] bool; None: every node attends to the whole context.
        """
        nodes = embeddings.shape[-2]
        committed = context.positions.shape[-1]
        if context_mask is None:
            context_mask = torch.ones(*positions.shape, committed, dtype=torch.bool, device=positions.device)
        x = embeddings
        for layer in range(self.config.num_hidden_layers):
            inside = block_mask
            if inside is None:
                inside = torch.ones(nodes, nodes, dtype=torch.bool, device=positions.device)
                inside = inside.tril() if self.config.layer_is_causal(layer) else inside
            mask = torch.cat((context_mask, inside.expand(*context_mask.shape[:-1], nodes)), dim=-1)
            if (window := self.config.layer_window(layer)) is not None:
                key_positions = torch.cat((context.positions, positions), dim=-1)
                mask = mask & (positions[..., :, None] - key_positions[..., None, :] < window)
            x = x + self._attention(layer, self._norm(x, f"layers.{layer}.input_layernorm"), positions, context, mask)
            x = x + self._mlp(layer, self._norm(x, f"layers.{layer}.post_attention_layernorm"))
        return self._norm(x, "norm")

    def _attention(self, layer: int, x: Tensor, positions: Tensor, context: ContextKV, mask: Tensor) -> Tensor:
        config, prefix = self.config, f"layers.{layer}.self_attn"
        queries = self._linear(x, f"{prefix}.q_proj").unflatten(-1, (config.num_attention_heads, config.head_dim))
        queries = rope(self._norm(queries, f"{prefix}.q_norm"), positions, config)
        own_keys, own_values = self._keys_values(layer, x, positions)
        group = config.num_attention_heads // config.num_key_value_heads
        keys, values = (
            torch.cat(parts, dim=-3).repeat_interleave(group, dim=-2).transpose(-2, -3)
            for parts in ((context.keys[layer], own_keys), (context.values[layer], own_values))
        )
        mixed = F.scaled_dot_product_attention(queries.transpose(-2, -3), keys, values, attn_mask=mask.unsqueeze(-3))
        return self._linear(mixed.transpose(-2, -3).flatten(-2), f"{prefix}.o_proj")

    def _keys_values(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        config, prefix = self.config, f"layers.{layer}.self_attn"
        shape = (config.num_key_value_heads, config.head_dim)
        keys = self._norm(self._linear(x, f"{prefix}.k_proj").unflatten(-1, shape), f"{prefix}.k_norm")
        return rope(keys, positions, config), self._linear(x, f"{prefix}.v_proj").unflatten(-1, shape)

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up = (self._linear(x, f"layers.{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return self._linear(F.silu(gate) * up, f"layers.{layer}.mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config.rms_norm_eps)
