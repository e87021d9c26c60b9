"""One target pass over the trees, and the target's own choice at every node.

The choice is made by SGLang's sampler on the nodes' rows, so it is by construction what plain decoding would draw:
temperature, top-k, top-p, min-p, seeds by position, biases, grammar, custom processors. Acceptance then only walks
the tree (`sgl_specflow.verify`).
"""

import dataclasses
from dataclasses import dataclass

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sgl_specflow.runtime.penalties import TreePenalties
from sgl_specflow.runtime.step import StepWindow
from sgl_specflow.runtime.tree_input import TreeInput
from sgl_specflow.tree import TokenTree


@dataclass
class Verdict:
    """What the target says of R trees of B nodes.

    Attributes:
        next_token: int64 [R, B], the target's choice at each node.
        hidden: [R * B, L * H], its hidden states at the head's layers.
        logits_output: SGLang's output. Where log-probabilities are asked for, its logits are the adjusted ones, not yet
            scaled by temperature; else the sampler may have overwritten them.
        can_run_cuda_graph: whether the pass was a graph replay.
        final_hidden: [R * B, H], its final-normed hidden states, where a drafter asked for them (`final_hidden`).
    """

    next_token: torch.Tensor
    hidden: torch.Tensor
    logits_output: object
    can_run_cuda_graph: bool
    final_hidden: torch.Tensor | None = None


class TreeVerifier:
    """Runs the target over trees."""

    def __init__(self, target_worker):
        self.target_worker = target_worker
        runner = target_worker.model_runner
        self.penalties = TreePenalties(runner.model_config.vocab_size, torch.device(runner.device))

    def verify(self, batch, window: StepWindow, tree: TokenTree, grammar_barrier=None) -> Verdict:
        """Score all nodes and choose a token at each. Leaves batch.out_cache_loc at the window's slots."""
        # Copied to the host while the target runs.
        grammar = _grammar_tree(tree) if batch.has_grammar else None
        output = self._forward(batch, window, tree)
        logits_output = output.logits_output
        logits = logits_output.next_token_logits
        hidden, logits_output.hidden_states = logits_output.hidden_states, None
        final_hidden, logits_output.last_hidden_states = logits_output.last_hidden_states, None
        self._adjust(logits, batch, tree, grammar, grammar_barrier)
        next_token = self._choose(logits_output, batch, tree, window)
        return Verdict(next_token, hidden, logits_output, output.can_run_cuda_graph, final_hidden)

    def _forward(self, batch, window: StepWindow, tree: TokenTree):
        tree_input = TreeInput(
            draft_token=tree.token.flatten(),
            positions=tree.positions(window.committed_length).flatten(),
            draft_token_num=tree.budget,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=window.plan,
            ancestors=tree.ancestors,
            depth=tree.depth,
        )
        batch.out_cache_loc = window.slots.flatten()
        forward_batch, _ = tree_input.prepare_for_verify(batch, self.target_worker)
        return self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )

    def _adjust(self, logits: torch.Tensor, batch, tree: TokenTree, grammar, grammar_barrier) -> None:
        """Everything that plain decoding does to logits before it samples, in its order, at every node."""
        nodes, info = tree.budget, batch.sampling_info
        self.penalties.apply(logits, batch.reqs, tree)
        if grammar is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=grammar, sampling_info=info, device=logits.device, barrier=grammar_barrier
            )
            if mask is not None:
                _apply_mask(mask, logits)
        if info.logit_bias is not None:
            logits.add_(info.logit_bias.repeat_interleave(nodes, 0))
        if info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, info, num_tokens_in_batch=nodes)

    def _choose(self, logits_output, batch, tree: TokenTree, window: StepWindow) -> torch.Tensor:
        info = batch.sampling_info
        logits = logits_output.next_token_logits
        if batch.return_logprob and not info.is_all_greedy:
            # The sampler turns logits into probabilities in place; log-probabilities are computed from the logits later.
            logits_output = dataclasses.replace(logits_output, next_token_logits=logits.clone())
        sampler = self.target_worker.model_runner.sampler
        chosen = sampler(
            logits_output,
            _rows_of_nodes(info, tree.budget),
            False,
            [],
            [],
            tree.positions(window.committed_length).flatten(),
        )
        return chosen.to(torch.int64).view_as(tree.token)


def _apply_mask(mask, logits: torch.Tensor) -> None:
    """`mask.apply` for rows that lie apart: xgrammar's kernel for CUDA takes the vocabulary's size for the distance of two
    rows, but where that is no multiple of 64 SGLang cuts the padding off and rows lie further apart."""
    rows = logits.contiguous()
    mask.apply(rows)
    if rows is not logits:
        logits.copy_(rows)


def _rows_of_nodes(info, nodes: int):
    """A SamplingBatchInfo with one row a node, for the sampler. What `_adjust` has applied is taken out."""
    repeat = {
        name: getattr(info, name).repeat_interleave(nodes, 0)
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
        if getattr(info, name) is not None
    }
    return dataclasses.replace(
        info,
        **repeat,
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        custom_params=None,
    )


def _grammar_tree(tree: TokenTree) -> GrammarTree:
    """SGLang's form of a tree: first child and next sibling of each node, -1 for none. Padding is linked to nothing."""
    nodes = tree.budget
    index = torch.arange(nodes, device=tree.token.device)
    is_child = tree.parent[:, None, :] == index[:, None]  # [R, parent, child]
    first_child = torch.where(is_child, index, nodes).amin(2)
    same_parent = (tree.parent[:, :, None] == tree.parent[:, None, :]) & (tree.parent[:, :, None] >= 0)
    next_sibling = torch.where(same_parent & (index[None, :] > index[:, None]), index, nodes).amin(2)
    return GrammarTree.from_device(
        first_child.masked_fill(first_child == nodes, -1),
        next_sibling.masked_fill(next_sibling == nodes, -1),
        tree.token,
    )
