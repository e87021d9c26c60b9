"""Hypothesis strategies for token trees, shared by the tree, acceptance and commit tests."""

import random

import torch
from hypothesis import strategies as st

from sgl_specflow.tree import TokenTree, ancestor_bits

VOCABULARY = 3


@st.composite
def token_trees(draw, max_requests=4, max_budget=70):
    """Batches of trees of any shape (not only those of `build_tree`), with padding, over a tiny vocabulary."""
    budget = draw(st.integers(1, max_budget))
    requests = draw(st.integers(1, max_requests))
    source = random.Random(draw(st.integers(0, 2**32)))
    rows = [_random_row(source, budget) for _ in range(requests)]
    token, parent, depth, node_count = (torch.tensor(field) for field in zip(*rows))
    return TokenTree(token, parent, depth, ancestor_bits(parent), node_count)


def _random_row(source, budget):
    node_count = source.randint(1, budget)
    root = source.randrange(VOCABULARY)
    token, parent, depth = [root], [-1], [0]
    level = [0]
    while len(token) < node_count:
        # Distinct (parent, token) pairs: siblings carry distinct tokens.
        children = [(above, child) for above in level for child in range(VOCABULARY)]
        width = source.randint(1, min(len(children), node_count - len(token), source.choice([1, 2, 8])))
        first = len(token)
        for above, child in source.sample(children, width):
            token.append(child)
            parent.append(above)
            depth.append(depth[above] + 1)
        level = range(first, len(token))
    padding = budget - node_count
    return token + [root] * padding, parent + [-1] * padding, depth + [0] * padding, node_count


def choices_near(tree, seed):
    """A next_token [R, B] that follows a random child of each node most of the time, so that paths grow long."""
    source = random.Random(seed)
    next_token = torch.randint(VOCABULARY, tree.token.shape, generator=torch.Generator().manual_seed(seed))
    for request in range(tree.token.shape[0]):
        for node in range(1, int(tree.node_count[request])):
            if source.random() < 0.6:
                next_token[request, tree.parent[request, node]] = tree.token[request, node]
    return next_token
