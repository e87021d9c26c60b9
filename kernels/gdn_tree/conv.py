"""The causal conv1d before a Gated Delta Net layer, on a token tree: naive PyTorch, Triton, and the functions that choose.

A node's window is itself and its nearest ancestors; where the tree ends, the window of committed inputs follows. Inputs
are kept for each node, so that the accepted path's last ones can become the new window: at once, since a window is three
numbers a channel.

Words: width K (4 in Qwen3-Next, Qwen3.5 and Qwen3.6), history K - 1. An *ancestor table* [R, N, K - 1] int32 holds at
[r, i, t] node i's (t + 1)-nearest ancestor; past the root -1, -2, ...: committed inputs, the newest first.
"""

from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sgl_specflow.tree import unpack_bits

# Interpreted Triton (TRITON_INTERPRET=1) runs on CPU tensors; the tests use it.
_BLOCK = 1024
_CONV_ROWS, _CONV_BLOCK = 16, 128  # nodes and channels of a program: the fastest of eight at 64 and 128 nodes


def nearest_ancestors(
    ancestors: torch.Tensor, history: int, out: torch.Tensor | None = None, *, implementation=None
) -> torch.Tensor:
    """The ancestor table of R trees.

    Args:
        ancestors: int32 [R, N, W], W >= ceil(N / 32), bits of each node's ancestors and itself, in topological order.
        history: K - 1.
        out: int32 [R, N, K - 1], contiguous; allocated where None.
    """
    if ancestors.dtype != torch.int32 or ancestors.dim() != 3:
        raise ValueError(f"gdn_tree: ancestors are int32 [R, N, W]; got {ancestors.dtype} {tuple(ancestors.shape)}")
    requests, nodes, words = ancestors.shape
    if out is None:
        out = torch.empty(requests, nodes, history, dtype=torch.int32, device=ancestors.device)
    if _choose(implementation, ancestors) == "naive":
        return out.copy_(_nearest_ancestors_naive(ancestors, history))
    if requests:
        _nearest_kernel[(requests, nodes)](
            ancestors,
            out,
            nodes,
            ancestors.stride(0),
            ancestors.stride(1),
            HISTORY=history,
            BLOCK=triton.next_power_of_2(nodes),
            num_warps=1,
        )
    return out


def tree_conv(
    x: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    inputs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    implementation: Literal["triton", "naive"] | None = None,
) -> torch.Tensor:
    """Depthwise causal convolution of R requests' N nodes along their own paths; sums in float32.

    Ancestors are rounded to the window's dtype, from which plain decoding would read them.

    x           [R * N, C], last stride 1
    window      [slots, C, K - 1]: committed inputs, the oldest first (SGLang's conv_state). Read only.
    slots       [R] int32; a negative one leaves the request out (zeros)
    table       [R, N, K - 1] int32, from `nearest_ancestors`
    weight      [C, K], the newest input's last; bias [C] or None; activation "silu" ("swish") or None
    inputs      [at least R, at least N, C] of the window's dtype: receives x, for `commit_windows`
    out         [R * N, C] contiguous; written and returned, allocated where None

    Raises ValueError for shapes that break this contract.
    """
    requests, nodes, history = table.shape
    if (
        x.shape[0] != requests * nodes
        or x.stride(-1) != 1
        or weight.shape != (x.shape[1], history + 1)
        or window.shape[1:] != (x.shape[1], history)
        or slots.shape != (requests,)
        or activation not in ("silu", "swish", None)
        or (inputs is not None and (inputs.dtype != window.dtype or inputs.stride(-1) != 1))
    ):
        raise ValueError(
            f"gdn_tree: tree_conv takes x [R * N, C], window [slots, C, K - 1], slots [R], table [R, N, K - 1], weight "
            f"[C, K], silu or no activation; got {tuple(x.shape)}, {tuple(window.shape)}, {tuple(slots.shape)}, "
            f"{tuple(table.shape)}, {tuple(weight.shape)}, {activation!r}"
        )
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if _choose(implementation, x) == "naive":
        return _tree_conv_naive(x, window, slots, table, weight, bias, activation, inputs, out)
    channels = x.shape[1]
    rows, block = min(_CONV_ROWS, triton.next_power_of_2(nodes)), min(_CONV_BLOCK, triton.next_power_of_2(channels))
    if requests:
        _tree_conv_kernel[(triton.cdiv(channels, block), triton.cdiv(nodes, rows), requests)](
            x,
            window,
            slots,
            table,
            weight,
            x if bias is None else bias,
            x if inputs is None else inputs,
            out,
            nodes,
            channels,
            x.stride(0),
            *window.stride(),
            *weight.stride(),
            0 if inputs is None else inputs.stride(0),
            0 if inputs is None else inputs.stride(1),
            HISTORY=history,
            HAS_BIAS=bias is not None,
            SILU=activation is not None,
            KEEP=inputs is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )
    return out


def commit_windows(
    window: torch.Tensor,
    inputs: torch.Tensor,
    slots: torch.Tensor,
    path: torch.Tensor,
    length: torch.Tensor,
    destination: torch.Tensor | None = None,
    *,
    implementation: Literal["triton", "naive"] | None = None,
) -> None:
    """Slides the windows of all layers over each request's accepted path.

    window       [layers, slots, C, K - 1]
    inputs       [layers, at least R, N, C], as `tree_conv` left them for the same batch
    slots        [R] int32; a negative one leaves the request out
    path         [R, P] integers: nodes, the root first; entries from `length` on mean nothing
    length       [R] integers, nodes that enter; 0 copies the window
    destination  [R] int32 slots to write, negative for none; None: `slots`. Else a source window is only read.
    """
    layers, _, channels, history = window.shape
    if inputs.shape[0] != layers or inputs.shape[3] != channels or path.shape[0] != slots.shape[0]:
        raise ValueError(
            "gdn_tree: commit_windows takes window [L, slots, C, K - 1], inputs [L, R, N, C], slots [R], path [R, P]; got "
            f"{tuple(window.shape)}, {tuple(inputs.shape)}, {tuple(slots.shape)}, {tuple(path.shape)}"
        )
    destination = slots if destination is None else destination
    if _choose(implementation, window) == "naive":
        return _commit_windows_naive(window, inputs, slots, path, length, destination)
    block = min(_BLOCK, triton.next_power_of_2(channels))
    if len(slots):
        _commit_kernel[(len(slots), layers, triton.cdiv(channels, block))](
            window,
            inputs,
            slots,
            path,
            length,
            destination,
            channels,
            path.stride(0),
            *window.stride(),
            *inputs.stride()[:3],
            HISTORY=history,
            BLOCK=block,
            num_warps=4,
        )


def _choose(implementation: str | None, tensor: torch.Tensor) -> str:
    chosen = implementation or ("triton" if tensor.is_cuda else "naive")
    if chosen not in ("triton", "naive"):
        raise ValueError(f"gdn_tree: implementation is {implementation!r}; use 'triton', 'naive' or None")
    return chosen


# --- naive -----------------------------------------------------------------------------------------------------------


def _nearest_ancestors_naive(ancestors: torch.Tensor, history: int) -> torch.Tensor:
    nodes = ancestors.shape[1]
    node = torch.arange(nodes, device=ancestors.device)
    above = unpack_bits(ancestors, nodes) & (node < node[:, None])
    nearest, table = node.expand(above.shape[:2]), []
    for _ in range(history):
        found = torch.where(above & (node < nearest[..., None]), node, -1).amax(2)
        nearest = torch.where(found >= 0, found, torch.where(nearest >= 0, -1, nearest - 1))
        table.append(nearest)
    return torch.stack(table, 2).to(torch.int32)


def _tree_conv_naive(x, window, slots, table, weight, bias, activation, inputs, out):
    requests, nodes, history = table.shape
    exact = torch.promote_types(x.dtype, torch.float32)
    rows = x.view(requests, nodes, -1)
    if inputs is not None:
        inputs[:requests, :nodes] = rows
    committed = window[slots.clamp(min=0).long()].transpose(1, 2)  # [R, K - 1, C]
    source = torch.cat([committed, rows.to(window.dtype)], 1).to(exact)
    # The t-th newest committed input, table entry -1 - t, stands at history - 1 - t; node i at history + i.
    index = (table.long() + history)[..., None].expand(-1, -1, -1, x.shape[1])
    total = rows.to(exact) * weight[:, -1].to(exact)
    for t in range(history):
        total += source.gather(1, index[:, :, t]) * weight[:, history - 1 - t].to(exact)
    if bias is not None:
        total += bias.to(exact)
    total = F.silu(total) if activation else total
    return out.copy_(torch.where((slots >= 0)[:, None, None], total, 0.0).flatten(0, 1))


def _commit_windows_naive(window, inputs, slots, path, length, destination) -> None:
    history = window.shape[3]
    for r, (slot, to) in enumerate(zip(slots.tolist(), destination.tolist())):
        if slot < 0 or to < 0:
            continue
        nodes = path[r, : int(length[r])].long()
        entered = inputs[:, r, nodes].transpose(1, 2).to(window.dtype)
        window[:, to] = torch.cat([window[:, slot], entered], 2)[:, :, -history:]


# --- Triton ----------------------------------------------------------------------------------------------------------


@triton.jit
def _nearest_kernel(bits, out, nodes, stride_request, stride_node, HISTORY: tl.constexpr, BLOCK: tl.constexpr):
    request, node = tl.program_id(0), tl.program_id(1)
    other = tl.arange(0, BLOCK)
    words = bits + request * stride_request + node * stride_node
    word = tl.load(words + other // 32, mask=other < node, other=0)
    above = ((word >> (other % 32)) & 1) != 0
    nearest = node
    for t in tl.static_range(HISTORY):
        found = tl.max(tl.where(above & (other < nearest), other, -1), axis=0)
        nearest = tl.where(found >= 0, found, tl.where(nearest >= 0, -1, nearest - 1))
        tl.store(out + (request * nodes + node) * HISTORY + t, nearest)


@triton.jit
def _tree_conv_kernel(
    x,
    window,
    slots,
    table,
    weight,
    bias,
    inputs,
    out,
    nodes,
    channels,
    stride_x,
    stride_slot,
    stride_channel,
    stride_history,
    stride_weight,
    stride_tap,
    stride_inputs_request,
    stride_inputs_node,
    HISTORY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS nodes of one request, which share what is read of the window and of the taps, one number a channel apart."""
    request = tl.program_id(2).to(tl.int64)
    node = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    slot = tl.load(slots + request).to(tl.int64)
    live = slot >= 0
    written = (node < nodes)[:, None] & exists[None, :]
    read = written & live
    row = request * nodes + node
    own = tl.load(x + (row * stride_x)[:, None] + channel[None, :], mask=read, other=0.0)
    taps = weight + channel * stride_weight
    committed = window + slot * stride_slot + channel * stride_channel
    total = own.to(tl.float32) * tl.load(taps + HISTORY * stride_tap, mask=exists, other=0.0).to(tl.float32)[None, :]
    for t in tl.static_range(HISTORY):
        above = tl.load(table + row * HISTORY + t, mask=node < nodes, other=0)
        drafted = tl.load(
            x + ((request * nodes + above) * stride_x)[:, None] + channel[None, :],
            mask=read & (above >= 0)[:, None],
            other=0.0,
        )
        source = drafted.to(window.dtype.element_ty)
        for h in tl.static_range(HISTORY):  # the committed inputs, the newest first
            before = tl.load(committed + (HISTORY - 1 - h) * stride_history, mask=exists & live, other=0.0)
            source = tl.where((above == -1 - h)[:, None], before[None, :], source)
        tap = tl.load(taps + (HISTORY - 1 - t) * stride_tap, mask=exists, other=0.0).to(tl.float32)
        total += source.to(tl.float32) * tap[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + (row * channels)[:, None] + channel[None, :], tl.where(live, total, 0.0), mask=written)
    if KEEP:
        kept = inputs + request * stride_inputs_request + (node.to(tl.int64) * stride_inputs_node)[:, None]
        tl.store(kept + channel[None, :], own.to(inputs.dtype.element_ty), mask=read)


@triton.jit
def _commit_kernel(
    window,
    inputs,
    slots,
    path,
    length,
    destination,
    channels,
    stride_path,
    stride_layer,
    stride_slot,
    stride_channel,
    stride_history,
    stride_inputs_layer,
    stride_inputs_request,
    stride_inputs_node,
    HISTORY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, to = tl.load(slots + request).to(tl.int64), tl.load(destination + request).to(tl.int64)
    if (slot >= 0) & (to >= 0):
        channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        mask = channel < channels
        entered = tl.load(length + request).to(tl.int32)
        old = window + layer * stride_layer + slot * stride_slot + channel * stride_channel
        new = window + layer * stride_layer + to * stride_slot + channel * stride_channel
        drafted = inputs + layer * stride_inputs_layer + request.to(tl.int64) * stride_inputs_request + channel
        # Entry t reads entry t + entered or a node; entries are written in ascending order, so none is read after its write.
        for t in tl.static_range(HISTORY):
            place = t + entered - HISTORY  # on the path, or negative: in the old window
            node = tl.load(path + request * stride_path + tl.maximum(place, 0), mask=place >= 0, other=0).to(tl.int64)
            from_path = tl.load(drafted + node * stride_inputs_node, mask=mask & (place >= 0), other=0.0)
            from_window = tl.load(old + (HISTORY + place) * stride_history, mask=mask & (place < 0), other=0.0)
            value = tl.where(place >= 0, from_path.to(window.dtype.element_ty), from_window)
            tl.store(new + t * stride_history, value, mask=mask)
