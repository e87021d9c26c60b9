"""The Weaver adapter of DFlash-TfM: it makes a DFlash head's marginals conditional on a tree's branch."""

from .checkpoint import find_weaver, load_weaver, load_weaver_config, save_weaver
from .config import WeaverConfig
from .construct import FoldedWeaver
from .reference import ReferenceWeaver

__all__ = [
    "FoldedWeaver",
    "ReferenceWeaver",
    "WeaverConfig",
    "find_weaver",
    "load_weaver",
    "load_weaver_config",
    "save_weaver",
]
