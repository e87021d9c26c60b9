"""Test files run again in Triton's interpreter, which must be chosen before Triton is imported: in a child process."""

import os
import subprocess
import sys

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(file: str, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess:
    """The finished pytest run of `file` with the interpreter, its output captured as text."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments, file],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
