"""The algorithms as SGLang sees them: `CustomSpecAlgo` with DFLASH's identity where that routes SGLang's branches.

`is_dflash` and `is_dflash_family` give us the capture of the target's hidden states, the draft KV pool's share of
memory, the draft runner's embeddings as graph inputs and the relay of anchors under overlap scheduling. What DFLASH
takes for granted and a tree does not have (a chain, one width for draft and verify) is undone by the hooks.
"""

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sgl_specflow.runtime.names import TREE_ALGORITHMS


class TreeAlgorithm(CustomSpecAlgo):
    """One registered name. `draft_block` is set by the worker, before it builds its draft runner."""

    draft_block: int | None = None

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        # The draft writes no chains of its own past the verify window: no page rounding a branch.
        return False

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(self, device, req_to_token_pool, needs_cpu_seq_lens=True, needs_confidence_relay=False):
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Nodes a request: the draft runner's block, or the target's budget."""
        return self.draft_block if is_draft_worker else num_draft_tokens

    def handle_server_args(self, server_args) -> None:
        """Check the start and write the resolved settings into SGLang's arguments; raises SpecflowConfigError."""
        from sgl_specflow.runtime.start_checks import resolve_server_args

        resolve_server_args(self.name, server_args)


def register() -> None:
    """Register every tree algorithm with SGLang."""
    for name in TREE_ALGORITHMS:
        SpeculativeAlgorithm.register(name, supports_overlap=True, spec_class=TreeAlgorithm)(_worker_class)


def _worker_class(server_args):
    from sgl_specflow.runtime import hooks
    from sgl_specflow.runtime.worker import TreeWorker

    hooks.check_applied()
    return TreeWorker
