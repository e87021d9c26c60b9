"""States of Gated Delta Net layers under tree speculation: what a verify leaves, and when it enters a state.

SGLang keeps a state a node for each running request (`intermediate_ssm`) and a conv window a node. We keep neither: a
verify leaves U, K, G and its conv inputs, acceptance records a path, the next verify puts that path into the state that it
reads anyway (docs/gdn.md). Conv windows, three numbers a channel, move at acceptance. So between a step and the next a
request's conv window is up to date and its state is one path behind, and whoever reads the state
must see to that path first:

- the request's own next verify: fused;
- a prefix-cache checkpoint while decoding (strategy extra_buffer): written at acceptance, into its own slot (`commit`);
- the prefix cache, which takes over a finished request's slot (strategy no_buffer): `flush_finished`;
- a prefill of a row with a new owner, or of a retracted request: `forget`, since the path is the old owner's;
- plain decoding, mixed chunks, sessions that keep a row, disaggregation: refused at start (`start_checks`).

Rows of the stash are rows of SGLang's request table. Everything here runs on the stream of the forward passes, in order.
"""

import logging
import math
from dataclasses import dataclass

import torch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_schedule, get_spec

from sgl_specflow.kernels.gdn_tree import PendingPaths, TreeStash, gdn_tree_flush, unsupported_by_cuda
from sgl_specflow.kernels.gdn_tree.conv import commit_windows
from sgl_specflow.runtime.names import is_tree_algorithm

logger = logging.getLogger(__name__)

GIB = 1 << 30


def implementation_for(device: torch.device, nodes: int, params, dtype: torch.dtype) -> str:
    """Which verify serves a model of `dtype`: "cuda" where the kernel can, else "batched". params: SGLang's description of
    the state (Mamba2CacheParams)."""
    _, value_dim, key_dim = params.shape.temporal
    if torch.device(device).type != "cuda":
        return "batched"
    device = torch.device("cuda", torch.cuda.current_device())
    reason = unsupported_by_cuda(nodes, key_dim, value_dim, dtype, params.dtype.temporal, device)
    if reason is not None:
        logger.warning(
            "sgl_specflow: Gated Delta Net verify in PyTorch, many times slower than the CUDA kernel: %s", reason
        )
    return "cuda" if reason is None else "batched"


def stash_bytes_per_request(params, nodes: int, dtype: torch.dtype) -> int:
    """What one running request takes on this rank: stash and conv inputs of all layers."""
    heads, value_dim, key_dim = params.shape.temporal
    stash = TreeStash.allocate(1, nodes, _key_heads(params), heads, key_dim, value_dim, "meta", dtype)
    return len(params.layers) * (stash.bytes + nodes * _channels(params) * params.dtype.conv.itemsize)


def node_state_bytes_per_request(params, nodes: int) -> int:
    """What SGLang would take for the same: a state and a conv window a node."""
    state = math.prod(params.shape.temporal) * params.dtype.temporal.itemsize
    windows = sum(math.prod(shape) for shape in params.shape.conv) * params.dtype.conv.itemsize
    return len(params.layers) * nodes * (state + windows)


def _channels(params) -> int:
    return params.shape.conv[0][0]


def _key_heads(params) -> int:
    """Key heads of this rank, from the sharded conv channels [q | k | v]."""
    heads, value_dim, key_dim = params.shape.temporal
    return (_channels(params) - heads * value_dim) // (2 * key_dim)


@dataclass
class GdnTreeState:
    """What the last verify of each request row left, all layers of this rank.

    Attributes:
        pool: SGLang's MambaPool, which holds temporal [L, slots, H, d_v, d_k] and conv [L, slots, C, K - 1].
        stash: TreeStash with L layers, a row for each row of the request table.
        pending: the rows' accepted paths that `temporal` does not hold yet.
        conv_inputs: [L, requests, N, C], the last verify's conv inputs in the windows' dtype, by position in its batch.
        implementation: of the operators, "cuda" or "batched".
    """

    pool: object
    stash: TreeStash
    pending: PendingPaths
    conv_inputs: torch.Tensor
    implementation: str

    @classmethod
    def allocate(
        cls, pool, params, dtype: torch.dtype, rows: int, requests: int, nodes: int, longest_path: int
    ) -> "GdnTreeState":
        """For a model of `dtype` with `rows` rows in the request table, up to `requests` in a batch."""
        heads, value_dim, key_dim = params.shape.temporal
        layers, device = pool.mamba_cache.temporal.shape[0], pool.device
        return cls(
            pool,
            TreeStash.allocate(rows, nodes, _key_heads(params), heads, key_dim, value_dim, device, dtype, layers),
            PendingPaths.allocate(rows, longest_path, device),
            torch.zeros(layers, requests, nodes, _channels(params), dtype=params.dtype.conv, device=device),
            implementation_for(device, nodes, params, dtype),
        )

    @property
    def bytes(self) -> int:
        return self.stash.bytes + self.conv_inputs.numel() * self.conv_inputs.element_size()

    def forget(self, rows: torch.Tensor) -> None:
        """Before a prefill of `rows` [R]: what is pending there is another request's."""
        self.pending.clear(rows.long())

    def commit(self, slots, rows, path, length, checkpoint=None, checkpoint_length=None) -> None:
        """After acceptance: the path becomes pending, conv windows take it at once, and checkpoints are written.

        slots, rows        [R] int32 of the verify; a negative slot leaves a request out
        path, length       [R, P] and [R], as `verify.Accepted` has them
        checkpoint         [R] int32 slots that receive the state after checkpoint_length nodes [R] of the path; negative
                           for none; None: no request has one
        """
        length = length.to(torch.int32)
        self.pending.record(rows.long(), path, length)
        conv = self.pool.mamba_cache.conv[0]
        if checkpoint is not None:
            checkpoint_length = checkpoint_length.to(torch.int32)
            self._flush(slots, rows, checkpoint_length, checkpoint)
            commit_windows(conv, self.conv_inputs, slots, path, checkpoint_length, checkpoint)
        commit_windows(conv, self.conv_inputs, slots, path, length)

    def flush(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes the pending paths of `rows` into `slots` (both [R] int32), and forgets them."""
        self._flush(slots, rows, None, None)
        self.pending.clear(rows.long())

    def _flush(self, slots, rows, length, destination) -> None:
        gdn_tree_flush(
            self.pool.mamba_cache.temporal,
            slots,
            self.stash,
            rows,
            self.pending,
            length,
            destination,
            implementation=self.implementation,
        )


# --- hooks -----------------------------------------------------------------------------------------------------------


def _is_tree() -> bool:
    return is_tree_algorithm(get_spec().speculative_algorithm)


def without_node_states(original, pool, *args, speculative_num_draft_tokens=None, **kwargs):
    """Around HybridReqToTokenPool._init_mamba_pool: no state and no conv window a node."""
    nodes = None if _is_tree() else speculative_num_draft_tokens
    return original(pool, *args, speculative_num_draft_tokens=nodes, **kwargs)


def with_stash(pool, configurator, *, max_num_reqs: int, extra_max_context_len: int) -> None:
    """After KVCacheConfigurator._build_hybrid_req_pool: `pool.gdn_tree` is the GdnTreeState of a tree algorithm's target."""
    if not _is_tree() or configurator.hybrid_gdn_config is None:
        return
    params, nodes = configurator.mambaish_config.mamba2_cache_params, get_spec().speculative_num_draft_tokens
    state = GdnTreeState.allocate(
        pool.mamba_pool,
        params,
        configurator.model_config.dtype,
        rows=pool.req_to_token.shape[0],
        requests=max_num_reqs,
        nodes=nodes,
        longest_path=get_spec().speculative_num_steps + 1,
    )
    pool.gdn_tree = state
    theirs = node_state_bytes_per_request(params, nodes) * (max_num_reqs + 1)
    logger.info(
        "sgl_specflow: Gated Delta Net layers, %d requests of %d nodes: a stash of %.2f GiB; a state and a conv window "
        "a node would take %.2f GiB. %.2f GiB come back",
        max_num_reqs,
        nodes,
        state.bytes / GIB,
        theirs / GIB,
        (theirs - state.bytes) / GIB,
    )


def reserve_memory(original, configurator, total_rest_memory):
    """Around KVCacheConfigurator._handle_max_mamba_cache: reserve our stash, and no states a node.

    SGLang reserves these only for speculative algorithms, so it is told that there is none.
    """
    if not _is_tree() or configurator.hybrid_gdn_config is None or configurator.is_draft_worker:
        return original(configurator, total_rest_memory)
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    params, schedule = configurator.mambaish_config.mamba2_cache_params, get_schedule()
    requests = max(1, schedule.max_running_requests // configurator.attn_dp_size) + 1
    nodes, dtype = get_spec().speculative_num_draft_tokens, configurator.model_config.dtype
    each = stash_bytes_per_request(params, nodes, dtype)
    algorithm, configurator.spec_algorithm = configurator.spec_algorithm, SpeculativeAlgorithm.NONE
    try:
        return original(configurator, total_rest_memory - each * requests / GIB)
    finally:
        configurator.spec_algorithm = algorithm


def flush_finished(component, req, *args, **kwargs) -> None:
    """Before MambaComponent.prepare_for_caching_req, which hands a finished request's live slot to the prefix cache where
    there is no extra buffer."""
    state = getattr(component.cache.req_to_token_pool, "gdn_tree", None)
    if state is None or component.cache.enable_mamba_extra_buffer:
        return
    row = torch.tensor([req.kv.req_pool_idx], dtype=torch.int32, device=state.conv_inputs.device)
    state.flush(req.kv.mamba_pool_idx.view(1).to(torch.int32), row)


HOOKS = [
    ("sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool._init_mamba_pool", without_node_states, HookType.AROUND),
    (
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_hybrid_req_pool",
        with_stash,
        HookType.AFTER,
    ),
    (
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        reserve_memory,
        HookType.AROUND,
    ),
    (
        "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent.prepare_for_caching_req",
        flush_finished,
        HookType.BEFORE,
    ),
]
