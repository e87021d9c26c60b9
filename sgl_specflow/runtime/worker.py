"""The worker that drives a step: draft a tree, verify it, accept a path, commit it.

    batch ──► StepWindow ──► drafter.draft ──► verifier.verify ──► accept and commit ──► result
              (KV slots)     (TokenTree)       (Verdict)           (Commit)

It speaks SGLang's V2 schema (srt/speculative/base_spec_worker.py, dflash_worker_v2.py), which the scheduler drives
with overlap and without. Nothing in a step reads a device value on the host.
"""

import logging

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.kernels.tree_step import Commit
from sgl_specflow.runtime.commit_graph import CommitGraphs, commit_paths, cuda_recorder
from sgl_specflow.runtime.gdn_backend import GdnCommit
from sgl_specflow.runtime.parallel_drafter import ParallelDrafter
from sgl_specflow.runtime.settings import Options, TreeSettings
from sgl_specflow.runtime.simulate import simulated_choice
from sgl_specflow.runtime.start_checks import draft_folder
from sgl_specflow.runtime.step import StepWindow
from sgl_specflow.runtime.verifier import TreeVerifier, Verdict
from sgl_specflow.runtime.weaver_drafter import WeaverDrafter
from sgl_specflow.tree import TokenTree
from sgl_specflow.verify import Accepted

logger = logging.getLogger(__name__)


class TreeWorker(BaseSpecWorker):
    """Tree speculative decoding with an exchangeable drafter."""

    def __init__(self, server_args, gpu_id: int, nccl_port: int, target_worker):
        super().__init__()
        self.server_args = server_args
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = target_worker.device
        spec = get_spec()
        self.head = HeadConfig.load(draft_folder(spec))
        self.settings = TreeSettings.resolve(
            spec.speculative_algorithm,
            self.head,
            spec.speculative_num_draft_tokens,
            spec.speculative_num_steps,
            spec.speculative_eagle_topk,
            Options.from_environment(),
        )
        self.speculative_num_draft_tokens = self.settings.budget
        self.model_runner.spec_algorithm.draft_block = self.settings.block
        drafter_class = WeaverDrafter if self.settings.adapter else ParallelDrafter
        self.drafter = drafter_class(self.settings, server_args, gpu_id, nccl_port, target_worker)
        self._draft_worker = self.drafter.worker
        self.verifier = TreeVerifier(target_worker)
        self.commit_graphs: CommitGraphs | None = None
        self.gdn = GdnCommit(self.model_runner)

    def __getattr__(self, name):
        # The scheduler asks its worker for things that only the target worker has.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    # --- life cycle: SGLang builds pools, attention backends and graphs in this order ---

    def alloc_memory_pool(self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None):
        self.drafter.alloc_memory_pool(
            memory_pool_config=memory_pool_config,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        )

    def init_attention_backends(self):
        self.drafter.init_attention_backends()

    def init_cuda_graphs(self):
        graphs = get_exec().graph.cuda_graph_config.decode
        runner = self.model_runner.decode_cuda_graph_runner
        captured = graphs.backend != Backend.DISABLED and runner is not None
        self.drafter.init_cuda_graphs(runner.capture_bs if captured else [])
        if captured:
            self.commit_graphs = CommitGraphs(
                runner.capture_bs,
                self.settings.budget,
                self.settings.depth,
                self._captured_hidden(runner),
                self._kv_cache().move_kv_cache,
                self.drafter.write_context,
            )
            self.commit_graphs.capture(cuda_recorder())

    def _captured_hidden(self, runner) -> torch.Tensor:
        """[rows, L * H]: the one buffer that the target's graphs fill, for the few models of SGLang that have it; else one
        of our own to copy to."""
        rows = runner.max_bs * self.settings.budget
        buffer = runner.buffers.aux_hidden_states
        if buffer is None:
            buffer = torch.zeros(rows, self.head.context_size, dtype=self.model_runner.dtype, device=self.device)
        return buffer[:rows]

    def _kv_cache(self):
        return self.model_runner.token_to_kv_pool_allocator.get_kvcache()

    def weight_update_runners(self):
        # A weight update carries the target's checkpoint, whose layers have the head's names: it must not reach the head.
        kept = (
            "the Weaver's tables" if self.settings.adapter else "the FP8 LM head" if self.settings.fp8_draft else None
        )
        if kept:
            logger.warning(
                "sgl_specflow: %s stay those of the weights loaded first. Output is the target's; accept length may fall "
                "until the server is started again.",
                kept,
            )
        return []

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return (self.model_runner.attn_backend, self.drafter.runner.attn_backend)

    # --- one batch ---

    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None):
        """SGLang's entry for a batch: a prefill, or one step of drafting and verifying."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        if batch.forward_mode.is_idle():
            return self._idle(on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _prefill(self, batch, on_publish) -> GenerationBatchResult:
        """Run the target over (a chunk of) the prompts and write the head's context for the same tokens."""
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        plan, result.kv_loc_plan = result.kv_loc_plan, None
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        # Now, since the scheduler may put these tokens into the prefix cache once we return.
        slots = self.drafter.write_ids(plan)
        # SGLang may pad the pass with further rows.
        hidden = result.logits_output.hidden_states[: slots.numel()]
        self.drafter.write_context(hidden, slots, self._prefill_positions(batch))
        result.logits_output.hidden_states = None
        if self.drafter.wants_final_hidden:
            self.drafter.remember_prefill(batch, result.logits_output)
        self.verifier.penalties.start(batch.reqs, result.next_token_ids)
        result.next_draft_input = make_draft_input_v2(bonus_tokens=result.next_token_ids, new_seq_lens=batch.seq_lens)
        return result

    def _prefill_positions(self, batch) -> torch.Tensor:
        """int64 [T]: each request's extend tokens stand at prefix length + 0, 1, ..."""
        positions = [
            torch.arange(prefix, prefix + length) for prefix, length in zip(batch.prefix_lens, batch.extend_lens)
        ]
        return torch.cat(positions).to(self.device, non_blocking=True)

    def _idle(self, on_publish) -> GenerationBatchResult:
        draft_input = DFlashDraftInputV2.create_idle_input(device=self.device)
        if on_publish is not None:
            on_publish(draft_input.new_seq_lens)
        return GenerationBatchResult(
            next_token_ids=torch.empty(0, dtype=torch.int64, device=self.device),
            accept_lens=torch.empty(0, dtype=torch.int32, device=self.device),
            next_draft_input=draft_input,
            speculative_num_draft_tokens=self.settings.budget,
            new_seq_lens=draft_input.new_seq_lens,
        )

    def _decode(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        window = StepWindow.of(batch, self.model_runner, self.settings.budget)
        tree = self.drafter.draft(batch, window, self._depth_limits(batch))
        verdict = self.verifier.verify(batch, window, tree, grammar_barrier)
        choice = simulated_choice(tree, verdict.next_token)
        choice = self._same_on_all_ranks(choice)
        commit = self._commit(window, tree, choice, verdict)
        accepted, new_lengths = commit.accepted, commit.new_length
        self.verifier.penalties.commit(batch.reqs, accepted)
        if batch.return_logprob:
            self._log_probs(batch, verdict, accepted, choice)
        self.gdn.on_accepted(batch, window, accepted)
        if self.drafter.wants_final_hidden:
            self.drafter.remember_accepted(batch, verdict.final_hidden, accepted)
        if on_publish is not None:
            on_publish(new_lengths)
        return GenerationBatchResult(
            logits_output=verdict.logits_output,
            next_token_ids=accepted.tokens.flatten(),
            accept_lens=accepted.length.to(torch.int32),
            new_seq_lens=new_lengths,
            next_draft_input=make_draft_input_v2(bonus_tokens=accepted.bonus, new_seq_lens=new_lengths),
            speculative_num_draft_tokens=self.settings.budget,
            speculative_output_stride=accepted.tokens.shape[1],
            can_run_cuda_graph=verdict.can_run_cuda_graph,
            # Held until the scheduler has read the step's results: the streams of two steps overlap.
            extra_keep_alive_refs=[window, tree, verdict, accepted],
        )

    def _depth_limits(self, batch) -> torch.Tensor | None:
        """A custom logit processor may read its request's output, which a tree node does not have: depth 0 for those."""
        info = batch.sampling_info
        if not info.has_custom_logit_processor:
            return None
        limits = torch.full((len(batch.reqs),), self.settings.depth, dtype=torch.int64)
        for entry in info.custom_logit_processor.values():
            limits[entry.rows] = 0
        return limits.to(self.device, non_blocking=True)

    def _same_on_all_ranks(self, choice: torch.Tensor) -> torch.Tensor:
        group = get_parallel().tp_group
        if group.world_size > 1:
            group.broadcast(choice, src=0)
        return choice

    def _log_probs(self, batch, verdict: Verdict, accepted: Accepted, choice: torch.Tensor) -> None:
        """Log-probabilities of the committed tokens, read at the nodes that chose them."""
        requests, nodes = choice.shape
        first = torch.arange(requests, device=choice.device)[:, None] * nodes
        accept_index = torch.where(accepted.path >= 0, first + accepted.path, first)
        compute_spec_logprobs(batch, verdict.logits_output, choice.flatten(), accept_index=accept_index)

    def _commit(self, window: StepWindow, tree: TokenTree, choice: torch.Tensor, verdict: Verdict) -> Commit:
        """Accept a path of each tree, move its KV to the front of the window, write the head's context for it."""
        slots, committed, hidden = window.slots, window.committed_length, verdict.hidden
        if verdict.can_run_cuda_graph and self.commit_graphs is not None and self.commit_graphs.fits(len(choice)):
            return self.commit_graphs.run(tree, choice, slots, committed, hidden)
        move, write_context = self._kv_cache().move_kv_cache, self.drafter.write_context
        return commit_paths(tree, choice, self.settings.depth, slots, committed, hidden, move, write_context)
