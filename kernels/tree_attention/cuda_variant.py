"""What `tree_attention.cu` is compiled for, and which of its variants a shape takes."""

import math
from dataclasses import dataclass, replace

import torch

DTYPES = (torch.bfloat16, torch.float16)  # by the number that the source is compiled for
MOST_SPLITS = 32
# As the source has them.
THREADS, TILE, REST, WORDS = 256, 64, 16, 11


@dataclass(frozen=True)
class Variant:
    """What `tree_attention.cu` is compiled for.

    Attributes:
        dtype: of q, k and v. group: query heads of a kv head. row_groups: 64 rows of a block each, 1 or 2; with 1 the
            block's other half works on other keys.
        splits: blocks that share the keys of the same rows, to MOST_SPLITS; all blocks of a launch run at once.
        capped: whether logits are capped. wgmma: products by Hopper's instruction, on sm_90a alone, and a pipeline.
        stages: turns of the ring, 2 at least; with wgmma half turns, 4 at least. 0: `ring`'s choice.
        head_dim: 128, or 256 with row_groups 2.
    """

    dtype: torch.dtype
    group: int
    row_groups: int
    splits: int
    capped: bool = False
    wgmma: bool = False
    stages: int = 0
    head_dim: int = 128

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
        """The source's Shared: the ring, the rest of a share, q, ancestor bits and barriers."""
        keys = self.ring * self.key_groups * TILE * (1 if self.wgmma else 2) + 2 * REST
        barriers = 16 * (self.ring + 1) if self.wgmma else 0
        return (keys + self.rows) * self.head_dim * 2 + self.rows * WORDS * 4 + barriers

    @property
    def part_bytes(self) -> int:
        """The source's Part: a block's sums and what goes with them."""
        return self.rows * (self.head_dim * (4 if self.dtype == torch.float16 else 2) + 16)

    def defines(self) -> dict[str, int]:
        return {
            "HALF": DTYPES.index(self.dtype),
            "HEAD_DIM": self.head_dim,
            "GROUP": self.group,
            "ROW_GROUPS": self.row_groups,
            "SPLITS": self.splits,
            "STAGES": self.ring,
            "CAPPED": int(self.capped),
            "WGMMA": int(self.wgmma),
            "SHARED_BYTES": self.shared_bytes,
            "PART_BYTES": self.part_bytes,
        }


def grid_of(variant: Variant, num_requests: int, num_nodes: int, num_kv_heads: int) -> tuple[int, int, int]:
    row_blocks = -(-num_nodes * variant.group // variant.rows)
    return variant.splits * row_blocks, num_kv_heads, num_requests


def choose(
    dtype: torch.dtype,
    num_requests: int,
    num_nodes: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    capped: bool,
    wgmma: bool,
    at_once: int,
) -> Variant:
    """The variant of a shape: the most splits of which all blocks run at once, or 1; prefix lengths do not enter, so that a
    CUDA graph holds.

    at_once: blocks that the device runs together.
    """
    row_groups = 1 if num_nodes * group <= 64 and head_dim == 128 else 2
    one = Variant(dtype, group, row_groups, 1, capped, wgmma, head_dim=head_dim)
    splits = at_once // math.prod(grid_of(one, num_requests, num_nodes, num_kv_heads))
    return replace(one, splits=min(max(splits, 1), MOST_SPLITS))
