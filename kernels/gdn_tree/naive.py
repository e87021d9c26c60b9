"""Gated Delta Net on a token tree in plain PyTorch: two references, and what runs where there is no GPU.

`tree_recurrence` walks every path and keeps a state a node. `tree_triangular` is the rollback-free form (docs/gdn.md):
one masked triangular system. They agree to rounding; `verify_naive` and `flush_naive` put the second under the
contract of dispatch.py.

Shapes of one request: N nodes, H value heads; q, k [N, H, d_k] normalised, q scaled; v [N, H, d_v]; g = log decay and
beta [N, H]; state [H, d_v, d_k].
"""

import torch
import torch.nn.functional as F
from sgl_specflow.kernels.gdn_tree.stash import PendingPaths, TreeStash

from sgl_specflow.tree import unpack_bits

NORM_EPS = 1e-6


def gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The projections a, b [..., H] to log decay g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b)."""
    return -A_log.exp() * F.softplus(a + dt_bias, threshold=20.0), b.sigmoid()


def inverse_norm(x: torch.Tensor) -> torch.Tensor:
    """1 / |x| over the last dimension, eps inside the root."""
    return (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def tree_recurrence(q, k, v, g, beta, state, parent) -> tuple[torch.Tensor, torch.Tensor]:
    """Node by node: S_i = e^{g_i} (I - beta_i k_i k_i^T) S_parent + beta_i k_i v_i^T, o_i = S_i^T q_i.

    parent [N] holds a smaller index, or a negative one for a child of `state`. Returns out [N, H, d_v] and every
    node's state [N, H, d_v, d_k].
    """
    out, states = torch.empty_like(v), []
    for i, above in enumerate(parent.tolist()):
        decayed = g[i].exp()[:, None, None] * (state if above < 0 else states[above])
        u = beta[i][:, None] * (v[i] - torch.einsum("hvk,hk->hv", decayed, k[i]))
        states.append(decayed + u[:, :, None] * k[i][:, None, :])
        out[i] = torch.einsum("hvk,hk->hv", states[i], q[i])
    return out, torch.stack(states)


def path_decay(g: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """G [..., N, H]: the sum of g over each node's path, itself included; visible [..., N, N] bool: j on the path to i."""
    return visible.to(g.dtype) @ g


def tree_triangular(q, k, v, g, beta, state, visible) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(I + X) U = beta (V - e^G K S), O = e^G Q S + Y U. Returns O [N, H, d_v], U [N, H, d_v] and G [N, H].

    visible [N, N] bool: node j is an ancestor of i or i itself; nodes in topological order. Leading dimensions of all
    arguments are a batch.
    """
    G = path_decay(g, visible)
    gaps = (G.unsqueeze(-2) - G.unsqueeze(-3)).movedim(-1, -3)  # [H, N, N]; e^{-G_j} alone would overflow
    decay = torch.where(visible.unsqueeze(-3), gaps, -torch.inf).exp()
    keys, queries = k.transpose(-3, -2), q.transpose(-3, -2)  # [H, N, d_k]
    into, rate = G.exp().mT.unsqueeze(-1), beta.mT.unsqueeze(-1)
    right = rate * (v.transpose(-3, -2) - into * (keys @ state.mT))
    X = (rate * decay * (keys @ keys.mT)).tril(-1)
    U = torch.linalg.solve_triangular(X, right, upper=False, unitriangular=True)
    out = into * (queries @ state.mT) + decay * (queries @ keys.mT) @ U
    return out.transpose(-3, -2), U.transpose(-3, -2), G


def commit_path(state, k, u, G, path) -> torch.Tensor:
    """The state after the nodes path [m]: e^{G_p} S + sum_j e^{G_p - G_j} u_j k_j^T, p the last."""
    last = G[path[-1]]
    weight = (last - G[path]).exp()  # [m, H]
    return last.exp()[:, None, None] * state + torch.einsum("mh,mhv,mhk->hvk", weight, u[path], k[path])


def verify_naive(
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
    """The contract of dispatch.gdn_tree_verify, request by request. Float64 inputs are computed in float64."""
    num_requests, nodes = ancestors.shape[:2]
    compute = torch.promote_types(q.dtype, torch.float32)
    group = v.shape[1] // k.shape[1]
    out.zero_()
    for r in range(num_requests):
        count = nodes if node_count is None else min(int(node_count[r]), nodes)
        slot = int(slots[r])
        if slot < 0 or count <= 0:
            continue
        at = slice(r * nodes, r * nodes + count)
        row = -1 if stash is None else int(rows[r])
        if row >= 0 and pending.length[row] > 0:
            state[slot] = _with_path(state[slot], stash, pending, row, int(pending.length[row]), compute)
        raw_k, norm_k = _per_value_head(k[at], group, compute)
        raw_q, norm_q = _per_value_head(q[at], group, compute)
        g, beta = gates(a[at].to(compute), b[at].to(compute), A_log.to(compute), dt_bias.to(compute))
        visible = unpack_bits(ancestors[r, :count], nodes)[:, :count].tril() | torch.eye(
            count, dtype=torch.bool, device=q.device
        )
        result, u, G = tree_triangular(
            raw_q * (norm_q * scale), raw_k * norm_k, v[at].to(compute), g, beta, state[slot].to(compute), visible
        )
        out[at] = result.to(out.dtype)
        if row >= 0:
            other = 1 - int(pending.parity[row])
            stash.u[row, :, :count] = (u * norm_k).transpose(0, 1)
            stash.k[other, row, :, :count] = k[at].transpose(0, 1)
            stash.g[other, row, :, :count] = G.T
    return out


def flush_naive(state, slots, destination, stash: TreeStash, rows, pending: PendingPaths, length) -> None:
    """The contract of dispatch.gdn_tree_flush; state [L, slot, H, d_v, d_k] and a stash with layers."""
    for r, (slot, to, row) in enumerate(zip(slots.tolist(), destination.tolist(), rows.tolist())):
        if slot < 0 or to < 0 or row < 0:
            continue
        count = int(pending.length[row]) if length is None else min(int(pending.length[row]), int(length[r]))
        for layer in range(state.shape[0]):
            compute = torch.promote_types(stash.k.dtype, torch.float32)
            source = state[layer, slot]
            state[layer, to] = (
                _with_path(source, stash.layer(layer), pending, row, count, compute) if count > 0 else source
            )


def _per_value_head(x: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, key heads, d] to [N, value heads, d], and the inverse norms [N, value heads, 1]."""
    repeated = x.to(dtype).repeat_interleave(group, dim=1)
    return repeated, inverse_norm(repeated)


def _with_path(state, stash, pending, row: int, length: int, compute: torch.dtype) -> torch.Tensor:
    parity, path = int(pending.parity[row]), pending.path[row, :length].long()
    k = stash.k[parity, row].to(compute)
    k = k.repeat_interleave(state.shape[0] // k.shape[0], dim=0).transpose(0, 1)
    u, G = stash.u[row].to(compute).transpose(0, 1), stash.g[parity, row].to(compute).T
    return commit_path(state.to(compute), k, u, G, path).to(state.dtype)
