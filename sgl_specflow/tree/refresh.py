"""Path refresh: re-scoring a tree on its own branches (JetFlow's tree-causal drafting).

One pass of masks gives every depth the same candidates on every branch. A second pass runs the causal head over the
tree's real tokens, each followed by a mask: the mask behind node i attends to the context, to i's path and to itself,
so its output is the distribution of i's children given i's branch. The rebuilt tree holds the best nodes among the
first tree's own and the new children, by the sum of conditional log-probabilities. A child never scores above its
parent, and every candidate's parent is a node of the first tree: the best nodes are closed under ancestors.
"""

import torch

from .token_tree import TokenTree, ancestor_bits, pack_bits


def refresh_block(tree: TokenTree, mask_token: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The head's second block over a tree of n nodes: its nodes, then the mask behind each.

    Returns:
        tokens int64 [R, 2n], depth int64 [R, 2n] and bits int32 [R, 2n, ceil(2n / 32)], what each entry attends to.
    """
    requests, nodes = tree.token.shape
    path = tree.ancestor_mask()
    itself = torch.eye(nodes, dtype=torch.bool, device=path.device).expand(requests, -1, -1)
    sees_nodes = torch.cat([path, path], 1)
    sees_masks = torch.cat([torch.zeros_like(itself), itself], 1)
    return (
        torch.cat([tree.token, torch.full_like(tree.token, mask_token)], 1),
        torch.cat([tree.depth, tree.depth + 1], 1),
        pack_bits(torch.cat([sees_nodes, sees_masks], 2)),
    )


def rebuild_tree(
    tree: TokenTree,
    own_log_prob: torch.Tensor,
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    budget: int,
    max_depth: int,
    limits: torch.Tensor | None = None,
) -> TokenTree:
    """The best tree of at most `budget` nodes over the first tree's nodes and their re-scored children.

    Order and ties as in `build_tree`: higher score; smaller depth; earlier parent; the first tree's own nodes before
    new children; smaller candidate rank.

    Args:
        tree: the first tree, n nodes a request.
        own_log_prob: float32 [R, n], log-probability of each node's token given its parent's branch (0 for the root).
        log_probs: float32 [R, n, K], tokens: int64 [R, n, K]: candidates behind each node, given its branch.
        budget: B >= 1. max_depth: children deeper than this are left out; at least the first tree's depth.
        limits: int64 [R], a smaller greatest depth of single requests, which the first tree keeps already; or None.
    """
    requests, nodes, width = log_probs.shape
    real = torch.arange(nodes, device=tree.token.device) < tree.node_count[:, None]
    own = own_log_prob.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0).masked_fill(~real, -torch.inf)
    own[:, 0] = 0.0
    score = torch.where(tree.ancestor_mask(), own[:, None, :], 0.0).sum(2)

    child = score[:, :, None] + log_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)
    deepest = tree.depth >= (max_depth if limits is None else limits[:, None])
    child = child.masked_fill(deepest[:, :, None] | _already_child(tree, tokens), -torch.inf)
    node_index = torch.arange(nodes, device=tree.token.device).expand(requests, -1)
    candidate_score = torch.cat([score, child.flatten(1)], 1)
    candidate_token = torch.cat([tree.token, tokens.flatten(1)], 1)
    candidate_depth = torch.cat([tree.depth, (tree.depth[:, :, None] + 1).expand_as(tokens).flatten(1)], 1)
    candidate_parent = torch.cat([tree.parent, node_index[:, :, None].expand_as(tokens).flatten(1)], 1)
    return _take_best(candidate_score, candidate_token, candidate_depth, candidate_parent, nodes, budget, max_depth)


def _already_child(tree: TokenTree, tokens: torch.Tensor) -> torch.Tensor:
    """bool [R, n, K]: whether the tree holds this candidate as a child of that node (siblings stay distinct)."""
    is_child = tree.parent[:, None, :] == torch.arange(tree.budget, device=tokens.device)[:, None]
    same = tokens[:, :, :, None] == tree.token[:, None, None, :]
    return (same & is_child[:, :, None, :]).any(3)


def _take_best(score, token, depth, parent, first_nodes, budget, max_depth) -> TokenTree:
    """Select by (score, depth, candidate order), then lay out by depth. Candidate order is parent order inside a depth
    only for children of one generation, so parents are remapped through the selection."""
    requests, candidates = score.shape
    keep = min(budget, candidates)
    by_depth = depth.argsort(dim=1, stable=True)
    chosen = by_depth.gather(1, score.gather(1, by_depth).argsort(dim=1, descending=True, stable=True)[:, :keep])
    alive = score.gather(1, chosen) > -torch.inf
    layout = depth.gather(1, chosen).masked_fill(~alive, max_depth + 1).argsort(dim=1, stable=True)
    chosen, alive = chosen.gather(1, layout), alive.gather(1, layout)

    place = torch.zeros(requests, candidates, dtype=torch.int64, device=score.device)
    place.scatter_(1, chosen, torch.arange(keep, device=score.device).expand(requests, -1))
    old_parent = parent.gather(1, chosen)
    new_parent = place[:, :first_nodes].gather(1, old_parent.clamp(min=0)).masked_fill((old_parent < 0) | ~alive, -1)
    root = token[:, :1]
    padding = budget - keep
    pad = torch.nn.functional.pad
    new_parent = pad(new_parent, (0, padding), value=-1)
    new_token = torch.where(alive, token.gather(1, chosen), root)
    return TokenTree(
        token=torch.cat([new_token, root.expand(-1, padding)], 1),
        parent=new_parent,
        depth=pad(depth.gather(1, chosen).masked_fill(~alive, 0), (0, padding)),
        ancestors=ancestor_bits(new_parent, max_depth),
        node_count=alive.sum(1),
    )
