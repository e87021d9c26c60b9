"""Tree attention in Triton: split-prefix flash attention whose tree part is a bit test.

A request's keys are one sequence of `prefix length + N` entries, the committed prefix and then the tree's nodes, cut
into tiles of BLOCK_N. The query heads of one kv head times the nodes fill the rows of a program, so a K/V tile is read
once per kv head and row block. Tiles that lie wholly in the prefix need no mask; only the last few test ancestor bits.

Work is dealt out as (request, piece of its tiles). The number of programs depends on shapes alone; the pieces follow
`prefix_indptr`, which is read on the device, so one captured CUDA graph serves every prefix length. A request cut into
several pieces leaves normalised partial outputs and base-2 log-sum-exps in scratch, which a second kernel merges.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
MERGE_ROWS = 4
MERGE_ITEMS = 8
MAX_PIECES_PER_REQUEST = 128
INTERPRETER_MULTIPROCESSORS = 16


@dataclass(frozen=True)
class TreeAttentionConfig:
    """Tile sizes and launch options; `pieces` is how many pieces all requests' keys together are cut into, `min_tiles`
    the least that a piece holds where its request has as many: below it, merging costs more than cutting saves."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    pieces: int
    min_tiles: int = 4


@dataclass(frozen=True)
class TreeAttentionScratch:
    """Float32 buffers for partial results; one pair serves every layer, since layers run one after another."""

    partial_out: torch.Tensor
    partial_lse: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_requests: int,
        node_counts: Sequence[int],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "TreeAttentionScratch":
        """Buffers that suffice for up to max_requests requests with any of node_counts nodes each."""
        rows = max(
            work_items(
                num_requests,
                select_config(
                    num_requests, nodes, num_heads, num_kv_heads, head_dim, value_dim, dtype, torch.device(device)
                ),
            )
            * nodes
            * num_heads
            for num_requests in range(1, max_requests + 1)
            for nodes in node_counts
        )
        return cls(
            torch.empty(rows * value_dim, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )


@triton.jit
def _cut_requests(
    prefix_indptr,
    num_requests,
    num_nodes,
    pieces,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Per request, as vectors of BLOCK_R: its first tile, number of tiles, and number of work items.

    A request gets ceil(its tiles / share) items with share = ceil(all tiles / pieces), or MIN_TILES if that is more: at
    most pieces + num_requests - 1 items in all, and never more than one each when pieces == 1.
    """
    request = tl.arange(0, BLOCK_R)
    exists = request < num_requests
    start = tl.load(prefix_indptr + request, mask=exists, other=0)
    end = tl.load(prefix_indptr + request + 1, mask=exists, other=0)
    first_tile = tl.zeros_like(start)
    if WINDOW >= 0:  # A node's depth is at least 0, so nothing below length - WINDOW is in anyone's window.
        first_tile = tl.maximum(end - start - WINDOW, 0) // BLOCK_N
    tiles = tl.where(exists, tl.cdiv(end - start + num_nodes, BLOCK_N) - first_tile, 0)
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), pieces), MIN_TILES)
    return request, first_tile, tiles, tl.cdiv(tiles, share)


@triton.jit
def _pick(vector, chosen):
    return tl.sum(tl.where(chosen, vector, 0), 0)


@triton.jit
def _slots_of_tile(prefix_slots, node_slots, tile, length, num_nodes, BLOCK_N: tl.constexpr):
    """The keys of one tile, int32 and int64 [BLOCK_N]: number in the request's sequence, and pool slot (0 past its end)."""
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    slots = tl.load(prefix_slots + key, mask=key < length, other=0).to(tl.int64)
    in_tree = (key >= length) & (key < length + num_nodes)
    return key, slots + tl.load(node_slots + key - length, mask=in_tree, other=0).to(tl.int64)


@triton.jit
def _ancestor_bits(rows, row_exists, key_node, num_words, BLOCK_N: tl.constexpr):
    """int32 [BLOCK_M, BLOCK_N]: 1 where the row's node has key_node among its ancestors, for key_node in the tree.

    rows: pointers to each row's first word. A tile's nodes lie in few neighbouring words, each read once a row.
    """
    first = tl.maximum(tl.min(key_node, 0), 0) >> 5
    bits = tl.zeros([rows.shape[0], BLOCK_N], tl.int32)
    for step in tl.static_range(0, (BLOCK_N + 30) // 32 + 1):
        word = tl.load(rows + first + step, mask=row_exists & (first + step < num_words), other=0)
        here = (key_node >> 5) == first + step
        bits = tl.where(here[None, :], word[:, None], bits)
    return (bits >> (key_node & 31)[None, :]) & 1


@triton.jit
def _base2_logits(products, scale, logit_cap, HAS_CAP: tl.constexpr):
    """Logits in units of log 2, so that exp2 is the exponential. `scale` includes log2(e) unless there is a cap."""
    if HAS_CAP:
        return (2 * tl.sigmoid(2 * (products * scale / logit_cap)) - 1) * (logit_cap * LOG2_E)
    else:
        return products * scale


@triton.jit
def _tree_attention_kernel(
    q,
    k_pool,
    v_pool,
    prefix_indptr,
    prefix_slots,
    node_slots,
    ancestors,
    depth,
    sinks,
    out,
    partial_out,
    partial_lse,
    stride_q_token,
    stride_q_head,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    stride_ancestors_request,
    stride_ancestors_node,
    stride_depth_request,
    stride_out_token,
    stride_out_head,
    num_requests,
    num_nodes,
    pieces,
    scale,
    logit_cap,
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY_MERGE: tl.constexpr,
):
    if EARLY_MERGE:
        gdc_launch_dependents()
    work = tl.program_id(2)
    request_ids, first_tiles, tile_counts, item_counts = _cut_requests(
        prefix_indptr, num_requests, num_nodes, pieces, WINDOW, BLOCK_N, BLOCK_R, MIN_TILES
    )
    items_end = tl.cumsum(item_counts, 0)
    request = tl.sum((items_end <= work).to(tl.int32), 0)
    if request >= num_requests:
        return
    chosen = request_ids == request
    items = _pick(item_counts, chosen)
    tiles = _pick(tile_counts, chosen)
    first_tile = _pick(first_tiles, chosen)
    piece = work - _pick(items_end, chosen) + items
    # Rounded up, so that the last piece, whose masked tiles cost more, gets the fewest.
    tile_begin = first_tile + tl.cdiv(piece * tiles, items)
    tile_end = first_tile + tl.cdiv((piece + 1) * tiles, items)
    prefix_start = tl.load(prefix_indptr + request)
    length = tl.load(prefix_indptr + request + 1) - prefix_start
    prefix_slots += prefix_start
    node_slots += request * num_nodes
    ancestors += request.to(tl.int64) * stride_ancestors_request
    depth += request.to(tl.int64) * stride_depth_request

    kv_head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_exists = row < num_nodes * GROUP
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    token = request.to(tl.int64) * num_nodes + node
    key_lane = tl.arange(0, BLOCK_N)
    key_dim = tl.arange(0, HEAD_DIM)
    value_dim = tl.arange(0, VALUE_DIM)
    k_head = k_pool + kv_head * stride_k_head + key_dim[:, None]
    v_head = v_pool + kv_head * stride_v_head + value_dim[None, :]
    queries = tl.load(
        q + (token * stride_q_token + head * stride_q_head)[:, None] + key_dim[None, :],
        mask=row_exists[:, None],
        other=0.0,
    )

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)

    # Tiles that every row sees whole: in the prefix, and inside the window of the deepest node here.
    open_begin = tile_begin
    if WINDOW >= 0:
        query_depth = tl.load(depth + node, mask=row_exists, other=0).to(tl.int32)
        first_open = tl.cdiv(tl.maximum(length + tl.max(query_depth, 0) - WINDOW, 0), BLOCK_N)
        open_begin = tl.minimum(tl.maximum(tile_begin, first_open), tile_end)
    open_end = tl.maximum(tl.minimum(tile_end, length // BLOCK_N), open_begin)
    for tile in tl.range(open_begin, open_end):
        slots = tl.load(prefix_slots + tile * BLOCK_N + key_lane).to(tl.int64)
        keys = tl.load(k_head + slots[None, :] * stride_k_slot).to(queries.dtype)
        logits = tl.dot(queries, keys, input_precision=PRECISION)
        if HAS_CAP:
            logits = _base2_logits(logits, scale, logit_cap, HAS_CAP)
            new_peak = tl.maximum(peak, tl.max(logits, 1))
            weights = tl.exp2(logits - new_peak[:, None])
        else:
            new_peak = tl.maximum(peak, tl.max(logits, 1) * scale)
            weights = tl.exp2(logits * scale - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        mixed = mixed * decay[:, None]
        values = tl.load(v_head + slots[:, None] * stride_v_slot).to(queries.dtype)
        mixed = tl.dot(weights.to(queries.dtype), values, mixed, input_precision=PRECISION)
        peak = new_peak

    # The tiles before and after those. A tile's slots are read while the one before it is worked on.
    before = open_begin - tile_begin
    masked_tiles = before + tile_end - open_end
    first_masked = tl.where(before > 0, tile_begin, open_end)
    key, slots = _slots_of_tile(prefix_slots, node_slots, first_masked, length, num_nodes, BLOCK_N)
    for masked in tl.range(0, masked_tiles, num_stages=1):
        in_prefix = key < length
        key_node = key - length
        in_tree = (key_node >= 0) & (key_node < num_nodes)
        exists = in_prefix | in_tree
        keys = tl.load(k_head + slots[None, :] * stride_k_slot, mask=exists[None, :], other=0.0)
        values = tl.load(v_head + slots[:, None] * stride_v_slot, mask=exists[:, None], other=0.0)
        bits = _ancestor_bits(
            ancestors + node * stride_ancestors_node, row_exists, key_node, tl.cdiv(num_nodes, 32), BLOCK_N
        )
        allowed = in_prefix[None, :] | (in_tree[None, :] & (bits != 0))
        if WINDOW >= 0:
            # Positions less the prefix length: a node's is its depth, a prefix key's is negative.
            node_depth = tl.load(depth + key_node, mask=in_tree, other=0).to(tl.int32)
            key_depth = tl.where(in_tree, node_depth, key_node)
            allowed = allowed & (query_depth[:, None] - key_depth[None, :] <= WINDOW)
        following = tl.where(masked + 1 < before, tile_begin + masked + 1, open_end + masked + 1 - before)
        key, slots = _slots_of_tile(prefix_slots, node_slots, following, length, num_nodes, BLOCK_N)
        keys = keys.to(queries.dtype)
        values = values.to(queries.dtype)
        logits = tl.dot(queries, keys, input_precision=PRECISION)
        logits = tl.where(allowed, _base2_logits(logits, scale, logit_cap, HAS_CAP), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(logits - finite_peak[:, None])
        decay = tl.exp2(peak - finite_peak)
        total = total * decay + tl.sum(weights, 1)
        mixed = mixed * decay[:, None]
        mixed = tl.dot(weights.to(queries.dtype), values, mixed, input_precision=PRECISION)
        peak = new_peak

    if items == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=row_exists, other=0.0).to(tl.float32) * LOG2_E
            total += tl.exp2(sink - tl.where(peak == float("-inf"), 0.0, peak))
        mixed = mixed * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
        tl.store(
            out + (token * stride_out_token + head * stride_out_head)[:, None] + value_dim[None, :],
            mixed.to(out.dtype.element_ty),
            mask=row_exists[:, None],
        )
    else:
        num_heads = tl.num_programs(1) * GROUP
        scratch_row = (work.to(tl.int64) * num_nodes + node) * num_heads + head
        mixed = mixed * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
        tl.store(partial_out + (scratch_row * VALUE_DIM)[:, None] + value_dim[None, :], mixed, mask=row_exists[:, None])
        lse = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + scratch_row, lse, mask=row_exists)


@triton.jit
def _merge_kernel(
    prefix_indptr,
    sinks,
    out,
    partial_out,
    partial_lse,
    stride_out_token,
    stride_out_head,
    num_requests,
    num_nodes,
    pieces,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MIN_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    EARLY_MERGE: tl.constexpr,
):
    """Weigh a request's partial outputs by 2^lse. A request with one item was finished by the first kernel."""
    request = tl.program_id(1)
    request_ids, _, _, item_counts = _cut_requests(
        prefix_indptr, num_requests, num_nodes, pieces, WINDOW, BLOCK_N, BLOCK_R, MIN_TILES
    )
    items = _pick(item_counts, request_ids == request)
    if items == 1:
        if EARLY_MERGE:  # What comes after this kernel relies on it for the first one's end.
            gdc_wait()
        return
    first_item = _pick(item_counts, request_ids < request)

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_exists = row < num_nodes * NUM_HEADS
    value_dim = tl.arange(0, VALUE_DIM)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + row % NUM_HEADS).to(tl.float32) * LOG2_E
    # The sink is one more logit with value 0: it enters the sum here, once, as the initial peak.
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    mixed = tl.zeros([ROWS, VALUE_DIM], tl.float32)
    if EARLY_MERGE:  # Up to here this ran beside the first kernel; its results are visible from here on.
        gdc_wait()
    for item in tl.range(0, items, ITEMS):
        items_here = item + tl.arange(0, ITEMS)
        exists = (items_here < items)[:, None] & row_exists[None, :]
        scratch_row = (first_item + items_here).to(tl.int64)[:, None] * num_nodes * NUM_HEADS + row[None, :]
        lse = tl.load(partial_lse + scratch_row, mask=exists, other=float("-inf"))
        partial = tl.load(
            partial_out + (scratch_row * VALUE_DIM)[:, :, None] + value_dim[None, None, :],
            mask=exists[:, :, None],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lse - finite_peak[None, :])
        decay = tl.exp2(peak - finite_peak)
        total = total * decay + tl.sum(weights, 0)
        mixed = mixed * decay[:, None] + tl.sum(partial * weights[:, :, None], 0)
        peak = new_peak
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    token = request.to(tl.int64) * num_nodes + row // NUM_HEADS
    tl.store(
        out + (token * stride_out_token + (row % NUM_HEADS) * stride_out_head)[:, None] + value_dim[None, :],
        mixed.to(out.dtype.element_ty),
        mask=row_exists[:, None],
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _has_dependent_launch(device: torch.device) -> bool:
    """Hopper on: a kernel may start while the one before it finishes (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _tile_shape(rows: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(block_m, block_n, num_warps, num_stages) for `rows` query rows a kv head and the larger head dimension.

    A tile's slots are read before its keys: of five stages Triton's pipeliner gives two to the slots and two to K and V.
    """
    if dtype == torch.float32:  # IEEE products run on the CUDA cores; larger tiles spill registers.
        return (16, 32, 8, 2) if dim <= 64 else (16, 16, 8, 2)
    block_n = 64 if dim <= 128 else 32
    if rows <= 16:
        return 16, block_n, 4, 5
    if dim > 128:
        return 64, block_n, 8, 5
    return (64, block_n, 4, 5) if rows <= 64 else (128, block_n, 8, 5)


@functools.cache
def select_config(
    num_requests: int,
    num_nodes: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TreeAttentionConfig:
    """The fixed choice of tiles and pieces for a shape; prefix lengths do not enter, so that a CUDA graph holds.

    The pieces a request are the fewest that leave whole waves of programs, as if all prefixes were equally long:
    `waves / pieces` is the time, `programs / multiprocessors` what it tends to.
    """
    rows = num_nodes * num_heads // num_kv_heads
    block_m, block_n, num_warps, num_stages = _tile_shape(rows, max(head_dim, value_dim), dtype)
    programs = num_requests * num_kv_heads * triton.cdiv(rows, block_m)
    multiprocessors = _multiprocessors(device)

    def time(pieces: int) -> float:
        return triton.cdiv(programs * pieces, multiprocessors) / pieces

    choices = range(1, MAX_PIECES_PER_REQUEST + 1)
    bound = 1.08 * programs / multiprocessors
    pieces = next((count for count in choices if time(count) <= bound), None) or min(choices, key=time)
    return TreeAttentionConfig(block_m, block_n, num_warps, num_stages, pieces * num_requests)


def work_items(num_requests: int, config: TreeAttentionConfig) -> int:
    """Programs along the work axis, and rows of scratch: the most items that `_cut_requests` can hand out."""
    return config.pieces + num_requests - 1


def tree_attention_triton(
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
    scratch: TreeAttentionScratch | None = None,
    config: TreeAttentionConfig | None = None,
) -> torch.Tensor:
    """The contract of `dispatch.tree_attention`, which checks it. Allocates by shape alone and never synchronises."""
    num_requests, num_nodes = ancestors.shape[:2]
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, value_dim = v_pool.shape[1:]
    if config is None:
        config = select_config(num_requests, num_nodes, num_heads, num_kv_heads, head_dim, value_dim, q.dtype, q.device)
    if out is None:
        out = q.new_empty(q.shape[0], num_heads, value_dim)
    items = work_items(num_requests, config)
    may_split = config.pieces > 1
    if scratch is None:
        scratch_rows = items * num_nodes * num_heads if may_split else 0
        scratch = TreeAttentionScratch(
            torch.empty(scratch_rows * value_dim, dtype=torch.float32, device=q.device),
            torch.empty(scratch_rows, dtype=torch.float32, device=q.device),
        )
    elif may_split and scratch.partial_lse.numel() < items * num_nodes * num_heads:
        raise ValueError(
            f"tree_attention: scratch has {scratch.partial_lse.numel()} rows, this call needs "
            f"{items * num_nodes * num_heads}; allocate it for {num_requests} requests of {num_nodes} nodes"
        )
    early_merge = may_split and _has_dependent_launch(q.device)
    group = num_heads // num_kv_heads
    block_r = max(32, triton.next_power_of_2(num_requests))
    _tree_attention_kernel[(triton.cdiv(num_nodes * group, config.block_m), num_kv_heads, items)](
        q,
        k_pool,
        v_pool,
        prefix_indptr,
        prefix_slots,
        node_slots,
        ancestors,
        depth,
        sinks,
        out,
        scratch.partial_out,
        scratch.partial_lse,
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        v_pool.stride(0),
        v_pool.stride(1),
        ancestors.stride(0),
        ancestors.stride(1),
        depth.stride(0),
        out.stride(0),
        out.stride(1),
        num_requests,
        num_nodes,
        config.pieces,
        scale * k_scale * (1.0 if logit_cap > 0 else LOG2_E.value),
        logit_cap,
        v_scale,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        WINDOW=sliding_window,
        HAS_CAP=logit_cap > 0,
        HAS_SINKS=sinks is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_R=block_r,
        MIN_TILES=config.min_tiles,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        EARLY_MERGE=early_merge,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if may_split:
        _merge_kernel[(triton.cdiv(num_nodes * num_heads, MERGE_ROWS), num_requests)](
            prefix_indptr,
            sinks,
            out,
            scratch.partial_out,
            scratch.partial_lse,
            out.stride(0),
            out.stride(1),
            num_requests,
            num_nodes,
            config.pieces,
            NUM_HEADS=num_heads,
            VALUE_DIM=value_dim,
            WINDOW=sliding_window,
            HAS_SINKS=sinks is not None,
            BLOCK_N=config.block_n,
            BLOCK_R=block_r,
            MIN_TILES=config.min_tiles,
            ROWS=MERGE_ROWS,
            ITEMS=MERGE_ITEMS,
            EARLY_MERGE=early_merge,
            num_warps=4,
            **({"launch_pdl": True} if early_merge else {}),
        )
    return out
