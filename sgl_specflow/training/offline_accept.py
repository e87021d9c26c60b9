"""Accept length without a server: the trees that a head would draft, walked along the target's greedy continuations."""

import torch
from torch import Tensor

from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.training.blocks import Blocks
from sgl_specflow.training.responses import Response
from sgl_specflow.training.target_states import FrozenTarget
from sgl_specflow.training.trainer import block_hidden, pad
from sgl_specflow.tree import build_tree
from sgl_specflow.verify.acceptance import accept

CANDIDATES = 32


@torch.inference_mode()
def marginals(head: ReferenceHead, target: FrozenTarget, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """One pass of masks at each anchor position [A] of a sequence [T]: (log-probabilities, tokens), both [A, D, K]."""
    size = head.config.block_size
    positions = (anchors[:, None] + torch.arange(size, device=tokens.device))[None]
    block = torch.full_like(positions, head.config.mask_token_id)
    block[..., 0] = tokens[anchors]
    blocks = Blocks(block, positions, torch.zeros(positions.shape, device=tokens.device))
    hidden = block_hidden(head, target, target.states(tokens[None])[0], blocks)[0, :, 1:]
    logits = hidden.to(target.lm_head.dtype) @ target.lm_head.T
    top, token = logits.float().log_softmax(-1).topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
    return top, token


@torch.inference_mode()
def accept_lengths(
    head: ReferenceHead, target: FrozenTarget, tokens: Tensor, prompt_length: int, budgets: tuple[int, ...]
):
    """Accept length at every anchor of one greedy response: {budget: int64 [anchors]}.

    tokens [T] on the target's device; the anchors are positions prompt_length to T - 2. A pass accepts the longest
    prefix of the true continuation that the tree holds, and one token more.
    """
    anchors = torch.arange(prompt_length, len(tokens) - 1, device=tokens.device)
    log_probs, candidates = marginals(head, target, tokens, anchors)
    # Past the response's end nothing matches: tokens are never -1.
    true = torch.nn.functional.pad(tokens, (0, head.config.depth + 1), value=-1)
    lengths = {}
    for budget in budgets:
        tree = build_tree(tokens[anchors], log_probs, candidates, budget)
        lengths[budget] = accept(tree, true[anchors[:, None] + tree.depth + 1], head.config.depth).length
    return lengths


def mean_accept_length(
    head: ReferenceHead, target: FrozenTarget, responses: list[Response], budgets: tuple[int, ...]
) -> dict[str, dict[int, float]]:
    """Tokens a verify pass, {source: {budget: mean}} with 'all' last, walking each response as the server would.

    The responses must be greedy continuations of this target. Those of fewer than two tokens are left out.
    """
    passes: dict[str, dict[int, int]] = {}
    committed: dict[str, int] = {}
    for response in responses:
        if len(response.tokens) - response.prompt_length < 2:
            continue
        tokens = pad([response], target.embedding.device)[0][0]
        lengths = accept_lengths(head, target, tokens, response.prompt_length, budgets)
        for source in (response.source, "all"):
            committed[source] = committed.get(source, 0) + len(tokens) - 1 - response.prompt_length
            for budget in budgets:
                of_source = passes.setdefault(source, {})
                of_source[budget] = of_source.get(budget, 0) + _passes(lengths[budget].tolist())
    sources = sorted(committed, key=lambda source: (source == "all", source))
    return {source: {b: committed[source] / passes[source][b] for b in budgets} for source in sources}


def _passes(lengths: list[int]) -> int:
    """Verify passes from the first anchor to the end of the response."""
    place, count = 0, 0
    while place < len(lengths):
        place += lengths[place]
        count += 1
    return count
