"""Plugins that tests put into a server's processes, through SGLang's own entry points and without an installation."""

import os
import textwrap
from pathlib import Path


def plugin_environment(folder: Path, source: str) -> dict[str, str]:
    """Environment under which every SGLang process also loads `register()` of `source` as a plugin."""
    folder = Path(folder)
    info = folder / "specflow_test_plugin-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "specflow_test_plugin.py").write_text(textwrap.dedent(source))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: specflow-test-plugin\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nzz_test = specflow_test_plugin:register\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
