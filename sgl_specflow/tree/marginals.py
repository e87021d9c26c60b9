"""Building the token tree from marginals on the device: depth by depth, fixed shapes, no host synchronisation."""

import torch

from .token_tree import TokenTree, ancestor_bits


def build_tree(
    root_token: torch.Tensor,
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    budget: int,
    max_depth: torch.Tensor | None = None,
) -> TokenTree:
    """The best-first tree of at most `budget` nodes over D depths of K candidates (DDTree; JetFlow in one pass).

    Every node at depth d - 1 has the same K candidates as children at depth d. A node's score is the float32 sum of
    its path's log-probabilities, added from the root to the leaf. The tree is the first `budget` nodes of this order:
    higher score; on equal score smaller depth; then the earlier parent in node order; then the smaller candidate
    rank. A candidate's rank is its place by log-probability among the K of its depth, and by input place on ties.

    A child never scores above its parent and loses a tie to it, so the first B nodes are closed under ancestors, and
    no depth needs more than B - 1 survivors. `reference.build_tree_by_heap` gives the same tree, bit for bit.

    Args:
        root_token: int64 [R], the anchors.
        log_probs: float32 [R, D, K], full-vocabulary log-probabilities. Values above 0 (rounding) count as 0;
            candidates of -inf or NaN are never chosen, nor is a node whose score overflows to -inf.
        tokens: int64 [R, D, K]; the K tokens of a depth are distinct, hence no two siblings carry the same token.
        budget: B >= 1, the root included.
        max_depth: int64 [R], the greatest depth allowed to each request (0: the root only); D when not given.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    _check_arguments(root_token, log_probs, tokens, budget, max_depth)
    log_probs, place = (
        log_probs.nan_to_num(nan=-torch.inf, posinf=0.0, neginf=-torch.inf)
        .clamp(max=0.0)
        .sort(dim=2, descending=True, stable=True)
    )
    tokens = tokens.gather(2, place)
    score, parent_slot, token = _survivors(log_probs, tokens, budget - 1, max_depth)
    return _select(root_token, score, parent_slot, token)


def _survivors(log_probs, tokens, slots, max_depth):
    """The best `slots` nodes of every depth, in tie order; unused slots score -inf.

    Returns:
        score float32, parent_slot int64 (slot in the depth above; 0 for the root) and token int64, all [R, D, slots].
    """
    requests, depths, candidates = log_probs.shape
    parent_slot, rank = _undominated_pairs(slots, candidates, log_probs.device)
    score = torch.full((requests, slots), -torch.inf, device=log_probs.device)
    score[:, :1] = 0.0
    levels = []
    for level in range(depths):
        child = score[:, parent_slot] + log_probs[:, level, rank]
        if max_depth is not None:
            child = child.masked_fill(max_depth[:, None] <= level, -torch.inf)
        # A stable sort keeps pair order on ties: earlier parent, then smaller rank. topk leaves ties undefined.
        child, order = child.sort(dim=1, descending=True, stable=True)
        score, order = child[:, :slots], order[:, :slots]
        levels.append((score, parent_slot[order], tokens[:, level].gather(1, rank[order])))
    return tuple(torch.stack(field, dim=1) for field in zip(*levels))


def _undominated_pairs(slots, candidates, device):
    """The (parent slot, candidate rank) pairs that can be among the best `slots` of a depth, parent first.

    Slots and ranks are sorted by descending score, so every pair (i', k') with i' <= i and k' <= k comes before or at
    (i, k) in the tie order. Pair (i, k) can survive only if those (i + 1)(k + 1) pairs fit into `slots`: about
    slots * ln(candidates) pairs instead of slots * candidates.

    Returns:
        parent_slot and rank, both int64 [pairs], with pairs >= slots.
    """
    total = sum(min(candidates, slots // (slot + 1)) for slot in range(slots))
    slot = torch.arange(slots, device=device)
    count = (slots // (slot + 1)).clamp(max=candidates)
    parent_slot = slot.repeat_interleave(count, output_size=total)
    rank = torch.arange(total, device=device) - (count.cumsum(0) - count)[parent_slot]
    return parent_slot, rank


def _select(root_token, score, parent_slot, token):
    """The tree of the root and the best `slots` of all survivors, renumbered by (depth, tie order)."""
    requests, depths, slots = score.shape
    budget = slots + 1
    device = score.device
    flat_score = score.flatten(1)
    # Flat order is (depth, tie order inside the depth), so a stable sort gives the smaller depth on ties.
    best = flat_score.sort(dim=1, descending=True, stable=True).indices[:, :slots]
    chosen = torch.zeros_like(flat_score, dtype=torch.bool).scatter(1, best, True) & (flat_score > -torch.inf)
    node = chosen.cumsum(1)
    depth = torch.arange(1, depths + 1, device=device)[:, None].expand(requests, -1, slots)
    node_of_depth = node.unflatten(1, (depths, slots))
    root_depth = torch.zeros_like(node_of_depth[:, :1])
    parent = torch.cat([root_depth, node_of_depth[:, :-1]], dim=1).gather(2, parent_slot)

    # Survivors that are not chosen land in column `budget`, which is cut off.
    column = torch.where(chosen, node, budget)
    wide = (requests, budget + 1)
    parent = torch.full(wide, -1, device=device).scatter(1, column, parent.flatten(1))[:, :budget].contiguous()
    return TokenTree(
        token=root_token[:, None].repeat(1, budget + 1).scatter(1, column, token.flatten(1))[:, :budget].contiguous(),
        parent=parent,
        depth=torch.zeros(wide, dtype=torch.int64, device=device)
        .scatter(1, column, depth.flatten(1))[:, :budget]
        .contiguous(),
        ancestors=ancestor_bits(parent, max_depth=depths),
        node_count=chosen.sum(1) + 1,
    )


def _check_arguments(root_token, log_probs, tokens, budget, max_depth):
    if log_probs.ndim != 3 or 0 in log_probs.shape[1:] or log_probs.dtype != torch.float32:
        raise ValueError(
            f"log_probs is {log_probs.dtype} {tuple(log_probs.shape)}; give float32 [R, D, K] with D >= 1 and K >= 1"
        )
    requests = log_probs.shape[:1]
    expected = {"root_token": (root_token, requests), "tokens": (tokens, log_probs.shape)}
    if max_depth is not None:
        expected["max_depth"] = (max_depth, requests)
    for name, (given, shape) in expected.items():
        if given.shape != shape or given.dtype != torch.int64:
            raise ValueError(f"{name} is {given.dtype} {tuple(given.shape)}; give int64 {tuple(shape)}")
    if budget < 1:
        raise ValueError(f"budget is {budget}; it counts the root, so give at least 1")
