"""CUDA sources compiled for tests: by g++ against cuda_on_cpu.h, to run on the CPU, and by nvcc, as the GPU gets them."""

import ctypes
import faulthandler
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from sgl_specflow.kernels import nvrtc

TESTS = Path(__file__).resolve().parent
GXX, NVCC = shutil.which("g++"), shutil.which("nvcc")
# As the sources are meant: they read numbers of one type as another's.
_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]


def build_for_cpu(runner: str, source_folder: Path, defines: Mapping[str, object]) -> ctypes.CDLL:
    """The library that tests/`runner` makes of a CUDA source in `source_folder`, which it includes."""
    with tempfile.TemporaryDirectory(prefix=f"{Path(runner).stem}_") as folder:  # not wanted once the library is loaded
        library = f"{folder}/kernel.so"
        folders = [f"-I{TESTS}", f"-I{source_folder}"]
        result = _run([GXX, *_FLAGS, *_given(defines), *folders, str(TESTS / runner), "-o", library])
        assert result.returncode == 0, result.stderr
        return ctypes.CDLL(library)


def compile_for_gpu(source: Path, defines: Mapping[str, object], target: str, cubin: Path) -> str:
    """What ptxas says of each kernel's registers and memory. `target`, as 'sm_90a'; warnings are errors."""
    arch = f"-gencode=arch=compute_{target[3:]},code={target}"
    flags = ["-std=c++17", "-cubin", "-Werror=all-warnings", "-Xptxas=-v"]
    result = _run([NVCC, arch, *flags, *_given(defines), str(source), "-o", str(cubin)])
    assert result.returncode == 0, result.stderr
    return result.stderr


def need_nvrtc() -> None:
    """Skips the test, with the reason, where CUDA's run-time compiler is missing."""
    try:
        nvrtc._nvrtc()
    except nvrtc.CudaToolsMissing as missing:
        pytest.skip(str(missing))


def assert_no_spills(report: str, kernels: int = 1) -> None:
    """All of the `kernels` in compile_for_gpu's report keep their numbers in registers."""
    assert report.count(" 0 bytes spill stores, 0 bytes spill loads") == kernels, report


def ends_well(run, seconds: int = 60) -> bool:
    """Whether `run` ends, in a process of its own and within `seconds`, with no AssertionError and no abort of the CPU
    runner."""
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)  # The others do not live through a fork: work for them would wait for ever.
            faulthandler.disable()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler in Python would wait for the CPU runner's end
            signal.alarm(seconds)
            run()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _given(defines: Mapping[str, object]) -> list[str]:
    return [f"-D{name}={value}" for name, value in defines.items()]


def _run(command: list) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)
