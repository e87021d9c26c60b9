"""Plain PyTorch for the Triton launches on SGLang's path, for the CPU reference platform. Read from SGLang 0.5.23.

`HOOKS` lists (dotted target, replacement, kind) for SGLang's `HookRegistry`; the plugin registers them only where the
reference platform is active. What SGLang lets a platform supply (KV pool, cache locations) goes through
`cpu_platform.CpuReferencePlatform` instead. Each replacement keeps the signature of its target, whose docstring holds.
"""

import torch
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native
from sglang.srt.plugins.hook_registry import HookType


class TorchMHATokenToKVPool(MHATokenToKVPool):
    """The MHA pool with an indexed copy where SGLang launches its tiled Triton copy."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)


def _ragged(starts: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every cell of the half-open ranges [starts[i], ends[i]), row by row."""
    starts, ends = starts.long(), ends.long()
    lens = (ends - starts).clamp(min=0)
    rows = torch.repeat_interleave(torch.arange(len(lens)), lens)
    first_cell = lens.cumsum(0) - lens
    columns = torch.arange(len(rows)) - first_cell[rows] + starts[rows]
    return rows, columns


def _check_row_width(req_to_token: torch.Tensor, ends: torch.Tensor) -> None:
    """Triton runs on into the next request's row here, without a word."""
    if ends.numel() and int(ends.max()) > req_to_token.shape[1]:
        raise ValueError(
            f"A request reaches column {int(ends.max())} of req_to_token, whose rows hold {req_to_token.shape[1]}. "
            "Reserve fewer draft slots, or stop requests this far before the context length."
        )


# --- slots -----------------------------------------------------------------------------------------------------------


def assign_req_to_token_pool_func(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size
) -> None:
    """Write `out_cache_loc`, packed, into columns [start_offset[i], end_offset[i]) of each request's row."""
    _check_row_width(req_to_token, end_offset)
    rows, columns = _ragged(start_offset, end_offset)
    req_to_token[req_pool_indices[rows].long(), columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def extend_cache_locs(
    *, req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device
) -> torch.Tensor:
    """Read the same columns back, packed: int64 [batch_size * draft_token_num], 0 past the last."""
    _check_row_width(req_to_token, end_offset)
    rows, columns = _ragged(start_offset, end_offset)
    out = torch.zeros(batch_size * draft_token_num, dtype=torch.int64, device=device)
    out[: len(rows)] = req_to_token[req_pool_indices[rows].long(), columns].long()
    return out


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, topk, num_cols, positions=None, mrope=None
) -> None:
    ends = seq_lens + topk * num_cols
    _check_row_width(req_to_token, ends)
    rows, columns = _ragged(seq_lens, ends)
    out_cache_loc.view(-1)[: len(rows)] = req_to_token[req_pool_indices[rows].long(), columns].to(out_cache_loc.dtype)
    if positions is not None:
        positions.view(-1, topk)[: len(seq_lens)] = seq_lens.view(-1, 1).to(positions.dtype)
    if mrope is not None:
        mrope.view(3, -1, topk)[:, : len(seq_lens)] = seq_lens.view(-1, 1).to(mrope.dtype)


def fill_front_out_cache_loc_func(num_front, out_cache_loc, front_out_cache_loc) -> None:
    rows, columns = _ragged(torch.zeros_like(num_front), num_front)
    window = out_cache_loc.view(num_front.numel(), -1)
    front_out_cache_loc[: len(rows)] = window[rows, columns].to(front_out_cache_loc.dtype)


def fill_accept_out_cache_loc_func(accept_index, out_cache_loc, accept_out_cache_loc, size) -> None:
    index = accept_index.reshape(-1)[:size]
    index = index[index > -1].long()
    accept_out_cache_loc[: len(index)] = out_cache_loc[index].to(accept_out_cache_loc.dtype)


def get_last_loc(req_to_token, req_pool_indices_tensor, prefix_lens_tensor) -> torch.Tensor:
    """SGLang picks its PyTorch version by the attention backend's name, which is not ours to change."""
    last = req_to_token[req_pool_indices_tensor.long(), (prefix_lens_tensor - 1).long()].to(prefix_lens_tensor.dtype)
    return torch.where(prefix_lens_tensor > 0, last, -1)


def pack_read_stream(
    self,
    plan,
    *,
    req_pool_indices,
    seq_lens,
    indptr,
    out,
    kv_start_idx=None,
    kind=IdSpaceKind.FULL,
    token_mapping=None,
    num_token_blocks=1,
    kv_lens_sum=None,
) -> bool:
    """`KVIndexTranslator.pack_read_stream` over a pool without page translation."""
    batch = int(seq_lens.numel())
    if self._reads_translated(kind) and not plan.has_read_table(kind, reader=self):
        raise NotImplementedError(
            "The CPU reference platform reads token-granular KV tables only; a unified or translating KV pool was "
            "given. Leave --enable-unified-memory out."
        )
    source = self.read_source(plan, req_pool_indices=req_pool_indices, bs=batch, kind=kind)
    starts = torch.zeros_like(seq_lens) if kv_start_idx is None else kv_start_idx[:batch].to(seq_lens.dtype)
    rows, positions = _ragged(starts, starts + seq_lens)
    page = source.entry_page_size
    ids = source.ids.view(-1)[source.row_ids[rows].long() * source.row_stride + positions // page].long()
    ids = ids if page == 1 else ids * page + positions % page
    if token_mapping is not None:
        ids = torch.where(ids < 0, ids, token_mapping[ids.clamp(min=0)].long())
    out[indptr[:batch].long()[rows] + positions - starts.long()[rows]] = ids.to(out.dtype)
    return source.is_translated or token_mapping is not None


# --- speculative decoding, spec V2 -----------------------------------------------------------------------------------


def fill_bonus_tokens_func(accept_tokens, accept_lens, bonus_tokens, accept_stride, batch_size) -> None:
    last = torch.arange(batch_size) * accept_stride + accept_lens[:batch_size].long() - 1
    bonus_tokens[:batch_size] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def prepare_verify_commit_outputs(
    predict, accept_index, accept_lens, seq_lens, num_draft_tokens=0, mamba_track_interval=0
):
    batch = accept_lens.numel()
    row = torch.arange(batch)
    accepted, length = accept_lens.long(), seq_lens.long()
    last = accept_index[row, accepted - 1].long()
    new_seq_lens = (length + accepted).to(torch.promote_types(seq_lens.dtype, accept_lens.dtype))
    bonus = predict[last].to(torch.int32)
    if not num_draft_tokens:
        return new_seq_lens, bonus
    track_steps = None
    if mamba_track_interval:
        after = length + accepted
        crossing = length // mamba_track_interval != after // mamba_track_interval
        position = (after // mamba_track_interval * mamba_track_interval - length - 1).clamp(min=0)
        position = torch.where(crossing, position, 0)
        track_steps = torch.where(crossing, accept_index[row, position].long() - row * num_draft_tokens, -1)
    mamba = (last - row * num_draft_tokens, track_steps)
    draft_extend = (accept_lens - 1, row * num_draft_tokens + accepted - 1, predict.long())
    return new_seq_lens, bonus, mamba, draft_extend


def gather_spec_extras(indices, topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf):
    hidden_states = None if hidden_states_buf is None else hidden_states_buf[indices]
    return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden_states


def table_qk_norm_rope_(
    qkv, positions, q_weight, k_weight, cos_sin_cache, num_q_heads, num_k_heads, head_dim, eps
) -> None:
    """In-place RMSNorm and rotation of q and k in `qkv` [tokens, (heads) * head_dim], rounded as the kernel rounds."""
    cos, sin = cos_sin_cache[positions.long()].float().unsqueeze(1).chunk(2, dim=-1)
    start = 0
    for heads, weight in ((num_q_heads, q_weight), (num_k_heads, k_weight)):
        columns = qkv[:, start : start + heads * head_dim]
        x = columns.reshape(-1, heads, head_dim).float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        x1, x2 = x.to(qkv.dtype).float().chunk(2, dim=-1)
        columns.copy_(torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).flatten(1))
        start += heads * head_dim


def fused_gate_sigmoid_mul_add(hidden_states, gate_weight, shared_output, final_hidden_states) -> None:
    """Add the shared expert's output [tokens, H], times the sigmoid of its gate, to that of the routed experts, in place."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
    final_hidden_states.copy_(final_hidden_states.float() + gate[:, None] * shared_output.float())


def get_device_module(device=None):
    """PyTorch's own takes no device for the accelerator that it was built for, and Qwen3-Next would allocate there."""
    return getattr(torch, torch.device("cpu" if device is None else device).type)


# --- sampling --------------------------------------------------------------------------------------------------------


def row_argmax(x: torch.Tensor) -> torch.Tensor:
    return x.argmax(dim=-1)


def div_argmax(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    return (x / divisor).argmax(dim=-1)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of (seed low, seed high, position, column): uint32 [rows, columns], the bits of SGLang's kernel."""
    low32 = 0xFFFFFFFF

    def rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
        return ((x << bits) | (x >> (32 - bits))) & low32

    def mix(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        k = (rotate((k * 0xCC9E2D51) & low32, 15) * 0x1B873593) & low32
        return (rotate(h ^ k, 13) * 5 + 0xE6546B64) & low32

    seed = seed.to(torch.int64)
    h = torch.zeros_like(seed)
    for block in (seed & low32, (seed >> 32) & low32, positions.to(torch.int64) & low32):
        h = mix(h, block)
    h = mix(h.unsqueeze(1), (col_indices.to(torch.int64) & low32).unsqueeze(0))
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & low32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & low32
    return (h ^ (h >> 16)).to(torch.uint32)


def maybe_enable_batch_invariant_mode(self) -> None:
    """Nothing to swap in on a CPU: --enable-deterministic-inference honours sampling seeds here, and no more."""


_OPS = "sglang.kernels.ops"
_ALLOCATION = "sglang.srt.mem_cache.allocation"

HOOKS = [
    (f"{_ALLOCATION}.assign_req_to_token_pool_func", assign_req_to_token_pool_func, HookType.REPLACE),
    (f"{_ALLOCATION}.get_last_loc", get_last_loc, HookType.REPLACE),
    (
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.pack_read_stream",
        pack_read_stream,
        HookType.REPLACE,
    ),
    (
        f"{_OPS}.speculative.cache_locs.assign_draft_cache_locs_contiguous_func",
        assign_draft_cache_locs_contiguous_func,
        HookType.REPLACE,
    ),
    (f"{_OPS}.speculative.cache_locs.fill_front_out_cache_loc_func", fill_front_out_cache_loc_func, HookType.REPLACE),
    (f"{_OPS}.speculative.eagle.fill_accept_out_cache_loc_func", fill_accept_out_cache_loc_func, HookType.REPLACE),
    (f"{_OPS}.speculative.eagle.fill_bonus_tokens_func", fill_bonus_tokens_func, HookType.REPLACE),
    (f"{_OPS}.speculative.eagle.prepare_verify_commit_outputs", prepare_verify_commit_outputs, HookType.REPLACE),
    (f"{_OPS}.speculative.gather_spec_extras.gather_spec_extras", gather_spec_extras, HookType.REPLACE),
    (f"{_OPS}.speculative.row_argmax.row_argmax", row_argmax, HookType.REPLACE),
    (f"{_OPS}.speculative.row_argmax.div_argmax", div_argmax, HookType.REPLACE),
    (f"{_OPS}.attention.table_qk_norm_rope.table_qk_norm_rope_", table_qk_norm_rope_, HookType.REPLACE),
    (f"{_OPS}.elementwise.elementwise.fused_gate_sigmoid_mul_add", fused_gate_sigmoid_mul_add, HookType.REPLACE),
    ("torch.get_device_module", get_device_module, HookType.REPLACE),
    (
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        maybe_enable_batch_invariant_mode,
        HookType.REPLACE,
    ),
    (f"{_OPS}.sampling.murmur_hash.murmur_hash32", murmur_hash32, HookType.REPLACE),
]
