"""The triangular form against the recurrence that walks every path, in float64."""

import copy

import pytest
import torch
from gdn_cases import TREE_SHAPES, accept_leaf, make_layer, parents, path_to, relative_error
from sgl_specflow.kernels.gdn_tree import PendingPaths, TreeStash, gdn_tree_flush, gdn_tree_verify
from sgl_specflow.kernels.gdn_tree.naive import gates, inverse_norm, tree_recurrence

TOLERANCE = 1e-10


def recurrence(layer, request, state):
    """One request's outputs [count, H, d_v] and node states, from raw inputs."""
    nodes, count = layer.ancestors.shape[1], len(layer.parent[request])
    at = slice(request * nodes, request * nodes + count)
    group = layer.v.shape[1] // layer.k.shape[1]
    q, k = (x[at].repeat_interleave(group, dim=1) for x in (layer.q, layer.k))
    g, beta = gates(layer.a[at], layer.b[at], layer.A_log, layer.dt_bias)
    scale = layer.k.shape[2] ** -0.5
    return tree_recurrence(
        q * inverse_norm(q) * scale,
        k * inverse_norm(k),
        layer.v[at],
        g,
        beta,
        state,
        torch.tensor(layer.parent[request]),
    )


def float64_layer(parent, *heads, **options):
    return make_layer(3, parent, *heads, dtype=torch.float64, state_dtype=torch.float64, **options)


def check_steps(layer, steps=2):
    """Verify, accept a random path, verify again: outputs and states of both steps."""
    for implementation in ("naive", "batched"):
        _check_steps(copy.deepcopy(layer), steps, implementation)


def _check_steps(layer, steps, implementation):
    states = layer.state.clone()
    for step in range(steps):
        out = gdn_tree_verify(*layer.arguments(), implementation=implementation)
        nodes = layer.ancestors.shape[1]
        after = []
        for r, row in enumerate(layer.parent):
            slot = layer.slots[r]
            expected, node_states = recurrence(layer, r, states[slot])
            assert relative_error(out[r * nodes : r * nodes + len(row)], expected) < TOLERANCE
            assert not out[r * nodes + len(row) : (r + 1) * nodes].any()
            after.append(node_states)
        assert relative_error(layer.state, states) < TOLERANCE  # without the step that was just verified
        paths = accept_leaf(layer, step)
        for r, path in enumerate(paths):
            states[layer.slots[r]] = after[r][path[-1]]
        layer.new_nodes(10 + step)
    gdn_tree_flush(
        layer.state[None],
        layer.slots,
        one_layer(layer.stash),
        layer.rows,
        layer.pending,
        implementation=implementation,
    )
    assert relative_error(layer.state, states) < TOLERANCE


def one_layer(stash):
    return TreeStash(stash.u[None], stash.k[None], stash.g[None])


@pytest.mark.parametrize("shape", TREE_SHAPES)
@pytest.mark.parametrize("decay", ["mixed", "one", "zero"])
@pytest.mark.parametrize("beta", ["mixed", "one", "zero"])
@pytest.mark.parametrize("repeated_keys", [False, True], ids=["random_keys", "repeated_keys"])
def test_triangular_form_is_the_recurrence(shape, decay, beta, repeated_keys):
    trees = [parents(shape, 33), parents(shape, 20, seed=1)]
    check_steps(float64_layer(trees, 1, 2, 8, 12, decay=decay, beta=beta, repeated_keys=repeated_keys))


@pytest.mark.parametrize("shape", ["chain", "comb", "recent"])
@pytest.mark.parametrize("decay", ["mixed", "one"])
def test_256_nodes(shape, decay):
    check_steps(float64_layer([parents(shape, 256)], 1, 1, 8, decay=decay), steps=1)


@pytest.mark.parametrize("heads", [(16, 48), (16, 32), (8, 24), (4, 12), (2, 2)], ids=str)
def test_grouped_heads(heads):
    check_steps(float64_layer([parents("recent", 9), [-1]], *heads, 4, 4))


def test_one_node():
    check_steps(float64_layer([[-1]], 1, 1, 8))


def test_decay_that_underflows_alone_is_finite():
    """e^{-G_j} is infinite for a chain of strong decays; the difference is not."""
    layer = float64_layer([parents("chain", 64)], 1, 1, 8, decay="zero")
    layer.dt_bias += 40.0
    assert gdn_tree_verify(*layer.arguments()).isfinite().all()
    check_steps(layer, steps=1)


@pytest.mark.parametrize("implementation", ["naive", "batched"])
def test_left_out_requests_keep_state_and_stash(implementation):
    layer = float64_layer([parents("recent", 12), parents("wide", 12)], 1, 2, 8)
    layer.slots[1] = -1
    before, stash = layer.state.clone(), layer.stash.u.clone()
    out = gdn_tree_verify(*layer.arguments(), implementation=implementation)
    assert out[:12].all() and not out[12:].any()
    assert torch.equal(layer.state, before) and torch.equal(layer.stash.u[layer.rows[1]], stash[layer.rows[1]])


def test_without_a_stash():
    layer = float64_layer([parents("wide", 12)], 1, 2, 8)
    expected = gdn_tree_verify(*layer.arguments())
    layer.stash = layer.rows = layer.pending = None
    assert torch.equal(gdn_tree_verify(*layer.arguments()), expected)


@pytest.mark.parametrize("implementation", ["naive", "batched"])
def test_flush_of_a_prefix_into_another_slot(implementation):
    layer = float64_layer([parents("chain", 12)], 1, 2, 8)
    slot, spare = int(layer.slots[0]), 0
    before = layer.state.clone()
    _, node_states = recurrence(layer, 0, before[slot])
    gdn_tree_verify(*layer.arguments())
    path = path_to(layer.parent[0], 11)
    layer.pending.record(layer.rows.long(), torch.tensor([path]), torch.tensor([12]))
    gdn_tree_flush(
        layer.state[None],
        layer.slots,
        one_layer(layer.stash),
        layer.rows,
        layer.pending,
        length=torch.tensor([7], dtype=torch.int32),
        destination=torch.tensor([spare], dtype=torch.int32),
        implementation=implementation,
    )
    assert relative_error(layer.state[spare], node_states[path[6]]) < TOLERANCE
    assert torch.equal(layer.state[slot], before[slot])


def test_flush_then_verify_is_verify():
    layer, fused = (float64_layer([parents("recent", 20)], 1, 2, 8) for _ in range(2))
    for each in (layer, fused):
        gdn_tree_verify(*each.arguments())
        accept_leaf(each, 4)
        each.new_nodes(5)
    gdn_tree_flush(layer.state[None], layer.slots, one_layer(layer.stash), layer.rows, layer.pending)
    layer.pending.clear(layer.rows.long())
    assert torch.equal(gdn_tree_verify(*layer.arguments()), gdn_tree_verify(*fused.arguments()))
    assert torch.equal(layer.state, fused.state)


def test_requests_without_pending_or_slot_in_one_batch():
    """One row has a path to commit, one has none, one is graph padding: batched is naive, states and stash included."""
    layers = [float64_layer([parents("recent", 12)] * 3, 2, 4, 8) for _ in range(2)]
    for layer, implementation in zip(layers, ("naive", "batched")):
        gdn_tree_verify(*layer.arguments(), implementation=implementation)
        accept_leaf(layer, 3)
        layer.pending.clear(layer.rows[1:2].long())
        layer.slots[2] = -1
        layer.out = gdn_tree_verify(*layer.arguments(), implementation=implementation)
    naive, batched = layers
    assert relative_error(batched.out, naive.out) < TOLERANCE
    assert relative_error(batched.state, naive.state) < TOLERANCE
    for row in naive.rows[:2].tolist():
        assert relative_error(batched.stash.u[row], naive.stash.u[row]) < TOLERANCE
        assert relative_error(batched.stash.g[:, row], naive.stash.g[:, row]) < TOLERANCE
        assert torch.equal(batched.stash.k[:, row], naive.stash.k[:, row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["naive", "batched"])
def test_models_in_lower_precision(dtype, implementation):
    layer = make_layer(3, [parents("recent", 40), parents("chain", 30)], 2, 4, 16, dtype=dtype)
    exact = copy.deepcopy(layer)
    for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state"):
        setattr(exact, name, getattr(layer, name).double())
    exact.stash = TreeStash(layer.stash.u.double(), layer.stash.k.double(), layer.stash.g.clone())
    for step in range(2):
        out = gdn_tree_verify(*layer.arguments(), implementation=implementation)
        expected = gdn_tree_verify(*exact.arguments())
        assert out.dtype == dtype
        assert relative_error(out, expected) < (2e-6 if dtype == torch.float32 else 3e-3)
        assert relative_error(layer.state, exact.state) < 2e-6
        for each in (layer, exact):
            accept_leaf(each, step)
    for each, way in ((layer, implementation), (exact, "naive")):
        gdn_tree_flush(each.state[None], each.slots, one_layer(each.stash), each.rows, each.pending, implementation=way)
    assert relative_error(layer.state, exact.state) < 2e-6


def test_stash_of_qwen36_is_small():
    stash = TreeStash.allocate(1, 128, 16, 48, 128, 128, "meta")
    assert stash.bytes < 5e6 < 128 * 48 * 128 * 128 * 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(3, 1, 8)}, "a row for each"),
        ({"slots": torch.zeros(1, dtype=torch.int64)}, r"slots is \[R\] int32"),
        ({"ancestors": torch.zeros(1, 12, 1, dtype=torch.int64)}, "ancestors is int32"),
        ({"pending": None}, "come together"),
        ({"state": torch.zeros(3, 2, 8, 9)}, "state is"),
        ({"stash": TreeStash.allocate(2, 4, 1, 2, 8, 8, "cpu")}, "at least N nodes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_broken_contracts_are_named(change, message):
    layer = make_layer(0, [parents("wide", 12)], 1, 2, 8, dtype=torch.float32)
    for name, value in change.items():
        setattr(layer, name, value)
    with pytest.raises(ValueError, match=message):
        gdn_tree_verify(*layer.arguments())


def test_pending_paths_flip_the_buffer():
    pending = PendingPaths.allocate(4, 6, "cpu")
    pending.record(torch.tensor([2, 0]), torch.tensor([[0, 3, 5], [0, 1, 0]]), torch.tensor([3, 2]))
    assert pending.parity.tolist() == [1, 0, 1, 0] and pending.length.tolist() == [2, 0, 3, 0]
    assert pending.path[2, :3].tolist() == [0, 3, 5]
    pending.clear(torch.tensor([2]))
    assert pending.length.tolist() == [2, 0, 0, 0]
