"""Acceptance: the path of a verified tree that the target agrees with."""

from dataclasses import dataclass

import torch

from ..tree.token_tree import TokenTree, pack_bits


@dataclass
class Accepted:
    """What one verify pass commits, for R requests; P = max_depth + 1.

    Attributes:
        path: int64 [R, P], node ids from node 0 down; -1 past `length`.
        length: int64 [R], nodes on the path, at least 1. It is the accept length: the pass commits the tokens of the
            path's nodes 1.. and the bonus token.
        tokens: int64 [R, P], the committed tokens, the bonus token last; 0 past `length`.
        bonus: int64 [R], the next anchor.
        last_node: int64 [R], the deepest node of the path, at which the bonus token was chosen.
    """

    path: torch.Tensor
    length: torch.Tensor
    tokens: torch.Tensor
    bonus: torch.Tensor
    last_node: torch.Tensor


def accept(tree: TokenTree, next_token: torch.Tensor, max_depth: int) -> Accepted:
    """Walk from the root while a child carries the token that the target chose at its parent.

    One rule serves greedy and sampled decoding. Let node i's choice X_i be drawn from the target's processed
    distribution p(. | context, path to i); greedy is the case where p is a point mass. The tree is fixed before any
    X_i is drawn, and the draws along a path are independent. The first committed token X_0 has law p(. | context).
    Given that the walk has reached node i by committing exactly the tokens of its path, X_i has law
    p(. | context, path to i), whatever was drawn above. So by the chain rule the committed tokens have the
    probability that plain decoding gives them; where no child carries X_i the walk stops, X_i is the bonus token, and
    the next pass goes on from p(. | ... X_i). The tree decides how many tokens a pass commits, never which.
    Nodes of one depth may share their randomness, since a path holds one node a depth.

    On the path means: the node and all its ancestors match. Siblings carry distinct tokens, so at most one node a
    depth does. No host synchronisation.

    Args:
        tree: as built; padding is never accepted.
        next_token: int64 [R, B], the target's choice at each node.
        max_depth: greatest depth that can be accepted; deeper nodes are left out, which stays lossless.

    Raises:
        ValueError: next_token is not int64 [R, B], or max_depth is negative.
    """
    if next_token.shape != tree.token.shape or next_token.dtype != torch.int64:
        raise ValueError(
            f"next_token is {next_token.dtype} {tuple(next_token.shape)}; give int64 {tuple(tree.token.shape)}"
        )
    if max_depth < 0:
        raise ValueError(f"max_depth is {max_depth}; give 0 (commit the bonus token only) or more")
    matches = (tree.parent >= 0) & (tree.token == next_token.gather(1, tree.parent.clamp(min=0)))
    matches[:, 0] = True
    broken = tree.ancestors & ~pack_bits(matches)[:, None]
    on_path = (broken == 0).all(2) & (tree.depth <= max_depth)

    entries = max_depth + 1
    node = torch.arange(tree.budget, device=tree.token.device).expand_as(tree.token)
    # Nodes off the path land in column `entries`, which is cut off.
    path = torch.full((tree.token.shape[0], entries + 1), -1, device=tree.token.device)
    path = path.scatter(1, torch.where(on_path, tree.depth, entries), node)[:, :entries].contiguous()
    length = on_path.sum(1)
    last_node = path.gather(1, length[:, None] - 1)
    # A path node's token is its parent's choice, so the committed tokens are the choices along the path.
    return Accepted(
        path=path,
        length=length,
        tokens=next_token.gather(1, path.clamp(min=0)).masked_fill(path < 0, 0),
        bonus=next_token.gather(1, last_node)[:, 0],
        last_node=last_node[:, 0],
    )
