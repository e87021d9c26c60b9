"""Building the token tree from a conditional drafter: rounds that expand the best nodes and what likely follows them.

Fixed shapes and no host synchronisation, so that one CUDA graph holds the whole construction. The drafter is a
function that is asked for a batch of nodes at a time; what it remembers of earlier nodes is its own business.
"""

from collections.abc import Callable

import torch

from . import expansion
from .expansion import Expansion
from .token_tree import TokenTree


def expansion_width(budget: int) -> int:
    """Nodes a round expands by default: half of the tree, 32 at most. Two such rounds find nearly the best-first tree."""
    return min(32, max(1, budget // 2))


def expansion_rounds(budget: int, width: int) -> int:
    """Rounds by default: as many expansions as the tree has nodes, but for its last, which width 1 never expands."""
    return max(1, -(-(budget - 1) // width))


def build_conditional_tree(
    root_token: torch.Tensor,
    pool_tokens: torch.Tensor,
    marginals: torch.Tensor,
    log_probs_of: Callable[[Expansion], torch.Tensor],
    budget: int,
    width: int,
    rounds: int,
    children: int,
    max_depth: torch.Tensor | None = None,
    builder=expansion,
) -> TokenTree:
    """The tree of at most `budget` nodes that `rounds` expansions of `width` nodes each find.

    A node's score is the sum of the drafter's log-probabilities along its path, known once its parent is expanded. The
    tree is always the best `budget` nodes whose score is known; at first it is the root. Each round expands nodes of
    it, and guessed descendants of them, in one asking:

    - Open nodes: those of the tree that are not expanded, less deep than the request's greatest depth.
    - What may follow an open node of depth d: the best-first tree (`marginals.build_tree`) of `width` nodes over the
      marginals of the depths behind d, its root being the node itself. A node of it has an estimated score: the open
      node's score plus its own path's marginals.
    - The round expands the `width` nodes of highest estimated score. An ancestor never scores below its descendant and
      wins ties, so a guess is expanded only together with the path to it.

    The drafter's answer gives the guesses' true scores, and those of each expanded node's `children` likeliest other
    candidates. Width 1 guesses nothing: it is strict best-first search, whole after budget - 1 rounds.

    Order of nodes: higher score; on equal score what was known in an earlier round; then guesses, by slot; then the
    others by their parent's slot, then by rank. A candidate's rank is its place by log-probability among the pool
    without guesses, and by pool place on ties. Order of estimates: higher estimate; then the earlier open node; then
    node order in the tree of marginals. A parent comes before its children, so the best nodes are always a tree.

    Args:
        root_token: int64 [R], the anchors.
        pool_tokens: int64 [R, D, P]: a node of depth d has its children among the tokens [:, d], which are distinct.
        marginals: float32 [R, D, P], log-probabilities of the pools that no branch is known to. They decide what is
            guessed, never what a node scores. Values above 0 count as 0; -inf and NaN are never guessed.
        log_probs_of: asked with an Expansion, gives [R, w, P], the nodes' log-probabilities over the pools of their
            depths. Values above 0 count as 0; candidates of -inf or NaN are never chosen. They are rounded to
            multiples of 2^-20 nats, and count as -2^20 at least.
        budget: B >= 1, the root included.
        width: w >= 1, nodes a round. rounds: >= 1. children: candidates considered a node beside its guesses, >= 1.
        max_depth: int64 [R], the greatest depth allowed to each request (0: the root only); D when not given.
        builder: `expansion`, or an equal of it.

    Returns:
        TokenTree; inside a depth, nodes stand in the order above.

    Raises:
        ValueError: a shape, dtype or number is not as above.
    """
    _check_arguments(root_token, pool_tokens, marginals, budget, width, rounds, children, max_depth)
    requests, depths, pool = pool_tokens.shape
    limit = torch.full_like(root_token, depths) if max_depth is None else max_depth.clamp(max=depths)
    known = builder.root(root_token, budget)
    if budget > 1:
        guesses = builder.guess(marginals, width)
        for number in range(rounds):
            chosen = builder.choose(known, guesses, pool_tokens, limit, width, number * width)
            log_probs = log_probs_of(chosen.nodes)
            known = builder.absorb(known, chosen, log_probs, pool_tokens, min(children, pool, budget - 1))
    return builder.lay_out(root_token, known, depths)


def _check_arguments(root_token, pool_tokens, marginals, budget, width, rounds, children, max_depth):
    if pool_tokens.ndim != 3 or 0 in pool_tokens.shape[1:] or pool_tokens.dtype != torch.int64:
        raise ValueError(
            f"pool_tokens is {pool_tokens.dtype} {tuple(pool_tokens.shape)}; give int64 [R, D, P] with D and P >= 1"
        )
    if marginals.shape != pool_tokens.shape:
        raise ValueError(f"marginals is {tuple(marginals.shape)}; give pool_tokens' shape {tuple(pool_tokens.shape)}")
    for name, given in (("root_token", root_token), ("max_depth", max_depth)):
        if given is not None and (given.shape != pool_tokens.shape[:1] or given.dtype != torch.int64):
            raise ValueError(f"{name} is {given.dtype} {tuple(given.shape)}; give int64 {tuple(pool_tokens.shape[:1])}")
    for name, number in (("budget", budget), ("width", width), ("rounds", rounds), ("children", children)):
        if number < 1:
            raise ValueError(f"{name} is {number}; give at least 1")
