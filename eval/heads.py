"""The heads that the package ships for SmolLM2-135M-Instruct, and the servers that algorithms make of heads."""

import json
from pathlib import Path

from sgl_specflow.launch.quickstart import tree_flags

import sgl_specflow
from sgl_specflow.runtime.settings import OPTIONS_VARIABLE

HEADS = Path(sgl_specflow.__file__).parent / "drafter" / "heads"
SHIPPED: dict[str, tuple[str, ...]] = {
    "jetflow": ("smollm2-135m-jetflow",),
    "ddtree": ("smollm2-135m-dflash",),
    "dflash_tfm": ("smollm2-135m-dflash", "smollm2-135m-weaver"),
}
"""By algorithm, the folder of its head, and of its Weaver where it has one."""


def tree_server(
    algorithm: str, budget: int, head: str | Path, weaver: str | Path | None = None, **options
) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a tree server. options: of OPTIONS_VARIABLE, beside `weaver`."""
    given = options | ({} if weaver is None else {"weaver": str(weaver)})
    return tree_flags(algorithm, head, budget), {OPTIONS_VARIABLE: json.dumps(given)} if given else {}
