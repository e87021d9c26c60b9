"""Building the token tree from marginals with a heap: plain Python, one request, the meaning of `build_tree`."""

import ctypes
import heapq
import math
from collections import Counter
from collections.abc import Sequence

import torch

from .token_tree import WORD_BITS, TokenTree


def build_tree_by_heap(
    root_token: int,
    log_probs: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    budget: int,
    max_depth: int | None = None,
) -> TokenTree:
    """Best-first expansion (DDTree), with the score, tie rule and exclusions that `marginals.build_tree` documents.

    Args:
        root_token: the anchor.
        log_probs: D rows of K float32 values.
        tokens: D rows of K tokens, distinct inside a row.
        budget: B >= 1, the root included.
        max_depth: greatest depth allowed (0: the root only); D when not given.

    Returns:
        A TokenTree of one request (R = 1).
    """
    last_depth = len(log_probs) if max_depth is None else min(max_depth, len(log_probs))
    candidates = [_ranked(row, row_tokens) for row, row_tokens in zip(log_probs, tokens)]
    nodes: list[tuple[int, int, int, int | None]] = []  # depth, place inside the depth, token, parent in `nodes`
    nodes_at = Counter()
    # The parent's place inside its depth is final before a child is pushed, since a parent pops before its children.
    heap = [(-0.0, 0, 0, 0, root_token, None)]  # -score, depth, parent's place, rank, token, parent
    while heap and len(nodes) < budget:
        negative_score, depth, _, _, token, parent = heapq.heappop(heap)
        place = nodes_at[depth]
        nodes_at[depth] += 1
        nodes.append((depth, place, token, parent))
        if depth == last_depth:
            continue
        for rank, (log_prob, child_token) in enumerate(candidates[depth]):
            score = _float32(-negative_score + log_prob)
            if score > -math.inf:
                heapq.heappush(heap, (-score, depth + 1, place, rank, child_token, len(nodes) - 1))
    return _as_tree(nodes, root_token, budget)


def _ranked(row, tokens):
    """The eligible (log-probability, token) pairs of a depth by rank."""
    eligible = [(min(value, 0.0), token) for value, token in zip(row, tokens) if value > -math.inf]
    return sorted(eligible, key=lambda pair: -pair[0])


def _float32(value: float) -> float:
    """Round to float32. The sum of two float32 values in double, rounded once more, is their float32 sum."""
    return ctypes.c_float(value).value


def _as_tree(nodes, root_token, budget):
    order = sorted(range(len(nodes)), key=lambda popped: nodes[popped][:2])
    number = {popped: node for node, popped in enumerate(order)}
    token, parent, depth = [root_token] * budget, [-1] * budget, [0] * budget
    paths = [{node} for node in range(budget)]
    for node, popped in enumerate(order):
        depth[node], _, token[node], above = nodes[popped]
        if above is not None:
            parent[node] = number[above]
            paths[node] |= paths[parent[node]]
    words = [[_word(path, first) for first in range(0, budget, WORD_BITS)] for path in paths]
    return TokenTree(
        token=torch.tensor([token]),
        parent=torch.tensor([parent]),
        depth=torch.tensor([depth]),
        ancestors=torch.tensor([words], dtype=torch.int32),
        node_count=torch.tensor([len(nodes)]),
    )


def _word(path, first):
    """The signed 32-bit word of the path's nodes first .. first + 31."""
    return ctypes.c_int32(sum(1 << (node - first) for node in path if first <= node < first + WORD_BITS)).value
