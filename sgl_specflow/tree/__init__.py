"""The token tree of one verify pass: its layout, and how it is built from marginals."""

from .marginals import build_tree
from .reference import build_tree_by_heap
from .token_tree import TokenTree, ancestor_bits, chain, pack_bits, unpack_bits

__all__ = ["TokenTree", "ancestor_bits", "build_tree", "build_tree_by_heap", "chain", "pack_bits", "unpack_bits"]
