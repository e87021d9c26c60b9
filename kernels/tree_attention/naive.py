"""Tree attention in plain PyTorch: the reference, and what runs where there is no GPU."""

import torch


def ancestor_matrix(ancestors: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Unpack ancestor bits [..., N, W] int32 to booleans [..., N, N]: node i may attend to node j."""
    bits = torch.arange(32, dtype=torch.int32, device=ancestors.device)
    return ((ancestors.unsqueeze(-1) >> bits) & 1).bool().flatten(-2)[..., :num_nodes]


def tree_attention_naive(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    prefix_indptr: torch.Tensor,
    prefix_slots: torch.Tensor,
    node_slots: torch.Tensor,
    ancestors: torch.Tensor,
    depth: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
    sliding_window: int = -1,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The contract of `dispatch.tree_attention`, one matrix product a request.

    Logits, softmax and sums are float32 (float64 where q is). Reads prefix_indptr on the host, so it synchronises.
    """
    num_requests, num_nodes = ancestors.shape[:2]
    num_heads, value_dim = q.shape[1], v_pool.shape[2]
    if out is None:
        out = q.new_empty(q.shape[0], num_heads, value_dim)
    compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    visible = ancestor_matrix(ancestors, num_nodes)
    bounds = prefix_indptr.tolist()
    for r in range(num_requests):
        rows = slice(r * num_nodes, (r + 1) * num_nodes)
        prefix = prefix_slots[bounds[r] : bounds[r + 1]].long()
        slots = torch.cat([prefix, node_slots[rows].long()])
        out[rows] = _attend(
            q[rows].to(compute_dtype),
            k_pool[slots].to(compute_dtype),
            v_pool[slots].to(compute_dtype),
            _hidden_keys(visible[r], depth[r].long(), prefix.numel(), sliding_window),
            scale * k_scale,
            logit_cap,
            sinks,
            v_scale,
        ).to(out.dtype)
    return out


def _hidden_keys(visible: torch.Tensor, depth: torch.Tensor, prefix_length: int, sliding_window: int) -> torch.Tensor:
    """Booleans [N, N] (nodes only) or, under a sliding window, [N, prefix + N]: what each node must not see."""
    if sliding_window < 0:
        return ~visible
    key_position = torch.cat([torch.arange(prefix_length, device=depth.device), prefix_length + depth])
    too_far = (prefix_length + depth)[:, None] - key_position[None, :] > sliding_window
    too_far[:, prefix_length:] |= ~visible
    return too_far


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    logit_cap: float,
    sinks: torch.Tensor | None,
    v_scale: float,
) -> torch.Tensor:
    """One request: q [N, Hq, D], k [L, Hkv, D], v [L, Hkv, Dv], hidden [N, the last N or all L keys] -> [N, Hq, Dv]."""
    num_nodes, num_heads, _ = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    grouped_q = q.reshape(num_nodes, num_kv_heads, group, -1).permute(1, 2, 0, 3).flatten(1, 2)
    logits = torch.matmul(grouped_q, k.permute(1, 2, 0)).mul_(scale)  # [Hkv, group * N, L]
    if logit_cap > 0:
        logits = logits.div_(logit_cap).tanh_().mul_(logit_cap)
    logits = logits.view(num_kv_heads, group, num_nodes, -1)
    logits[..., logits.shape[-1] - hidden.shape[1] :].masked_fill_(hidden, float("-inf"))

    peak = logits.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(num_kv_heads, group, 1, 1)
        peak = torch.maximum(peak, sink)
    # A row that sees nothing has peak -inf; any finite peak makes its weights 0 instead of NaN.
    peak = peak.clamp_(min=torch.finfo(peak.dtype).min)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sink - peak).exp()
    mixed = torch.matmul(weights.flatten(1, 2), v.transpose(0, 1)).view(num_kv_heads, group, num_nodes, -1)
    mixed = torch.where(total > 0, mixed * (v_scale / total), torch.zeros_like(mixed))
    return mixed.permute(2, 0, 1, 3).reshape(num_nodes, num_heads, -1)
