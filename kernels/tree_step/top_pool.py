"""The many likeliest tokens of each row of logits, and the row's log-sum-exp, in two CUDA launches.

The logits are read once. A row is cut into groups; the tokens wanted lie in those whose greatest logits are greatest, and
only these are read again. `top_pool.cu` says how.
"""

import ctypes
import functools
from pathlib import Path

import torch
from sgl_specflow.kernels.nvrtc import LoadedKernels, architecture, compile_cubin

SOURCE = Path(__file__).with_name("top_pool.cu")
MAX_WIDTH = 2048
MAX_ROWS = 65535
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # by the number that the source is compiled for
VECTOR_BYTES = 16
GROUP_THREADS, PICK_THREADS = 128, 512
PICK_SHARED_BYTES = 75016  # the source's Shared
_FEWEST_GROUPS, _MOST_GROUPS = 5120, 8192


class PoolArguments(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *("logits", "keys", "sums", "values", "tokens", "total"),
                *("row_stride", "vocabulary", "width", "groups", "depth"),
            )
        ),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    ]


def serves(logits: torch.Tensor, width: int) -> bool:
    """CUDA of compute capability 8 on (warp-wide sums), and shapes and a dtype that `top_pool` takes."""
    if logits.device.type != "cuda" or not logits.shape[0] or logits.stride(1) != 1:
        return False
    small = width <= min(MAX_WIDTH, logits.shape[1]) and logits.shape[0] <= MAX_ROWS
    return small and logits.dtype in DTYPES and torch.cuda.get_device_capability(logits.device)[0] >= 8


def top_pool(
    logits: torch.Tensor, width: int, scale: float, cap: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`best_tokens` on CUDA, where `serves` says so.

    Args:
        logits: [N, V] bfloat16, float16 or float32, rows contiguous, any distance apart; N to 65535. scale, cap: as
            `best_tokens` has them.
        width: 1 to V, at most 2048.

    Returns:
        values float32 [N, width], tokens int64 [N, width], log-sum-exp float32 [N]. No host synchronisation.
    """
    arguments, outputs, _scratch = pool_arguments(logits, width, scale, cap)
    rows, device = logits.shape[0], logits.device.index
    blocks = -(-arguments.groups // GROUP_THREADS)
    with torch.cuda.device(device):
        kernels, stream = _load(logits.dtype, cap != 0.0, device), torch.cuda.current_stream().cuda_stream
        kernels.launch("top_pool_groups", (blocks, rows, 1), GROUP_THREADS, 0, stream, arguments)
        kernels.launch("top_pool_pick", (rows, 1, 1), PICK_THREADS, PICK_SHARED_BYTES, stream, arguments)
    return outputs


def pool_arguments(logits, width, scale, cap):
    """The kernels' argument, which keeps no reference to the tensors; the outputs; and the scratch. All must outlive the
    launches."""
    rows, vocabulary = logits.shape
    if logits.dtype not in DTYPES or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {logits.dtype} with strides {logits.stride()}; give float32, bfloat16 or float16 and contiguous "
            "rows"
        )
    if not (1 <= width <= min(MAX_WIDTH, vocabulary) and 1 <= rows <= MAX_ROWS):
        raise ValueError(
            f"{width} of {vocabulary} logits in {rows} rows; the kernel serves 1 to {MAX_WIDTH} of at least as many in "
            f"1 to {MAX_ROWS} rows"
        )
    groups, depth = grouping(vocabulary, width, logits.element_size())
    empty = functools.partial(torch.empty, device=logits.device)
    scratch = empty(rows, groups, dtype=torch.int64), empty(rows, -(-groups // 32), 2)
    outputs = empty(rows, width), empty(rows, width, dtype=torch.int64), empty(rows)
    addresses = (tensor.data_ptr() for tensor in (logits, *scratch, *outputs))
    return PoolArguments(*addresses, logits.stride(0), vocabulary, width, groups, depth, scale, cap), outputs, scratch


def grouping(vocabulary: int, width: int, element_size: int) -> tuple[int, int]:
    """Groups of a row and vectors of a group. More groups than tokens wanted, so that few of a group's tokens are wanted;
    enough to give the first launch threads; at most what the second holds."""
    lanes = VECTOR_BYTES // element_size
    vectors = -(-(vocabulary + lanes - 1) // lanes)  # a row may begin at any lane of its first vector
    depth = -(-vectors // min(max(_FEWEST_GROUPS, 8 * width), _MOST_GROUPS))
    return -(-vectors // depth), depth


@functools.cache
def _load(dtype: torch.dtype, capped: bool, device: int) -> LoadedKernels:
    torch.cuda.current_stream().synchronize()  # makes the device's context current before the driver loads into it
    return LoadedKernels(compile_for(dtype, capped, architecture(device)))


def compile_for(dtype: torch.dtype, capped: bool, target: str) -> bytes:
    """Machine code for logits of one dtype, with or without a soft cap."""
    return compile_cubin("top_pool", SOURCE.read_text(), {}, defines(dtype, capped), target)


def defines(dtype: torch.dtype, capped: bool) -> dict[str, int]:
    """What `top_pool.cu` is compiled for."""
    return {"DTYPE": DTYPES.index(dtype), "CAPPED": int(capped), "SHARED_BYTES": PICK_SHARED_BYTES}
