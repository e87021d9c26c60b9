"""Plain PyTorch in place of the Triton launches on SGLang's path, for the CPU reference platform. Read from SGLang 0.5.23.

`HOOKS` lists (dotted target, replacement, kind) for SGLang's `HookRegistry`; the plugin registers them only where the
reference platform is active. What SGLang lets a platform supply (KV pool, cache locations) goes through
`cpu_platform.ReferenceCpuPlatform` instead.
"""

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native
from sglang.srt.plugins.hook_registry import HookType


class TorchMHATokenToKVPool(MHATokenToKVPool):
    """The MHA pool with an indexed copy where SGLang launches its tiled Triton copy."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)


def extend_cache_locs(**kwargs):
    raise NotImplementedError

HOOKS = []
