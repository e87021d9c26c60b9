"""`tree_attention` for heads of 128 and 256 on Hopper, in one CUDA launch: `tree_attention.cu` says how."""

import ctypes
import functools
import math
from pathlib import Path

import torch
from sgl_specflow.kernels.nvrtc import LoadedKernels, architecture, compile_cubin, multiprocessors
from sgl_specflow.kernels.tree_attention.cuda_variant import DTYPES, Variant, choose, grid_of

SOURCE = Path(__file__).with_name("tree_attention.cu")
INDEX_DTYPES = (torch.int32, torch.int64)
LEAST_CAPABILITY = (9, 0)
HEAD_DIMS = (128, 256)
MOST_GROUP, MOST_NODES, MOST_REQUESTS = 16, 256, 16
HOPPERS_SHARED_BYTES = 227 << 10  # that a block may have
LOG2_E = math.log2(math.e)
NEEDS = (
    "a device of compute capability 9.0 on, q, k_pool and v_pool of one dtype, bfloat16 or float16, heads of 128 or 256, "
    f"to {MOST_GROUP} query heads a kv head, to {MOST_NODES} nodes and {MOST_REQUESTS} requests, no sliding window, float32 "
    "sinks, and rows of q, k_pool, v_pool and out at 16-byte addresses"
)


class AttentionArguments(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "q",
                "k_pool",
                "v_pool",
                "prefix_indptr",
                "prefix_slots",
                "node_slots",
                "ancestors",
                "sinks",
                "out",
                "q_token",
                "q_head",
                "k_slot",
                "k_head",
                "v_slot",
                "v_head",
                "out_token",
                "out_head",
                "ancestors_request",
                "ancestors_node",
                "nodes",
                "prefix_wide",
                "node_wide",
            )
        ),
        *((name, ctypes.c_double) for name in ("scale", "inner_scale", "v_scale")),
        ("parts", ctypes.c_int64),
    ]


def fits(
    q, k_pool, v_pool, prefix_indptr, prefix_slots, node_slots, ancestors, sliding_window=-1, sinks=None, out=None
) -> bool:
    """Whether the kernel takes these, by shapes, dtypes and strides alone.

    K and V of q's dtype, bfloat16 or float16, heads of 128 or 256, to 16 query heads a kv head, to 256 nodes and 16
    requests (of more, unequal lengths are better shared by the Triton kernel), no sliding window, and every row at a
    16-byte address.
    """
    num_requests, num_nodes = ancestors.shape[:2]
    group = q.shape[1] // k_pool.shape[1]
    same = q.dtype in DTYPES and q.dtype == k_pool.dtype == v_pool.dtype
    sizes = (
        q.shape[2] in HEAD_DIMS
        and q.shape[2] == k_pool.shape[2] == v_pool.shape[2]
        and 1 <= group <= MOST_GROUP
        and 1 <= num_nodes <= MOST_NODES
        and 1 <= num_requests <= MOST_REQUESTS
    )
    indices = (
        prefix_indptr.dtype == torch.int32
        and prefix_slots.dtype in INDEX_DTYPES
        and node_slots.dtype in INDEX_DTYPES
        and all(x.stride(-1) == 1 or x.shape[-1] <= 1 for x in (prefix_indptr, prefix_slots, node_slots, ancestors))
    )
    rows = (q, k_pool, v_pool) if out is None else (q, k_pool, v_pool, out)
    aligned = all(x.data_ptr() % 16 == 0 and x.stride(2) == 1 and _rows_aligned(x) for x in rows)
    sink = sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    return sliding_window < 0 and same and sizes and indices and aligned and sink


def _rows_aligned(x: torch.Tensor) -> bool:
    """16 bytes are 8 numbers; distances are ints in the source."""
    return x.stride(0) % 8 == x.stride(1) % 8 == 0 and max(x.stride(0), x.stride(1)) * 2 < 2**31


@functools.cache
def device_serves(device: int) -> bool:
    properties = torch.cuda.get_device_properties(device)
    capable = (properties.major, properties.minor) >= LEAST_CAPABILITY
    return capable and properties.shared_memory_per_block_optin >= HOPPERS_SHARED_BYTES


def supported(
    q, k_pool, v_pool, prefix_indptr, prefix_slots, node_slots, ancestors, sliding_window=-1, sinks=None, out=None
) -> bool:
    """Whether `tree_attention_cuda` takes these: CUDA of compute capability 9.0 on with Hopper's shared memory, and
    `fits`."""
    return (
        q.is_cuda
        and device_serves(q.device.index)
        and fits(q, k_pool, v_pool, prefix_indptr, prefix_slots, node_slots, ancestors, sliding_window, sinks, out)
    )


def tree_attention_cuda(
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
    variant: Variant | None = None,
) -> torch.Tensor:
    """The contract of `dispatch.tree_attention` where `supported` says so. depth is not read.

    One launch, no host synchronisation but at the first call of a variant and a shape, which compiles and allocates: call
    once before a CUDA graph is captured. The same input gives the same bits. variant: `chosen`'s. Where it has splits,
    launches whose scratch has the same size share it (`_scratch`), and launches on a device must not run at the same time:
    those of one stream, on which any number of graphs may be replayed, never do. Nothing may write prefix_indptr while the
    kernel runs: blocks that read other lengths than those that they wait for would wait for ever, or leave parts
    that a later launch takes for its own.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    device = q.device.index
    num_requests, num_nodes = ancestors.shape[:2]
    num_kv_heads = k_pool.shape[1]
    if variant is None:
        group = q.shape[1] // num_kv_heads
        variant = chosen(device, q.dtype, num_requests, num_nodes, num_kv_heads, group, q.shape[2], logit_cap > 0)
    grid = grid_of(variant, num_requests, num_nodes, num_kv_heads)
    arguments = attention_arguments(
        q,
        k_pool,
        v_pool,
        prefix_indptr,
        prefix_slots,
        node_slots,
        ancestors,
        scale,
        logit_cap,
        sinks,
        k_scale,
        v_scale,
        out,
        _scratch(device, scratch_bytes(variant, grid)) if variant.splits > 1 else None,
    )
    with torch.cuda.device(device):
        kernels, stream = _load(variant, device), torch.cuda.current_stream().cuda_stream
        kernels.launch(
            "tree_attention",
            grid,
            variant.threads,
            variant.shared_bytes,
            stream,
            arguments,
            together=variant.splits > 1,
        )
    return out


def attention_arguments(
    q,
    k_pool,
    v_pool,
    prefix_indptr,
    prefix_slots,
    node_slots,
    ancestors,
    scale,
    logit_cap,
    sinks,
    k_scale,
    v_scale,
    out,
    scratch=None,
) -> AttentionArguments:
    """The kernel's argument, which keeps no reference to the tensors; all must outlive the launch. scratch: of
    `scratch_bytes`, all 255, for a variant with splits."""
    tensors = (q, k_pool, v_pool, prefix_indptr, prefix_slots, node_slots, ancestors, sinks, out)
    inner_scale = scale * k_scale
    return AttentionArguments(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(2 * stride for tensor in (q, k_pool, v_pool, out) for stride in tensor.stride()[:2]),
        *ancestors.stride()[:2],
        ancestors.shape[1],
        int(prefix_slots.dtype == torch.int64),
        int(node_slots.dtype == torch.int64),
        LOG2_E * (logit_cap if logit_cap > 0 else inner_scale),
        inner_scale / logit_cap if logit_cap > 0 else 1.0,
        v_scale,
        0 if scratch is None else scratch.data_ptr(),
    )


def scratch_bytes(variant: Variant, grid: tuple[int, int, int]) -> int:
    """Of parts, one of a block."""
    return math.prod(grid) * variant.part_bytes


@functools.cache
def _scratch(device: int, size: int) -> torch.Tensor:
    """A device's launches with so many bytes of parts share these, never freed: graphs hold the address. Every launch leaves
    them as it finds them, all 255."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "tree_attention: the first call of a shape allocates scratch, and a CUDA graph is being captured; call "
                "once with the same shapes before the capture"
            )
        parts = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        torch.cuda.current_stream().synchronize()  # other streams find it so
    return parts


@functools.cache
def chosen(
    device: int,
    dtype: torch.dtype,
    num_requests: int,
    num_nodes: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    capped: bool,
) -> Variant:
    """`choose`'s for a device."""
    wgmma = architecture(device) == "sm_90a"
    return choose(dtype, num_requests, num_nodes, num_kv_heads, group, head_dim, capped, wgmma, blocks_at_once(device))


def blocks_at_once(device: int) -> int:
    """A multiprocessor runs one: its shared memory is not enough for two."""
    return multiprocessors(device)


def runs_at_once(q: torch.Tensor, k_pool: torch.Tensor, ancestors: torch.Tensor, logit_cap: float = 0.0) -> bool:
    """Whether all blocks of the chosen variant run together, and two or more share each of several requests, so that a long
    one among short ones is not one block's work. Else the Triton kernel, which deals tiles out evenly, serves."""
    (num_requests, num_nodes), num_kv_heads, device = ancestors.shape[:2], k_pool.shape[1], q.device.index
    group = q.shape[1] // num_kv_heads
    variant = chosen(device, q.dtype, num_requests, num_nodes, num_kv_heads, group, q.shape[2], logit_cap > 0)
    blocks = math.prod(grid_of(variant, num_requests, num_nodes, num_kv_heads))
    return blocks <= blocks_at_once(device) and variant.splits >= min(num_requests, 2)


@functools.cache
def _load(variant: Variant, device: int) -> LoadedKernels:
    torch.cuda.current_stream().synchronize()  # makes the device's context current before the driver loads into it
    return LoadedKernels(compile_for(variant, architecture(device)))


def compile_for(variant: Variant, target: str) -> bytes:
    """Machine code for one variant."""
    return compile_cubin("tree_attention", SOURCE.read_text(), {}, variant.defines(), target)
