"""The token tree of one verify pass: its layout, and how it is built from marginals or a conditional drafter."""

from .conditional import Expansion, build_conditional_tree, expansion_rounds, expansion_width
from .marginals import build_tree
from .reference import build_tree_by_heap
from .token_tree import TokenTree, ancestor_bits, chain, pack_bits, unpack_bits

__all__ = [
    "Expansion",
    "TokenTree",
    "ancestor_bits",
    "build_conditional_tree",
    "build_tree",
    "build_tree_by_heap",
    "chain",
    "expansion_rounds",
    "expansion_width",
    "pack_bits",
    "unpack_bits",
]
