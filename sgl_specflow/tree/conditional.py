"""Building the token tree from a conditional drafter: rounds that expand the best nodes and what likely follows them.

Fixed shapes and no host synchronisation, so that one CUDA graph holds the whole construction. The drafter is a
function that is asked for a batch of nodes at a time; what it remembers of earlier nodes is its own business.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .marginals import build_tree
from .token_tree import TokenTree, ancestor_bits

# Scores are float64 multiples of 1 / SCORE_STEPS nats and a log-probability counts as LOWEST at least: sums over a path
# are exact, so that their order does not matter and no child scores above its parent.
SCORE_STEPS = 2**20
LOWEST = -(2.0**20)


@dataclass
class Expansion:
    """w nodes of each of R requests that a round expands. They occupy slots `first_slot` .. `first_slot + w - 1`.

    A slot is a node's place in the order of expansion, the root's is 0. An ancestor of a node may be in the same round,
    then in an earlier slot. Dead nodes (fewer were left than a round expands) hold any token, parent and depth < D; what
    the drafter says of them is ignored.

    Attributes:
        first_slot: int, w times the rounds before.
        token: int64 [R, w].
        parent: int64 [R, w], the parent's slot (0 for the root itself).
        depth: int64 [R, w], 0 for the root.
        above: int64 [R, w], the slot of the nearest ancestor of an earlier round (0 in the first round).
        inside: bool [R, w, w]: entry [r, i, j] is true when node j of the round is node i or an ancestor of it.
    """

    first_slot: int
    token: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    above: torch.Tensor
    inside: torch.Tensor


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
    tree_of_marginals: Callable[..., TokenTree] = build_tree,
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
        tree_of_marginals: `marginals.build_tree`, or an equal that takes candidates in descending order.

    Returns:
        TokenTree; inside a depth, nodes stand in the order above.

    Raises:
        ValueError: a shape, dtype or number is not as above.
    """
    _check_arguments(root_token, pool_tokens, marginals, budget, width, rounds, children, max_depth)
    requests, depths, pool = pool_tokens.shape
    limit = torch.full_like(root_token, depths) if max_depth is None else max_depth.clamp(max=depths)
    known = _Nodes.root(root_token, budget)
    if budget > 1:
        guesses = _Guesses.of(_as_log_probs(marginals), width, tree_of_marginals)
        for number in range(rounds):
            chosen = _choose(known, guesses, pool_tokens, limit, width, number * width)
            log_probs = _as_log_probs(log_probs_of(chosen.nodes))
            known = known.with_expanded(chosen, log_probs, pool_tokens, min(children, pool, budget - 1))
    return _lay_out(root_token, known, depths)


@dataclass
class _Guesses:
    """For each request and depth d, the best-first tree of E nodes over the marginals behind d. Node 0 is a node of
    depth d itself. Nodes that may not be expanded (deeper than D - 1) or do not exist score -inf.

    Attributes:
        score: float64 [R, D, E], the path's marginals. depth: int64 [R, D, E], below node 0.
        parent: int64 [R, D, E], -1 for node 0. place: int64 [R, D, E] in the pool, any for node 0.
        ancestors: bool [R, D, E, E], the node itself included.
    """

    score: torch.Tensor
    depth: torch.Tensor
    parent: torch.Tensor
    place: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    def of(cls, marginals: torch.Tensor, width: int, tree_of_marginals) -> "_Guesses":
        """marginals: float32 [R, D, P] <= 0."""
        requests, depths, pool = marginals.shape
        levels, ranks = max(1, min(width, depths) - 1), max(1, min(width - 1, pool))
        best, place = (part[:, :-1, :ranks] for part in marginals.sort(dim=2, descending=True, stable=True))
        pad = (0, 0, 0, levels)
        best, place = (
            torch.nn.functional.pad(part, pad, value=value)
            .unfold(1, levels, 1)
            .transpose(2, 3)
            .flatten(0, 1)
            .contiguous()
            for part, value in ((best, -torch.inf), (place, 0))
        )
        tree = tree_of_marginals(place.new_zeros(len(place)), best, place, width)
        shape = (requests, depths, width)
        depth, parent, place = (part.view(shape) for part in (tree.depth, tree.parent, tree.token))
        level = (torch.arange(depths, device=depth.device)[:, None] + depth - 1).clamp(min=0)
        own = _exact(marginals.flatten(1).gather(1, (level * pool + place).flatten(1)).view(shape))
        own = torch.where(parent >= 0, own, -torch.inf)
        own[:, :, 0] = 0.0
        ancestors = tree.ancestor_mask().view(*shape, width)
        return cls(_path_sums(own, ancestors), depth, parent, place, ancestors)


@dataclass
class _Chosen:
    """What a round expands.

    Attributes:
        nodes: the Expansion.
        node: int64 [R, w], places among the known nodes of what is no guess; their number B elsewhere.
        score: float64 [R, w] of what is no guess; -inf of dead nodes, any of guesses.
        guess: bool [R, w]. candidate: int64 [R, w], a guess's entry in the round's [w * P] log-probabilities, w * P
            elsewhere.
    """

    nodes: Expansion
    node: torch.Tensor
    score: torch.Tensor
    guess: torch.Tensor
    candidate: torch.Tensor


def _choose(known: "_Nodes", guesses: _Guesses, pool_tokens, limit, width: int, first_slot: int) -> _Chosen:
    """The `width` nodes of highest estimated score among open nodes and what may follow them."""
    requests, depths, pool = pool_tokens.shape
    budget, device = known.score.shape[1], known.score.device
    _, _, depth, slot = known.fields
    open_score = known.score.masked_fill((slot >= 0) | (depth >= limit[:, None]), -torch.inf)
    open_score, node = (part[:, :width] for part in open_score.sort(dim=1, descending=True, stable=True))
    token, parent, depth, _ = known.fields.gather(2, node.expand(4, -1, -1))
    # A node at the greatest depth is not open.
    depth = depth.clamp(max=depths - 1)

    count, row = node.shape[1], depth[:, :, None].expand(-1, -1, width)
    estimate = open_score[:, :, None] + guesses.score.gather(1, row)
    too_deep = depth[:, :, None] + guesses.depth.gather(1, row) >= limit[:, None, None]
    # Flat order: the earlier open node, then node order of the guesses.
    estimate, pair = estimate.masked_fill(too_deep, -torch.inf).flatten(1).sort(dim=1, descending=True, stable=True)
    estimate, pair = estimate[:, :width], pair[:, :width]
    order = torch.arange(width, device=device)
    place_of_pair = torch.zeros(requests, count * width, dtype=torch.int64, device=device)
    place_of_pair.scatter_(1, pair, order.expand(requests, -1))

    which, guessed = pair // width, pair % width
    token, parent, depth, node, open_score = (
        part.gather(1, which) for part in (token, parent, depth, node, open_score)
    )
    row = depth * width + guessed
    inside = guesses.ancestors.flatten(1, 2).gather(1, row[:, :, None].expand(-1, -1, width))
    inside = inside.gather(2, guessed[:, None].expand(-1, width, -1)) & (which[:, :, None] == which[:, None])
    below, guessed_parent, place = (
        part.flatten(1).gather(1, row) for part in (guesses.depth, guesses.parent, guesses.place)
    )
    alive = estimate > -torch.inf
    guess = alive & (guessed > 0)
    parent_place = place_of_pair.gather(1, which * width + guessed_parent.clamp(min=0))
    depth_of_guess = (depth + below).clamp(max=depths - 1)
    guess_token = pool_tokens.flatten(1).gather(1, (depth_of_guess - 1).clamp(min=0) * pool + place)
    nodes = Expansion(
        first_slot=first_slot,
        token=torch.where(guess, guess_token, token),
        parent=torch.where(guess, first_slot + parent_place, parent),
        depth=depth_of_guess,
        above=parent,
        inside=inside,
    )
    return _Chosen(
        nodes=nodes,
        node=torch.where(alive & ~guess, node, budget),
        score=torch.where(alive, open_score, -torch.inf),
        guess=guess,
        candidate=torch.where(guess, parent_place * pool + place, width * pool),
    )


@dataclass
class _Nodes:
    """The best B nodes whose scores are known, in order; -inf where there are fewer.

    Attributes:
        fields: int64 [4, R, B], token, parent's slot, depth, own slot (-1: not expanded). score: float64 [R, B].
    """

    fields: torch.Tensor
    score: torch.Tensor

    @classmethod
    def root(cls, root_token: torch.Tensor, budget: int) -> "_Nodes":
        fields = root_token.new_zeros(4, len(root_token), budget)
        fields[0], fields[3] = root_token[:, None], -1
        score = torch.full(fields.shape[1:], -torch.inf, dtype=torch.float64, device=fields.device)
        score[:, 0] = 0.0
        return cls(fields, score)

    def with_expanded(self, chosen: _Chosen, log_probs: torch.Tensor, pool_tokens, keep: int) -> "_Nodes":
        """With what log_probs, float32 [R, w, P] <= 0, say of a round's guesses and other candidates, `keep` a node."""
        nodes, budget = chosen.nodes, self.score.shape[1]
        requests, width, pool = log_probs.shape
        slot = nodes.first_slot + torch.arange(width, device=log_probs.device)
        # One column more takes what is no guess.
        flat = torch.nn.functional.pad(log_probs.flatten(1), (0, 1))
        own = torch.where(chosen.guess, _exact(flat.gather(1, chosen.candidate)), chosen.score)
        score = _path_sums(own, nodes.inside)
        others = flat.scatter(1, chosen.candidate, -torch.inf)[:, :-1].view(log_probs.shape)
        # Stable: equal candidates keep pool order. topk leaves ties undefined.
        best, place = (part[:, :, :keep] for part in others.sort(dim=2, descending=True, stable=True))
        level = nodes.depth[:, :, None]
        token = pool_tokens.flatten(1).gather(1, (level * pool + place).flatten(1))
        parent = slot[:, None].expand(requests, width, keep)
        depth = (level + 1).expand(-1, -1, keep)
        others = torch.stack((token, parent.flatten(1), depth.flatten(1), torch.full_like(token, -1)))
        others_score = (score[:, :, None] + _exact(best)).flatten(1)

        # Again one column more, for guesses and dead nodes.
        fields = torch.nn.functional.pad(self.fields, (0, 1))
        fields[3].scatter_(1, chosen.node, slot.expand(requests, -1))
        guesses = torch.stack((nodes.token, nodes.parent, nodes.depth, slot.expand(requests, -1)))
        guesses_score = score.masked_fill(~chosen.guess, -torch.inf)
        score = torch.cat((self.score, guesses_score, others_score), 1)
        score, order = (part[:, :budget] for part in score.sort(dim=1, descending=True, stable=True))
        fields = torch.cat((fields[:, :, :budget], guesses, others), 2)
        return _Nodes(fields.gather(2, order.expand(4, -1, -1)), score)


def _as_log_probs(values: torch.Tensor) -> torch.Tensor:
    """Float32, NaN as -inf, at most 0."""
    return values.float().nan_to_num(nan=-torch.inf, posinf=0.0, neginf=-torch.inf).clamp(max=0.0)


def _exact(log_probs: torch.Tensor) -> torch.Tensor:
    """Float64 multiples of 1 / SCORE_STEPS between LOWEST and 0; -inf stays."""
    rounded = (log_probs.double().clamp(min=LOWEST) * SCORE_STEPS).round() / SCORE_STEPS
    return torch.where(log_probs == -torch.inf, -torch.inf, rounded)


def _path_sums(own: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """Sums of own [..., n] over each node's ancestors, bool [..., n, n]."""
    return torch.where(ancestors, own[..., None, :], 0.0).sum(-1)


def _lay_out(root_token, known: _Nodes, depths: int) -> TokenTree:
    """From the order of scores to the order of depth, dead nodes last."""
    token, parent, depth, slot = known.fields
    alive = known.score > -torch.inf
    order = torch.where(alive, depth, depths + 1).sort(dim=1, stable=True).indices
    token, parent, depth, slot = known.fields.gather(2, order.expand(4, -1, -1))
    alive = alive.gather(1, order)
    node = torch.arange(order.shape[1], device=order.device)
    # At most B expanded nodes are left of w * rounds: a parent is found by comparing slots.
    is_parent = (parent[:, :, None] == slot[:, None]) & alive[:, None]
    parent = (is_parent * node).sum(2).masked_fill(~alive | (node == 0), -1)
    return TokenTree(
        token=torch.where(alive, token, root_token[:, None]),
        parent=parent,
        depth=depth.masked_fill(~alive, 0),
        ancestors=ancestor_bits(parent, max_depth=depths),
        node_count=alive.sum(1),
    )


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
