"""The best-first tree of marginals in one CUDA launch: `sgl_specflow.tree.build_tree`, bit for bit."""

import ctypes
import functools
from pathlib import Path

import torch
from sgl_specflow.kernels.nvrtc import LoadedKernels, architecture, compile_cubin

from sgl_specflow.tree import TokenTree, build_tree
from sgl_specflow.tree.token_tree import WORD_BITS

SOURCE = Path(__file__).with_name("tree_build.cu")
MAX_BUDGET, MAX_WIDTH, MAX_DEPTH = 256, 256, 255
THREADS = 256  # of a block
_SHARED_BYTES = 48 << 10


class BuildArguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("root", "log_probs", "tokens", "max_depth"),
            *("token", "parent", "depth", "ancestors", "node_count", "position"),
            *("committed", "depths", "width", "budget"),
        )
    ]


def empty_tree(requests: int, budget: int, device: torch.device) -> TokenTree:
    """Fields of a tree's shapes and dtypes, unset."""
    whole = functools.partial(torch.empty, dtype=torch.int64, device=device)
    words = -(-budget // WORD_BITS)
    return TokenTree(
        token=whole(requests, budget),
        parent=whole(requests, budget),
        depth=whole(requests, budget),
        ancestors=torch.empty(requests, budget, words, dtype=torch.int32, device=device),
        node_count=whole(requests),
    )


def tree_from_marginals(
    root_token: torch.Tensor,
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    budget: int,
    max_depth: torch.Tensor | None = None,
    *,
    out: TokenTree | None = None,
    committed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> TokenTree:
    """`build_tree` for candidates that come sorted: on CUDA one launch of one block a request, elsewhere in torch, and so on
    CUDA for more candidates than a block's shared memory holds. The tree is the same.

    Args:
        root_token: int64 [R]; log_probs: float32 [R, D, K], descending in K; tokens: int64 [R, D, K]; max_depth: int64
            [R] or None, as `build_tree` has them. CUDA serves budgets and K to 256 and D to 255.
        out: the tree to write, for CUDA graphs; a fresh one if None.
        committed, positions: int64 [R] and int64 [R, budget]; positions receives committed + depth where given.

    No host synchronisation; a CUDA graph may hold it.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    requests, depths, width = log_probs.shape
    if not _kernel_serves(log_probs, budget):
        tree = build_tree(root_token, log_probs, tokens, budget, max_depth)
        if positions is not None:
            positions.copy_(tree.positions(committed))
        return tree if out is None else out.copy_(tree)
    out = empty_tree(requests, budget, log_probs.device) if out is None else out
    arguments = build_arguments(root_token, log_probs, tokens, budget, max_depth, out, committed, positions)
    device = log_probs.device.index
    with torch.cuda.device(device):
        slots = out.ancestors.shape[2]
        _load(slots, device).launch(
            "tree_build", (requests, 1, 1), THREADS, shared_bytes(budget, depths, width), _stream(), arguments
        )
    return out


def _kernel_serves(log_probs: torch.Tensor, budget: int) -> bool:
    """CUDA of compute capability 8 on (warp-wide sums), and candidates that fit into a block's shared memory."""
    if log_probs.device.type != "cuda" or shared_bytes(budget, *log_probs.shape[1:]) > _SHARED_BYTES:
        return False
    return torch.cuda.get_device_capability(log_probs.device)[0] >= 8


def build_arguments(root_token, log_probs, tokens, budget, max_depth, out, committed, positions) -> BuildArguments:
    """The kernel's argument; it keeps no reference to the tensors, which must outlive the launch."""
    requests, depths, width = log_probs.shape
    wide = (requests, budget)
    expected = {
        "root_token": (root_token, torch.int64, (requests,)),
        "log_probs": (log_probs, torch.float32, (requests, depths, width)),
        "tokens": (tokens, torch.int64, (requests, depths, width)),
        "max_depth": (max_depth, torch.int64, (requests,)),
        "committed": (committed, torch.int64, (requests,)),
        "positions": (positions, torch.int64, wide),
        "out.token": (out.token, torch.int64, wide),
        "out.parent": (out.parent, torch.int64, wide),
        "out.depth": (out.depth, torch.int64, wide),
        "out.ancestors": (out.ancestors, torch.int32, (*wide, -(-budget // WORD_BITS))),
        "out.node_count": (out.node_count, torch.int64, (requests,)),
    }
    for name, (tensor, dtype, shape) in expected.items():
        if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, contiguous {tensor.is_contiguous()}; "
                f"give contiguous {dtype} {tuple(shape)}"
            )
    if not (1 <= budget <= MAX_BUDGET and 1 <= width <= MAX_WIDTH and 1 <= depths <= MAX_DEPTH):
        raise ValueError(
            f"budget {budget}, {width} candidates, {depths} depths; the kernel serves 1 to {MAX_BUDGET}, 1 to {MAX_WIDTH} "
            f"and 1 to {MAX_DEPTH}"
        )
    if shared_bytes(budget, depths, width) > _SHARED_BYTES:
        raise ValueError(f"{depths} depths of {width} candidates do not fit into a block's {_SHARED_BYTES} bytes")
    if (committed is None) != (positions is None):
        raise ValueError("committed and positions go together")
    address = lambda tensor: 0 if tensor is None else tensor.data_ptr()  # noqa: E731
    return BuildArguments(
        *map(address, (root_token, log_probs, tokens, max_depth)),
        *map(address, (out.token, out.parent, out.depth, out.ancestors, out.node_count, positions)),
        *(address(committed), depths, width, budget),
    )


def shared_bytes(budget: int, depths: int, width: int) -> int:
    """What one block needs; the source's layout."""
    kept = WORD_BITS * -(-budget // WORD_BITS)
    return 4 * (6 * kept + THREADS // 16 + 2 * depths + 2 + depths * width) + 6 * THREADS * _turns(kept - 1)


@functools.cache
def _turns(nodes: int) -> int:
    """Pairs of a place and a rank a thread, where `nodes` are kept of `MAX_WIDTH` candidates."""
    pairs = min(nodes, MAX_WIDTH) + sum(min(nodes // (place + 1) - 1, MAX_WIDTH) for place in range(1, nodes))
    return -(-(pairs + 31) // THREADS)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@functools.cache
def _load(slots: int, device: int) -> LoadedKernels:
    torch.cuda.current_stream().synchronize()  # makes the device's context current before the driver loads into it
    return LoadedKernels(compile_for(slots, architecture(device)))


def compile_for(slots: int, target: str) -> bytes:
    """Machine code for budgets of `slots` * 32 nodes."""
    return compile_cubin("tree_build", SOURCE.read_text(), {}, {"SLOTS": slots}, target)
