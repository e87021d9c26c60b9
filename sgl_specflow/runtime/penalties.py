"""Penalties over a tree: every node is penalised for the output that its own path would have produced.

SGLang's penalisers count committed tokens once a step; on a tree a node deeper down must also count the nodes above
it, or the output differs from plain decoding's. We keep each penalised request's counts on the device, exact also
under overlap scheduling, and add a node's path to them. The order is the one of SGLang's overlapped plain decoding:
frequency, presence and minimum length first, repetition last.

A prefill is still sampled with SGLang's own penalisers. They forget a retracted request's output, which the token after
its second prefill must be penalised for; so it is counted again when SGLang makes them.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from sgl_specflow.runtime.names import is_tree_algorithm
from sgl_specflow.tree import TokenTree
from sgl_specflow.verify import Accepted


@dataclass
class _Ledger:
    """One request's output so far: counts float32 [V] and its stop tokens int64 [S]."""

    counts: torch.Tensor
    stop_tokens: torch.Tensor


class TreePenalties:
    """Output counts of the penalised requests that SGLang still holds. Keyed by request and not by its row of the
    request table: under overlap a step may still run for a finished request whose row a new one has."""

    def __init__(self, vocab_size: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device
        self._ledgers: WeakKeyDictionary[object, _Ledger] = WeakKeyDictionary()

    def start(self, reqs, next_tokens: torch.Tensor) -> None:
        """After a prefill: count what each penalised request has put out, and next_tokens int64 [R], its newest."""
        for i, req in enumerate(reqs):
            if not is_penalised(req):
                continue
            counts = _output_counts(req, self.vocab_size, self.device)
            counts.index_add_(0, next_tokens[i : i + 1].to(torch.int64), torch.ones(1, device=self.device))
            self._ledgers[req] = _Ledger(counts, _stop_tokens(req, self.device))

    def apply(self, logits: torch.Tensor, reqs, tree: TokenTree) -> None:
        """Penalise logits [R * B, V] in place, at every node of each penalised request."""
        nodes = tree.budget
        for i, req in enumerate(reqs):
            if is_penalised(req):
                rows = logits[i * nodes : (i + 1) * nodes]
                above = tree.ancestor_mask()[i].float()
                above[:, 0] = 0  # the anchor is counted as committed output
                self._penalise(rows, req.sampling_params, self._ledgers[req], tree.token[i], above, tree.depth[i])

    def _penalise(self, logits, params, ledger: _Ledger, token, above, depth) -> None:
        nodes = token.numel()
        counts = ledger.counts.repeat(nodes, 1).scatter_add_(1, token.expand(nodes, -1), above)
        present = counts > 0
        if params.frequency_penalty:
            logits -= params.frequency_penalty * counts
        if params.presence_penalty:
            logits -= params.presence_penalty * present
        if params.min_new_tokens:
            too_short = ledger.counts.sum() + depth < params.min_new_tokens
            logits[:, ledger.stop_tokens] += torch.where(too_short, -torch.inf, 0.0)[:, None]
        if params.repetition_penalty != 1.0:
            scaled = torch.where(logits < 0, logits * params.repetition_penalty, logits / params.repetition_penalty)
            logits.copy_(torch.where(present, scaled, logits))

    def commit(self, reqs, accepted: Accepted) -> None:
        """Count what each penalised request committed."""
        entry = torch.arange(accepted.tokens.shape[1], device=self.device)
        committed = (entry < accepted.length[:, None]).float()
        for i, req in enumerate(reqs):
            if is_penalised(req):
                self._ledgers[req].counts.scatter_add_(0, accepted.tokens[i], committed[i])


def is_penalised(req) -> bool:
    """Whether a request's logits depend on its own output."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty or params.presence_penalty or params.min_new_tokens or params.repetition_penalty != 1.0
    )


def _output_counts(req, vocab_size: int, device) -> torch.Tensor:
    """float32 [V], how often each token stands in a request's output."""
    output = torch.tensor(list(req.output_ids), dtype=torch.int64)
    return torch.bincount(output, minlength=vocab_size).float().to(device, non_blocking=True)


def _stop_tokens(req, device: torch.device) -> torch.Tensor:
    """Tokens that end a request, as SGLang's BatchedMinNewTokensPenalizer collects them."""
    tokens = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    tokenizer = req.tokenizer
    if tokenizer is not None:
        tokens |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
        tokens.add(tokenizer.eos_token_id)
    return torch.tensor(sorted(tokens - {None}), dtype=torch.int64).to(device, non_blocking=True)


def restore_after_retraction(_result, info, batch, vocab_size: int) -> None:
    """After SamplingBatchInfo.adjusted_from_schedule_batch: count the output of requests that have some already."""
    orchestrator = info.penalizer_orchestrator
    if not is_tree_algorithm(batch.spec_algorithm.name) or not orchestrator.is_required:
        return
    for i, req in enumerate(batch.reqs):
        if len(req.output_ids) == 0 or not is_penalised(req):
            continue
        counts = _output_counts(req, vocab_size, orchestrator.device)
        for kind, penalizer in orchestrator.penalizers.items():
            if penalizer.is_prepared():
                _restore(kind, penalizer, i, counts)


def _restore(kind: type, penalizer, row: int, counts: torch.Tensor) -> None:
    """Set one request's row of one of SGLang's penalisers to what cumulating its output would have made it."""
    if kind is BatchedFrequencyPenalizer:
        penalizer.cumulated_frequency_penalties[row] = penalizer.frequency_penalties[row] * counts
    elif kind is BatchedPresencePenalizer:
        penalizer.cumulated_presence_penalties[row] = penalizer.presence_penalties[row] * (counts > 0)
    elif kind is BatchedRepetitionPenalizer:
        row_penalties = torch.where(counts > 0, penalizer.repetition_penalties[row], 1.0)
        penalizer.cumulated_repetition_penalties[row] = row_penalties
    elif kind is BatchedMinNewTokensPenalizer:
        penalizer.len_output_tokens[row] = int(counts.sum())


HOOKS = [
    (
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch",
        restore_after_retraction,
        HookType.AFTER,
    ),
]
