"""Tree attention: one operator for tree verify, the draft head's block and path refresh."""

from sgl_specflow.kernels.tree_attention.dispatch import UnsupportedTreeAttention, tree_attention
from sgl_specflow.kernels.tree_attention.naive import ancestor_matrix
from sgl_specflow.kernels.tree_attention.triton_kernel import TreeAttentionConfig, TreeAttentionScratch, select_config

__all__ = [
    "TreeAttentionConfig",
    "TreeAttentionScratch",
    "UnsupportedTreeAttention",
    "ancestor_matrix",
    "select_config",
    "tree_attention",
]
