"""What a pass reads, staged in one launch each: a step's KV slots, the committed prefixes, the tree's bits.

Every function has a torch form, for the CPU, and a Triton one, for CUDA; neither synchronises with the host.
"""

import torch
import triton
import triton.language as tl
from sgl_specflow.kernels.placement import runs_triton

from sgl_specflow.tree.token_tree import pack_bits

_BLOCK = 1024
_COPY_PROGRAMS = 32  # that share the copy of one request's row


def window_slots(table: torch.Tensor, rows: torch.Tensor, committed: torch.Tensor, budget: int) -> torch.Tensor:
    """The KV slots of positions committed .. committed + budget - 1 of each request.

    Args:
        table: int32 [rows, row width], SGLang's request table. rows, committed: integers [R].

    Returns:
        int64 [R, budget].
    """
    if not runs_triton(table):
        offsets = torch.arange(budget, device=committed.device)
        return table[rows[:, None], committed[:, None] + offsets].to(torch.int64)
    slots = torch.empty(rows.numel(), budget, dtype=torch.int64, device=table.device)
    _window[(rows.numel(),)](table, rows, committed, slots, table.stride(0), budget, triton.next_power_of_2(budget))
    return slots


def pack_rows(
    table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, indptr: torch.Tensor, slots: torch.Tensor
) -> None:
    """The first `lengths` slots of each request's row, one request after the other.

    Args:
        table, rows: as `window_slots` has them. lengths: integers [R].
        indptr: int32 [R + 1], written: where each request's slots begin. slots: int32 [at least their sum], written.
    """
    requests = rows.numel()
    if not runs_triton(table):
        indptr[0] = 0
        indptr[1:] = lengths.cumsum(0)
        if requests:
            packed = torch.cat([table[row, :length] for row, length in zip(rows.tolist(), lengths.tolist())])
            slots[: packed.numel()] = packed
        return
    _pack[(requests, _COPY_PROGRAMS)](
        table, rows, lengths, indptr, slots, table.stride(0), triton.next_power_of_2(requests), _BLOCK, _COPY_PROGRAMS
    )


def stage_bits(
    ancestors: torch.Tensor,
    depth: torch.Tensor,
    out_ancestors: torch.Tensor,
    out_causal: torch.Tensor,
    out_depth: torch.Tensor,
) -> None:
    """Copy the trees of a pass to buffers of fixed address; requests past the pass's own see only themselves.

    Args:
        ancestors: int32 [L, N, W], depth: int64 [L, N]; any strides but the last of ancestors, which is 1.
        out_ancestors: int32 [R, N, W], R >= L. out_causal: the same without the bits of later nodes: node i keeps bits
            0 to i. out_depth: int64 [R, N]. All contiguous.
    """
    live, (requests, nodes, words) = ancestors.shape[0], out_ancestors.shape
    if not runs_triton(out_ancestors):
        alone = pack_bits(torch.eye(nodes, dtype=torch.bool))
        not_later = pack_bits(torch.ones(nodes, nodes, dtype=torch.bool).tril())
        out_ancestors[:live], out_depth[:live] = ancestors, depth
        out_ancestors[live:], out_depth[live:] = alone, 0
        torch.bitwise_and(out_ancestors, not_later, out=out_causal)
        return
    _bits[(requests, words)](
        ancestors,
        depth,
        out_ancestors,
        out_causal,
        out_depth,
        ancestors.stride(0),
        ancestors.stride(1),
        depth.stride(0),
        depth.stride(1),
        live,
        nodes,
        triton.next_power_of_2(nodes),
    )


@triton.jit
def _window(table, rows, committed, slots, width, budget, NODES: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < budget
    begin = tl.load(rows + request).to(tl.int64) * width + tl.load(committed + request)
    tl.store(slots + request * budget + node, tl.load(table + begin + node, mask=inside).to(tl.int64), mask=inside)


@triton.jit
def _pack(
    table, rows, lengths, indptr, slots, width, REQUESTS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr
):
    request, part = tl.program_id(0), tl.program_id(1)
    before = tl.arange(0, REQUESTS)
    begin = tl.sum(tl.load(lengths + before, mask=before < request, other=0).to(tl.int64), 0)
    length = tl.load(lengths + request).to(tl.int64)
    if part == 0:
        if request == 0:
            tl.store(indptr, 0)
        tl.store(indptr + request + 1, (begin + length).to(tl.int32))
    row = table + tl.load(rows + request).to(tl.int64) * width
    lane = tl.arange(0, BLOCK)
    for first in range(part * BLOCK, length, PROGRAMS * BLOCK):
        inside = first + lane < length
        tl.store(slots + begin + first + lane, tl.load(row + first + lane, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["live"])
def _bits(
    ancestors,
    depth,
    out_ancestors,
    out_causal,
    out_depth,
    stride_request,
    stride_node,
    stride_depth_request,
    stride_depth_node,
    live,
    nodes,
    NODES: tl.constexpr,
):
    request, word, words = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    node = tl.arange(0, NODES)
    inside = node < nodes
    in_pass = inside & (request < live)
    own_bit = tl.where(node // 32 == word, 1 << (node % 32), 0).to(tl.int32)
    bits = tl.load(ancestors + request * stride_request + node * stride_node + word, mask=in_pass, other=0)
    bits = tl.where(in_pass, bits, own_bit)
    # All bits of earlier words, the bits up to its own of a node's own word, none of later words.
    up_to_own = own_bit | (own_bit - 1)
    not_later = tl.where(node // 32 > word, -1, tl.where(node // 32 == word, up_to_own, 0))
    row = (request * nodes + node) * words + word
    tl.store(out_ancestors + row, bits, mask=inside)
    tl.store(out_causal + row, bits & not_later, mask=inside)
    if word == 0:
        levels = tl.load(depth + request * stride_depth_request + node * stride_depth_node, mask=in_pass, other=0)
        tl.store(out_depth + request * nodes + node, levels, mask=inside)
