"""`sgl_specflow.tree.expansion` for the GPU: a function is one launch, `absorb` two and `guess` three.

The results are the same, bit for bit, in all that is alive. One program serves one request, one node or one depth. What
it must find anew by an index, it writes to memory and reads behind a barrier of its own threads.

Sorting: a key is an int64, above a value that is ordered like the score, below it the complement of the place: all keys
differ, and of equal scores the smaller place comes first. Scores are multiples of 1 / SCORE_STEPS: a key holds them whole.
"""

import torch
import triton
import triton.language as tl
from sgl_specflow.kernels.tree_step.tree_build import empty_tree, tree_from_marginals

from sgl_specflow.tree import TokenTree
from sgl_specflow.tree import expansion as in_torch
from sgl_specflow.tree.expansion import LOWEST, SCORE_STEPS, Chosen, Expansion, Guesses, Known

MAX_WIDTH = 64  # its square is the number of estimates that one program sorts
MAX_ENTRIES = 4096  # nodes and candidates that one program sorts
MAX_POOL = 4096  # candidates of a depth that one program holds
_CHUNK = 16

_STEPS, _LOWEST = tl.constexpr(float(SCORE_STEPS)), tl.constexpr(LOWEST)
_NEVER = tl.constexpr(-(2**63))
# Added to a double below 2^51 and taken off again, it leaves the nearest integer, the even one of two.
_TO_INTEGER = tl.constexpr(1.5 * 2**52)


@triton.jit
def _log_prob(value):
    """Float32 at most 0; NaN is -inf."""
    value = value.to(tl.float32)
    return tl.where(value == value, tl.minimum(value, 0.0), -float("inf"))


@triton.jit
def _exact(log_prob):
    steps = tl.maximum(log_prob.to(tl.float64), _LOWEST) * _STEPS
    return tl.where(log_prob == -float("inf"), -float("inf"), ((steps + _TO_INTEGER) - _TO_INTEGER) / _STEPS)


@triton.jit
def _key_of_log_prob(log_prob, place, PLACES: tl.constexpr):
    """Above 0 for numbers; -inf has the keys below PLACES."""
    # The bits of numbers of one sign are ordered as their magnitudes; -0.0 becomes 0.0.
    magnitude = (0.0 - log_prob).to(tl.int32, bitcast=True)
    return (0x7F800000 - magnitude).to(tl.int64) * PLACES + (PLACES - 1 - place)


@triton.jit
def _log_prob_of_key(key, PLACES: tl.constexpr):
    return 0.0 - (0x7F800000 - key // PLACES).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _key_of_score(score, place, PLACES: tl.constexpr):
    alive = score > -float("inf")
    steps = tl.where(alive, score * _STEPS, 0.0).to(tl.int64)
    return tl.where(alive, steps * PLACES + (PLACES - 1 - place), _NEVER)


@triton.jit
def _place_of_key(key, PLACES: tl.constexpr):
    return PLACES - 1 - (key & (PLACES - 1))


@triton.jit
def _score_of_key(key, PLACES: tl.constexpr, BITS: tl.constexpr):
    return tl.where(key == _NEVER, -float("inf"), (key >> BITS).to(tl.float64) / _STEPS)


@triton.jit
def _root_kernel(root, fields, score, requests, budget, NODES: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < budget
    at = fields + request * budget + node
    step = requests * budget
    tl.store(at, tl.load(root + request) + tl.zeros([NODES], tl.int64), mask=inside)
    tl.store(at + step, tl.zeros([NODES], tl.int64), mask=inside)
    tl.store(at + 2 * step, tl.zeros([NODES], tl.int64), mask=inside)
    tl.store(at + 3 * step, tl.full([NODES], -1, tl.int64), mask=inside)
    start = tl.where(node == 0, 0.0, -float("inf"))
    tl.store(score + request * budget + node, start.to(tl.float64), mask=inside)


@triton.jit
def _windows_kernel(
    marginals, best, place, depths, pool, levels, ranks, POOL: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    request, source = tl.program_id(0).to(tl.int64), tl.program_id(1)
    candidate = tl.arange(0, POOL)
    # The last depth, and what would be behind it, is never guessed.
    wanted = (candidate < pool) & (source < depths - 1)
    row = marginals + (request * depths + source) * pool
    value = _log_prob(tl.load(row + candidate, mask=wanted, other=-float("inf")))
    key = tl.topk(_key_of_log_prob(value, candidate, POOL), RANKS)
    rank = tl.arange(0, RANKS)
    inside = rank < ranks
    value = tl.where(key < POOL, -float("inf"), _log_prob_of_key(key, POOL))
    at = tl.where(key < POOL, 0, _place_of_key(key, POOL))
    for level in range(levels):
        depth = source - level
        if (depth >= 0) & (depth < depths):
            out = ((request * depths + depth) * levels + level) * ranks + rank
            tl.store(best + out, value, mask=inside)
            tl.store(place + out, at, mask=inside)


@triton.jit
def _guess_scores_kernel(
    marginals, depth, parent, place, ancestors, score, depths, pool, width, WORDS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, WIDTH)
    inside = node < width
    below = tl.load(depth + row * width + node, mask=inside, other=0)
    above = tl.load(parent + row * width + node, mask=inside, other=-1)
    child = above >= 0
    at = tl.load(place + row * width + node, mask=inside & child, other=0)
    own = _exact(_log_prob(tl.load(marginals + (row + below - 1) * pool + at, mask=child, other=-float("inf"))))
    own = tl.where(node == 0, 0.0, own)
    word = tl.load(
        ancestors + (row * width + node[:, None]) * WORDS + node[None, :] // 32,
        mask=inside[:, None] & inside[None, :],
        other=0,
    )
    on_path = ((word >> (node[None, :] % 32)) & 1) != 0
    total = tl.sum(tl.where(on_path, own[None, :], 0.0), 1)
    tl.store(score + row * width + node, total, mask=inside)


@triton.jit(do_not_specialize=["first_slot"])
def _choose_kernel(
    fields, known_score, guess_score, guess_depth, guess_parent, guess_place, ancestors, tokens, limit,
    open_nodes, out_token, out_parent, out_depth, out_above, out_inside, out_node, out_score, out_guess, out_candidate,
    first_slot, requests, budget, depths, pool, width,
    WORDS: tl.constexpr, NODES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    step = requests * budget
    fields += request * budget
    known_score += request * budget
    open_nodes += request * WIDTH
    last = tl.minimum(tl.load(limit + request), depths)

    # Known nodes stand in order: the open ones are found by counting.
    node = tl.arange(0, NODES)
    real = node < budget
    score = tl.load(known_score + node, mask=real, other=-float("inf"))
    depth = tl.load(fields + 2 * step + node, mask=real, other=0)
    slot = tl.load(fields + 3 * step + node, mask=real, other=0)
    is_open = (score > -float("inf")) & (slot < 0) & (depth < last)
    rank = tl.cumsum(is_open.to(tl.int32), 0) - 1
    count = tl.minimum(tl.sum(is_open.to(tl.int32), 0), width)
    tl.store(open_nodes + rank, node, mask=is_open & (rank < width))
    tl.debug_barrier()

    entry = tl.arange(0, WIDTH)
    opened = tl.load(open_nodes + entry, mask=entry < count, other=0)
    open_score = tl.load(known_score + opened, mask=entry < count, other=-float("inf"))
    open_depth = tl.load(fields + 2 * step + opened, mask=entry < count, other=0)
    row = (request * depths + open_depth)[:, None] * width + entry[None, :]
    wanted = (entry < count)[:, None] & (entry < width)[None, :]
    estimate = open_score[:, None] + tl.load(guess_score + row, mask=wanted, other=-float("inf"))
    level = open_depth[:, None] + tl.load(guess_depth + row, mask=wanted, other=0)
    estimate = tl.where(level < last, estimate, -float("inf"))
    pair = entry[:, None] * WIDTH + entry[None, :]
    key = tl.topk(tl.reshape(_key_of_score(estimate, pair, WIDTH * WIDTH), [WIDTH * WIDTH]), WIDTH)

    alive = (key != _NEVER) & (entry < width)
    pair = tl.where(alive, _place_of_key(key, WIDTH * WIDTH), 0)
    which, guessed = pair // WIDTH, pair % WIDTH
    opened = tl.load(open_nodes + which, mask=alive, other=0)
    token = tl.load(fields + opened)
    above = tl.load(fields + step + opened)
    depth = tl.minimum(tl.load(fields + 2 * step + opened), depths - 1)
    score = tl.load(known_score + opened)
    row = (request * depths + depth) * width + guessed
    below = tl.load(guess_depth + row)
    guess = alive & (guessed > 0)
    guess_above = tl.load(guess_parent + row, mask=guess, other=0)
    place = tl.load(guess_place + row, mask=guess, other=0)
    same = (which[:, None] == which[None, :]) & alive[:, None] & alive[None, :]
    is_parent = same & (guess_above[:, None] == guessed[None, :])
    parent = tl.sum(tl.where(is_parent, entry[None, :], 0), 1)
    word = tl.load(ancestors + row[:, None] * WORDS + guessed[None, :] // 32, mask=same, other=0)
    seen = ((word >> (guessed[None, :] % 32).to(tl.int32)) & 1) != 0
    seen = (same & seen) | (entry[:, None] == entry[None, :])
    depth = tl.minimum(depth + below, depths - 1)
    at = (request * depths + depth - 1) * pool + place
    token = tl.where(guess, tl.load(tokens + at, mask=guess, other=0), token)

    inside = entry < width
    out = request * width + entry
    tl.store(out_token + out, token, mask=inside)
    tl.store(out_parent + out, tl.where(guess, first_slot + parent, above), mask=inside)
    tl.store(out_depth + out, depth, mask=inside)
    tl.store(out_above + out, above, mask=inside)
    square = out[:, None] * width + entry[None, :]
    tl.store(out_inside + square, seen.to(tl.uint8), mask=inside[:, None] & inside[None, :])
    tl.store(out_node + out, tl.where(alive & (guessed == 0), opened, budget), mask=inside)
    tl.store(out_score + out, tl.where(alive, score, -float("inf")), mask=inside)
    tl.store(out_guess + out, guess.to(tl.uint8), mask=inside)
    tl.store(out_candidate + out, tl.where(guess, parent * pool + place, width * pool), mask=inside)


@triton.jit
def _children_kernel(
    log_probs, candidate, best, place, own, pool, width, keep, POOL: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One program a node: its guessed children's log-probabilities, and its `keep` best others."""
    node = tl.program_id(0).to(tl.int64)
    request, number = node // width, node % width
    first = request * width
    row = log_probs + node * pool
    at = tl.arange(0, POOL)
    value = _log_prob(tl.load(row + at, mask=at < pool, other=-float("inf")))
    key = _key_of_log_prob(value, at, POOL)
    for other in range(width):
        taken = tl.load(candidate + first + other) - number * pool
        if (taken >= 0) & (taken < pool):
            key = tl.where(at == taken, -1, key)
            tl.store(own + first + other, _exact(_log_prob(tl.load(row + taken))))
    out = node * keep
    for rank in range(keep):
        highest = tl.max(key, 0)
        log_prob = tl.where(highest < POOL, -float("inf"), _log_prob_of_key(highest, POOL))
        tl.store(best + out + rank, _exact(log_prob))
        tl.store(place + out + rank, tl.where(highest < POOL, 0, _place_of_key(highest, POOL)))
        key = tl.where(key == highest, -1, key)


@triton.jit(do_not_specialize=["first_slot"])
def _merge_kernel(
    fields, known_score, node_token, node_parent, node_depth, node_inside, chosen_node, chosen_score, chosen_guess,
    own, best, place, tokens, path_score, out_fields, out_score,
    first_slot, requests, budget, depths, pool, width, keep,
    NODES: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Known nodes, guesses and other candidates, in this order: the best `budget` of them."""
    request = tl.program_id(0).to(tl.int64)
    step = requests * budget
    fields += request * budget
    first = request * width
    others = first * keep

    entry = tl.arange(0, WIDTH)
    expanded = entry < width
    guess = tl.load(chosen_guess + first + entry, mask=expanded, other=0) != 0
    step_score = tl.load(own + first + entry, mask=guess, other=0.0)
    step_score = tl.where(guess, step_score, tl.load(chosen_score + first + entry, mask=expanded, other=-float("inf")))
    square = (first + entry)[:, None] * width + entry[None, :]
    on_path = tl.load(node_inside + square, mask=expanded[:, None] & expanded[None, :], other=0) != 0
    total = tl.sum(tl.where(on_path, step_score[None, :], 0.0), 1)
    tl.store(path_score + first + entry, total, mask=expanded)
    tl.debug_barrier()

    at = tl.arange(0, ENTRIES)
    guessed, other = at - budget, at - budget - width
    is_guess = (guessed >= 0) & (guessed < width)
    is_guess = is_guess & (tl.load(chosen_guess + first + guessed, mask=is_guess, other=0) != 0)
    is_other = (other >= 0) & (other < width * keep)
    score = tl.load(known_score + request * budget + at, mask=at < budget, other=-float("inf"))
    score = tl.where(is_guess, tl.load(path_score + first + guessed, mask=is_guess, other=0.0), score)
    parent_score = tl.load(path_score + first + other // keep, mask=is_other, other=0.0)
    parent_score += tl.load(best + others + other, mask=is_other, other=0.0)
    score = tl.where(is_other, parent_score, score)
    key = tl.topk(_key_of_score(score, at, ENTRIES), NODES)

    node = tl.arange(0, NODES)
    inside = node < budget
    alive = key != _NEVER
    at = tl.where(alive, _place_of_key(key, ENTRIES), 0).to(tl.int32)
    guessed, other = at - budget, at - budget - width
    was_known = at < budget
    is_other = other >= 0
    is_guess = (guessed >= 0) & (other < 0)
    above = other // keep
    source = tl.where(is_other, above, guessed)
    new = is_other | is_guess
    level = tl.load(node_depth + first + source, mask=new, other=0)
    token = tl.load(fields + at, mask=was_known, other=0)
    token = tl.where(is_guess, tl.load(node_token + first + source, mask=is_guess, other=0), token)
    chosen_place = tl.load(place + others + other, mask=is_other, other=0)
    other_token = tl.load(tokens + (request * depths + level) * pool + chosen_place, mask=is_other, other=0)
    token = tl.where(is_other, other_token, token)
    parent = tl.load(fields + step + at, mask=was_known, other=0)
    parent = tl.where(is_guess, tl.load(node_parent + first + source, mask=is_guess, other=0), parent)
    parent = tl.where(is_other, first_slot + above, parent)
    depth = tl.load(fields + 2 * step + at, mask=was_known, other=0)
    depth = tl.where(new, level + is_other.to(tl.int64), depth)
    slot = tl.load(fields + 3 * step + at, mask=was_known, other=-1)
    slot = tl.where(is_guess, first_slot + guessed, slot)
    # The number of known nodes, which stands for none, is no known node's place.
    opened = tl.load(chosen_node + first + entry, mask=expanded, other=budget).to(tl.int32)
    number = tl.max(tl.where(at[:, None] == opened[None, :], entry[None, :], -1), 1)
    slot = tl.where(was_known & (number >= 0), first_slot + number, slot)

    out = out_fields + request * budget + node
    tl.store(out, token, mask=inside)
    tl.store(out + step, parent, mask=inside)
    tl.store(out + 2 * step, depth, mask=inside)
    tl.store(out + 3 * step, slot, mask=inside)
    tl.store(out_score + request * budget + node, _score_of_key(key, ENTRIES, BITS), mask=inside)


@triton.jit
def _lay_out_kernel(
    root, fields, score, place, out_token, out_parent, out_depth, out_ancestors, out_count, requests, budget, depths,
    WORDS: tl.constexpr, WORD_BLOCK: tl.constexpr, NODES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    step = requests * budget
    first = request * budget
    fields += first
    node = tl.arange(0, NODES)
    real = node < budget
    alive = tl.load(score + first + node, mask=real, other=-float("inf")) > -float("inf")
    depth = tl.where(alive, tl.load(fields + 2 * step + node, mask=real, other=0).to(tl.int32), depths + 1)
    own_parent = tl.load(fields + step + node, mask=real, other=0)
    token = tl.load(fields + node, mask=real, other=0)

    # A node's place is the number of those before it; its parent is found by slot.
    before = tl.zeros([NODES], tl.int32)
    above = tl.zeros([NODES], tl.int32)
    for start in range(0, budget, CHUNK):
        other = start + tl.arange(0, CHUNK)
        lives = tl.load(score + first + other, mask=other < budget, other=-float("inf")) > -float("inf")
        level = tl.load(fields + 2 * step + other, mask=other < budget, other=0).to(tl.int32)
        level = tl.where(lives, level, depths + 1 + (other >= budget).to(tl.int32))
        earlier = (level[None, :] < depth[:, None]) | (
            (level[None, :] == depth[:, None]) & (other[None, :] < node[:, None])
        )
        before += tl.sum(earlier.to(tl.int32), 1)
        slot = tl.load(fields + 3 * step + other, mask=lives, other=-1)
        is_parent = lives[None, :] & (slot[None, :] == own_parent[:, None])
        above += tl.sum(tl.where(is_parent, other[None, :], 0), 1)
    tl.store(place + first + node, before, mask=real)
    tl.debug_barrier()
    parent = tl.load(place + first + above, mask=real, other=0)
    parent = tl.where(alive & (before > 0), parent, -1)
    out = first + before
    tl.store(out_token + out, tl.where(alive, token, tl.load(root + request)), mask=real)
    tl.store(out_parent + out, parent.to(tl.int64), mask=real)
    tl.store(out_depth + out, tl.where(alive, depth, 0).to(tl.int64), mask=real)
    tl.store(out_count + request, tl.sum(alive.to(tl.int64), 0))
    tl.debug_barrier()

    word = tl.arange(0, WORD_BLOCK)
    at = node
    bits = tl.zeros([NODES, WORD_BLOCK], tl.int32)
    for _ in range(depths + 1):
        bit = tl.full([NODES], 1, tl.int32) << (at % 32)
        bits = tl.where((at >= 0)[:, None] & ((at // 32)[:, None] == word[None, :]), bits | bit[:, None], bits)
        at = tl.load(out_parent + first + at, mask=real & (at >= 0), other=-1).to(tl.int32)
    target = (first + node)[:, None] * WORDS + word[None, :]
    tl.store(out_ancestors + target, bits, mask=real[:, None] & (word < WORDS)[None, :])


def root(root_token: torch.Tensor, budget: int) -> Known:
    """`sgl_specflow.tree.expansion.root`."""
    requests, device = len(root_token), root_token.device
    known = _unset(requests, budget, device)
    _root_kernel[(requests,)](
        root_token, known.fields, known.score, requests, budget, NODES=_block(budget), num_warps=1
    )
    return known


def guess(marginals: torch.Tensor, width: int) -> Guesses:
    """`sgl_specflow.tree.expansion.guess`; in torch for widths and pools that a program does not hold."""
    requests, depths, pool = marginals.shape
    if width > MAX_WIDTH or pool > MAX_POOL:
        return in_torch.guess(marginals, width)
    marginals, device = marginals.contiguous(), marginals.device
    levels, ranks = max(1, min(width, depths) - 1), max(1, min(width - 1, pool))
    windows = requests * depths
    best = torch.empty(windows, levels, ranks, dtype=torch.float32, device=device)
    place = torch.empty(best.shape, dtype=torch.int64, device=device)
    block = _block(pool)
    _windows_kernel[(requests, depths - 1 + levels)](
        marginals, best, place, depths, pool, levels, ranks,
        POOL=block, RANKS=min(block, _block(ranks)), num_warps=4,
    )  # fmt: skip
    # Nobody reads the token of a root or of padding.
    tree = tree_from_marginals(torch.empty(windows, dtype=torch.int64, device=device), best, place, width)
    score = torch.empty(requests, depths, width, dtype=torch.float64, device=device)
    _guess_scores_kernel[(windows,)](
        marginals, tree.depth, tree.parent, tree.token, tree.ancestors, score, depths, pool, width,
        WORDS=tree.ancestors.shape[2], WIDTH=_block(width), num_warps=4,
    )  # fmt: skip
    depth, parent, place = (part.view(score.shape) for part in (tree.depth, tree.parent, tree.token))
    return Guesses(score, depth, parent, place, tree.ancestors.view(*score.shape, -1))


def choose(known: Known, guesses: Guesses, pool_tokens, limit, width: int, first_slot: int) -> Chosen:
    """`sgl_specflow.tree.expansion.choose`; in torch for widths that a program does not hold."""
    if width > MAX_WIDTH:
        return in_torch.choose(known, guesses, pool_tokens, limit, width, first_slot)
    requests, depths, pool = pool_tokens.shape
    budget, device = known.score.shape[1], known.score.device
    whole = lambda: torch.empty(requests, width, dtype=torch.int64, device=device)
    flags = lambda *shape: torch.empty(requests, *shape, dtype=torch.bool, device=device)
    nodes = Expansion(first_slot, whole(), whole(), whole(), whole(), flags(width, width))
    score = torch.empty(requests, width, dtype=torch.float64, device=device)
    chosen = Chosen(nodes, whole(), score, flags(width), whole())
    block = _block(width)
    open_nodes = torch.empty(requests, block, dtype=torch.int32, device=device)
    _choose_kernel[(requests,)](
        known.fields, known.score, guesses.score, guesses.depth, guesses.parent, guesses.place, guesses.ancestors,
        pool_tokens.contiguous(), limit, open_nodes,
        nodes.token, nodes.parent, nodes.depth, nodes.above, nodes.inside.view(torch.uint8),
        chosen.node, chosen.score, chosen.guess.view(torch.uint8), chosen.candidate,
        first_slot, requests, budget, depths, pool, width,
        WORDS=guesses.ancestors.shape[3], NODES=_block(budget), WIDTH=block, num_warps=8,
    )  # fmt: skip
    return chosen


def absorb(known: Known, chosen: Chosen, log_probs: torch.Tensor, pool_tokens, keep: int) -> Known:
    """`sgl_specflow.tree.expansion.absorb`; in torch for numbers that a program does not hold."""
    requests, width, pool = log_probs.shape
    budget, device, nodes = known.score.shape[1], log_probs.device, chosen.nodes
    entries = _block(budget + width * (keep + 1))
    if width > MAX_WIDTH or entries > MAX_ENTRIES or pool > MAX_POOL:
        return in_torch.absorb(known, chosen, log_probs, pool_tokens, keep)
    double = lambda *shape: torch.empty(requests, *shape, dtype=torch.float64, device=device)
    best, own, path_score = double(width, keep), double(width), double(width)
    place = torch.empty(best.shape, dtype=torch.int64, device=device)
    _children_kernel[(requests * width,)](
        log_probs.contiguous(), chosen.candidate, best, place, own, pool, width, keep,
        POOL=_block(pool), WIDTH=_block(width), num_warps=2,
    )  # fmt: skip
    out = _unset(requests, budget, device)
    _merge_kernel[(requests,)](
        known.fields, known.score, nodes.token, nodes.parent, nodes.depth, nodes.inside.view(torch.uint8),
        chosen.node, chosen.score, chosen.guess.view(torch.uint8), own, best, place, pool_tokens.contiguous(), path_score,
        out.fields, out.score, nodes.first_slot, requests, budget, pool_tokens.shape[1], pool, width, keep,
        NODES=_block(budget), WIDTH=_block(width), ENTRIES=entries, BITS=entries.bit_length() - 1, num_warps=8,
    )  # fmt: skip
    return out


def lay_out(root_token: torch.Tensor, known: Known, depths: int) -> TokenTree:
    """`sgl_specflow.tree.expansion.lay_out`."""
    requests, budget = known.score.shape
    tree = empty_tree(requests, budget, known.score.device)
    words = tree.ancestors.shape[2]
    place = torch.empty(requests, budget, dtype=torch.int32, device=known.score.device)
    _lay_out_kernel[(requests,)](
        root_token, known.fields, known.score, place,
        tree.token, tree.parent, tree.depth, tree.ancestors, tree.node_count, requests, budget, depths,
        WORDS=words, WORD_BLOCK=triton.next_power_of_2(words), NODES=_block(budget), CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    return tree


def _unset(requests: int, budget: int, device) -> Known:
    fields = torch.empty(4, requests, budget, dtype=torch.int64, device=device)
    return Known(fields, torch.empty(requests, budget, dtype=torch.float64, device=device))


def _block(count: int) -> int:
    return max(2, triton.next_power_of_2(count))
