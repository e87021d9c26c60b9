"""The operators for a whole batch in PyTorch, without host synchronisation: what serves dtypes and devices that the CUDA
kernel does not, such as float32 models, also inside a CUDA graph.

Held to `naive.py` by tests. Memory: [R, value heads, N, N] in float32.
"""

import torch
from sgl_specflow.kernels.gdn_tree.naive import gates, inverse_norm, tree_triangular
from sgl_specflow.kernels.gdn_tree.stash import PendingPaths, TreeStash

from sgl_specflow.tree import unpack_bits


def verify_batched(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    state,
    slots,
    ancestors,
    node_count,
    stash: TreeStash | None,
    rows,
    pending: PendingPaths | None,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """The contract of dispatch.gdn_tree_verify, but where a slot is negative, slot and row 0 must be nobody's."""
    requests, nodes = ancestors.shape[:2]
    compute = torch.promote_types(q.dtype, torch.float32)
    group = v.shape[1] // k.shape[1]
    node = torch.arange(nodes, device=q.device)
    real = node < (nodes if node_count is None else node_count[:, None])  # [R, N] or [N]
    live = slots >= 0
    at = slots.clamp(min=0).long()
    start = state[at].to(compute)  # [R, H, d_v, d_k]
    if stash is not None:
        row = torch.where(live, rows, 0).clamp(min=0).long()
        enter = live & (rows >= 0) & (pending.length[row] > 0)
        start = _after_path(start, stash, pending, row, torch.where(enter, pending.length[row], 0))
        start = start.to(state.dtype).to(compute)
        state[at] = torch.where(enter[:, None, None, None], start.to(state.dtype), state[at])

    def per_head(x: torch.Tensor, times: int) -> torch.Tensor:
        return x.to(compute).view(requests, nodes, *x.shape[1:]).repeat_interleave(times, dim=2)

    queries, keys, values = per_head(q, group), per_head(k, group), per_head(v, 1)
    norm = inverse_norm(keys)
    g, beta = gates(per_head(a, 1), per_head(b, 1), A_log.to(compute), dt_bias.to(compute))
    visible = unpack_bits(ancestors, nodes).tril() & real[..., None, :] & real[..., :, None]
    visible = visible | torch.eye(nodes, dtype=torch.bool, device=q.device)
    result, u, G = tree_triangular(
        queries * (inverse_norm(queries) * scale), keys * norm, values, g, beta, start, visible
    )
    written = (live[:, None] & real)[..., None, None].expand(requests, nodes, 1, 1).flatten(0, 1)
    out.copy_(torch.where(written, result.flatten(0, 1), 0.0))
    if stash is not None:
        other = 1 - pending.parity[row].long()
        stash.u[row, :, :nodes] = (u * norm).transpose(1, 2)
        stash.k[other, row, :, :nodes] = k.view(requests, nodes, *k.shape[1:]).transpose(1, 2)
        stash.g[other, row, :, :nodes] = G.transpose(1, 2).to(stash.g.dtype)
    return out


def flush_batched(state, slots, destination, stash: TreeStash, rows, pending: PendingPaths, length) -> None:
    """The contract of dispatch.gdn_tree_flush, with the same exception; state [L, slot, H, d_v, d_k]."""
    live = (slots >= 0) & (destination >= 0) & (rows >= 0)
    row = torch.where(live, rows, 0).long()
    count = pending.length[row] if length is None else torch.minimum(pending.length[row], length)
    count = torch.where(live, count, 0)
    source, to = torch.where(live, slots, 0).long(), torch.where(live, destination, 0).long()
    for layer in range(state.shape[0]):
        compute = torch.promote_types(stash.k.dtype, torch.float32)
        after = _after_path(state[layer, source].to(compute), stash.layer(layer), pending, row, count)
        state[layer, to] = after.to(state.dtype)


def _after_path(start, stash: TreeStash, pending: PendingPaths, row: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """start [R, H, d_v, d_k] after the first `count` [R] nodes of each row's path; unchanged where that is 0."""
    compute, heads = start.dtype, start.shape[1]
    parity, entries = pending.parity[row].long(), pending.path.shape[1]
    path = pending.path[row].clamp(0, stash.u.shape[2] - 1).long()  # [R, P]
    request = row[:, None]
    u = stash.u[request, :, path].to(compute)  # [R, P, H, d_v]
    k = stash.k[parity[:, None], request, :, path].to(compute)
    k = k.repeat_interleave(heads // k.shape[2], dim=2)
    G = stash.g[parity[:, None], request, :, path]  # [R, P, H]
    last = G.gather(1, (count - 1).clamp(min=0).long()[:, None, None].expand(-1, 1, heads))
    entered = torch.arange(entries, device=row.device) < count[:, None]
    weight = torch.where(entered[..., None], (last - G).clamp(max=0.0).exp(), 0.0).to(compute)
    decay = torch.where(count[:, None] > 0, last[:, 0].exp(), 1.0).to(compute)
    update = torch.einsum("rph,rphv,rphk->rhvk", weight, u.masked_fill(~entered[..., None, None], 0.0), k)
    return decay[..., None, None] * start + update
