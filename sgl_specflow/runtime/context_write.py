"""The head's context keys and values: projected for all layers at once and written in one launch, or layer by layer as
SGLang's own modules do it. Read from SGLang 0.5.23 (models/dflash.py, layers/layernorm.py, layers/rotary_embedding).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.models.dflash import DFlashAttention, DFlashDraftModel
from sglang.srt.speculative.dflash_utils import can_dflash_use_fused_qkv_proj

from sgl_specflow.kernels.context_write import BUFFER_DTYPES, LayerBuffers, write_context_rows

_WRITING = ("set_kv_buffer", "_store_kv_layer")  # what a pool with ways of its own to write overrides


@dataclass(frozen=True)
class StackedLayers:
    """What the context of all L layers is computed from.

    weight: [L * 2 * Hkv * D, H], the key and value rows of every layer's qkv_proj, of this rank's heads. A copy beside the
    layers' own, 84 MB for the head of Qwen3-8B. It cannot go stale: no weight update reaches the head
    (`TreeWorker.weight_update_runners` is empty), and a server that may sleep keeps a backup of the head's weights
    (`check_memory_saver`), which it wakes with; the copy itself is outside the memory saver's regions and stays.
    norm: float32 [L, D]. eps: of that norm. rotary: the layers' one rotary embedding.
    """

    weight: torch.Tensor
    norm: torch.Tensor
    eps: float
    rotary: RotaryEmbedding

    @classmethod
    def of(cls, model: torch.nn.Module) -> "StackedLayers | None":
        """None where the layers do more than the plain head's do, or differ from one another."""
        layers = [layer.self_attn for layer in model.layers]
        first = layers[0]
        if type(model).prepare_context_hidden_for_kv is not DFlashDraftModel.prepare_context_hidden_for_kv:
            return None
        if not all(_is_plain(attention) for attention in layers):
            return None
        if any(
            attention.rotary_emb is not first.rotary_emb
            or (attention.num_kv_heads, attention.head_dim) != (first.num_kv_heads, first.head_dim)
            or attention.k_norm.variance_epsilon != first.k_norm.variance_epsilon
            or attention.qkv_proj.weight.dtype != first.qkv_proj.weight.dtype
            for attention in layers
        ):
            return None
        with torch.no_grad():
            weight = torch.cat([attention.qkv_proj.weight[attention.q_size :] for attention in layers])
            norm = torch.stack([attention.k_norm.weight.float() for attention in layers])
        return cls(weight, norm, first.k_norm.variance_epsilon, first.rotary_emb)


def _is_plain(attention: torch.nn.Module) -> bool:
    """Whether keys are a projection without bias, an RMS norm and a rotation by table, and values a projection."""
    if type(attention) is not DFlashAttention or attention.v_scale is not None:
        return False
    norm, rotary, qkv_proj = attention.k_norm, attention.rotary_emb, attention.qkv_proj
    plain_norm = (
        type(norm) is RMSNorm
        and not norm.cast_x_before_out_mul
        and norm.variance_size_override is None
        and norm.override_orig_dtype is None
    )
    # Subclasses that only make another table are as good: SGLang's scaled embeddings of text models are such. For head
    # sizes without a kernel of their own SGLang rounds the table, and for training on policy it rounds as transformers.
    plain_rotary = (
        isinstance(rotary, RotaryEmbedding)
        and type(rotary).forward is RotaryEmbedding.forward
        and type(rotary).forward_cuda is RotaryEmbedding.forward_cuda
        and type(rotary).forward_native is RotaryEmbedding.forward_native
        and not rotary.use_fallback_kernel
        and not rotary._force_native
        and rotary.head_size == attention.head_dim
        and rotary.cos_sin_cache.shape[1] == rotary.rotary_dim
    )
    plain_projection = (
        can_dflash_use_fused_qkv_proj(qkv_proj)[0]
        and qkv_proj.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and qkv_proj.weight.shape[0] == attention.q_size + 2 * attention.kv_size
    )
    return plain_norm and plain_rotary and plain_projection


class ContextWriter:
    """Writes the context of committed tokens to the draft KV pool. Which way is decided by the head, when it is loaded, and
    by the pool."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.stacked = StackedLayers.of(model)
        self.pool = None
        self.buffers: LayerBuffers | None = None

    def bind(self, pool) -> None:
        """Take the pool, once it is allocated. Its buffers must stay where they are."""
        self.pool = pool
        if self.stacked is not None:
            layers = [layer.self_attn.attn for layer in self.model.layers]
            self.buffers = _buffers(pool, layers, self.stacked.weight.dtype)
        if self.buffers is None:
            self.stacked = None

    def write(self, context: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """context [T, H], the projected hidden states (`project_target_hidden`); slots, positions int64 [T]."""
        if self.stacked is None:
            self._write_by_layer(context, slots, positions)
            return
        stacked, buffers = self.stacked, self.buffers
        kv = F.linear(context, stacked.weight).view(-1, len(buffers.keys), 2, *buffers.keys[0].shape[1:])
        rotary = stacked.rotary
        # The table is read from its module: SGLang lengthens it by putting another in its place.
        write_context_rows(
            kv, stacked.norm, stacked.eps, rotary.cos_sin_cache, rotary.is_neox_style, positions, slots, buffers
        )

    def _write_by_layer(self, context: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        for layer in self.model.layers:
            attention = layer.self_attn
            k, v = attention.kv_proj_only(self.model.prepare_context_hidden_for_kv(layer, context))
            k = attention.apply_k_rope(positions, attention.apply_k_norm(k))
            self.pool.set_kv_buffer(
                attention.attn,
                KVWriteLoc(slots, physical=True),
                k.view(-1, attention.num_kv_heads, attention.head_dim),
                v.view(-1, attention.num_kv_heads, attention.head_dim),
                attention.attn.k_scale,
                attention.attn.v_scale,
            )


def _buffers(pool, layers: list, dtype: torch.dtype) -> LayerBuffers | None:
    """The layers' buffers, or None where `set_kv_buffer` does more than convert and store rows of them."""
    if not isinstance(pool, MHATokenToKVPool) or pool.is_quantized_kv_cache or pool.dtype not in BUFFER_DTYPES:
        return None
    if any(getattr(type(pool), name) is not getattr(MHATokenToKVPool, name) for name in _WRITING):
        return None
    if pool.use_hnd or pool.kv_cache_layout != "nhd" or pool.head_dim != pool.v_head_dim:
        return None
    # Scales apply where the pool's dtype is another than the model's.
    if pool.dtype != dtype and any(layer.k_scale is not None or layer.v_scale is not None for layer in layers):
        return None
    index = [layer.layer_id - pool.start_layer for layer in layers]
    return LayerBuffers.of([pool.k_buffer[i] for i in index], [pool.v_buffer[i] for i in index], pool.dtype)
