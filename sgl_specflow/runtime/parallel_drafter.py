"""The parallel draft head inside SGLang: JetFlow (causal) and DFlash (bidirectional), in one pass or with path refresh.

The head is SGLang's own `models/dflash.py` on a draft ModelRunner. Its context keys and values are written to the
draft KV pool at the slots of the target's tokens, so a cached prefix serves both. Its block is a verify-like pass
whose attention pattern is given as bits (`TreeInput`).
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import attention_backends
from sglang.srt.speculative.draft_parallel import model_draft_parallel_spec, resolve_draft_parallel_layout
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.kernels.tree_step import tree_from_marginals
from sgl_specflow.runtime.context_write import ContextWriter
from sgl_specflow.runtime.draft_graph import DraftTail
from sgl_specflow.runtime.fp8_draft import quantise_head
from sgl_specflow.runtime.marginals import TargetVocabulary
from sgl_specflow.runtime.settings import TreeSettings
from sgl_specflow.runtime.step import StepWindow
from sgl_specflow.runtime.tree_input import TreeInput
from sgl_specflow.tree import TokenTree
from sgl_specflow.tree.refresh import rebuild_tree, refresh_block
from sgl_specflow.tree.token_tree import pack_bits


class ParallelDrafter:
    """Drafts a token tree a request from one pass of the head (two with path refresh)."""

    wants_final_hidden = False

    def __init__(self, settings: TreeSettings, server_args, gpu_id: int, nccl_port: int, target_worker):
        self.settings = settings
        runner = target_worker.model_runner
        self.layout = resolve_draft_parallel_layout(
            model_draft_parallel_spec(runner.spec_aux_config.draft_model_config, spec_algorithm=runner.spec_algorithm)
        )
        with draft_pp_context(), draft_tp_context(self.layout):
            bundle = build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=runner.model_config,
                algo_label=settings.algorithm,
                attention_backend_override=_draft_backend(runner),
            )
        self.worker = bundle.draft_worker
        self.runner = bundle.draft_model_runner
        self.model = bundle.draft_model
        _check_dtype(self.runner.dtype, runner.dtype)
        self.vocabulary = TargetVocabulary.of(runner.model)
        if settings.fp8_draft:
            quantise_head(self.model)
            self.vocabulary.quantise()
        self.context_writer = ContextWriter(self.model)
        # SGLang's hook for embedding inside the draft's own pass (and graph), in the target's dtype. The bound method,
        # not the module: the embedding must not become the draft's own parameter.
        self.model.forward_embed = self.vocabulary.embedding.forward
        self.block_depth = torch.arange(settings.block, device=runner.device)
        visible = torch.ones(settings.block, settings.block, dtype=torch.bool, device=runner.device)
        self.block_bits = pack_bits(visible.tril() if settings.causal else visible)
        # Path refresh drafts half a tree first.
        self.first_budget = settings.budget // 2 if settings.path_refresh else settings.budget
        self.tail: DraftTail | None = None

    def alloc_memory_pool(self, **pools) -> None:
        with draft_tp_context(self.layout):
            self.worker.alloc_memory_pool(**pools)
        self.context_writer.bind(self.runner.token_to_kv_pool)

    def init_attention_backends(self) -> None:
        with draft_pp_context(), draft_tp_context(self.layout):
            self.worker.init_attention_backends()

    def init_cuda_graphs(self, sizes: Sequence[int]) -> None:
        """Capture the head's pass, tree building included, for batches of `sizes`; none: the head runs eagerly."""
        if sizes:
            settings = self.settings
            self.tail = DraftTail(
                self._grow, max(sizes), self.first_budget, settings.block, settings.depth, self.block_depth.device
            )
            self.runner.capture_tail_hooks.append(self.tail)
        with draft_pp_context(), draft_tp_context(self.layout):
            self.worker.init_cuda_graphs(capture_decode_cuda_graph=bool(sizes))

    def write_context(self, target_hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Write the head's context keys and values of T committed tokens.

        Args:
            target_hidden: [T, L * H], the target's hidden states at `target_layer_ids`.
            slots: int64 [T] in the draft pool. A slot given twice must come with equal rows.
            positions: int64 [T].
        """
        with torch.inference_mode(), draft_tp_context(self.layout):
            context = self.model.project_target_hidden(target_hidden)
            self.context_writer.write(context, slots, positions)

    def write_ids(self, plan) -> torch.Tensor:
        """The slots that plan writes, as the draft pool numbers them."""
        return plan.write_ids(self.runner.kv_index_translator)

    def draft(self, batch, window: StepWindow, max_depth: torch.Tensor | None) -> TokenTree:
        """A tree of `budget` nodes a request. max_depth int64 [R] caps single requests (0: the anchor only)."""
        if self.tail is not None:
            self.tail.set_limits(max_depth)
        hidden, replayed = self._run_masks(batch, window)
        if replayed and self.tail is not None:
            tree = self.tail.trees(window.anchor.numel())
            if self.settings.path_refresh:
                # The second pass may be as wide as the first: it then replays the same graph, tail and all.
                tree = tree.clone()
        else:
            tree = self._grow(window.anchor, hidden, batch.req_pool_indices, max_depth)
        return self._refresh(batch, window, tree, max_depth) if self.settings.path_refresh else tree

    def _run_masks(self, batch, window: StepWindow) -> tuple[torch.Tensor, bool]:
        """The head over [anchor, mask, ...]: hidden [R, block, H], whose row i >= 1 predicts the token at anchor + i, and
        whether the pass was a graph replay."""
        requests = window.anchor.numel()
        tokens = torch.full((requests, self.settings.block), self.settings.mask_token, device=window.anchor.device)
        tokens[:, 0] = window.anchor
        depth = self.block_depth.expand(requests, -1)
        return self._run_block(batch, window, tokens, depth, self.block_bits.expand(requests, -1, -1))

    def _grow(
        self,
        anchors: torch.Tensor,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        limits: torch.Tensor | None,
        out: TokenTree | None = None,
    ) -> TokenTree:
        """The tree of one pass: anchors int64 [R], hidden [R, block, H], rows [R] of the request table, limits int64 [R]
        on the depth or None. A CUDA graph may hold it."""
        settings = self.settings
        log_probs, candidates, _ = self.vocabulary.best(hidden[:, 1 : settings.depth + 1].flatten(0, 1), settings.width)
        shape = (anchors.numel(), settings.depth, -1)
        return tree_from_marginals(
            anchors, log_probs.view(shape), candidates.view(shape), self.first_budget, limits, out=out
        )

    def _refresh(self, batch, window: StepWindow, tree: TokenTree, limits: torch.Tensor | None) -> TokenTree:
        """Re-score half a tree on its own branches and grow it to the whole budget."""
        nodes = tree.budget
        tokens, depth, bits = refresh_block(tree, self.settings.mask_token)
        behind = self._run_block(batch, window, tokens, depth, bits)[0][:, nodes:]
        # A node's own log-probability is asked of the mask behind its parent.
        log_probs, candidates, own = self._score_children(behind, tree)
        return rebuild_tree(tree, own, log_probs, candidates, self.settings.budget, self.settings.depth, limits)

    def _score_children(self, behind: torch.Tensor, tree: TokenTree):
        requests, nodes, _ = behind.shape
        first = torch.arange(requests, device=behind.device)[:, None] * nodes
        # A node's own log-probability is that of its token in its parent's row.
        asked = (first + tree.parent.clamp(min=0)).flatten(), tree.token.flatten()
        log_probs, candidates, own = self.vocabulary.best(behind.flatten(0, 1), self.settings.width, asked)
        shape = (requests, nodes, -1)
        return log_probs.view(shape), candidates.view(shape), own.view(requests, nodes)

    def _run_block(self, batch, window: StepWindow, tokens, depth, bits) -> tuple[torch.Tensor, bool]:
        """The head over a block: tokens, depth int64 [R, N], bits int32 [R, N, W] -> hidden [R, N, H], and whether the
        pass was a graph replay."""
        requests, nodes = tokens.shape
        positions = (window.committed_length[:, None] + depth).flatten()
        plan = window.plan
        slots = window.slots[:, :nodes].flatten()
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=tokens.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=window.committed_length,
            out_cache_loc=slots,
            seq_lens_sum=batch.seq_lens_sum,
            seq_lens_cpu=batch.seq_lens_cpu,
            positions=positions,
            spec_algorithm=batch.spec_algorithm,
            spec_info=TreeInput(
                draft_token=tokens.flatten(),
                positions=positions,
                draft_token_num=nodes,
                capture_hidden_mode=CaptureHiddenMode.NULL,
                ancestors=bits,
                depth=depth,
            ),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=requests * nodes,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        columns = (
            None if nodes == self.settings.budget else _columns(requests, nodes, self.settings.budget, slots.device)
        )
        plan.bind(forward_batch, self.runner.kv_index_translator, cols=columns)
        with torch.inference_mode(), draft_tp_context(self.layout):
            output = self.runner.forward(forward_batch)
        return output.logits_output.hidden_states.view(requests, nodes, -1), output.can_run_graph


@lru_cache
def _columns(requests: int, nodes: int, budget: int, device) -> torch.Tensor:
    """Flat indices of the window's first `nodes` columns."""
    rows = torch.arange(requests, device=device) * budget
    return (rows[:, None] + torch.arange(nodes, device=device)).flatten()


def _check_dtype(head: torch.dtype, target: torch.dtype) -> None:
    """The head reads the target's hidden states and shares its embedding: one dtype."""
    if head != target:
        raise SpecflowConfigError(
            given=f"a head that is loaded in {head} for a target in {target}",
            allowed="one dtype for both",
            todo=f'set "dtype": "{str(target).removeprefix("torch.")}" in the head\'s config.json, or give --dtype',
        )


def _draft_backend(target_runner) -> str:
    """The draft runner's attention backend: it only ever runs our own block pass, so any that builds will do."""
    return "triton" if str(target_runner.device).startswith("cuda") else attention_backends()[0]
