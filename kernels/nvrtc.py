"""Compiles a CUDA source by NVRTC through cuda-python, once: the machine code is kept on disk."""

import ctypes
import functools
import hashlib
import os
import tempfile
from pathlib import Path

import torch


class CudaToolsMissing(RuntimeError):
    """The CUDA driver, the NVRTC compiler or cuda-python cannot be used here."""


class CudaCompileError(RuntimeError):
    """NVRTC refused the source; the text is its log."""


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sgl_specflow" / "kernels"


@functools.cache
def architecture(device: int) -> str:
    """What to compile for on a device, such as "sm_90a"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def compile_cubin(name: str, source: str, headers: dict[str, str], defines: dict[str, int], architecture: str) -> bytes:
    """Machine code of `source` for `architecture` ("sm_90a"), from the disk where the same was compiled before.

    headers: name to text of the files that the source includes. Raises CudaToolsMissing or CudaCompileError.
    """
    nvrtc = _nvrtc()
    options = [
        "--std=c++17",
        f"--gpu-architecture={architecture}",
        *(f"-D{key}={value}" for key, value in defines.items()),
    ]
    version = _checked(nvrtc, nvrtc.nvrtcVersion())
    digest = hashlib.sha256(repr((source, sorted(headers.items()), options, version)).encode()).hexdigest()
    stored = cache_directory() / f"{name}-{architecture}-{digest[:32]}.cubin"
    if stored.is_file():
        return stored.read_bytes()
    cubin = _compile(nvrtc, name, source, headers, options)
    _store(stored, cubin)
    return cubin


def _store(path: Path, content: bytes) -> None:
    """Whole or not at all, since several ranks may compile at once; a read-only disk costs only the next start."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError:
        pass


def _compile(nvrtc, name: str, source: str, headers: dict[str, str], options: list[str]) -> bytes:
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            source.encode(),
            f"{name}.cu".encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [key.encode() for key in headers],
        ),
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            text = log.rstrip(b"\0").decode(errors="replace") or str(status)
            raise CudaCompileError(f"NVRTC could not compile {name}.cu with {' '.join(options)}:\n{text}")
        cubin = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class LoadedKernels:
    """A cubin on the current device: kernels by name, launched with one ctypes structure as their argument."""

    def __init__(self, cubin: bytes):
        self._driver = driver = _driver()
        self._cubin = cubin  # the library may read it later
        self._library = _checked(driver, driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0))
        self._functions: dict[str, tuple[object, int]] = {}  # with the shared memory that each may use

    def function(self, name: str, shared_bytes: int):
        """The kernel, allowed to use at least `shared_bytes`."""
        function, allowed = self._functions.get(name, (None, -1))
        if shared_bytes > allowed:
            driver = self._driver
            if function is None:
                kernel = _checked(driver, driver.cuLibraryGetKernel(self._library, name.encode()))
                function = _checked(driver, driver.cuKernelGetFunction(kernel))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver, driver.cuFuncSetAttribute(function, attribute, shared_bytes))
            self._functions[name] = function, shared_bytes
        return function

    def clusters_at_a_time(self, name: str, cluster: int, threads: int, shared_bytes: int) -> int:
        """How many clusters of `cluster` blocks the whole device runs together."""
        driver = self._driver
        size = driver.CUlaunchAttribute()
        size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = cluster, 1, 1
        config = _launch_config(driver, (cluster, 1, 1), threads, shared_bytes, size)
        return _checked(driver, driver.cuOccupancyMaxActiveClusters(self.function(name, shared_bytes), config))

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        argument,
        ahead: bool = False,
        together: bool = False,
    ) -> None:
        """ahead: the kernel may start while the one before it on the stream runs (programmatic dependent launch); it
        must wait itself for what it needs. together: its blocks wait for each other, so all must run at once (a cooperative
        launch, which fails where the device cannot). One of the two at most."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        driver = self._driver
        if ahead or together:
            attribute, kinds = driver.CUlaunchAttribute(), driver.CUlaunchAttributeID
            if ahead:
                attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                attribute.value.programmaticStreamSerializationAllowed = 1
            else:
                attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
                attribute.value.cooperative = 1
            config = _launch_config(driver, grid, threads, shared_bytes, attribute)
            config.hStream = stream
            function = self.function(name, shared_bytes)
            _checked(driver, driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))
            return
        _checked(
            driver,
            driver.cuLaunchKernel(
                self.function(name, shared_bytes),
                *grid,
                threads,
                1,
                1,
                shared_bytes,
                stream,
                ctypes.addressof(pointers),
                0,
            ),
        )


def _launch_config(driver, grid: tuple[int, int, int], threads: int, shared_bytes: int, attribute):
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs, config.numAttrs = [attribute], 1
    return config


@functools.cache
def _nvrtc():
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-python raises its loader's own error types
        raise CudaToolsMissing(
            f"the NVRTC compiler cannot be loaded ({error}). Install cuda-python and nvidia-cuda-nvrtc of the driver's CUDA "
            "version"
        ) from error
    return nvrtc


@functools.cache
def _driver():
    try:
        from cuda.bindings import driver

        _checked(driver, driver.cuInit(0))
    except Exception as error:
        raise CudaToolsMissing(
            f"the CUDA driver cannot be used ({error}). Check nvidia-smi, and install cuda-python"
        ) from error
    return driver


def _checked(module, result):
    """A cuda-python call's value; its first element is the status."""
    status, *values = result
    if int(status) != 0:
        raise CudaToolsMissing(f"{module.__name__.rpartition('.')[2]} call failed: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
