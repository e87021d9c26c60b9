"""Products of few rows with what stands before and behind them in a layer, in one CUDA launch: `row_linear.cu` says how."""

import ctypes
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from sgl_specflow.kernels.nvrtc import LoadedKernels, architecture, compile_cubin

SOURCE = Path(__file__).with_name("row_linear.cu")
HEADER = SOURCE.with_name("few_rows.cuh")
DTYPES = (torch.bfloat16, torch.float16)  # by the number that the source is compiled for
ROW_GROUPS = (1, 2, 4, 8)  # of 8 rows
MOST_ROWS = 64  # of a block; more are several blocks' for each tile
TILES = (8, 16, 24, 32, 48)
WARPS = (4, 8, 16)
CHUNK = 32  # as the source has it
HOPPERS_SHARED_BYTES = 227 << 10  # that a block may have
DEPENDENT_CAPABILITY = (9, 0)  # from which kernels can be launched ahead
EPSILON = 1e-6


@dataclass(frozen=True)
class Ends:
    """What a launch does beside the product.

    Attributes:
        norm: x's rows are divided by their root mean square first. bias: one is added to the product.
        gated: the features' first half are gates of the second; silu(gate) times feature comes out.
        residual: a tensor is added to what comes out.
    """

    norm: bool = False
    bias: bool = False
    gated: bool = False
    residual: bool = False


@dataclass(frozen=True)
class Variant:
    """What `row_linear.cu` is compiled for; the bits of an output depend on none of the last five but `warps`.

    Attributes:
        dtype: of everything. ends: see there. steps: chunks of the depth that a warp multiplies (`steps_of`).
        warps: of a block, which share the depth. row_groups: of 8 rows, that a block takes.
        tile: features that a block makes, gates counted. dependent: weights are asked for before the kernel before has
            ended, inside CUDA graphs.
    """

    dtype: torch.dtype
    ends: Ends
    steps: int
    warps: int
    row_groups: int
    tile: int
    dependent: bool = False

    @property
    def outputs(self) -> int:
        """Of a block."""
        return self.tile // 2 if self.ends.gated else self.tile

    @property
    def shared_bytes(self) -> int:
        """The source's Shared: a warp's weights or its sums, its sums of squares, biases, the residual."""
        rows, feature_tiles = 8 * self.row_groups, self.tile // 8
        sums = rows * 8 * (4 * feature_tiles + (0 if feature_tiles % 2 else 4))
        weights = self.steps * self.tile * CHUNK * 2
        return self.warps * (max(weights, sums) + rows * 4) + self.tile * 2 + rows * self.outputs * 2

    def defines(self) -> dict[str, int]:
        return {
            "HALF": DTYPES.index(self.dtype),
            "ROW_GROUPS": self.row_groups,
            "FEATURE_TILES": self.tile // 8,
            "WARPS": self.warps,
            "STEPS": self.steps,
            "NORM": int(self.ends.norm),
            "BIAS": int(self.ends.bias),
            "GATED": int(self.ends.gated),
            "RESIDUAL": int(self.ends.residual),
            "DEPENDENT": int(self.dependent),
            "SHARED_BYTES": self.shared_bytes,
        }


class RowLinearArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("x", "weight", "bias", "residual", "out", "rows", "outputs", "depth")),
        ("epsilon", ctypes.c_float),
    ]


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: bool = False,
    gated: bool = False,
    variant: Variant | None = None,
) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, with its ends, in one launch made for few rows: [..., N], or [..., N / 2].

    With y = x, or x / sqrt(mean(x^2) + 1e-6) of each row where `norm`; p = y @ weight.T + bias; q = p, or
    silu(p[..., : N / 2]) * p[..., N / 2 :] where `gated`; the result is q + residual. Sums are float32, and the result is
    rounded once, to the dtype of all tensors (bfloat16 or float16). More rows are cut into 64 at a time.

    No host synchronisation but at the first call of a variant, which compiles: call once before a CUDA graph is captured.
    The same row gives the same bits, whatever the others and however many. A `dependent` variant reads weight and bias
    ahead of the kernels before it, so no kernel of the same graph may write them; outside graphs it is launched like any.

    Raises ValueError for tensors that it does not take (`check`), and for a variant (None: `choose`'s) of another shape.
    """
    check(x, weight, bias, residual, gated)
    ends = Ends(norm, bias is not None, gated, residual is not None)
    device = x.device.index
    rows, (features, depth) = x.numel() // x.shape[-1], weight.shape
    variant = variant or choose(x.dtype, ends, rows, depth, features, *abilities(device))
    _check_variant(variant, x.dtype, ends, depth, device)
    out = x.new_empty(*x.shape[:-1], features // 2 if gated else features)
    with torch.cuda.device(device):
        kernels, stream = _load(variant, device), torch.cuda.current_stream().cuda_stream
        arguments = row_linear_arguments(x, weight, bias, residual, out)
        ahead = variant.dependent and torch.cuda.is_current_stream_capturing()
        threads = 32 * variant.warps
        grid = grid_of(variant, rows, out.shape[-1])
        kernels.launch("row_linear", grid, threads, variant.shared_bytes, stream, arguments, ahead)
    return out


def check(x, weight, bias=None, residual=None, gated: bool = False) -> None:
    """Raises ValueError, with the name of what is wrong, where the kernel does not take these."""
    features, depth = weight.shape
    outputs = features // 2 if gated else features
    wanted = {"x": (*x.shape[:-1], depth), "bias": (features,), "residual": (*x.shape[:-1], outputs)}
    if x.dtype not in DTYPES:
        raise ValueError(f"row_linear: x is {x.dtype}; bfloat16 and float16 are multiplied")
    if x.numel() == 0 or depth % 8 or features % (16 if gated else 8):
        raise ValueError(
            f"row_linear: x is {tuple(x.shape)}, weight {tuple(weight.shape)}; x must have rows, the depth (last) and the "
            "outputs be multiples of 8" + (", the features (first) of 16" if gated else "")
        )
    for name, tensor in {"x": x, "weight": weight, "bias": bias, "residual": residual}.items():
        if tensor is None:
            continue
        if tensor.shape != wanted.get(name, tensor.shape) or tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(
                f"row_linear: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; with x {x.dtype} on "
                f"{x.device} it must be {tuple(wanted.get(name, weight.shape))} of the same"
            )
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(f"row_linear: {name} must be contiguous, at an address that is a multiple of 16")


def _check_variant(variant: Variant, dtype: torch.dtype, ends: Ends, depth: int, device: int) -> None:
    if (variant.dtype, variant.ends, variant.steps) != (dtype, ends, steps_of(depth, variant.warps)):
        raise ValueError(f"row_linear: {dtype}, depth {depth}, {ends} is not what {variant} is for")
    there = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if variant.shared_bytes > there:
        raise ValueError(
            f"row_linear: {variant} needs {variant.shared_bytes} bytes of shared memory, {there} are there"
        )


def row_linear_arguments(x, weight, bias, residual, out) -> RowLinearArguments:
    """The kernel's argument, which keeps no reference to the tensors; all must outlive the launch."""
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in (x, weight, bias, residual, out))
    return RowLinearArguments(*addresses, x.numel() // x.shape[-1], out.shape[-1], x.shape[-1], EPSILON)


def grid_of(variant: Variant, rows: int, outputs: int) -> tuple[int, int, int]:
    return -(-outputs // variant.outputs), -(-rows // (8 * variant.row_groups)), 1


def steps_of(depth: int, warps: int) -> int:
    """Chunks of the depth that each warp multiplies."""
    return -(-depth // (CHUNK * warps))


def row_groups_of(rows: int) -> int:
    return next((groups for groups in ROW_GROUPS if rows <= 8 * groups), ROW_GROUPS[-1])


def block_time(variant: Variant, rows: int, depth: int, features: int, multiprocessors: int) -> int:
    """How long the kernel takes, about, in numbers that a multiprocessor reads: weights, and x, which each block reads."""
    across, along, _ = grid_of(variant, rows, features // 2 if variant.ends.gated else features)
    return -(-across * along // multiprocessors) * (variant.tile + 8 * variant.row_groups) * depth


@functools.cache
def choose(
    dtype: torch.dtype, ends: Ends, rows: int, depth: int, features: int, multiprocessors: int, dependent: bool
) -> Variant:
    """The variant of a shape: eight warps, and the tile of the least `block_time`.

    On an H200, for a Weaver's products of 8, 16 and 32 rows, within 13 % of the fastest variant, but for `down` at 8 and 16
    rows (21 % and 38 %): `python -m sgl_specflow.eval row_linear` measures all `alternatives`.
    """
    forms = _forms(dtype, ends, rows, depth, (8,), (dependent,))
    if not forms:
        raise ValueError(
            f"row_linear: weights of depth {depth} do not fit a block's shared memory, 8 features at a time"
        )
    return min(forms, key=lambda form: block_time(form, rows, depth, features, multiprocessors))


def alternatives(
    dtype: torch.dtype,
    ends: Ends,
    rows: int,
    depth: int,
    features: int,
    multiprocessors: int,
    dependent: bool,
    worst: float = 2.0,
) -> list[Variant]:
    """Variants worth a measurement: those whose `block_time` is at most `worst` times the least one's. dependent: whether
    the device can launch kernels ahead; both ways are then among them."""
    forms = _forms(dtype, ends, rows, depth, WARPS, (False, True) if dependent else (False,))
    times = {form: block_time(form, rows, depth, features, multiprocessors) for form in forms}
    return [form for form in forms if times[form] <= worst * min(times.values())]


def _forms(dtype: torch.dtype, ends: Ends, rows: int, depth: int, warps, dependent) -> list[Variant]:
    """Those that a block has shared memory and registers for."""
    tiles = [tile for tile in TILES if tile % 16 == 0 or not ends.gated]
    forms = [
        Variant(dtype, ends, steps_of(depth, count), count, row_groups_of(rows), tile, ahead)
        for count, tile, ahead in itertools.product(warps, tiles, dependent)
    ]
    return [
        form for form in forms if form.shared_bytes <= HOPPERS_SHARED_BYTES and _registers(form) <= 2048 // form.warps
    ]


def _registers(form: Variant) -> int:
    """Of a thread, about: its sums, what it holds of x, and the rest."""
    tiles = -(-form.row_groups // 2)
    return 4 * tiles * form.tile // 8 + 4 * min(form.steps, 16 // form.row_groups) * form.row_groups + 48


@functools.cache
def abilities(device: int) -> tuple[int, bool]:
    """How many multiprocessors it has, and whether it can launch kernels ahead."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor) >= DEPENDENT_CAPABILITY


@functools.cache
def _load(variant: Variant, device: int) -> LoadedKernels:
    torch.cuda.current_stream().synchronize()  # makes the device's context current before the driver loads into it
    return LoadedKernels(compile_for(variant, architecture(device)))


def compile_for(variant: Variant, target: str) -> bytes:
    """Machine code for one variant."""
    return compile_cubin("row_linear", SOURCE.read_text(), {HEADER.name: HEADER.read_text()}, variant.defines(), target)
