"""The commit plan and the row move held to a naive simulation of the cache."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import choices_near, token_trees

from sgl_specflow.commit import move_rows, plan_commit
from sgl_specflow.tree import chain
from sgl_specflow.verify import accept


def windows(tree, seed):
    """Distinct random slots for every node of every request, and the number of slots in the cache."""
    nodes = tree.token.numel()
    slots = nodes + 9
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))
    return order[:nodes].reshape(tree.token.shape), slots


@settings(max_examples=300, deadline=None)
@given(tree=token_trees(), seed=st.integers(0, 2**32), slack=st.integers(0, 80))
def test_commit_equals_the_simulation(tree, seed, slack):
    accepted = accept(tree, choices_near(tree, seed), int(tree.depth.max()) + slack)
    window, slots = windows(tree, seed)
    committed_length = torch.arange(len(window)) * 50 + 3
    plan = plan_commit(window, accepted, committed_length)
    buffer = torch.randn(slots, 2, 3)
    before = buffer.clone()
    expected = before.clone()
    for request in range(len(window)):
        length = int(accepted.length[request])
        for entry, node in enumerate(accepted.path[request, :length].tolist()):
            assert node >= entry
            expected[window[request, entry]] = before[window[request, node]]
            assert plan.node[request, entry] == node
            # The entry's position is that of the node in the verified tree: keys keep their rotation.
            assert plan.position[request, entry] == tree.positions(committed_length)[request, node]
    move_rows(buffer, plan.source, plan.destination)
    assert torch.equal(buffer, expected)


@settings(max_examples=100, deadline=None)
@given(tree=token_trees(), seed=st.integers(0, 2**32), slack=st.integers(0, 80))
def test_entries_past_the_length_repeat_entry_zero_which_copies_a_slot_onto_itself(tree, seed, slack):
    accepted = accept(tree, choices_near(tree, seed), int(tree.depth.max()) + slack)
    window, _ = windows(tree, seed)
    committed_length = torch.arange(len(window))
    plan = plan_commit(window, accepted, committed_length)
    past = torch.arange(accepted.path.shape[1]) >= accepted.length[:, None]
    past[:, 0] = True
    anchor = window[:, :1].expand_as(plan.source)
    assert torch.equal(plan.source[past], anchor[past])
    assert torch.equal(plan.destination[past], anchor[past])
    assert (plan.node[past] == 0).all()
    assert torch.equal(plan.position[past], committed_length[:, None].expand_as(past)[past])
    # No other entry writes the anchor's slot, so a repeat can neither lose nor reorder a write.
    assert (plan.destination != anchor)[~past].all()
    for request, destination in enumerate(plan.destination.tolist()):
        assert len(set(destination)) == accepted.length[request]


def test_move_rows_reads_every_source_before_it_writes():
    buffer = torch.arange(5.0)[:, None].repeat(1, 2)
    move_rows(buffer, torch.tensor([[0, 2, 1, 4]]), torch.tensor([[0, 1, 2, 3]]))
    assert buffer[:, 0].tolist() == [0.0, 2.0, 1.0, 4.0, 4.0]


def test_requests_that_share_a_dummy_slot_leave_it_as_it_was():
    tree = chain(torch.tensor([[1, 2, 3], [1, 2, 3]]))
    accepted = accept(tree, torch.tensor([[2, 3, 4], [2, 9, 9]]), 2)
    plan = plan_commit(torch.full((2, 3), 4), accepted, torch.tensor([0, 0]))
    buffer = torch.randn(5, 2)
    before = buffer.clone()
    move_rows(buffer, plan.source, plan.destination)
    assert torch.equal(buffer, before)


def test_plan_commit_reads_no_value_on_the_host():
    tree = chain(torch.arange(6).reshape(2, 3))
    accepted = accept(tree, tree.token, 5)
    for name in accepted.__dataclass_fields__:
        setattr(accepted, name, getattr(accepted, name).to("meta"))
    window = torch.empty(2, 3, dtype=torch.int64, device="meta")
    plan = plan_commit(window, accepted, window[:, 0])
    assert plan.source.shape == plan.destination.shape == plan.node.shape == plan.position.shape == (2, 6)
