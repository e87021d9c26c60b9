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
    takes) have score -inf, the root's token and slot 0 as parent; what the drafter says of them is ignored.

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
    device = root_token.device
    limit = torch.full_like(root_token, depths) if max_depth is None else max_depth.clamp(max=depths)
    zero = torch.zeros(requests, 1, dtype=torch.int64, device=device)
    nodes = Expansion(0, root_token[:, None], zero, zero, torch.zeros(requests, 1, device=device))
    taken = [nodes]
    empty = zero[:, :0]
    frontier = Expansion(-1, empty, empty, empty, nodes.score[:, :0])
    count = 1
    while count < budget:
        wanted = budget - count
        new = _children_of(nodes, log_probs_of(nodes), pool_tokens, limit, min(children, pool, wanted))
        frontier = _best(frontier, new, wanted)
        now = min(width, wanted)
        nodes = _cut(frontier, count, 0, now)
        nodes.token = torch.where(nodes.score > -torch.inf, nodes.token, root_token[:, None])
        taken.append(nodes)
        frontier = _cut(frontier, -1, now, None)
        count += now
    return _lay_out(taken, depths)


def _children_of(nodes: Expansion, log_probs, pool_tokens, limit, keep: int) -> Expansion:
    """The `keep` likeliest children of each node, parents in slot order, flattened to [R, n * keep]."""
    requests, count, _ = log_probs.shape
    log_probs = log_probs.float().nan_to_num(nan=-torch.inf, posinf=0.0, neginf=-torch.inf).clamp(max=0.0)
    # Stable: equal candidates keep pool order. topk leaves ties undefined.
    best, place = log_probs.sort(dim=2, descending=True, stable=True)
    best, place = best[:, :, :keep], place[:, :, :keep]
    score = nodes.score[:, :, None] + best
    score = score.masked_fill((nodes.depth >= limit[:, None])[:, :, None], -torch.inf)
    # A node at the greatest depth has no pool; its children are masked above.
    level = nodes.depth.clamp(max=pool_tokens.shape[1] - 1)
    token = pool_tokens.flatten(1).gather(1, (level[:, :, None] * pool_tokens.shape[2] + place).flatten(1))
    slot = torch.arange(nodes.first_slot, nodes.first_slot + count, device=token.device)
    parent = slot[:, None].expand(requests, count, keep)
    depth = (nodes.depth + 1)[:, :, None].expand(-1, -1, keep)
    return Expansion(-1, token, parent.flatten(1), depth.flatten(1), score.flatten(1))


def _best(frontier: Expansion, new: Expansion, keep: int) -> Expansion:
    """The best `keep` entries, in order. Stable: the frontier is in order and its parents are the earlier ones."""
    score, order = torch.cat((frontier.score, new.score), 1).sort(dim=1, descending=True, stable=True)
    order = order[:, :keep]
    pick = lambda old, added: torch.cat((old, added), 1).gather(1, order)
    return Expansion(
        -1,
        pick(frontier.token, new.token),
        pick(frontier.parent, new.parent),
        pick(frontier.depth, new.depth),
        score[:, :keep],
    )


def _cut(entries: Expansion, first_slot: int, start: int, end: int | None) -> Expansion:
    """Entries start..end of each request. Ranges past the end (a frontier shorter than a round) are filled with dead
    ones."""
    missing = 0 if end is None else max(0, end - entries.score.shape[1])
    pad = lambda field, value: torch.nn.functional.pad(field[:, start:end], (0, missing), value=value)
    return Expansion(
        first_slot,
        pad(entries.token, 0),
        pad(entries.parent, 0),
        pad(entries.depth, 0),
        pad(entries.score, -torch.inf),
    )


def _lay_out(taken: list[Expansion], depths: int) -> TokenTree:
    """From the order of selection to the order of depth, dead nodes last."""
    token, parent, depth, score = (
        torch.cat([getattr(nodes, name) for nodes in taken], dim=1) for name in ("token", "parent", "depth", "score")
    )
    alive = score > -torch.inf
    order = torch.where(alive, depth, depths + 1).sort(dim=1, stable=True).indices
    node_of_slot = torch.zeros_like(order).scatter(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    alive = alive.gather(1, order)
    parent = node_of_slot.gather(1, parent.gather(1, order)).masked_fill(~alive, -1)
    parent[:, 0] = -1
    return TokenTree(
        token=token.gather(1, order),
        parent=parent,
        depth=depth.gather(1, order).masked_fill(~alive, 0),
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
