"""What one round of building a conditional tree does, in plain PyTorch. `kernels.tree_step.expansion` has the same functions
as one GPU kernel each, or two or three.

A builder is a module, or anything else, with `root`, `guess`, `choose`, `absorb` and `lay_out` of these contracts.
Tensors are contiguous, shapes fixed, and nothing waits for the device. What fields say of dead entries may differ between
builders, within the bounds of what they index.
"""

from dataclasses import dataclass

import torch

from .marginals import build_tree
from .token_tree import TokenTree, ancestor_bits, unpack_bits

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


@dataclass
class Guesses:
    """For each request and depth d, the best-first tree of E nodes over the marginals behind d. Node 0 is a node of
    depth d itself. Nodes that may not be expanded (deeper than D - 1) or do not exist score -inf.

    Attributes:
        score: float64 [R, D, E], the path's marginals. depth: int64 [R, D, E], below node 0.
        parent: int64 [R, D, E], -1 for node 0. place: int64 [R, D, E] in the pool, any for node 0.
        ancestors: int32 [R, D, E, ceil(E / 32)], bits as in TokenTree.
    """

    score: torch.Tensor
    depth: torch.Tensor
    parent: torch.Tensor
    place: torch.Tensor
    ancestors: torch.Tensor


@dataclass
class Chosen:
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


@dataclass
class Known:
    """The best B nodes whose scores are known, in order; -inf where there are fewer.

    Attributes:
        fields: int64 [4, R, B], token, parent's slot, depth, own slot (-1: not expanded). score: float64 [R, B].
    """

    fields: torch.Tensor
    score: torch.Tensor


def root(root_token: torch.Tensor, budget: int) -> Known:
    """The root alone."""
    fields = root_token.new_zeros(4, len(root_token), budget)
    fields[0], fields[3] = root_token[:, None], -1
    score = torch.full(fields.shape[1:], -torch.inf, dtype=torch.float64, device=fields.device)
    score[:, 0] = 0.0
    return Known(fields, score)


def guess(marginals: torch.Tensor, width: int) -> Guesses:
    """marginals: [R, D, P], log-probabilities; E = width."""
    marginals = _as_log_probs(marginals)
    requests, depths, pool = marginals.shape
    levels, ranks = max(1, min(width, depths) - 1), max(1, min(width - 1, pool))
    best, place = (part[:, :-1, :ranks] for part in marginals.sort(dim=2, descending=True, stable=True))
    pad = (0, 0, 0, levels)
    best, place = (
        torch.nn.functional.pad(part, pad, value=value).unfold(1, levels, 1).transpose(2, 3).flatten(0, 1).contiguous()
        for part, value in ((best, -torch.inf), (place, 0))
    )
    tree = build_tree(place.new_zeros(len(place)), best, place, width)
    shape = (requests, depths, width)
    depth, parent, place = (part.view(shape) for part in (tree.depth, tree.parent, tree.token))
    level = (torch.arange(depths, device=depth.device)[:, None] + depth - 1).clamp(min=0)
    own = _exact(marginals.flatten(1).gather(1, (level * pool + place).flatten(1)).view(shape))
    own = torch.where(parent >= 0, own, -torch.inf)
    own[:, :, 0] = 0.0
    score = _path_sums(own, tree.ancestor_mask().view(*shape, width))
    return Guesses(score, depth, parent, place, tree.ancestors.view(*shape, -1))


def choose(known: Known, guesses: Guesses, pool_tokens, limit, width: int, first_slot: int) -> Chosen:
    """The `width` nodes of highest estimated score among open nodes and what may follow them.

    pool_tokens: int64 [R, D, P]. limit: int64 [R], greatest depths, at most D. first_slot: the round's.
    """
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
    words = guesses.ancestors.flatten(1, 2)
    words = words.gather(1, row[:, :, None].expand(-1, -1, words.shape[2]))
    inside = unpack_bits(words, width)
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
    return Chosen(
        nodes=nodes,
        node=torch.where(alive & ~guess, node, budget),
        score=torch.where(alive, open_score, -torch.inf),
        guess=guess,
        candidate=torch.where(guess, parent_place * pool + place, width * pool),
    )


def absorb(known: Known, chosen: Chosen, log_probs: torch.Tensor, pool_tokens, keep: int) -> Known:
    """With what log_probs [R, w, P] say of a round's guesses and other candidates, `keep` <= P a node."""
    log_probs = _as_log_probs(log_probs)
    nodes, budget = chosen.nodes, known.score.shape[1]
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
    fields = torch.nn.functional.pad(known.fields, (0, 1))
    fields[3].scatter_(1, chosen.node, slot.expand(requests, -1))
    guesses = torch.stack((nodes.token, nodes.parent, nodes.depth, slot.expand(requests, -1)))
    guesses_score = score.masked_fill(~chosen.guess, -torch.inf)
    score = torch.cat((known.score, guesses_score, others_score), 1)
    score, order = (part[:, :budget] for part in score.sort(dim=1, descending=True, stable=True))
    fields = torch.cat((fields[:, :, :budget], guesses, others), 2)
    return Known(fields.gather(2, order.expand(4, -1, -1)), score.contiguous())


def lay_out(root_token, known: Known, depths: int) -> TokenTree:
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
