"""The accepted path held to a naive walk, and the sampled law to the target's."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import VOCABULARY, choices_near, token_trees

from sgl_specflow.tree import TokenTree, ancestor_bits, chain
from sgl_specflow.verify import accept


def walk(tree, next_token, request, max_depth):
    """The accepted node ids and the committed tokens of one request, by child links."""
    children = {
        (int(tree.parent[request, node]), int(tree.token[request, node])): node
        for node in range(1, int(tree.node_count[request]))
    }
    path, committed = [0], []
    while True:
        choice = int(next_token[request, path[-1]])
        committed.append(choice)
        child = children.get((path[-1], choice))
        if child is None or len(path) > max_depth:
            return path, committed
        path.append(child)


def assert_same_as_walk(tree, next_token, max_depth):
    accepted = accept(tree, next_token, max_depth)
    entries = max_depth + 1
    for request in range(len(tree.token)):
        path, committed = walk(tree, next_token, request, max_depth)
        fill = entries - len(path)
        assert accepted.path[request].tolist() == path + [-1] * fill
        assert accepted.tokens[request].tolist() == committed + [0] * fill
        assert accepted.length[request] == len(path)
        assert accepted.bonus[request] == committed[-1]
        assert accepted.last_node[request] == path[-1]
    return accepted


@settings(max_examples=400, deadline=None)
@given(tree=token_trees(), seed=st.integers(0, 2**32), slack=st.integers(0, 3))
def test_acceptance_equals_the_walk(tree, seed, slack):
    assert_same_as_walk(tree, choices_near(tree, seed), int(tree.depth.max()) + slack)


@settings(max_examples=50, deadline=None)
@given(tree=token_trees(), seed=st.integers(0, 2**32), max_depth=st.integers(0, 4))
def test_a_smaller_max_depth_stops_the_walk_early(tree, seed, max_depth):
    assert_same_as_walk(tree, choices_near(tree, seed), max_depth)


@pytest.mark.parametrize("agreed", range(41))
def test_chain_is_accepted_up_to_its_first_disagreement(agreed):
    tokens = torch.arange(100, 141)[None]
    next_token = tokens + 1
    next_token[0, agreed] = 7
    accepted = assert_same_as_walk(chain(tokens), next_token, 40)
    assert accepted.length.tolist() == [agreed + 1]
    assert accepted.bonus.tolist() == [7]


def test_a_match_below_a_mismatch_is_not_accepted():
    accepted = accept(chain(torch.tensor([[1, 2, 3]])), torch.tensor([[9, 3, 4]]), 2)
    assert accepted.path.tolist() == [[0, -1, -1]]
    assert accepted.tokens.tolist() == [[9, 0, 0]]


def test_padding_is_never_accepted_even_if_its_token_matches():
    parent = torch.full((1, 4), -1)
    tree = TokenTree(torch.full((1, 4), 5), parent, torch.zeros_like(parent), ancestor_bits(parent), torch.tensor([1]))
    tree.check()
    accepted = accept(tree, torch.full((1, 4), 5), 3)
    assert accepted.path.tolist() == [[0, -1, -1, -1]]
    assert accepted.length.tolist() == [1]


def test_committed_tokens_have_the_target_distribution():
    # Exhaustive: the law of the first committed tokens, over every outcome of the draws at the nodes.
    # Tree over tokens {0, 1}: root - a(0), b(1); a - c(1).
    parent = torch.tensor([[-1, 0, 0, 1]])
    tree = TokenTree(
        torch.tensor([[0, 0, 1, 1]]), parent, torch.tensor([[0, 1, 1, 2]]), ancestor_bits(parent), torch.tensor([4])
    )
    chance_of_one = {(): 0.3, (0,): 0.9, (1,): 0.2, (0, 1): 0.6}
    paths = [(), (0,), (1,), (0, 1)]

    def chance(path, token):
        return chance_of_one[path] if token else 1 - chance_of_one[path]

    law = Counter()
    for choices in itertools.product((0, 1), repeat=4):
        weight = torch.tensor([chance(path, token) for path, token in zip(paths, choices)], dtype=torch.float64).prod()
        accepted = accept(tree, torch.tensor([choices]), 2)
        committed = tuple(accepted.tokens[0, : accepted.length[0]].tolist())
        law[committed] += float(weight)
    for committed, probability in law.items():
        expected = 1.0
        for index, token in enumerate(committed):
            expected *= chance(committed[:index], token)
        assert probability == pytest.approx(expected)
    assert sum(law.values()) == pytest.approx(1.0)
    assert set(law) == {(0, 0), (0, 1, 0), (0, 1, 1), (1, 0), (1, 1)}


def test_accept_reads_no_value_on_the_host():
    tree = chain(torch.arange(6).reshape(2, 3))
    on_meta = TokenTree(*(getattr(tree, name).to("meta") for name in tree.__dataclass_fields__))
    accepted = accept(on_meta, torch.empty(2, 3, dtype=torch.int64, device="meta"), 5)
    assert accepted.path.shape == accepted.tokens.shape == (2, 6)


def test_accept_refuses_wrong_arguments_by_name():
    tree = chain(torch.arange(3)[None] % VOCABULARY)
    with pytest.raises(ValueError, match="next_token is torch.int32"):
        accept(tree, torch.zeros(1, 3, dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="next_token is"):
        accept(tree, torch.zeros(1, 2, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="max_depth is -1"):
        accept(tree, torch.zeros(1, 3, dtype=torch.int64), -1)
