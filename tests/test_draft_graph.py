"""The head's graph leaves its trees in buffers: what must not go wrong with them, and what a step takes of the memory."""

import types

import pytest
import torch
from test_tree import marginals

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.runtime import parallel_drafter, tree_memory
from sgl_specflow.runtime.draft_graph import DraftTail
from sgl_specflow.runtime.parallel_drafter import ParallelDrafter
from sgl_specflow.tree import TokenTree, build_tree

BUDGET, BLOCK, DEPTH = 12, 5, 4
CPU = torch.device("cpu")


def grow(anchors, hidden, rows, limits, out):
    """A tree of each request's first hidden number, as a stand-in for the LM head."""
    trees = []
    for anchor, seed in zip(anchors, hidden[:, 0, 0].tolist()):
        log_probs, tokens = marginals("smooth", 1, DEPTH, 6, int(seed))
        trees.append(build_tree(anchor[None], log_probs, tokens, BUDGET, limits[:1]))
    for name, value in vars(out).items():
        value.copy_(torch.cat([getattr(tree, name) for tree in trees]))
    return out


def captured_pass(tail: DraftTail, anchors: list[int], seeds: list[int]) -> None:
    """What a replay of the head's graph ends with."""
    hidden = torch.tensor(seeds, dtype=torch.float32)[:, None, None].expand(-1, BLOCK, 3).contiguous()
    ids = torch.zeros(len(anchors), BLOCK, dtype=torch.int64)
    ids[:, 0] = torch.tensor(anchors)
    batch = types.SimpleNamespace(input_ids=ids.flatten(), req_pool_indices=torch.arange(len(anchors)))
    tail(None, types.SimpleNamespace(hidden_states=hidden.flatten(0, 1)), batch, len(anchors) * BLOCK)


@pytest.fixture
def tail() -> DraftTail:
    return DraftTail(grow, 3, BUDGET, BLOCK, DEPTH, CPU)


def test_a_replay_leaves_its_trees(tail):
    captured_pass(tail, [7, 9], [1, 2])
    tree = tail.trees(2)
    tree.check()
    assert tree.token[:, 0].tolist() == [7, 9] and tree.depth.max() > 0


def test_limits_hold_for_one_batch(tail):
    tail.set_limits(torch.tensor([0]))
    captured_pass(tail, [7], [1])
    assert tail.trees(1).node_count.tolist() == [1]
    tail.set_limits(None)
    captured_pass(tail, [7], [1])
    assert tail.trees(1).node_count.tolist() == [BUDGET]


def test_limits_of_a_batch_that_no_graph_holds_change_nothing(tail):
    tail.set_limits(torch.zeros(4, dtype=torch.int64))
    captured_pass(tail, [7], [1])
    assert tail.trees(1).node_count.tolist() == [BUDGET]


@pytest.mark.parametrize("path_refresh", [False, True])
def test_a_refresh_that_replays_the_graph_keeps_the_first_tree(tail, path_refresh):
    drafter = object.__new__(ParallelDrafter)
    drafter.settings, drafter.tail = types.SimpleNamespace(path_refresh=path_refresh), tail
    captured_pass(tail, [7], [1])
    first = {name: value.clone() for name, value in vars(tail.trees(1)).items()}

    def run_masks(batch, window):
        captured_pass(tail, [7], [1])
        return None, True

    def refresh(batch, window, tree, limits):
        captured_pass(tail, [7], [5])
        return tree

    drafter._run_masks, drafter._refresh = run_masks, refresh
    tree = drafter.draft(None, types.SimpleNamespace(anchor=torch.tensor([7])), None)
    assert isinstance(tree, TokenTree)
    assert all(torch.equal(value, first[name]) for name, value in vars(tree).items())


def test_a_head_in_another_dtype_is_refused():
    parallel_drafter._check_dtype(torch.bfloat16, torch.bfloat16)
    with pytest.raises(SpecflowConfigError, match="float16 for a target in torch.bfloat16"):
        parallel_drafter._check_dtype(torch.float16, torch.bfloat16)


# --- memory ---


def reserve(monkeypatch, tmp_path, available: int, algorithm="JETFLOW", device="cuda", requests=48):
    spec = types.SimpleNamespace(speculative_algorithm=algorithm, speculative_num_draft_tokens=64)
    graphs = types.SimpleNamespace(
        cuda_graph_config=types.SimpleNamespace(decode=types.SimpleNamespace(bs=[1, 8, 512]))
    )
    monkeypatch.setattr(tree_memory, "get_spec", lambda: spec)
    monkeypatch.setattr(tree_memory, "get_schedule", lambda: types.SimpleNamespace(max_running_requests=requests))
    monkeypatch.setattr(tree_memory, "get_exec", lambda: types.SimpleNamespace(graph=graphs))
    monkeypatch.setattr("sgl_specflow.runtime.start_checks.draft_folder", lambda _: tmp_path)
    head = types.SimpleNamespace(context_size=20480)
    monkeypatch.setattr("sgl_specflow.drafter.config.HeadConfig.load", lambda _: head)
    model = types.SimpleNamespace(vocab_size=151936, dtype=torch.bfloat16)
    configurator = types.SimpleNamespace(is_draft_worker=False, device=device, model_config=model)
    return tree_memory.reserve_step_memory(lambda *_: available, configurator, 0)


def test_the_kv_pool_leaves_room_for_verifying(monkeypatch, tmp_path):
    logits = 48 * 64 * 151936 * 4
    hidden = (1 + 8 + 48) * 64 * 20480 * 2
    assert reserve(monkeypatch, tmp_path, 100 * 2**30) == 100 * 2**30 - 4 * logits - hidden


@pytest.mark.parametrize(
    "gib, budget, vocabulary, requests",
    [(141, 64, 151936, 48), (80, 64, 151936, 33), (24, 64, 151936, 9), (141, 256, 248320, 8), (16, 256, 151936, 4)],
)
def test_the_default_number_of_requests_fits_the_device(gib, budget, vocabulary, requests):
    assert tree_memory.default_requests(gib * 1024, budget, vocabulary) == requests
    assert tree_memory.default_requests(None, budget, vocabulary) == 48


def test_other_algorithms_and_devices_keep_all(monkeypatch, tmp_path):
    assert reserve(monkeypatch, tmp_path, 10**9, algorithm=None) == 10**9
    assert reserve(monkeypatch, tmp_path, 10**9, device="cpu") == 10**9


def test_too_little_memory_is_refused_by_name(monkeypatch, tmp_path):
    with pytest.raises(SpecflowConfigError, match="4800 requests of 64 nodes"):
        reserve(monkeypatch, tmp_path, 100 * 2**30, requests=4800)
