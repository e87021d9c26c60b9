"""Plugins that tests put into a server's processes, through SGLang's own entry points and without an installation."""

import functools
import os
import tempfile
import textwrap
from pathlib import Path

FORK = """
import multiprocessing, os

def register():
    spawn = multiprocessing.set_start_method

    def fork(*_, **__):
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            raise RuntimeError(f"a process of {threads} threads must not be forked")
        spawn("fork", force=True)

    multiprocessing.set_start_method = fork
"""


def plugin_environment(folder: Path, source: str, name: str = "specflow_test_plugin") -> dict[str, str]:
    """Environment under which every SGLang process also loads `register()` of `source` as a plugin, the module `name`."""
    folder = Path(folder)
    info = folder / f"{name}-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nzz_{name} = {name}:register\n")
    return {"PYTHONPATH": _paths(folder, os.environ.get("PYTHONPATH"))}


def with_forked_children(environment: dict[str, str]) -> dict[str, str]:
    """`environment` under which SGLang forks its scheduler and detokenizer where it would start each as a Python of its own:
    a server on the CPU is up in half the time, since nothing is imported twice. What a process loads for itself (plugins)
    is for servers without this to show."""
    return environment | {"PYTHONPATH": _paths(_fork(), environment.get("PYTHONPATH", os.environ.get("PYTHONPATH")))}


@functools.cache
def _fork() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fork_"))
    plugin_environment(folder, FORK, "specflow_fork_plugin")
    return folder


def _paths(*paths) -> str:
    return os.pathsep.join(str(path) for path in paths if path)
