"""Tree verification inside SGLang's backend of Gated Delta Net layers.

As in `tree_backend`, the class of SGLang's backend is exchanged for a subclass of the same name whose verify pass is ours;
prefill stays SGLang's. A verify pass of a layer is two launches: the conv1d along each node's path, and `gdn_tree_verify`,
which also brings the state up to date with the path accepted a step ago (`gdn_state`).
"""

from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.plugins.hook_registry import HookType

from sgl_specflow.kernels.gdn_tree import gdn_tree_verify
from sgl_specflow.kernels.gdn_tree.conv import nearest_ancestors, tree_conv
from sgl_specflow.runtime.gdn_state import GdnTreeState
from sgl_specflow.tree.token_tree import pack_bits


@dataclass
class GdnPass:
    """What every Gated Delta Net layer of one verify reads. R requests of N nodes.

    Attributes:
        slots: int32 [R], state slots as they were when the pass began; negative for graph padding.
        rows: int32 [R], rows of the request table and of the stash.
        ancestors: int32 [R, N, W].
        table: int32 [R, N, K - 1], the ancestor table of the conv1d (kernels.gdn_tree.conv).
    """

    slots: torch.Tensor
    rows: torch.Tensor
    ancestors: torch.Tensor
    table: torch.Tensor

    @classmethod
    def empty(cls, requests: int, nodes: int, history: int, device) -> "GdnPass":
        """Buffers; every node sees itself only, no request has a slot."""
        alone = pack_bits(torch.eye(nodes, dtype=torch.bool, device=device))

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        return cls(
            integers(requests) - 1,
            integers(requests),
            alone.expand(requests, -1, -1).contiguous(),
            integers(requests, nodes, history),
        )

    def first(self, requests: int) -> "GdnPass":
        return GdnPass(self.slots[:requests], self.rows[:requests], self.ancestors[:requests], self.table[:requests])

    def fill(self, slots: torch.Tensor, tree_input) -> None:
        """Take a pass's slots and trees. Requests past the input's own are padding: they have no slot, whatever bits."""
        self.slots.copy_(slots)
        if tree_input.ancestors is not None:
            self.ancestors[: tree_input.ancestors.shape[0]].copy_(tree_input.ancestors)

    def prepare(self, rows: torch.Tensor) -> None:
        """What depends on `fill`'s buffers and `rows` [R]; may be captured in a CUDA graph."""
        self.rows.copy_(rows)
        nearest_ancestors(self.ancestors, self.table.shape[2], out=self.table)


class GdnTreeVerify:
    """Methods that the backend gets (see `tree_backend.TreeVerify` for how)."""

    def _slots(self, forward_batch) -> torch.Tensor:
        pool = self.req_to_token_pool
        return pool.translate_mamba_indices(pool.get_mamba_indices(forward_batch.req_pool_indices))

    def _empty_pass(self, requests: int, nodes: int) -> GdnPass:
        return GdnPass.empty(requests, nodes, self.conv_states_shape[-1], self.device)

    def init_forward_metadata(self, forward_batch):
        if not forward_batch.forward_mode.is_target_verify():
            if forward_batch.forward_mode.is_extend():
                self.gdn_state.forget(forward_batch.req_pool_indices)
            return self.tree_base.init_forward_metadata(self, forward_batch)
        self.tree_pass = self._empty_pass(forward_batch.batch_size, forward_batch.spec_info.draft_token_num)
        self.tree_pass.fill(self._slots(forward_batch), forward_batch.spec_info)
        self.tree_pass.prepare(forward_batch.req_pool_indices)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.tree_base.init_cuda_graph_state(self, max_bs, max_num_tokens)
        self.tree_graph_buffers = self._empty_pass(max_bs, max_num_tokens // max_bs)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        if not forward_batch.forward_mode.is_target_verify():
            if forward_batch.forward_mode.is_extend() and not in_capture:
                self.gdn_state.forget(forward_batch.req_pool_indices)
            return self.tree_base.init_forward_metadata_out_graph(self, forward_batch, in_capture)
        if self.tree_graph_buffers is None:
            return self.init_forward_metadata(forward_batch)
        # SGLang's own refresh knows which requests are padding and gives them slot -1.
        self.tree_base.init_forward_metadata_out_graph(self, forward_batch, in_capture)
        self.tree_pass = self.tree_graph_buffers.first(forward_batch.batch_size)
        self.tree_pass.fill(self.forward_metadata.mamba_cache_indices, forward_batch.spec_info)

    def init_forward_metadata_in_graph(self, forward_batch):
        if not forward_batch.forward_mode.is_target_verify():
            return self.tree_base.init_forward_metadata_in_graph(self, forward_batch)
        if self.tree_graph_buffers is not None:
            self.tree_pass.prepare(forward_batch.req_pool_indices)

    def forward_decode(self, layer, forward_batch, *args, **kwargs):
        raise RuntimeError(
            "sgl_specflow: SGLang ran a plain decode step on Gated Delta Net layers, whose states are one path behind "
            "under tree speculation. Report this, and serve the model without --speculative-algorithm."
        )

    def forward_extend(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        if not forward_batch.forward_mode.is_target_verify():
            return self.tree_base.forward_extend(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)
        state, tree = self.gdn_state, self.tree_pass
        index = self.req_to_token_pool.mamba2_layer_index(layer.layer_id)
        cache = state.pool.mamba_cache
        convolved = tree_conv(
            mixed_qkv,
            cache.conv[0][index],
            tree.slots,
            tree.table,
            layer.conv_weights,
            layer.bias,
            layer.activation,
            inputs=state.conv_inputs[index],
        )
        q, k, v = convolved.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
        out = gdn_tree_verify(
            q.unflatten(-1, (layer.num_q_heads, layer.head_q_dim)),
            k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
            v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
            a,
            b,
            layer.A_log,
            layer.dt_bias,
            cache.temporal[index],
            tree.slots,
            tree.ancestors,
            stash=state.stash.layer(index),
            rows=tree.rows,
            pending=state.pending,
            implementation=state.implementation,
        )
        return out[None]


def with_gdn_tree_verify(hybrid, runner, full_attn_backend):
    """After attn_backend_wrapper: give the backend of a tree algorithm's target our verify pass."""
    state = getattr(runner.req_to_token_pool, "gdn_tree", None)
    linear = getattr(hybrid, "linear_attn_backend", None)
    if state is None or runner.is_draft_worker or not isinstance(linear, GDNAttnBackend):
        return hybrid
    base = type(linear)
    methods = {name: member for name, member in vars(GdnTreeVerify).items() if not name.startswith("__")}
    linear.tree_base = base
    linear.tree_pass = None
    linear.tree_graph_buffers = None
    linear.gdn_state = state
    linear.__class__ = type(base.__name__, (base,), {**methods, "__module__": base.__module__})
    return hybrid


class GdnCommit:
    """What the worker calls after acceptance; does nothing for targets without Gated Delta Net layers."""

    def __init__(self, model_runner):
        self.runner = model_runner

    def on_accepted(self, batch, window, accepted) -> None:
        """Commit the verify that has just run over `window`'s requests. Reads no device value on the host."""
        state: GdnTreeState | None = getattr(self.runner.req_to_token_pool, "gdn_tree", None)
        if state is None:
            return
        tree = self.runner.attn_backend.linear_attn_backend.tree_pass.first(accepted.length.numel())
        checkpoints = self._checkpoints(batch, window, accepted)
        state.commit(tree.slots, tree.rows, accepted.path, accepted.length, *checkpoints)

    def _checkpoints(self, batch, window, accepted) -> tuple:
        """Slot and path length of each prefix-cache checkpoint that the accepted paths pass.

        SGLang takes one at each multiple of the track grid (spec_utils._verify_commit_step_indices); its result
        processor finds the same crossings again from the accept lengths.
        """
        if batch.mamba_track_indices is None:
            return ()
        from sglang.srt.runtime_context import mamba_track_grid

        grid = mamba_track_grid(batch.tree_cache.page_size)
        before = window.committed_length
        last = (before + accepted.length) // grid
        crosses = before // grid != last
        slots = self.runner.req_to_token_pool.translate_mamba_indices(batch.mamba_track_indices).to(torch.int32)
        return torch.where(crosses, slots, -1), torch.where(crosses, last * grid - before, 0)


HOOKS = [
    ("sglang.srt.layers.attention.attention_registry.attn_backend_wrapper", with_gdn_tree_verify, HookType.AFTER),
]
