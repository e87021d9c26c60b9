"""DFlash-TfM inside SGLang: the DFlash head's one pass gives pools, the Weaver grows the tree over them."""

import torch

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.weaver import FoldedWeaver, load_weaver
from sgl_specflow.runtime.final_hidden import FinalHidden, keep_final_hidden
from sgl_specflow.runtime.parallel_drafter import ParallelDrafter
from sgl_specflow.runtime.settings import TreeSettings
from sgl_specflow.runtime.start_checks import draft_folder
from sgl_specflow.tree import TokenTree
from sgl_specflow.verify import Accepted


class WeaverDrafter(ParallelDrafter):
    """Drafts trees whose branches are conditional.

    Under tensor parallelism every rank holds the whole adapter, with its tables of all ranks' vocabulary rows, and grows the
    same tree from the same pools and hidden states.
    """

    wants_final_hidden = True

    def __init__(self, settings: TreeSettings, server_args, gpu_id: int, nccl_port: int, target_worker):
        super().__init__(settings, server_args, gpu_id, nccl_port, target_worker)
        self.target_runner = target_worker.model_runner
        keep_final_hidden(self.target_runner.model)
        embedding, lm_head = self.vocabulary.embedding_rows(), self.vocabulary.weight
        with torch.inference_mode():
            config, tensors = load_weaver(settings.adapter.path)
            config.check_against(
                HeadConfig.load(draft_folder(server_args)), embedding.shape[1], str(settings.adapter.path)
            )
            self.weaver = FoldedWeaver(
                config, tensors, embedding, lm_head, lm_head.dtype, of_all_ranks=self.vocabulary.of_all_ranks
            )
        self.final_hidden: FinalHidden | None = None

    def alloc_memory_pool(self, **pools) -> None:
        super().alloc_memory_pool(**pools)
        rows = self.target_runner.req_to_token_pool.req_to_token.shape[0]
        weight = self.vocabulary.weight
        self.final_hidden = FinalHidden(rows, weight.shape[1], weight.dtype, weight.device)

    def _grow(self, anchors, hidden, rows, limits, out=None) -> TokenTree:
        settings, adapter = self.settings, self.settings.adapter
        proposal = hidden[:, 1:]
        scores, tokens, _ = self.vocabulary.best(proposal[:, : settings.depth].flatten(0, 1), adapter.pool)
        shape = (anchors.numel(), settings.depth, -1)
        tree = self.weaver.build_tree(
            anchors,
            self.final_hidden.read(rows),
            proposal[:, : adapter.prefix],
            tokens.view(shape),
            scores.view(shape),
            settings.budget,
            adapter.width,
            adapter.rounds,
            settings.width,
            adapter.temperature,
            limits,
        )
        return tree if out is None else out.copy_(tree)

    def remember_prefill(self, batch, logits_output) -> None:
        """After (a chunk of) a prefill: the state that chose each request's anchor is its last row."""
        final, logits_output.last_hidden_states = logits_output.last_hidden_states, None
        last = torch.tensor(batch.extend_lens, dtype=torch.int64).cumsum(0) - 1
        self.final_hidden.write(batch.req_pool_indices, final[last.to(final.device, non_blocking=True)])

    def remember_accepted(self, batch, final_hidden: torch.Tensor, accepted: Accepted) -> None:
        """After a step: the state of the last accepted node chose the new anchor. final_hidden [R * B, H]."""
        requests = accepted.last_node.shape[0]
        hidden = final_hidden.view(requests, -1, final_hidden.shape[1])
        row = torch.arange(requests, device=hidden.device)
        self.final_hidden.write(batch.req_pool_indices, hidden[row, accepted.last_node])
