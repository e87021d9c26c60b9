"""Gated Delta Net layers in plain PyTorch, for the CPU reference platform. Read from SGLang 0.5.23.

`HOOKS` as in `cpu_ops`: what Qwen3-Next, Qwen3.5 and Qwen3.6 launch Triton for in a prefill and in plain decoding. The
recurrence is written token by token, so that it is another computation than the tree verify that tests compare with it.
"""

import torch
import torch.nn.functional as F
from sglang.srt.plugins.hook_registry import HookType

from sgl_specflow.kernels.gdn_tree.naive import gates, inverse_norm

STATE_CHUNK = 64  # tokens between the states that a prefill hands out


# --- around the recurrence -------------------------------------------------------------------------------------------


def fused_qkvzba_split_reshape_cat_contiguous(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v):
    """[q | k | v | z] and [b | a] to (q | k | v, z, b, a)."""
    mixed_qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + num_heads_v * head_v, num_heads_v * head_v], dim=-1)
    b, a = mixed_ba.split(num_heads_v, dim=-1)
    return mixed_qkv.contiguous(), z.unflatten(-1, (num_heads_v, head_v)).contiguous(), b.contiguous(), a.contiguous()


def fused_qkvzba_split_reshape_cat(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v):
    """The same from Qwen3-Next's layout: q, k, v, z and b, a of one key head after the other."""
    group = num_heads_v // num_heads_qk
    q, k, v, z = mixed_qkvz.unflatten(-1, (num_heads_qk, -1)).split(
        [head_qk, head_qk, group * head_v, group * head_v], dim=-1
    )
    b, a = mixed_ba.unflatten(-1, (num_heads_qk, 2 * group)).split(group, dim=-1)
    mixed_qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
    return mixed_qkv, z.reshape(-1, num_heads_v, head_v), b.flatten(1).contiguous(), a.flatten(1).contiguous()


def fused_sigmoid_mul(attn_output, gate, inplace=False, quant=False):
    product = attn_output * gate.reshape(attn_output.shape).sigmoid()
    return attn_output.copy_(product) if inplace else product


def rms_norm_gated(
    *,
    x,
    weight,
    bias,
    z=None,
    eps=1e-6,
    group_size=None,
    norm_before_gate=True,
    is_rms_norm=False,
    activation="swish",
):
    if not is_rms_norm or not norm_before_gate or bias is not None or group_size not in (None, x.shape[-1]):
        raise NotImplementedError(
            "The CPU reference platform has the gated RMSNorm of Gated Delta Net layers only: norm before gate, no bias, "
            "one group."
        )
    out = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()
    if z is not None:
        z = z.reshape(x.shape).float()
        out = out * (z.sigmoid() if activation == "sigmoid" else F.silu(z))
    return out.to(x.dtype)


def fused_rms_norm_gated(
    x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False, eps=1e-6
):
    """The same norm as Qwen3-Next calls it; g is z."""
    if residual is not None or prenorm:
        raise NotImplementedError("The CPU reference platform's gated RMSNorm takes no residual.")
    return rms_norm_gated(x=x, weight=weight, bias=bias, z=g, eps=eps, is_rms_norm=True, activation=activation)


# --- conv1d ----------------------------------------------------------------------------------------------------------


def _convolve(window: torch.Tensor, weight, bias, activation) -> torch.Tensor:
    """Causal convolution of [C, width - 1 + T] with weight [C, width], depthwise: [C, T]."""
    out = F.conv1d(
        window[None].float(), weight[:, None].float(), None if bias is None else bias.float(), groups=len(weight)
    )
    return (F.silu(out) if activation in ("silu", "swish", True) else out)[0].to(window.dtype)


def causal_conv1d_fn(
    x,
    weight,
    bias,
    conv_states,
    query_start_loc,
    seq_lens_cpu,
    cache_indices=None,
    has_initial_state=None,
    activation="silu",
    pad_slot_id=-1,
    validate_data=False,
    block_table=None,
    **kwargs,
):
    out, history = torch.zeros_like(x), weight.shape[1] - 1
    starts = query_start_loc.tolist()
    for i, (start, end) in enumerate(zip(starts, starts[1:])):
        slot = int(cache_indices[i])
        if slot == pad_slot_id or start == end:
            continue
        before = conv_states[slot] if bool(has_initial_state[i]) else torch.zeros_like(conv_states[slot])
        window = torch.cat([before.to(x.dtype), x[:, start:end]], dim=1)
        out[:, start:end] = _convolve(window, weight, bias, activation)
        conv_states[slot] = window[:, -history:]
    return out


def causal_conv1d_update(
    x,
    conv_state,
    weight,
    bias=None,
    activation=None,
    cache_seqlens=None,
    conv_state_indices=None,
    num_accept_tokens=None,
    intermediate_conv_window=None,
    intermediate_state_indices=None,
    retrieve_next_token=None,
    retrieve_next_sibling=None,
    retrieve_parent_token=None,
    pad_slot_id=-1,
    metadata=None,
    validate_data=False,
):
    """One token a request, x [R, C]."""
    if x.dim() != 2 or intermediate_conv_window is not None:
        raise NotImplementedError("The CPU reference platform's conv1d takes one token a request.")
    slots = conv_state_indices.long()
    window = torch.cat([conv_state[slots].to(x.dtype), x[:, :, None]], dim=2)
    live = slots != pad_slot_id
    conv_state[slots[live]] = window[live][:, :, 1:].to(conv_state.dtype)
    return torch.stack([_convolve(row, weight, bias, activation)[:, 0] for row in window])


# --- the recurrence --------------------------------------------------------------------------------------------------


def fused_gdn_gating(A_log, a, b, dt_bias, beta=1.0, threshold=20.0):
    g, rate = gates(a.float(), b.float(), A_log.float(), dt_bias.float())
    # The kernel rounds beta to the activations' dtype.
    return g[None], rate.to(b.dtype).float()[None]


def _step(state, q, k, v, g, beta):
    """One token of all heads: state [H, d_v, d_k], q, k [H, d_k], v [H, d_v], g, beta [H] -> (state, out [H, d_v])."""
    state = g.exp()[:, None, None] * state
    u = beta[:, None] * (v - (state @ k[:, :, None])[..., 0])
    state = state + u[:, :, None] * k[:, None, :]
    return state, (state @ q[:, :, None])[..., 0]


def _per_value_head(x: torch.Tensor, heads: int, normalise: bool) -> torch.Tensor:
    x = x.float()
    return (x * inverse_norm(x) if normalise else x).repeat_interleave(heads // x.shape[-2], dim=-2)


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    initial_state_indices=None,
    cu_seqlens=None,
    head_first=False,
    use_qk_l2norm_in_kernel=False,
    inplace_update=True,
):
    """Returns (out, None, states before every 64th token of each sequence [1, chunks, H, d_v, d_k])."""
    heads = v.shape[2]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    queries, keys = (_per_value_head(x[0], heads, use_qk_l2norm_in_kernel) for x in (q, k))
    queries, values = queries * scale, v[0].float()
    out, states = torch.zeros_like(values), []
    starts = cu_seqlens.tolist()
    for start, end, slot in zip(starts, starts[1:], initial_state_indices.tolist()):
        state = initial_state[slot].float()
        for i in range(start, end):
            if (i - start) % STATE_CHUNK == 0:
                states.append(state)
            state, out[i] = _step(state, queries[i], keys[i], values[i], g[0, i], beta[0, i])
        if inplace_update and slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    return out.to(v.dtype)[None], None, torch.stack(states)[None]


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv,
    a,
    b,
    A_log,
    dt_bias,
    scale,
    initial_state,
    out,
    ssm_state_indices,
    use_qk_l2norm_in_kernel=False,
):
    heads, value_dim, key_dim = initial_state.shape[1:]
    q, k, v = mixed_qkv.split([(mixed_qkv.shape[1] - heads * value_dim) // 2] * 2 + [heads * value_dim], dim=-1)
    queries, keys = (_per_value_head(x.unflatten(1, (-1, key_dim)), heads, use_qk_l2norm_in_kernel) for x in (q, k))
    values = v.unflatten(1, (heads, value_dim)).float()
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    out.zero_()
    for i, slot in enumerate(ssm_state_indices.tolist()):
        if slot >= 0:
            state, result = _step(
                initial_state[slot].float(), queries[i] * scale, keys[i], values[i], g[0, i], beta[0, i]
            )
            initial_state[slot], out[i, 0] = state.to(initial_state.dtype), result.to(out.dtype)
    return out, initial_state


_OPS = "sglang.kernels.ops"
_PROJECTION = f"{_OPS}.attention.triton_gdn_fused_proj"

HOOKS = [
    (f"{_PROJECTION}.{function.__name__}", function, HookType.REPLACE)
    for function in (fused_qkvzba_split_reshape_cat_contiguous, fused_qkvzba_split_reshape_cat)
] + [
    (f"{_OPS}.elementwise.elementwise.fused_sigmoid_mul", fused_sigmoid_mul, HookType.REPLACE),
    (f"{_OPS}.attention.fla.layernorm_gated.rms_norm_gated", rms_norm_gated, HookType.REPLACE),
    (f"{_OPS}.attention.fla.fused_norm_gate.rms_norm_gated", fused_rms_norm_gated, HookType.REPLACE),
    (f"{_OPS}.mamba.causal_conv1d_triton.causal_conv1d_fn", causal_conv1d_fn, HookType.REPLACE),
    (f"{_OPS}.mamba.causal_conv1d_triton.causal_conv1d_update", causal_conv1d_update, HookType.REPLACE),
    (f"{_OPS}.attention.linear.fused_gdn_gating.fused_gdn_gating", fused_gdn_gating, HookType.REPLACE),
    (f"{_OPS}.attention.fla.chunk.chunk_gated_delta_rule", chunk_gated_delta_rule, HookType.REPLACE),
    (
        f"{_OPS}.attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
        fused_recurrent_gated_delta_rule_packed_decode,
        HookType.REPLACE,
    ),
]
