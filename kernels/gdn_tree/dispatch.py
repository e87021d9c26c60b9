"""The public operators: check the contract, then run the CUDA kernel on CUDA tensors and plain PyTorch elsewhere."""

from typing import Literal

import torch
from sgl_specflow.kernels.gdn_tree import cuda_kernel
from sgl_specflow.kernels.gdn_tree.batched import flush_batched, verify_batched
from sgl_specflow.kernels.gdn_tree.naive import flush_naive, verify_naive
from sgl_specflow.kernels.gdn_tree.stash import PendingPaths, TreeStash

HEAD_DIMS = (64, 128)
STATE_DTYPES = (torch.float32, torch.bfloat16)


class UnsupportedGdnTree(NotImplementedError):
    """A valid request that the CUDA kernel cannot serve."""


def gdn_tree_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    ancestors: torch.Tensor,
    node_count: torch.Tensor | None = None,
    stash: TreeStash | None = None,
    rows: torch.Tensor | None = None,
    pending: PendingPaths | None = None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    *,
    implementation: Literal["cuda", "batched", "naive"] | None = None,
    shape: cuda_kernel.KernelShape | None = None,
) -> torch.Tensor:
    """One layer's Gated Delta Net outputs for R requests' N tree nodes (docs/gdn.md).

    Node i of a request starts from its parent's state: S_i = e^{g_i} (I - beta_i k_i k_i^T) S_parent + beta_i k_i v_i^T,
    o_i = S_i^T q_i, with g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), q and k divided by
    sqrt(sum of squares + 1e-6), q scaled. No node's state is stored. With a stash, the row's pending path first enters
    `state`, which the nodes then start from, and the nodes replace the stash; `pending` itself is left as it is.

    q, k        [R * N, key heads, d_k] bfloat16, may be strided views of the projection; the last stride is 1
    v           [R * N, value heads, d_v] likewise; value heads are a multiple of key heads
    a, b        [R * N, value heads] likewise
    A_log       [value heads] float32 or bfloat16; dt_bias likewise
    state       [slots, value heads, d_v, d_k] float32 or bfloat16; a slot is contiguous, slots may be strided
    slots       [R] int32; a negative one leaves the request out (its output is zero)
    ancestors   [R, N, W] int32, W >= ceil(N / 32): bit j % 32 of word j // 32, parents before children
    node_count  [R] int32: nodes from there on are padding (output zero); None: all are real
    stash, rows, pending  the layer's TreeStash, each request's row in it ([R] int32, negative for none) and the
                pending paths; all or none. Rows of one call are distinct.
    scale       of q; None: d_k ** -0.5
    out         [R * N, value heads, d_v] of v's dtype, contiguous; written and returned, allocated where None
    implementation  None: "cuda" for CUDA tensors, "naive" for others; "batched": PyTorch without host synchronisation,
                where slot and row 0 are nobody's (SGLang reserves both)
    shape       for the CUDA kernel: another build than the one `cuda_kernel.select_shape` takes

    The CUDA kernel needs rows of q, k and v, `out` and state slots aligned to 16 bytes.

    Raises ValueError for inputs that break this contract, UnsupportedGdnTree for those that the CUDA kernel does not
    serve, CudaToolsMissing where it cannot be built. The CUDA kernel compiles at a shape's first call (so call it once
    before a CUDA graph is captured); after that it allocates `out` alone and does not synchronise.
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    _check_verify(q, k, v, a, b, A_log, dt_bias, state, slots, ancestors, node_count, stash, rows, pending, out)
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    arguments = (q, k, v, a, b, A_log, dt_bias, state, slots, ancestors, node_count, stash, rows, pending, scale, out)
    chosen = _choose(implementation, q)
    if chosen != "cuda":
        return (verify_naive if chosen == "naive" else verify_batched)(*arguments)
    num_requests, nodes = ancestors.shape[:2]
    shape = shape or _cuda_shape(nodes, k.shape[2], v.shape[2], state)
    _check_cuda(q, k, v, a, b, A_log, dt_bias, state, ancestors, stash, out)
    if num_requests:
        cuda_kernel.launch_verify(shape, cuda_kernel.verify_arguments(*arguments), num_requests, q.device.index)
    return out


def unsupported_by_cuda(
    nodes: int, key_dim: int, value_dim: int, dtype: torch.dtype, state_dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the CUDA kernel cannot serve trees of `nodes` nodes on a CUDA device, or None where it can."""
    if dtype != torch.bfloat16:
        return f"activations are {dtype}, not bfloat16"
    try:
        _cuda_shape(nodes, key_dim, value_dim, torch.empty(0, dtype=state_dtype, device=device))
    except UnsupportedGdnTree as error:
        return str(error)
    return None


def gdn_tree_flush(
    state: torch.Tensor,
    slots: torch.Tensor,
    stash: TreeStash,
    rows: torch.Tensor,
    pending: PendingPaths,
    length: torch.Tensor | None = None,
    destination: torch.Tensor | None = None,
    *,
    implementation: Literal["cuda", "batched", "naive"] | None = None,
) -> None:
    """Writes the states after pending paths, all layers at once, where no verify will: a finish, a retraction, a snapshot.

    state        [layers, slots, value heads, d_v, d_k]; a stash with the same layers
    slots, rows  [R] int32: where each request's state lies and its stash row; a negative one leaves it out
    length       [R] int32: enter only so many nodes of the path; None: all
    destination  [R] int32: slots to write; None: `slots`. The source slot is only read then.

    `pending` is left as it is: after a flush in place the caller clears those rows.
    """
    destination = slots if destination is None else destination
    _require(
        state.dim() == 5 and stash.u.dim() == 5 and stash.u.shape[0] == state.shape[0],
        "state [layers, slots, value heads, d_v, d_k] and a stash with the same layers",
        state=state,
        stash_u=stash.u,
    )
    for name, tensor in {"slots": slots, "rows": rows, "destination": destination, "length": length}.items():
        _require(
            tensor is None or (tensor.shape == slots.shape and tensor.dtype == torch.int32),
            f"{name} is [R] int32",
            **{name: tensor},
        )
    chosen = _choose(implementation, state)
    if chosen != "cuda":
        return (flush_naive if chosen == "naive" else flush_batched)(
            state, slots, destination, stash, rows, pending, length
        )
    _check_state(state)
    _check_stash(stash)
    shape = _cuda_shape(TILE_NODES, stash.k.shape[-1], state.shape[3], state)
    arguments = cuda_kernel.flush_arguments(state, slots, destination, stash, rows, pending, length)
    if len(slots):
        cuda_kernel.launch_flush(shape, arguments, len(slots), state.shape[0], state.device.index)


TILE_NODES = cuda_kernel.TILE  # the flush does not depend on the number of nodes: it uses the smallest shape


def _choose(implementation: str | None, tensor: torch.Tensor) -> str:
    chosen = implementation or ("cuda" if tensor.is_cuda else "naive")
    if chosen not in ("cuda", "batched", "naive"):
        raise ValueError(f"gdn_tree: implementation is {implementation!r}; use 'cuda', 'batched', 'naive' or None")
    if chosen == "cuda" and not tensor.is_cuda:
        raise ValueError(f"gdn_tree: implementation 'cuda' needs CUDA tensors, not {tensor.device}")
    return chosen


def _require(condition: bool, rule: str, **given: torch.Tensor | None) -> None:
    if not condition:
        shapes = ", ".join(
            f"{name} {'None' if tensor is None else f'{tuple(tensor.shape)} {tensor.dtype}'}"
            for name, tensor in given.items()
        )
        raise ValueError(f"gdn_tree: {rule}; got {shapes}")


def _check_verify(
    q, k, v, a, b, A_log, dt_bias, state, slots, ancestors, node_count, stash, rows, pending, out
) -> None:
    given = {"q": q, "k": k, "v": v, "a": a, "b": b, "state": state, "ancestors": ancestors}
    _require(
        q.dim() == k.dim() == v.dim() == ancestors.dim() == 3 and state.dim() == 4,
        "q, k, v and ancestors have 3 dimensions, state 4",
        **given,
    )
    num_requests, nodes, words = ancestors.shape
    tokens, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1:]
    _require(
        tokens == num_requests * nodes and v.shape[0] == tokens and q.shape == k.shape,
        "q, k and v have a row for each of the R * N nodes of ancestors [R, N, W]",
        **given,
    )
    _require(value_heads % key_heads == 0, "value heads are a multiple of key heads", **given)
    _require(a.shape == b.shape == (tokens, value_heads), "a and b are [R * N, value heads]", **given)
    _require(
        A_log.shape == dt_bias.shape == (value_heads,),
        "A_log and dt_bias are [value heads]",
        A_log=A_log,
        dt_bias=dt_bias,
    )
    _require(state.shape[1:] == (value_heads, value_dim, key_dim), "state is [slots, value heads, d_v, d_k]", **given)
    _require(
        words * 32 >= nodes and ancestors.dtype == torch.int32, "ancestors is int32 with a bit for each node", **given
    )
    for name, tensor in {"slots": slots, "node_count": node_count, "rows": rows}.items():
        _require(
            tensor is None
            or (tensor.shape == (num_requests,) and tensor.dtype == torch.int32 and tensor.is_contiguous()),
            f"{name} is [R] int32, contiguous",
            **{name: tensor},
        )
    _require((stash is None) == (rows is None) == (pending is None), "stash, rows and pending come together", rows=rows)
    if stash is not None:
        _require(
            stash.u.dim() == 4
            and stash.u.shape[1] == value_heads
            and stash.u.shape[3] == value_dim
            and stash.k.shape[2] == key_heads
            and stash.k.shape[4] == key_dim
            and stash.u.shape[2] >= nodes,
            "stash is one layer's, with these heads and at least N nodes",
            stash_u=stash.u,
            stash_k=stash.k,
            **given,
        )
    _require(
        out is None or (out.shape == v.shape and out.dtype == v.dtype and out.is_contiguous()),
        "out is [R * N, value heads, d_v] of v's dtype, contiguous",
        out=out,
    )


def _cuda_shape(nodes: int, key_dim: int, value_dim: int, state: torch.Tensor) -> cuda_kernel.KernelShape:
    def require(condition: bool, rule: str) -> None:
        if not condition:
            raise UnsupportedGdnTree(f"the CUDA kernel of gdn_tree needs {rule}")

    require(1 <= nodes <= cuda_kernel.MAX_NODES, f"1 to {cuda_kernel.MAX_NODES} nodes, not {nodes}")
    require(
        key_dim in HEAD_DIMS and value_dim in HEAD_DIMS, f"head dimensions in {HEAD_DIMS}, not {key_dim}, {value_dim}"
    )
    require(state.dtype in STATE_DTYPES, f"a state in {STATE_DTYPES}, not {state.dtype}")
    limit = cuda_kernel.shared_limit(state.device.index)
    shape = cuda_kernel.select_shape(nodes, key_dim, value_dim, state.dtype == torch.bfloat16, limit)
    require(
        shape is not None,
        f"more shared memory than the {limit} bytes of this device for {nodes} nodes; use fewer nodes",
    )
    return shape


def _check_cuda(q, k, v, a, b, A_log, dt_bias, state, ancestors, stash, out) -> None:
    def require(condition: bool, rule: str) -> None:
        if not condition:
            raise UnsupportedGdnTree(f"the CUDA kernel of gdn_tree needs {rule}")

    alignments = (("q", q, 16), ("k", k, 16), ("v", v, 16), ("a", a, 2), ("b", b, 2), ("out", out, 16))
    for name, tensor, alignment in alignments:
        require(tensor.dtype == torch.bfloat16, f"{name} in bfloat16, not {tensor.dtype}")
        require(tensor.stride(-1) == 1, f"a last stride of 1 in {name}, not {tensor.stride()}")
        elements = alignment // 2
        require(
            tensor.data_ptr() % alignment == 0 and all(step % elements == 0 for step in tensor.stride()[:-1]),
            f"rows of {name} aligned to {alignment} bytes, not strides {tensor.stride()}",
        )
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        require(
            tensor.dtype in STATE_DTYPES and tensor.is_contiguous(),
            f"{name} contiguous in {STATE_DTYPES}, not {tensor.dtype}",
        )
    words = ancestors.shape[2]
    require(
        ancestors.stride(2) == 1 and ancestors.stride(0) == ancestors.shape[1] * ancestors.stride(1),
        f"ancestors with W = {words} contiguous words a node, not strides {ancestors.stride()}",
    )
    _check_state(state)
    if stash is not None:
        _check_stash(stash)


def _check_state(state: torch.Tensor) -> None:
    """state [slots, ...] or, of several layers, [layers, slots, ...]."""
    slot = state[(0,) * (state.dim() - 3)]
    steps = (step * state.element_size() for step in state.stride()[: state.dim() - 3])
    if not slot.is_contiguous() or state.data_ptr() % 16 or any(step % 16 for step in steps):
        raise UnsupportedGdnTree(
            "the CUDA kernel of gdn_tree needs contiguous state slots aligned to 16 bytes, not strides "
            f"{state.stride()} of {state.dtype}"
        )


def _check_stash(stash: TreeStash) -> None:
    layers = stash.u.dim() == 5
    parts = (stash.u[0], stash.k[0], stash.g[0]) if layers else (stash.u, stash.k, stash.g)
    if (
        not all(part.is_contiguous() for part in parts)
        or stash.u.dtype != torch.float32
        or stash.k.dtype != torch.bfloat16
    ):
        raise UnsupportedGdnTree(
            "the CUDA kernel of gdn_tree needs a contiguous stash with u in float32 and k in bfloat16, not "
            f"{stash.u.dtype}, {stash.k.dtype}"
        )
