"""Builds and launches gdn_tree.cu: its compile-time shape, its argument structures, its two entries."""

import ctypes
import functools
import heapq
from dataclasses import dataclass
from pathlib import Path

import torch
from sgl_specflow.kernels.gdn_tree.stash import PendingPaths, TreeStash
from sgl_specflow.kernels.nvrtc import LoadedKernels, architecture, compile_cubin, multiprocessors

SOURCE = Path(__file__).with_name("gdn_tree.cu")
HEADERS = [SOURCE.with_name(name) for name in ("intrinsics.cuh", "layout.cuh", "state.cuh")]
TILE = 16
TILE_BYTES = 1536  # of X and Y
MAX_NODES = 256


@dataclass(frozen=True)
class KernelShape:
    """What the source is compiled for."""

    tiles: int  # of 16 nodes
    key_dim: int
    value_dim: int
    value_slice: int  # value columns of a block, 8 a warp
    state_bf16: bool
    shared_limit: int  # bytes a block of the device may use

    @property
    def warps(self) -> int:
        return self.value_slice // 8

    @property
    def slices(self) -> int:
        return self.value_dim // self.value_slice

    @property
    def panel(self) -> int:
        """Row tiles of X and Y, the longest, that shared memory holds at a time: as many as fit, 0 where not one does."""
        return next((panel for panel in range(self.tiles, 0, -1) if self._bytes(panel) <= self.shared_limit), 0)

    @property
    def shared_bytes(self) -> int:
        """SHARED_BYTES of gdn_tree.cu, which checks that both agree."""
        return self._bytes(max(self.panel, 1))

    @property
    def computes_whole_heads(self) -> bool:
        """WHOLE_HEADS of gdn_tree.cu: a block may compute all slices of a head, with one X and Y."""
        return self.slices > 1 and self.tiles > 4 and self.panel == self.tiles and not self._overlaid

    @property
    def _overlaid(self) -> bool:
        return self._bytes_apart(self.panel) > self.shared_limit

    def _bytes(self, panel: int) -> int:
        apart = self._bytes_apart(panel)
        if apart <= self.shared_limit:
            return apart
        tiles, staged = self._panel_bytes(panel), self._staged_bytes
        return apart - tiles - staged - self._value_bytes + max(tiles, staged)

    def _bytes_apart(self, panel: int) -> int:
        rows = 2 * self._nodes * self.key_dim * 2  # k and q
        vectors = self._nodes * (20 + self._words * 4) + self.tiles * 4
        return rows + self._path_bytes + vectors + self._panel_bytes(panel) + self._staged_bytes + self._value_bytes

    def _panel_bytes(self, panel: int) -> int:
        return (panel * self.tiles - panel * (panel - 1) // 2) * TILE_BYTES

    @property
    def _staged_bytes(self) -> int:
        return self._state_bytes + self._words * 1024  # the state and the sums of decays

    @property
    def _value_bytes(self) -> int:
        return self._nodes * self.value_slice * 2

    @property
    def _nodes(self) -> int:
        return self.tiles * TILE

    @property
    def _words(self) -> int:
        return -(-self._nodes // 32)  # of ancestor bits

    @property
    def _state_bytes(self) -> int:
        return self.value_slice * self.key_dim * (2 if self.state_bf16 else 4)

    @property
    def _path_bytes(self) -> int:
        return 16 * self.key_dim * 2 + 16 * (self.value_slice + 4) * 4 + 18 * 8

    @property
    def flush_bytes(self) -> int:
        """Shared memory of the flush: the block's state and sixteen nodes of the path."""
        return self._state_bytes + self._path_bytes

    @property
    def fits(self) -> bool:
        return self.panel > 0

    def defines(self) -> dict[str, int]:
        return {
            "GDN_TILES": self.tiles,
            "GDN_PANEL": max(self.panel, 1),
            "GDN_KEY_DIM": self.key_dim,
            "GDN_VALUE_DIM": self.value_dim,
            "GDN_SLICE": self.value_slice,
            "GDN_STATE_BF16": int(self.state_bf16),
            "GDN_SHARED_LIMIT": self.shared_limit,
            "GDN_SHARED_BYTES": self.shared_bytes,
        }


def select_shape(nodes: int, key_dim: int, value_dim: int, state_bf16: bool, shared_limit: int) -> KernelShape | None:
    """The shape for `nodes`: slices of 64 columns (two blocks a head fill the chip at one request), 32 where that does
    not fit. None where nothing fits."""
    for value_slice in (64, 32):
        shape = KernelShape(-(-nodes // TILE), key_dim, value_dim, value_slice, state_bf16, shared_limit)
        if shape.fits:
            return shape
    return None


class _Stash(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "u",
            "k",
            "g",
            "row",
            "parity",
            "length",
            "path",
            "rows",
            "nodes",
            "path_stride",
            "layer_u",
            "layer_k",
            "layer_g",
        )
    ]


class _Heads(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("key_heads", "value_heads", "group")]


class _State(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("data", "slots", "slot_stride", "layer_stride")]


class VerifyArguments(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "q",
                "k",
                "v",
                "a",
                "b",
                "A_log",
                "dt_bias",
                "ancestors",
                "node_count",
                "out",
            )
        ),
        ("state", _State),
        ("stash", _Stash),
        ("heads", _Heads),
        *(
            (name, ctypes.c_int64)
            for name in (
                "nodes",
                "ancestor_words",
                "whole",
                "q_token",
                "q_head",
                "k_token",
                "k_head",
                "v_token",
                "v_head",
                "a_token",
                "b_token",
                "A_log_is_bf16",
                "dt_bias_is_bf16",
            )
        ),
        ("scale", ctypes.c_double),
    ]


class FlushArguments(ctypes.Structure):
    _fields_ = [
        ("state", _State),
        ("stash", _Stash),
        ("heads", _Heads),
        ("destination", ctypes.c_int64),
        ("length", ctypes.c_int64),
    ]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _stash_fields(stash: TreeStash | None, rows: torch.Tensor | None, pending: PendingPaths | None) -> _Stash:
    if stash is None:
        return _Stash()
    per_layer = (x.stride(0) if stash.u.dim() == 5 else 0 for x in (stash.u, stash.k, stash.g))
    return _Stash(
        _address(stash.u),
        _address(stash.k),
        _address(stash.g),
        _address(rows),
        _address(pending.parity),
        _address(pending.length),
        _address(pending.path),
        stash.u.shape[-4],
        stash.u.shape[-2],
        pending.path.stride(0),
        *per_layer,
    )


def _heads(key_heads: int, value_heads: int) -> _Heads:
    return _Heads(key_heads, value_heads, value_heads // key_heads)


def verify_arguments(
    q, k, v, a, b, A_log, dt_bias, state, slots, ancestors, node_count, stash, rows, pending, scale, out
) -> VerifyArguments:
    """Keeps no reference to the tensors: they must outlive the launch."""
    return VerifyArguments(
        *map(_address, (q, k, v, a, b, A_log, dt_bias, ancestors, node_count, out)),
        _State(_address(state), _address(slots), state.stride(0), 0),
        _stash_fields(stash, rows, pending),
        _heads(k.shape[1], v.shape[1]),
        ancestors.shape[1],
        ancestors.stride(1),
        0,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        a.stride(0),
        b.stride(0),
        int(A_log.dtype == torch.bfloat16),
        int(dt_bias.dtype == torch.bfloat16),
        scale,
    )


def flush_arguments(state, slots, destination, stash, rows, pending, length) -> FlushArguments:
    return FlushArguments(
        _State(_address(state), _address(slots), state.stride(1), state.stride(0)),
        _stash_fields(stash, rows, pending),
        _heads(stash.k.shape[-3], stash.u.shape[-3]),
        _address(destination),
        _address(length),
    )


def verify_grid(shape: KernelShape, arguments: VerifyArguments, requests: int) -> tuple[int, int, int]:
    heads = arguments.heads
    return heads.group, requests, arguments.whole + (heads.key_heads - arguments.whole) * shape.slices


# The time of a block that computes two slices, over that of one slice (H200, 128 nodes). Each further one is taken to add as
# much.
WHOLE_HEAD_COST = 1.6


@functools.cache
def whole_key_heads(key_heads: int, heads_of_each: int, slices: int, multiprocessors: int) -> int:
    """For how many key heads blocks should compute all slices of a value head. heads_of_each: the value heads of a key
    head, of all requests. With the number returned everything is done soonest when each multiprocessor takes the next
    block, whole ones first; none is best of equals, since the kernel for slices alone is the faster one for those."""
    whole_cost = 1 + (slices - 1) * (WHOLE_HEAD_COST - 1)

    def time(whole: int) -> float:
        ends = [0.0] * multiprocessors
        for cost, count in (
            (whole_cost, whole * heads_of_each),
            (1.0, (key_heads - whole) * slices * heads_of_each),
        ):
            for _ in range(count):
                heapq.heapreplace(ends, ends[0] + cost)
        return max(ends)

    if key_heads * heads_of_each > 16 * multiprocessors:
        return key_heads
    return min(range(key_heads + 1), key=lambda whole: (time(whole), whole > 0, -whole))


@functools.cache
def shared_limit(device: int) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def load(shape: KernelShape, device: int) -> LoadedKernels:
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current before the driver loads into it
        return LoadedKernels(compile_for(shape, architecture(device)))


def compile_for(shape: KernelShape, target: str) -> bytes:
    return compile_cubin("gdn_tree", SOURCE.read_text(), headers(), shape.defines(), target)


def headers() -> dict[str, str]:
    """What the source includes, by name."""
    return {header.name: header.read_text() for header in HEADERS}


def launch_verify(shape: KernelShape, arguments: VerifyArguments, requests: int, device: int) -> None:
    if shape.computes_whole_heads:
        heads = arguments.heads
        arguments.whole = whole_key_heads(
            heads.key_heads, heads.group * requests, shape.slices, multiprocessors(device)
        )
    grid = verify_grid(shape, arguments, requests)
    name = "gdn_tree_verify_heads" if arguments.whole else "gdn_tree_verify"
    _launch(shape, name, grid, shape.shared_bytes, arguments, device)


def launch_flush(shape: KernelShape, arguments: FlushArguments, requests: int, layers: int, device: int) -> None:
    grid = (shape.slices * arguments.heads.value_heads, requests, layers)
    _launch(shape, "gdn_tree_flush", grid, shape.flush_bytes, arguments, device)


def _launch(shape, name, grid, shared_bytes, arguments, device) -> None:
    with torch.cuda.device(device):
        load(shape, device).launch(
            name, grid, shape.warps * 32, shared_bytes, torch.cuda.current_stream().cuda_stream, arguments
        )
