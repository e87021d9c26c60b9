"""Tree attention inside SGLang's attention backends.

SGLang builds the attention backend that the user named, and it keeps prefill and plain decoding. Its class is
exchanged for a subclass of the same name (SGLang tests classes and class names in places) whose verify pass is ours:
`tree_attention` over the committed prefix and the nodes' ancestor bits. The draft runner's block goes the same way,
since a causal or bidirectional block is only another bit pattern.

What a pass reads from the scheduler's tables is copied before the pass: while it runs, the scheduler may hand a
finished request's row to a new one.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.plugins.hook_registry import HookType

from sgl_specflow.kernels.tree_attention import tree_attention
from sgl_specflow.kernels.tree_step import stage_bits
from sgl_specflow.runtime.names import is_tree_algorithm
from sgl_specflow.runtime.prefix_table import pack_prefix
from sgl_specflow.tree.token_tree import pack_bits


@dataclass
class TreeMetadata:
    """What every layer of one pass reads. R requests of N nodes.

    `prefix_indptr` int32 [R + 1] and `prefix_slots` [at least prefix_indptr[R]]: each request's committed slots in
    position order. `ancestors` int32 [R, N, W], `depth` int64 [R, N]. `causal` is `ancestors` without the nodes that
    come later in node order: the same for a tree, but not for a bidirectional block, whose sliding layers are causal.
    """

    prefix_indptr: torch.Tensor
    prefix_slots: torch.Tensor
    ancestors: torch.Tensor
    causal: torch.Tensor
    depth: torch.Tensor

    @classmethod
    def empty(cls, requests: int, nodes: int, context_length: int, device: torch.device) -> "TreeMetadata":
        """Buffers of fixed address for CUDA graphs of up to `requests` requests."""
        alone = _alone(requests, nodes, device)
        return cls(
            prefix_indptr=torch.zeros(requests + 1, dtype=torch.int32, device=device),
            prefix_slots=torch.zeros(requests * context_length, dtype=torch.int32, device=device),
            ancestors=alone,
            causal=alone.clone(),
            depth=torch.zeros(requests, nodes, dtype=torch.int64, device=device),
        )

    def first(self, requests: int) -> "TreeMetadata":
        """Views of the first `requests` requests."""
        return TreeMetadata(
            self.prefix_indptr[: requests + 1],
            self.prefix_slots,
            self.ancestors[:requests],
            self.causal[:requests],
            self.depth[:requests],
        )

    def fill(self, tree_input, requests: int) -> None:
        """Take a pass's tree; requests past the input's own (graph padding) see only themselves."""
        ancestors, depth = tree_input.ancestors, tree_input.depth
        if ancestors is None:
            ancestors, depth = self.ancestors[:0], self.depth[:0]
        stage_bits(ancestors, depth, self.ancestors[:requests], self.causal[:requests], self.depth[:requests])


def _alone(requests: int, nodes: int, device: torch.device) -> torch.Tensor:
    """Bits under which each node sees itself only."""
    return pack_bits(torch.eye(nodes, dtype=torch.bool, device=device)).expand(requests, -1, -1).contiguous()


def _metadata(backend, forward_batch) -> TreeMetadata:
    """Metadata of an eager pass, in fresh tensors."""
    requests, nodes = forward_batch.batch_size, forward_batch.spec_info.draft_token_num
    indptr, slots = pack_prefix(backend.tree_req_to_token, forward_batch)
    tree = TreeMetadata.empty(requests, nodes, 0, indptr.device)
    tree.fill(forward_batch.spec_info, requests)
    return replace(tree, prefix_indptr=indptr, prefix_slots=slots)


class TreeVerify:
    """Methods that a backend's verify passes get; everything else stays the backend's own.

    Never instantiated: `with_tree_verify` copies the methods into a subclass of the user's backend, in which
    `super(type(self), self)` would be wrong for further subclasses, hence `self.tree_base`.
    """

    def init_forward_metadata(self, forward_batch):
        if not forward_batch.forward_mode.is_target_verify():
            return self.tree_base.init_forward_metadata(self, forward_batch)
        self.tree_metadata = _metadata(self, forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        if not forward_batch.forward_mode.is_target_verify():
            return self.tree_base.init_forward_metadata_out_graph(self, forward_batch, in_capture)
        if self.tree_graph_buffers is None:
            self.tree_metadata = _metadata(self, forward_batch)
            return
        requests = forward_batch.batch_size
        self.tree_metadata = self.tree_graph_buffers.first(requests)
        pack_prefix(self.tree_req_to_token, forward_batch, out=self.tree_metadata)
        self.tree_metadata.fill(forward_batch.spec_info, requests)

    def init_forward_metadata_in_graph(self, forward_batch):
        if not forward_batch.forward_mode.is_target_verify():
            self.tree_base.init_forward_metadata_in_graph(self, forward_batch)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        with _without_verify_buffers(self):
            self.tree_base.init_cuda_graph_state(self, max_bs, max_bs)
        width = self.tree_req_to_token.shape[1]
        self.tree_graph_buffers = TreeMetadata.empty(
            max_bs, max_num_tokens // max_bs, width, self.tree_req_to_token.device
        )

    def get_cuda_graph_seq_len_fill_value(self):
        return 1

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **kwargs):
        if not forward_batch.forward_mode.is_target_verify():
            if sinks is not None:
                kwargs["sinks"] = sinks
            return self.tree_base.forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if given := [name for name, value in kwargs.items() if value is not None]:
            raise NotImplementedError(
                f"sgl_specflow's tree attention got {given} from layer {layer.layer_id}; it supports sinks only. "
                "Serve this model without --speculative-algorithm."
            )
        if save_kv_cache and k is not None:
            _write_nodes(self.token_to_kv_pool, layer, forward_batch, k, v)
        return _attend(self.token_to_kv_pool, self.tree_metadata, layer, forward_batch, q, sinks)


@contextmanager
def _without_verify_buffers(backend):
    """While a backend allocates for CUDA graphs: nothing for its own verify pass, which ours replaces.

    SGLang would take a byte a node and context position of every request for a mask, which it leaves out for draft runners;
    the number of tokens that it is told decides about 4 to 8 bytes more for indices: gigabytes at a long context.
    """
    before = vars(backend).get("is_draft_runner")
    backend.is_draft_runner = True
    try:
        yield
    finally:
        backend.is_draft_runner = before


def _write_nodes(pool, layer, forward_batch, k, v) -> None:
    """Write the nodes' keys and values to their slots. A scaling pool divides its arguments in place: give it copies."""
    k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
    v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
    if layer.k_scale is not None:
        k, v = k.clone(), v.clone()
    pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v, layer.k_scale, layer.v_scale)


def _attend(pool, tree: TreeMetadata, layer, forward_batch, q, sinks) -> torch.Tensor:
    """q [R * N, Hq * D] -> [R * N, Hq * Dv]."""
    window = layer.sliding_window_size
    out = tree_attention(
        q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        tree.prefix_indptr,
        tree.prefix_slots,
        forward_batch.out_cache_loc,
        tree.ancestors if layer.attn_type == AttentionType.ENCODER_ONLY else tree.causal,
        tree.depth,
        layer.scaling,
        logit_cap=float(layer.logit_cap or 0.0),
        sliding_window=-1 if window is None else int(window),
        sinks=sinks,
        k_scale=1.0 if layer.k_scale is None else layer.k_scale_float,
        v_scale=1.0 if layer.v_scale is None else layer.v_scale_float,
    )
    return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def with_tree_verify(backend, *, model_runner, backend_str: str, init_new_workspace: bool):
    """After _build_full_attention_backend_from_str: give the backend of a tree algorithm our verify pass."""
    spec_algorithm = model_runner.spec_algorithm
    if not (spec_algorithm.is_speculative() and is_tree_algorithm(spec_algorithm.name)):
        return backend
    base = type(backend)
    methods = {name: member for name, member in vars(TreeVerify).items() if not name.startswith("__")}
    backend.tree_base = base
    backend.tree_metadata = None
    backend.tree_graph_buffers = None
    backend.tree_req_to_token = model_runner.req_to_token_pool.req_to_token
    backend.token_to_kv_pool = model_runner.token_to_kv_pool
    backend.__class__ = type(base.__name__, (base,), {**methods, "__module__": base.__module__})
    return backend


HOOKS = [
    (
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup."
        "_build_full_attention_backend_from_str",
        with_tree_verify,
        HookType.AFTER,
    ),
]
