"""Each request's committed KV slots, copied from SGLang's request table for one pass."""

import torch

from sgl_specflow.kernels.tree_step import pack_rows


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
    if out is not None:
        indptr, slots = out.prefix_indptr, out.prefix_slots
    else:
        indptr = torch.empty(rows.numel() + 1, dtype=torch.int32, device=rows.device)
        # Whole rows: the host's lengths may lag behind the device's, and a copy must not overrun.
        room = int(lengths.sum()) if rows.device.type == "cpu" else rows.numel() * req_to_token.shape[1]
        slots = torch.empty(room, dtype=torch.int32, device=rows.device)
    pack_rows(req_to_token, rows, lengths, indptr, slots)
    return indptr, slots
