"""Building the token tree from a conditional drafter: DySpec's best-first expansion, several nodes at once.

Fixed shapes and no host synchronisation, so that one CUDA graph holds the whole construction. The drafter is a
function that is asked for a batch of nodes at a time; what it remembers of earlier nodes is its own business.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .token_tree import TokenTree, ancestor_bits


@dataclass
class Expansion:
    """n nodes that a round takes, of R requests. They occupy slots `first_slot` .. `first_slot + n - 1`.

    A slot is a node's place in the order of selection, the root's is 0. Dead nodes (fewer were left than a round
    takes) have score -inf, and any token and parent; what the drafter says of them is ignored.

    Attributes:
        first_slot: int.
        token: int64 [R, n].
        parent: int64 [R, n], the parent's slot (0 for the root itself).
        depth: int64 [R, n], 0 for the root.
        score: float32 [R, n], sum of the path's log-probabilities.
    """

    first_slot: int
    token: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    score: torch.Tensor


def expansion_rounds(budget: int, width: int) -> int:
    """How often `build_conditional_tree` asks its drafter: the root alone, then `width` nodes at a time."""
    return 0 if budget == 1 else -(-(budget - 1) // width)


def build_conditional_tree(
    root_token: torch.Tensor,
    pool_tokens: torch.Tensor,
    log_probs_of: Callable[[Expansion], torch.Tensor],
    budget: int,
    width: int,
    children: int,
    max_depth: torch.Tensor | None = None,
) -> TokenTree:
    """The tree of at most `budget` nodes that best-first expansion, `width` nodes a round, finds.

    A node's score is the float32 sum of the drafter's log-probabilities along its path. The root is asked for first. A
    round then takes the `width` best nodes of the frontier (the children of all nodes asked so far that are not in the
    tree), puts them into the tree, and asks the drafter for all of them at once; their children join the frontier. The
    last nodes are not asked for, so a tree takes ceil((budget - 1) / width) askings. Width 1 is exact best-first
    search. A round uses up `width` places of the budget even where the frontier holds fewer nodes (shapes are fixed).

    Order in the frontier: higher score; on equal score the parent that was taken earlier; then the smaller candidate
    rank. A candidate's rank is its place by log-probability among its node's pool, and by pool place on ties. The
    frontier keeps no more entries than nodes are still wanted, which loses nothing: an entry is overtaken for ever.

    Args:
        root_token: int64 [R], the anchors.
        pool_tokens: int64 [R, D, P]: a node of depth d has its children among the tokens [:, d], which are distinct.
        log_probs_of: asked with an Expansion of n nodes, gives [R, n, P], their log-probabilities over the pools of
            their depths. Values above 0 count as 0; candidates of -inf or NaN are never chosen.
        budget: B >= 1, the root included.
        width: w >= 1, nodes a round. children: candidates considered a node, >= 1.
        max_depth: int64 [R], the greatest depth allowed to each request (0: the root only); D when not given.

    Returns:
        TokenTree; inside a depth, nodes stand in the order in which they were taken.

    Raises:
        ValueError: a shape, dtype or number is not as above.
    """
    _check_arguments(root_token, pool_tokens, budget, width, children, max_depth)
    requests, depths, pool = pool_tokens.shape
    limit = torch.full_like(root_token, depths) if max_depth is None else max_depth.clamp(max=depths)
    zero = torch.zeros_like(root_token[:, None])
    # Fields of nodes and of frontier entries: int64 [3, R, n], token, parent's slot, depth.
    fields, score = torch.stack((root_token[:, None], zero, zero)), zero.to(torch.float32)
    taken = [(fields, score)]
    frontier = fields[:, :, :0], score[:, :0]
    first_slot, count = 0, 1
    while count < budget:
        wanted = budget - count
        nodes = Expansion(first_slot, *fields, score)
        children_of_nodes = _children_of(nodes, log_probs_of(nodes), pool_tokens, limit, min(children, pool, wanted))
        frontier = _best(frontier, children_of_nodes, wanted)
        now = min(width, wanted)
        fields, score = _first(frontier, now)
        taken.append((fields, score))
        frontier = tuple(part[..., now:] for part in frontier)
        first_slot, count = count, count + now
    return _lay_out(root_token, *(torch.cat(part, dim=-1) for part in zip(*taken)), depths)


def _children_of(nodes: Expansion, log_probs, pool_tokens, limit, keep: int):
    """The `keep` likeliest children of each node, parents in slot order: fields [3, R, n * keep] and their scores."""
    requests, count, _ = log_probs.shape
    log_probs = log_probs.float().nan_to_num(nan=-torch.inf, posinf=0.0, neginf=-torch.inf).clamp(max=0.0)
    # Stable: equal candidates keep pool order. topk leaves ties undefined.
    best, place = log_probs.sort(dim=2, descending=True, stable=True)
    best, place = best[:, :, :keep], place[:, :, :keep]
    score = (nodes.score[:, :, None] + best).masked_fill((nodes.depth >= limit[:, None])[:, :, None], -torch.inf)
    # A node at the greatest depth has no pool; its children are masked above.
    level = nodes.depth.clamp(max=pool_tokens.shape[1] - 1)
    token = pool_tokens.flatten(1).gather(1, (level[:, :, None] * pool_tokens.shape[2] + place).flatten(1))
    slot = torch.arange(nodes.first_slot, nodes.first_slot + count, device=token.device)
    parent = slot[:, None].expand(requests, count, keep).flatten(1)
    depth = (nodes.depth + 1)[:, :, None].expand(-1, -1, keep).flatten(1)
    return torch.stack((token, parent, depth)), score.flatten(1)


def _best(frontier, new, keep: int):
    """The best `keep` entries, in order. Stable: the frontier is in order and its parents are the earlier ones."""
    score, order = torch.cat((frontier[1], new[1]), 1).sort(dim=1, descending=True, stable=True)
    fields = torch.cat((frontier[0], new[0]), 2).gather(2, order[:, :keep].expand(3, -1, -1))
    return fields, score[:, :keep]


def _first(entries, count: int):
    """The first `count` entries, dead ones added where there are fewer."""
    fields, score = (part[..., :count] for part in entries)
    missing = count - score.shape[1]
    if missing:
        pad = torch.nn.functional.pad
        fields, score = pad(fields, (0, missing)), pad(score, (0, missing), value=-torch.inf)
    return fields, score


def _lay_out(root_token, fields, score, depths: int) -> TokenTree:
    """From the order of selection to the order of depth, dead nodes last."""
    alive = score > -torch.inf
    order = torch.where(alive, fields[2], depths + 1).sort(dim=1, stable=True).indices
    node = torch.arange(order.shape[1], device=order.device).expand_as(order)
    node_of_slot = torch.zeros_like(order).scatter(1, order, node)
    alive = alive.gather(1, order)
    token, parent, depth = fields.gather(2, order.expand(3, -1, -1))
    parent = node_of_slot.gather(1, parent).masked_fill(~alive | (node == 0), -1)
    return TokenTree(
        token=torch.where(alive, token, root_token[:, None]),
        parent=parent,
        depth=depth.masked_fill(~alive, 0),
        ancestors=ancestor_bits(parent, max_depth=depths),
        node_count=alive.sum(1),
    )


def _check_arguments(root_token, pool_tokens, budget, width, children, max_depth):
    if pool_tokens.ndim != 3 or 0 in pool_tokens.shape[1:] or pool_tokens.dtype != torch.int64:
        raise ValueError(
            f"pool_tokens is {pool_tokens.dtype} {tuple(pool_tokens.shape)}; give int64 [R, D, P] with D and P >= 1"
        )
    for name, given in (("root_token", root_token), ("max_depth", max_depth)):
        if given is not None and (given.shape != pool_tokens.shape[:1] or given.dtype != torch.int64):
            raise ValueError(f"{name} is {given.dtype} {tuple(given.shape)}; give int64 {tuple(pool_tokens.shape[:1])}")
    for name, number in (("budget", budget), ("width", width), ("children", children)):
        if number < 1:
            raise ValueError(f"{name} is {number}; give at least 1")
