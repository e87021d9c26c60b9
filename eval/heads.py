"""The heads that the package ships for SmolLM2-135M-Instruct, and the server that each algorithm makes of them."""

import json
from pathlib import Path

from sgl_specflow.launch.quickstart import tree_flags

import sgl_specflow
from sgl_specflow.runtime.settings import OPTIONS_VARIABLE

HEADS = Path(sgl_specflow.__file__).parent / "drafter" / "heads"
HEAD_OF = {
    "jetflow": "smollm2-135m-jetflow",
    "ddtree": "smollm2-135m-dflash",
    "dflash_tfm": "smollm2-135m-dflash",
}
WEAVER = "smollm2-135m-weaver"


def tree_server(algorithm: str, budget: int, heads: Path) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a tree server with the heads in the folder `heads`."""
    flags = tree_flags(algorithm, heads / HEAD_OF[algorithm], budget)
    if algorithm != "dflash_tfm":
        return flags, {}
    return flags, {OPTIONS_VARIABLE: json.dumps({"weaver": str(heads / WEAVER)})}
