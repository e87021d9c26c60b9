"""Each request's committed KV slots, copied from SGLang's request table for one pass."""

import torch

_COPY_BLOCKS = 16  # programs that share the copy of one request's row


def pack_prefix(req_to_token: torch.Tensor, forward_batch, out=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of each request's committed prefix, one request after the other.

    Args:
        req_to_token: int32 [rows, row width], SGLang's request table.
        forward_batch: its `req_pool_indices` and `seq_lens` (committed lengths), both [R].
        out: buffers with `prefix_indptr` [R + 1] and `prefix_slots` to fill, for CUDA graphs; fresh ones if None.

    Returns:
        prefix_indptr int32 [R + 1] and prefix_slots int32; entries past prefix_indptr[R] mean nothing.
    """
    rows, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
    indptr = torch.zeros(rows.numel() + 1, dtype=torch.int32, device=rows.device) if out is None else out.prefix_indptr
    indptr[1:] = lengths.cumsum(0)
    if rows.device.type == "cpu":
        slots = [req_to_token[row, :length] for row, length in zip(rows.tolist(), lengths.tolist())]
        return indptr, torch.cat(slots)
    # Whole rows where there is no buffer: the host's lengths may lag behind the device's, and a copy must not overrun.
    slots = (
        torch.empty(rows.numel() * req_to_token.shape[1], dtype=torch.int32, device=rows.device)
        if out is None
        else out.prefix_slots
    )
    from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton

    create_flashinfer_kv_indices_triton[(rows.numel(), _COPY_BLOCKS)](
        req_to_token, rows, lengths, indptr, None, slots, req_to_token.stride(0), TOKEN_BLOCK_PARALLEL=True
    )
    return indptr, slots
