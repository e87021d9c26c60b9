"""What `tree_attention.cu` is compiled for, and which of its variants a shape takes: by a small model of the time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

DTYPES = (torch.bfloat16, torch.float16)  # by the number that the source is compiled for
MOST_PORTABLE_CLUSTER, MOST_SPLITS = 8, 8
# As the source has them.
THREADS, TILE, WORDS = 256, 64, 11

# What a block takes, roughly, in microseconds on an H200: to begin and to merge, a tile of 128 rows of 128, two of 64 rows.
BLOCK_TIME, TILE_TIME, PAIR_TIME = 7.5, 1.5, 1.1
# What splitting adds: writing to scratch, a ticket and reading; bytes that a block reads of scratch in a microsecond.
SPLIT_TIME, SCRATCH_SPEED = 2.5, 1e5
# Tokens. A shape is split for the time at LONG_PREFIX, where that costs at most SLOWER at each of OTHER_PREFIXES, and where
# without splits its blocks are not more than FULL of the device's.
ASSUMED_PREFIX, LONG_PREFIX, OTHER_PREFIXES = 4096, 32768, (128, 1024, 4096)
SLOWER, FULL = 1.05, 2 / 3


@dataclass(frozen=True)
class Variant:
    """What `tree_attention.cu` is compiled for.

    Attributes:
        dtype: of q, k and v. group: query heads of a kv head. row_groups: 64 rows of a block each, 1 or 2; with 1 the
            block's other half works on other keys. cluster: blocks that share a request's keys.
        capped: whether logits are capped. wgmma: products by Hopper's instruction, on sm_90a alone, and a pipeline.
        stages: turns of the ring, 2 at least; with wgmma half turns, 4 at least. 0: `ring`'s choice.
        dependent: launched ahead inside CUDA graphs. head_dim: 128, or 256 with row_groups 2.
        splits: clusters that share the keys of a request that has, nodes included, `split_from` or more; 0: `threshold`'s
            choice.
    """

    dtype: torch.dtype
    group: int
    row_groups: int
    cluster: int
    capped: bool = False
    wgmma: bool = False
    stages: int = 0
    dependent: bool = False
    head_dim: int = 128
    splits: int = 1
    split_from: int = 0

    @property
    def ring(self) -> int:
        """Stages: those asked for, or as many as are worth their memory (a turn of one row group is twice as long)."""
        return self.stages or (1 + self.wgmma) * (2 if self.head_dim == 256 else 5 if self.row_groups == 2 else 3)

    @property
    def threads(self) -> int:
        return THREADS + 128 * self.wgmma

    @property
    def rows(self) -> int:
        return 64 * self.row_groups

    @property
    def key_groups(self) -> int:
        """Tiles of a turn."""
        return 2 // self.row_groups

    @property
    def shared_bytes(self) -> int:
        """The source's Shared: the ring and, over it, sums; q and ancestor bits."""
        ring = self.ring * self.key_groups * TILE * self.head_dim * 2 * (1 if self.wgmma else 2)
        sums = self.key_groups * self.rows * ((self.head_dim + 8) * 4 + 8)
        barriers = 16 * self.ring if self.wgmma else 0
        return max(ring, sums) + self.rows * (self.head_dim * 2 + WORDS * 4) + barriers

    @property
    def part_floats(self) -> int:
        """The source's Part: sums of a row block, peaks and totals."""
        return self.rows * (self.head_dim + 2)

    @property
    def turn_time(self) -> float:
        return PAIR_TIME if self.row_groups == 1 else TILE_TIME * self.head_dim / 128

    @property
    def split_time(self) -> float:
        """What splitting adds to a request that is split."""
        return SPLIT_TIME + 4 * self.part_floats * self.splits / self.cluster / SCRATCH_SPEED

    @property
    def threshold(self) -> int:
        """Keys from which a request is split: those asked for, or as many as make splitting worth its time."""
        if self.split_from or self.splits == 1:
            return self.split_from
        saved = self.turn_time / (self.key_groups * TILE) * (1 - 1 / self.splits) / self.cluster  # a key
        return math.ceil(self.split_time / saved)

    def time(self, keys: int) -> float:
        """Of a request of so many keys, nodes included, where all blocks run at once."""
        splits = self.splits if keys >= self.threshold else 1
        tiles = -(-keys // TILE)
        turns = -(-tiles // (self.cluster * splits * self.key_groups))
        return BLOCK_TIME + turns * self.turn_time + (self.split_time if splits > 1 else 0.0)

    def defines(self) -> dict[str, int]:
        return {
            "HALF": DTYPES.index(self.dtype),
            "HEAD_DIM": self.head_dim,
            "GROUP": self.group,
            "ROW_GROUPS": self.row_groups,
            "CLUSTER": self.cluster,
            "SPLITS": self.splits,
            "SPLIT_FROM": self.threshold,
            "STAGES": self.ring,
            "CAPPED": int(self.capped),
            "WGMMA": int(self.wgmma),
            "DEPENDENT": int(self.dependent),
            "SHARED_BYTES": self.shared_bytes,
        }


def grid_of(variant: Variant, num_requests: int, num_nodes: int, num_kv_heads: int) -> tuple[int, int, int]:
    row_blocks = -(-num_nodes * variant.group // variant.rows)
    return variant.cluster * variant.splits * row_blocks, num_kv_heads, num_requests


def clusters_of(variant: Variant, num_requests: int, num_nodes: int, num_kv_heads: int) -> int:
    return math.prod(grid_of(variant, num_requests, num_nodes, num_kv_heads)) // variant.cluster


def choose(
    dtype: torch.dtype,
    num_requests: int,
    num_nodes: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    capped: bool,
    wgmma: bool,
    clusters_at_a_time: Callable[[int], int],
) -> Variant:
    """The variant of a shape; prefix lengths do not enter, so that a CUDA graph holds.

    The largest cluster of which all run at once; where no size does, the one that takes least time, its waves counted.
    Several requests are cut in 2 at least, so that a long one among short ones is not one block's work. Where that
    leaves much of the device idle, `_split`, into MOST_SPLITS at most.
    clusters_at_a_time: of a size, how many clusters the device runs together.
    """
    row_groups = 1 if num_nodes * group <= 64 and head_dim == 128 else 2
    least = 2 if num_requests > 1 else 1
    sizes = [size for size in range(least, MOST_PORTABLE_CLUSTER + 1) if clusters_at_a_time(size)]
    one = Variant(dtype, group, row_groups, 1, capped, wgmma, head_dim=head_dim)
    clusters = clusters_of(one, num_requests, num_nodes, num_kv_heads)
    tiles = -(-(ASSUMED_PREFIX + num_nodes) // TILE)

    def time(size: int) -> float:
        return -(-clusters // clusters_at_a_time(size)) * (BLOCK_TIME + TILE_TIME * head_dim / 128 * tiles / size)

    def at_once(splits: int) -> list[Variant]:
        largest = [size for size in sizes if clusters * splits <= clusters_at_a_time(size)][-1:]
        return [replace(one, cluster=size, splits=splits) for size in largest]

    if not at_once(1):
        return replace(one, cluster=min(sizes, key=time))
    (whole,) = at_once(1)
    if clusters * whole.cluster > FULL * clusters_at_a_time(1):
        return whole
    return _split(whole, [variant for splits in range(2, MOST_SPLITS + 1) for variant in at_once(splits)], num_nodes)


def _split(whole: Variant, variants: list[Variant], num_nodes: int) -> Variant:
    """The fastest at a long prefix of `whole`, which has no splits, and those variants that keep up with it at shorter
    ones: splits mean smaller clusters, which are all that short requests have."""
    allowed = [
        variant
        for variant in variants
        if all(variant.time(prefix + num_nodes) <= SLOWER * whole.time(prefix + num_nodes) for prefix in OTHER_PREFIXES)
    ]
    return min([whole, *allowed], key=lambda variant: variant.time(LONG_PREFIX + num_nodes))
