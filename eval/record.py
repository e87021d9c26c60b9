"""What every result file says about its run: date, device, versions, commit and command."""

import datetime
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

PACKAGES = ("sglang", "torch", "triton", "transformers", "sgl-specflow")


def describe(commit: str | None = None) -> dict:
    """The `meta` of a result file. commit: where the code runs outside its checkout; else git's HEAD."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": commit or _commit(),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    model = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ":"
    )
    return f"CPU {model.split(':', 1)[1].strip()}, {torch.get_num_threads()} threads"


def _commit() -> str:
    answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return (answer.stdout.strip() or "unknown") + ("+changes" if dirty.stdout.strip() else "")
