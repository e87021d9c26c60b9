"""`fp8_linear` for few rows, in one CUDA launch that reads the weights once: `fp8_linear.cu` says how."""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from sgl_specflow.kernels.nvrtc import LoadedKernels, architecture, compile_cubin

SOURCE = Path(__file__).with_name("fp8_linear.cu")
DTYPES = (torch.bfloat16, torch.float16)  # by the number that the source is compiled for
MOST_ROWS = 64
LEAST_CAPABILITY = (9, 0)  # clusters
CLUSTERS = (1, 2, 4)
# As the source has them.
WARPS, CHUNK, STAGES = 8, 64, 2
THREADS = 32 * WARPS
_SUM_COST = 128  # a tile's sums over warps and blocks take about as long as this much of a block's depth


@dataclass(frozen=True)
class Variant:
    """What `fp8_linear.cu` is compiled for.

    Attributes:
        dtype: of x. row_tiles: tiles of 16 rows, 1, 2 or 4. cluster: blocks that share a tile's depth.
    """

    dtype: torch.dtype
    row_tiles: int
    cluster: int

    @property
    def tile(self) -> int:
        """Features that a cluster makes at a time."""
        return 128 if self.row_tiles <= 2 else 64

    @property
    def shared_bytes(self) -> int:
        """The source's Shared: rings, sums of the warps, and a block's sums where blocks share them."""
        rings = WARPS * STAGES * (self.tile // 8 + 4 * self.row_tiles) * 32 * 16
        round_stride = {1: 72, 2: 16, 4: 8}[self.row_tiles]
        sums = 16 * self.row_tiles * self.tile * 4 if self.cluster > 1 else 0
        return rings + WARPS * 16 * self.row_tiles * round_stride * 4 + sums

    def defines(self) -> dict[str, int]:
        return {
            "HALF": DTYPES.index(self.dtype),
            "ROW_TILES": self.row_tiles,
            "CLUSTER": self.cluster,
            "SHARED_BYTES": self.shared_bytes,
        }


MOST_SHARED_BYTES = max(Variant(DTYPES[0], tiles, cluster).shared_bytes for tiles in (1, 2, 4) for cluster in CLUSTERS)


class LinearArguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("x", "weight", "scale", "out", "row_stride", "rows", "features", "depth")
    ]


def fits(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether the kernel takes these: 1 to 64 rows of bfloat16 or float16, and everything that is copied 16 bytes at a
    time (rows of x and of the weight) at 16-byte addresses, whole."""
    rows, depth = x.shape
    apart = x.stride(0) if rows > 1 else 0
    aligned = x.data_ptr() % 16 == weight.data_ptr() % 16 == depth % 16 == apart % 8 == 0
    dense = x.stride(1) == 1 and weight.is_contiguous() and scale.is_contiguous() and scale.dtype == torch.float32
    return x.dtype in DTYPES and 1 <= rows <= MOST_ROWS and min(weight.shape) > 0 and aligned and dense


@functools.cache
def _device_serves(device: int) -> bool:
    properties = torch.cuda.get_device_properties(device)
    capable = (properties.major, properties.minor) >= LEAST_CAPABILITY
    return capable and properties.shared_memory_per_block_optin >= MOST_SHARED_BYTES


def serves(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether `fp8_linear_cuda` takes these: CUDA of compute capability 9.0 on with Hopper's shared memory, and `fits`."""
    return x.device.type == "cuda" and fits(x, weight, scale) and _device_serves(x.device.index)


def fp8_linear_cuda(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`fp8_linear` where `serves` says so: x [M, K] (M to 64), weight float8_e4m3fn [N, K], scale float32 [N] -> [M, N].

    One launch, no host synchronisation but at the first call of a variant, which compiles: call once before a CUDA graph
    is captured. The same input gives the same bits. NaN codes in the weight count as 480.
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    device = x.device.index
    variant = choose(x.dtype, *x.shape, weight.shape[0], _multiprocessors(device))
    with torch.cuda.device(device):
        kernels, at_a_time = _load(variant, device)
        blocks = variant.cluster * min(-(-weight.shape[0] // variant.tile), at_a_time)
        arguments, stream = linear_arguments(x, weight, scale, out), torch.cuda.current_stream().cuda_stream
        kernels.launch("fp8_linear", (blocks, 1, 1), THREADS, variant.shared_bytes, stream, arguments)
    return out


def linear_arguments(x, weight, scale, out) -> LinearArguments:
    """The kernel's argument, which keeps no reference to the tensors; all must outlive the launch."""
    addresses = (tensor.data_ptr() for tensor in (x, weight, scale, out))
    return LinearArguments(*addresses, x.stride(0), x.shape[0], *weight.shape)


@functools.cache
def choose(dtype: torch.dtype, rows: int, depth: int, features: int, multiprocessors: int) -> Variant:
    """The variant whose cluster size leaves the fewest multiprocessors idle: a block's time is its tiles' depth."""
    row_tiles = 1 if rows <= 16 else 2 if rows <= 32 else 4

    def block_time(variant: Variant) -> int:
        tiles = -(-features // variant.tile)
        turns = -(-tiles // max(multiprocessors // variant.cluster, 1))
        chunks = -(-depth // CHUNK)
        steps = -(-chunks // (variant.cluster * WARPS))
        return turns * (steps * WARPS * CHUNK + _SUM_COST)

    return min((Variant(dtype, row_tiles, cluster) for cluster in CLUSTERS), key=block_time)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _load(variant: Variant, device: int) -> tuple[LoadedKernels, int]:
    """The kernel, and how many of its clusters the device runs at a time."""
    torch.cuda.current_stream().synchronize()  # makes the device's context current before the driver loads into it
    kernels = LoadedKernels(compile_for(variant, architecture(device)))
    return kernels, kernels.clusters_at_a_time("fp8_linear", variant.cluster, THREADS, variant.shared_bytes)


def compile_for(variant: Variant, target: str) -> bytes:
    """Machine code for one variant."""
    return compile_cubin("fp8_linear", SOURCE.read_text(), {}, variant.defines(), target)
