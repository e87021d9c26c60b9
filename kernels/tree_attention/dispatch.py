"""The public operator: checks the contract, then runs the CUDA or the Triton kernel on GPUs, plain PyTorch elsewhere."""

from typing import Literal

import torch
from sgl_specflow.kernels.tree_attention import cuda_kernel
from sgl_specflow.kernels.tree_attention.naive import tree_attention_naive
from sgl_specflow.kernels.tree_attention.triton_kernel import (
    TreeAttentionConfig,
    TreeAttentionScratch,
    tree_attention_triton,
)

TRITON_HEAD_DIMS = (64, 128, 256)
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class UnsupportedTreeAttention(NotImplementedError):
    """A valid request that the chosen implementation cannot serve."""


def tree_attention(
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
    *,
    implementation: Literal["cuda", "triton", "naive"] | None = None,
    scratch: TreeAttentionScratch | None = None,
    config: TreeAttentionConfig | None = None,
) -> torch.Tensor:
    """Attention of R requests' N tree nodes, each to its request's committed prefix and to the nodes its bits name.

    For node i of request r, over keys j in the prefix and nodes j with bit j of ancestors[r, i] set:
    out = sum_j softmax_j(cap(scale * k_scale * q_i . k_j)) * v_scale * v_j, cap(x) = logit_cap * tanh(x / logit_cap)
    where logit_cap > 0. The bits are taken as they are: a tree, a causal block and a bidirectional one differ in them
    alone. A row that sees nothing gives 0.

    q               [R * N, Hq, D] bfloat16, float16 or float32 (float32 products are IEEE, never TF32)
    k_pool, v_pool  [S, Hkv, D], [S, Hkv, Dv], q's dtype or float8_e4m3fn; may be strided, the last stride is 1. The
                    nodes' own k and v are already in it. Every slot named must hold finite values.
    prefix_indptr   [R + 1] int32; request r's prefix is prefix_slots[prefix_indptr[r] : prefix_indptr[r + 1]]
    prefix_slots    [at least prefix_indptr[R]] int32 or int64 pool slots, in order of position
    node_slots      [R * N] int32 or int64 pool slots of the nodes
    ancestors       [R, N, W] int32, W >= ceil(N / 32): bit j % 32 of word j // 32, the node itself included
    depth           [R, N] int32 or int64: a node's position is its prefix length + depth, depth >= 0; read only under
                    a sliding window
    sliding_window  key j is seen iff position_i - position_j <= sliding_window; -1 for none
    sinks           [Hq] float: one more logit a head in the softmax's denominator
    out             [R * N, Hq, Dv], written and returned; allocated where None
    implementation  None: for CUDA tensors "cuda" where `cuda_kernel.supported` and `runs_at_once` say so (shapes, dtypes
                    and the device decide) and no config is given, else "triton"; "naive" for others
    scratch, config for the Triton kernel: buffers kept across calls, and tiles other than the table's

    Raises ValueError for inputs that break this contract, UnsupportedTreeAttention for those that the chosen kernel
    does not serve. Both kernels allocate by shape alone and do not synchronise, so a CUDA graph may hold them; the CUDA
    one compiles and allocates scratch at the first call of a shape, so call once before a graph is captured.
    """
    _check_contract(q, k_pool, v_pool, prefix_indptr, node_slots, ancestors, depth, scale, k_scale, sinks, out)
    arguments = (
        q,
        k_pool,
        v_pool,
        prefix_indptr,
        prefix_slots,
        node_slots,
        ancestors,
        depth,
        scale,
        logit_cap,
        sliding_window,
        sinks,
        k_scale,
        v_scale,
        out,
    )
    serves = implementation in (None, "cuda") and cuda_kernel.supported(
        q, k_pool, v_pool, prefix_indptr, prefix_slots, node_slots, ancestors, sliding_window, sinks, out
    )
    if implementation is None:
        by_cuda = serves and config is None and cuda_kernel.runs_at_once(q, k_pool, ancestors, logit_cap)
        implementation = "naive" if not q.is_cuda else "cuda" if by_cuda else "triton"
    if implementation == "naive":
        return tree_attention_naive(*arguments)
    if implementation == "cuda":
        if not serves:
            raise UnsupportedTreeAttention(f"the CUDA kernel of tree_attention needs {cuda_kernel.NEEDS}")
        return cuda_kernel.tree_attention_cuda(*arguments)
    if implementation != "triton":
        raise ValueError(f"tree_attention: implementation is {implementation!r}; use 'cuda', 'triton', 'naive' or None")
    _check_triton(q, k_pool, v_pool, prefix_slots, node_slots, ancestors, depth, out)
    return tree_attention_triton(*arguments, scratch=scratch, config=config)


def _check_contract(q, k_pool, v_pool, prefix_indptr, node_slots, ancestors, depth, scale, k_scale, sinks, out) -> None:
    def require(condition: bool, rule: str) -> None:
        if not condition:
            raise ValueError(
                f"tree_attention: {rule}; got q {tuple(q.shape)}, k_pool {tuple(k_pool.shape)}, "
                f"v_pool {tuple(v_pool.shape)}, prefix_indptr {tuple(prefix_indptr.shape)}, "
                f"node_slots {tuple(node_slots.shape)}, ancestors {tuple(ancestors.shape)}, depth {tuple(depth.shape)}"
            )

    require(q.dim() == k_pool.dim() == v_pool.dim() == ancestors.dim() == 3, "q, pools and ancestors have 3 dimensions")
    num_requests, num_nodes, words = ancestors.shape
    num_heads, head_dim = q.shape[1:]
    require(q.shape[0] == num_requests * num_nodes, "q has a row for each of the R * N nodes of ancestors [R, N, W]")
    require(k_pool.shape[:2] == v_pool.shape[:2], "k_pool and v_pool have the same slots and kv heads")
    require(k_pool.shape[2] == head_dim, "k_pool has q's head dimension")
    require(num_heads % k_pool.shape[1] == 0, "query heads are a multiple of kv heads")
    require(prefix_indptr.shape == (num_requests + 1,), "prefix_indptr is [R + 1]")
    require(node_slots.shape == (num_requests * num_nodes,), "node_slots is [R * N]")
    require(depth.shape == (num_requests, num_nodes), "depth is [R, N]")
    require(words * 32 >= num_nodes, "ancestors has a bit for each node")
    require(ancestors.dtype == torch.int32, f"ancestors is int32, not {ancestors.dtype}")
    require(scale > 0 and k_scale > 0, f"scale {scale} and k_scale {k_scale} are positive")
    require(sinks is None or sinks.shape == (num_heads,), "sinks is [Hq]")
    require(
        out is None or (out.shape == (*q.shape[:2], v_pool.shape[2]) and out.dtype == q.dtype),
        "out is [R * N, Hq, Dv] of q's dtype",
    )


def _check_triton(q, k_pool, v_pool, prefix_slots, node_slots, ancestors, depth, out) -> None:
    def require(condition: bool, rule: str) -> None:
        if not condition:
            raise UnsupportedTreeAttention(f"the Triton kernel of tree_attention needs {rule}")

    require(q.dtype in TRITON_DTYPES, f"q in bfloat16, float16 or float32, not {q.dtype}")
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        allowed = (q.dtype, torch.float8_e4m3fn)
        require(pool.dtype in allowed, f"{name} in q's dtype {q.dtype} or float8_e4m3fn, not {pool.dtype}")
        require(pool.shape[2] in TRITON_HEAD_DIMS, f"head dimensions in {TRITON_HEAD_DIMS}, not {pool.shape[2]}")
    tensors = {
        "q": q,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "prefix_slots": prefix_slots,
        "node_slots": node_slots,
        "ancestors": ancestors,
        "depth": depth,
    }
    if out is not None:
        tensors["out"] = out
    for name, tensor in tensors.items():
        require(tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"a last stride of 1 in {name}, not {tensor.stride()}")
