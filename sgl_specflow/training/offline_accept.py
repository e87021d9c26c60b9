"""Accept length without a server: drafting along the target's own greedy answers, exactly the passes a server makes.

Many answers walk at once. A pass drafts at each answer's anchor, accepts the longest prefix of the true continuation
that the tree holds, and moves the anchor to the bonus token behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_specflow.drafter.reference import ContextKV, ReferenceHead
from sgl_specflow.training.responses import Response
from sgl_specflow.training.target_states import FrozenTarget
from sgl_specflow.tree import TokenTree, build_tree, chain, unpack_bits
from sgl_specflow.tree.refresh import rebuild_tree, refresh_block
from sgl_specflow.verify.acceptance import accept

LOGIT_ROWS = 8192
WIDTH = 16


@dataclass
class Answers:
    """R answers with the head's context of all their tokens.

    Attributes:
        tokens: [R, T] int64, right-padded with -1. prompt, length: [R] int64, tokens of the prompt and in all.
        context: keys and values [R, T, kv heads, D] a draft layer.
    """

    tokens: Tensor
    prompt: Tensor
    length: Tensor
    context: ContextKV

    def select(self, rows: Tensor) -> "Answers":
        """These rows, trimmed to their longest."""
        width = int(self.length[rows].max())
        cut = lambda tensor: tensor[rows, :width]
        context = ContextKV(
            [cut(keys) for keys in self.context.keys],
            [cut(values) for values in self.context.values],
            cut(self.context.positions),
        )
        return Answers(cut(self.tokens), self.prompt[rows], self.length[rows], context)


class OfflineDrafter:
    """Drafts as `runtime.parallel_drafter` does, over known text: [R] anchors of R answers at a time."""

    def __init__(self, head: ReferenceHead, target: FrozenTarget, width: int = WIDTH, lm_head: Tensor | None = None):
        """lm_head: another than the target's own for drafting [V, H], or None."""
        self.head, self.target, self.width = head, target, width
        self.lm_head = target.lm_head if lm_head is None else lm_head

    @torch.inference_mode()
    def read(self, responses: list[Response], at_once: int = 64) -> Answers:
        """Run the target over the answers and keep the head's context."""
        device, head = self.target.embedding.device, self.head
        tokens = torch.nn.utils.rnn.pad_sequence([r.tokens for r in responses], batch_first=True, padding_value=-1)
        tokens = tokens.to(device)
        where = torch.arange(tokens.shape[1], device=device)
        parts = []
        for some in tokens.split(at_once):
            hidden = self.target.states(some.clamp(min=0))[0].to(head.tensors["fc.weight"].dtype)
            parts.append(head.context_kv(head.project_context(hidden), where.expand(len(some), -1)))
        context = ContextKV(
            [torch.cat(keys) for keys in zip(*(part.keys for part in parts))],
            [torch.cat(values) for values in zip(*(part.values for part in parts))],
            torch.cat([part.positions for part in parts]),
        )
        prompt = torch.tensor([r.prompt_length for r in responses], device=device)
        return Answers(tokens, prompt, torch.tensor([len(r.tokens) for r in responses], device=device), context)

    def tree(self, answers: Answers, anchor: Tensor, budget: int) -> TokenTree:
        """One pass: the best-first tree of marginals."""
        root = answers.tokens.gather(1, anchor[:, None])[:, 0]
        return build_tree(root, *self._marginals(answers, anchor, budget), budget)

    def chain(self, answers: Answers, anchor: Tensor, nodes: int) -> TokenTree:
        """One pass: the likeliest token of each depth, as SGLang's DFLASH drafts."""
        root = answers.tokens.gather(1, anchor[:, None])
        return chain(torch.cat((root, self._marginals(answers, anchor, nodes)[1][:, :, 0]), dim=1))

    def refreshed_tree(self, answers: Answers, anchor: Tensor, budget: int) -> TokenTree:
        """Two passes: half a tree, then its nodes re-scored on their own branches and grown to the budget."""
        tree = self.tree(answers, anchor, budget // 2)
        tokens, depth, bits = refresh_block(tree, self.head.config.mask_token_id)
        mask = unpack_bits(bits, tokens.shape[1])
        hidden = self._run(answers, anchor, tokens, anchor[:, None] + depth, mask)
        behind = hidden[:, tree.budget :]
        log_probs, candidates, total = self._best(behind)
        parent = tree.parent.clamp(min=0)
        above = behind.gather(1, parent[:, :, None].expand_as(behind)).to(self.lm_head.dtype)
        own = (above.float() * self.lm_head[tree.token].float()).sum(-1) - total.gather(1, parent)
        depths = min(self.head.config.depth, budget - 1)
        return rebuild_tree(tree, own, log_probs, candidates, budget, depths)

    def _marginals(self, answers: Answers, anchor: Tensor, budget: int) -> tuple[Tensor, Tensor]:
        config = self.head.config
        depth = min(config.depth, budget - 1)
        size = depth + 1 if config.causal_head else min(config.block_size, budget)
        block = torch.full((len(anchor), size), config.mask_token_id, device=anchor.device)
        block[:, 0] = answers.tokens.gather(1, anchor[:, None])[:, 0]
        positions = anchor[:, None] + torch.arange(size, device=anchor.device)
        hidden = self._run(answers, anchor, block, positions, None)
        return self._best(hidden[:, 1 : depth + 1])[:2]

    def _run(self, answers: Answers, anchor: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        seen = answers.context.positions < anchor[:, None]
        seen = seen[:, None].expand(-1, tokens.shape[1], -1)
        embeddings = self.target.embedding[tokens].to(self.head.tensors["fc.weight"].dtype)
        return self.head.forward(embeddings, positions, answers.context, mask, seen)

    def _best(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [R, N, H] -> (log-probabilities [R, N, K], tokens [R, N, K], logsumexp of the logits [R, N])."""
        lm_head, parts = self.lm_head, []
        for rows in hidden.flatten(0, 1).split(LOGIT_ROWS):
            logits = (rows.to(lm_head.dtype) @ lm_head.T).float()
            total = logits.logsumexp(1)
            values, tokens = logits.topk(min(self.width, logits.shape[1]), dim=1)
            parts.append((values - total[:, None], tokens, total))
        return tuple(torch.cat(part).unflatten(0, hidden.shape[:2]) for part in zip(*parts))


@torch.inference_mode()
def verify_passes(answers: Answers, draft: Callable[[Answers, Tensor], TokenTree], depth: int) -> Tensor:
    """Verify passes of each answer, int64 [R], from its first anchor (its first token) to its end."""
    passes = torch.zeros_like(answers.prompt)
    place, rows, some = answers.prompt.clone(), torch.arange(len(answers.prompt), device=passes.device), answers
    while len(active := (place[rows] < answers.length[rows] - 1).nonzero()[:, 0]):
        if len(active) < 0.6 * len(rows):
            rows, some = rows[active], some.select(active)
        anchor = torch.minimum(place[rows], some.length - 1)
        running = anchor < some.length - 1
        tree = draft(some, anchor)
        true = torch.nn.functional.pad(some.tokens, (0, depth + 1), value=-1)
        length = accept(tree, true.gather(1, anchor[:, None] + tree.depth + 1), depth).length
        place[rows] = torch.where(running, anchor + length, place[rows])
        passes[rows] += running
    return passes


def accept_lengths(
    drafter: OfflineDrafter, responses: list[Response], budgets: list[int], refreshed: list[int] = (), chains=()
) -> dict[str, dict[str, float]]:
    """Tokens a verify pass: {method: {source: mean}} with "all" last, over greedy answers of this target.

    Answers of fewer than two tokens are left out. Methods are named tree-B, refresh-B and chain-N.

    Args:
        budgets, refreshed: of trees in one pass and with path refresh. chains: nodes of chains, the anchor included.
    """
    responses = measurable(responses)
    methods = {f"tree-{b}": (drafter.tree, b) for b in budgets}
    methods |= {f"refresh-{b}": (drafter.refreshed_tree, b) for b in refreshed}
    methods |= {f"chain-{n}": (drafter.chain, n) for n in chains}
    return walk(drafter.read(responses), responses, methods, drafter.head.config.depth)


def measurable(responses: list[Response]) -> list[Response]:
    """Those of two tokens or more: the first comes from the prompt's own pass."""
    return [r for r in responses if len(r.tokens) - r.prompt_length >= 2]


def walk(
    answers: Answers, responses: list[Response], methods: dict[str, tuple[Callable, int]], depth: int
) -> dict[str, dict[str, float]]:
    """Tokens a verify pass: {method: {source: mean}} with "all" last.

    Args:
        answers: what a drafter read of the responses. methods: by name, (draft(answers, anchor, nodes), nodes).
        depth: of the head.
    """
    committed = answers.length - 1 - answers.prompt
    sources = sorted({r.source for r in responses})
    inside = {s: torch.tensor([r.source == s for r in responses], device=committed.device) for s in sources}
    inside["all"] = torch.ones_like(committed, dtype=torch.bool)
    results = {}
    for name, (draft, size) in methods.items():
        passes = verify_passes(answers, lambda some, anchor, draft=draft, size=size: draft(some, anchor, size), depth)
        results[name] = {s: (committed[m].sum() / passes[m].sum()).item() for s, m in inside.items()}
    return results
