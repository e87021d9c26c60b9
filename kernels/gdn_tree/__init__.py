"""Gated Delta Net on a token tree: verify without rollback, the accepted path enters the state in the next launch."""

from sgl_specflow.kernels.gdn_tree.dispatch import (
    UnsupportedGdnTree,
    gdn_tree_flush,
    gdn_tree_verify,
    unsupported_by_cuda,
)
from sgl_specflow.kernels.gdn_tree.stash import PendingPaths, TreeStash
from sgl_specflow.kernels.nvrtc import CudaCompileError, CudaToolsMissing

__all__ = [
    "CudaCompileError",
    "CudaToolsMissing",
    "PendingPaths",
    "TreeStash",
    "UnsupportedGdnTree",
    "gdn_tree_flush",
    "gdn_tree_verify",
    "unsupported_by_cuda",
]
