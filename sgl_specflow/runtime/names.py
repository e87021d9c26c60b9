"""Names of the algorithms that the plugin registers, as SGLang spells them (upper case)."""

JETFLOW = "JETFLOW"
JETSPEC = "JETSPEC"
DDTREE = "DDTREE"
DFLASH_TFM = "DFLASH_TFM"
TREE_ALGORITHMS = (JETFLOW, JETSPEC, DDTREE, DFLASH_TFM)


def is_tree_algorithm(name: str | None) -> bool:
    """Whether name, as --speculative-algorithm gives it, is one of ours."""
    return name is not None and name.upper() in TREE_ALGORITHMS
