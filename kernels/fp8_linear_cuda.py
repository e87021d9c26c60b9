"""`fp8_linear` for few rows, in one CUDA launch that reads the weights once: `fp8_linear.cu` says how."""

import ctypes
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from sgl_specflow.kernels.nvrtc import LoadedKernels, architecture, compile_cubin, multiprocessors

SOURCE = Path(__file__).with_name("fp8_linear.cu")
HEADER = SOURCE.with_name("few_rows.cuh")
DTYPES = (torch.bfloat16, torch.float16)  # by the number that the source is compiled for
MOST_ROWS = 64
LEAST_CAPABILITY = (9, 0)  # clusters
CLUSTERS = (1, 2, 4)
TILES = (32, 64, 128)
MOST_STAGES = 6
# As the source has them.
WARPS, CHUNK = 8, 64
THREADS = 32 * WARPS
HOPPERS_SHARED_BYTES = 227 << 10  # that a block may have
_TURN_COST = {1: 4000, 2: 19000, 4: 67000}  # by cluster, in bytes of weights: 28000 are a microsecond
_SUM_COST = 128  # a tile's sums over warps and blocks take about as long as this much of a block's depth


@dataclass(frozen=True)
class Variant:
    """What `fp8_linear.cu` is compiled for; the bits of a product depend on none but `cluster` and `row_tiles`.

    Attributes:
        dtype: of x. row_tiles: tiles of 16 rows, 1, 2 or 4. cluster: blocks that share a tile's depth.
        tile: features that a cluster makes at a time, 32, 64 or 128. stages: chunks of a warp's ring.
        kept_steps: 0, or the steps of the depth that this variant is for (`steps_of`): x is then copied once a block.
        dependent: weights are asked for before the kernel before has ended, inside CUDA graphs.
    """

    dtype: torch.dtype
    row_tiles: int
    cluster: int
    tile: int
    stages: int = 2
    kept_steps: int = 0
    dependent: bool = False

    @property
    def sums_at_a_time(self) -> int:
        """Feature tiles whose sums of all warps lie in shared memory together: as many as fit."""
        most = min({1: 8, 2: 2, 4: 1}[self.row_tiles], self.tile // 8)
        return most if most <= 4 or self._shared_bytes(most) <= HOPPERS_SHARED_BYTES else 4

    @property
    def shared_bytes(self) -> int:
        return self._shared_bytes(self.sums_at_a_time)

    def _shared_bytes(self, sums_at_a_time: int) -> int:
        """The source's Shared: weights, x, sums of the warps, and a block's sums where blocks share them."""
        rows = 16 * self.row_tiles
        weights = WARPS * self.stages * self.tile * CHUNK
        x = WARPS * (self.kept_steps or self.stages) * rows * CHUNK * 2
        parts = WARPS * rows * (8 * sums_at_a_time + (8 if self.row_tiles == 1 else 0)) * 4
        sums = rows * self.tile * 4 if self.cluster > 1 else 0
        return weights + x + parts + sums

    def defines(self) -> dict[str, int]:
        return {
            "HALF": DTYPES.index(self.dtype),
            "ROW_TILES": self.row_tiles,
            "CLUSTER": self.cluster,
            "FEATURE_TILES": self.tile // 8,
            "STAGES": self.stages,
            "KEPT_STEPS": self.kept_steps,
            "ROUND": self.sums_at_a_time,
            "DEPENDENT": int(self.dependent),
            "SHARED_BYTES": self.shared_bytes,
        }


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
    return capable and properties.shared_memory_per_block_optin >= HOPPERS_SHARED_BYTES


def serves(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether `fp8_linear_cuda` takes these: CUDA of compute capability 9.0 on with Hopper's shared memory, and `fits`."""
    return x.device.type == "cuda" and fits(x, weight, scale) and _device_serves(x.device.index)


def fp8_linear_cuda(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, variant: Variant | None = None
) -> torch.Tensor:
    """`fp8_linear` where `serves` says so: x [M, K] (M to 64), weight float8_e4m3fn [N, K], scale float32 [N] -> [M, N].

    One launch, no host synchronisation but at the first call of a variant, which compiles: call once before a CUDA graph
    is captured. The same input gives the same bits. NaN codes in the weight count as 480. variant: `choose`'s.

    A `dependent` variant reads weights ahead of the kernels before it, so no kernel of the same CUDA graph may write them;
    outside graphs it is launched like any kernel.
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    device = x.device.index
    variant = variant or choose(x.dtype, *x.shape, weight.shape[0], multiprocessors(device))
    _check(variant, x)
    with torch.cuda.device(device):
        kernels, at_a_time = _load(variant, device)
        blocks = variant.cluster * min(-(-weight.shape[0] // variant.tile), at_a_time)
        arguments, stream = linear_arguments(x, weight, scale, out), torch.cuda.current_stream().cuda_stream
        ahead = variant.dependent and torch.cuda.is_current_stream_capturing()
        kernels.launch("fp8_linear", (blocks, 1, 1), THREADS, variant.shared_bytes, stream, arguments, ahead)
    return out


def _check(variant: Variant, x: torch.Tensor) -> None:
    wanted = x.dtype, row_tiles_of(len(x)), steps_of(x.shape[1], variant.cluster)
    if (variant.dtype, variant.row_tiles, variant.kept_steps or wanted[2]) != wanted:
        raise ValueError(f"fp8_linear: x {x.dtype} {tuple(x.shape)} is not what {variant} is for")
    if variant.shared_bytes > HOPPERS_SHARED_BYTES:
        raise ValueError(
            f"fp8_linear: {variant} needs {variant.shared_bytes} bytes of shared memory, {HOPPERS_SHARED_BYTES} are there: "
            "take fewer stages, or do not keep x"
        )


def linear_arguments(x, weight, scale, out) -> LinearArguments:
    """The kernel's argument, which keeps no reference to the tensors; all must outlive the launch."""
    addresses = (tensor.data_ptr() for tensor in (x, weight, scale, out))
    return LinearArguments(*addresses, x.stride(0), x.shape[0], *weight.shape)


def steps_of(depth: int, cluster: int) -> int:
    """Chunks of the depth that each warp goes through."""
    return -(-depth // (CHUNK * cluster * WARPS))


def _tiles_of_a_block(features: int, tile: int, cluster: int, multiprocessors: int) -> int:
    """The most that one block goes through, of those that run together."""
    tiles = -(-features // tile)
    return -(-tiles // max(multiprocessors // cluster, 1))


def block_time(variant: Variant, depth: int, features: int, multiprocessors: int) -> int:
    """How long the kernel takes, about, in bytes that a block copies: weights, and x, which comes from the L2 cache."""
    turns = _tiles_of_a_block(features, variant.tile, variant.cluster, multiprocessors)
    own_depth = steps_of(depth, variant.cluster) * WARPS * CHUNK
    x_bytes = 16 * variant.row_tiles * 2 * own_depth
    return turns * (variant.tile * (own_depth + _SUM_COST)) + (1 if variant.kept_steps else turns) * x_bytes


def _few_rows_time(variant: Variant, depth: int, features: int, multiprocessors: int) -> int:
    """`block_time` up to 16 rows, within a tenth of what was measured behind another kernel, save a constant 5 us."""
    turns = _tiles_of_a_block(features, variant.tile, variant.cluster, multiprocessors)
    own_depth = steps_of(depth, variant.cluster) * WARPS * CHUNK
    return turns * (variant.tile * own_depth + _TURN_COST[variant.cluster])


@functools.cache
def choose(dtype: torch.dtype, rows: int, depth: int, features: int, multiprocessors: int) -> Variant:
    """The variant of a shape, two stages deep, as measured on an H200 (eval/results/fp8_linear_variants_h200.json).

    Up to 16 rows a block's time is that of its weights and of its turns, of which each waits for the cluster's other blocks:
    copies of x hide behind both. With more rows x counts too (`block_time`; measured with the widest tiles only).
    `python -m sgl_specflow.eval fp8_linear --sweep` measures all `alternatives`.
    """
    row_tiles = row_tiles_of(rows)
    if row_tiles == 1:
        forms = [Variant(dtype, row_tiles, cluster, tile) for cluster in CLUSTERS for tile in TILES]
        return min(forms, key=lambda form: _few_rows_time(form, depth, features, multiprocessors))
    tile = 128 if row_tiles <= 2 else 64
    of_clusters = [Variant(dtype, row_tiles, cluster, tile) for cluster in CLUSTERS]
    return min(of_clusters, key=lambda variant: block_time(variant, depth, features, multiprocessors))


def row_tiles_of(rows: int) -> int:
    return 1 if rows <= 16 else 2 if rows <= 32 else 4


def alternatives(
    dtype: torch.dtype, rows: int, depth: int, features: int, multiprocessors: int, worst: float = 1.5
) -> list[Variant]:
    """Variants worth a measurement: all that fit a block's shared memory and whose `block_time` is at most `worst` times
    the best one's, or `choose`'s. Rings are of two stages, or as deep as fits and as there are steps."""
    row_tiles, found = row_tiles_of(rows), []
    for cluster, tile, keeps, dependent in itertools.product(CLUSTERS, TILES, (False, True), (False, True)):
        if tile * row_tiles > 256:
            continue  # more sums than registers
        kept = steps_of(depth, cluster) if keeps else 0
        turns = _tiles_of_a_block(features, tile, cluster, multiprocessors)
        most = max(2, min(MOST_STAGES, turns * steps_of(depth, cluster)))
        deep = [Variant(dtype, row_tiles, cluster, tile, stages, kept, dependent) for stages in range(2, most + 1)]
        fitting = [variant for variant in deep if variant.shared_bytes <= HOPPERS_SHARED_BYTES]
        found += [fitting[0], fitting[-1]] if len(fitting) > 1 else fitting
    times = {variant: block_time(variant, depth, features, multiprocessors) for variant in found}
    chosen = times[choose(dtype, rows, depth, features, multiprocessors)]
    return [variant for variant in found if times[variant] <= max(chosen, worst * min(times.values()))]


@functools.cache
def _load(variant: Variant, device: int) -> tuple[LoadedKernels, int]:
    """The kernel, and how many of its clusters the device runs at a time."""
    torch.cuda.current_stream().synchronize()  # makes the device's context current before the driver loads into it
    kernels = LoadedKernels(compile_for(variant, architecture(device)))
    return kernels, kernels.clusters_at_a_time("fp8_linear", variant.cluster, THREADS, variant.shared_bytes)


def compile_for(variant: Variant, target: str) -> bytes:
    """Machine code for one variant."""
    return compile_cubin("fp8_linear", SOURCE.read_text(), {HEADER.name: HEADER.read_text()}, variant.defines(), target)
