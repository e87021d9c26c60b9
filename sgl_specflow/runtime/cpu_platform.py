"""Reference platform: unmodified SGLang on a CPU, in plain PyTorch. Read from SGLang 0.5.23.

It serves as ground truth for the tests and for a look at the whole path without a GPU. It needs no kernel library
(`sgl_kernel`), no AMX and no Triton. It is not SGLang's own CPU engine (`SGLANG_USE_CPU_ENGINE=1`), which needs all of
the first two.
"""

import os

import torch
from sglang.srt.arg_groups.choices import (
    DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    add_deterministic_attention_backend_choices,
)
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.runtime.names import is_tree_algorithm

NAME = "sgl_specflow_cpu"

# Sized for a reference: a user's --max-total-tokens and --max-running-requests win.
DEFAULT_MAX_TOTAL_TOKENS = 65536
DEFAULT_MAX_RUNNING_REQUESTS = 32
STATES_PER_REQUEST = 6

# Backends whose forward is plain PyTorch. A plugin that brings its own adds its name before the arguments resolve.
ATTENTION_BACKENDS = {"torch_native"}


def accelerator_present() -> bool:
    """Whether PyTorch sees a device other than the CPU."""
    if torch.cuda.is_available():
        return True
    for name in ("xpu", "npu", "musa", "mps", "hpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return True
    return torch.accelerator.current_accelerator(check_available=True) is not None


def activate() -> str | None:
    """Entry point of group `sglang.srt.platforms`: the platform's dotted path, or None to leave SGLang its choice.

    SGLANG_PLATFORM decides where it is set. Without it the reference platform stands in only where there is no
    accelerator and SGLang's own CPU engine was not asked for.
    """
    selected = os.environ.get("SGLANG_PLATFORM")
    if selected:
        if selected != NAME:
            return None
        # SGLang's modules pick CUDA kernels from torch.cuda.is_available(), whatever the platform says: hide the
        # devices from this process, if CUDA is not up yet, and from the workers that it starts.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or accelerator_present():
        return None
    # For the workers that SGLang starts: OpenMP threads that spin while they wait make a step 15 times slower as soon as
    # another process wants a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return f"{__name__}.{CpuReferencePlatform.__name__}"


class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on the CPU with PyTorch attention, PyTorch sampling, no overlap and no graphs."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int | None = None) -> str:
        # A string: ServerArgs takes this as its --device default and splits it.
        return "cpu"

    def init_backend(self) -> None:
        # In each worker. SGLang decorates a few small functions (seeded sampling, penalties) with torch.compile, which
        # would want a C++ compiler here.
        torch.compiler.set_stance("force_eager")

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def apply_server_args_defaults(self, server_args) -> None:
        # What the user gave. By now SGLang has put its own CPU engine's choices over it.
        given = server_args._raw_input
        _refuse_conflicts(given)
        if given["enable_deterministic_inference"]:
            # The flag that makes SGLang honour a request's sampling_seed.
            unlisted = ATTENTION_BACKENDS.difference(DETERMINISTIC_ATTENTION_BACKEND_CHOICES)
            add_deterministic_attention_backend_choices(sorted(unlisted))
        server_args.device = "cpu"
        server_args.attention_backend = given["attention_backend"] or self.get_default_attention_backend()
        server_args.sampling_backend = "pytorch"
        server_args.disable_overlap_schedule = True
        # An idle scheduler polls without pause: here it would take a core that the model needs.
        server_args.sleep_on_idle = True
        if given["max_total_tokens"] is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
        if given["max_running_requests"] is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        if given["max_mamba_cache_size"] is None:
            # Otherwise SGLang sizes the states of linear layers by the machine's memory.
            server_args.max_mamba_cache_size = STATES_PER_REQUEST * server_args.max_running_requests

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from sgl_specflow.runtime.cpu_ops import TorchMHATokenToKVPool

        return TorchMHATokenToKVPool

    def get_speculative_cache_locs_fn(self):
        from sgl_specflow.runtime.cpu_ops import extend_cache_locs

        return extend_cache_locs

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return is_tree_algorithm(algorithm)

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend in ATTENTION_BACKENDS

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return self.get_default_attention_backend()

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_quantization_config(self, quantization: str):
        raise SpecflowConfigError(
            given=f"quantization {quantization!r}, from the checkpoint or from --quantization",
            allowed="unquantized float32, bfloat16 and float16 weights on the CPU reference platform",
            todo="use an unquantized checkpoint",
        )

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU


def _refuse_conflicts(given: dict) -> None:
    """Raise SpecflowConfigError on the first flag that this platform cannot serve."""
    device = given["device"]
    if device is not None and device.split(":")[0] != "cpu":
        raise SpecflowConfigError(
            given=f"--device {device} with SGLang on the platform {NAME}",
            allowed="--device cpu",
            todo="leave --device out, or unset SGLANG_PLATFORM on a machine with an accelerator",
        )
    backends = sorted(ATTENTION_BACKENDS)
    allowed = {
        "attention_backend": backends,
        "prefill_attention_backend": backends,
        "decode_attention_backend": backends,
        "speculative_draft_attention_backend": backends,
        "sampling_backend": ["pytorch"],
        "cuda_graph_backend_decode": ["disabled"],
        "cuda_graph_backend_prefill": ["disabled"],
        "kv_cache_dtype": ["auto", "bf16", "bfloat16"],
        "quantization": [],
        "enable_torch_compile": [False],
        "enable_unified_memory": [False],
        "pp_size": [1],
        "dp_size": [1],
    }
    for field, choices in allowed.items():
        value = given[field]
        if value is None or value in choices:
            continue
        flag = f"--{field.replace('_', '-')}"
        raise SpecflowConfigError(
            given=f"{flag} {value} on the CPU reference platform ({NAME})",
            allowed=", ".join(f"{flag} {choice}" for choice in choices if choice is not False) or "the default only",
            todo=f"leave {flag} out",
        )
