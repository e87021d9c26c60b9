"""The CUDA kernel's tile algorithm in PyTorch, and the CUDA source itself on the CPU, against float64 references."""

import copy

import gdn_on_cpu
import pytest
import torch
from compiled import GXX
from gdn_cases import TREE_SHAPES, accept, accept_leaf, make_layer, parents, path_to, relative_error
from sgl_specflow.kernels.gdn_tree import TreeStash, gdn_tree_flush, gdn_tree_verify
from sgl_specflow.kernels.gdn_tree.cuda_kernel import KernelShape
from sgl_specflow.kernels.gdn_tree.naive import commit_path, gates, inverse_norm, tree_recurrence, tree_triangular
from sgl_specflow.kernels.gdn_tree.tiled import commit_tiled, verify_tiled

from sgl_specflow.tree import unpack_bits

HOPPER, AMPERE = 232448, 166912  # bytes of shared memory a block


@pytest.mark.parametrize("nodes", [1, 15, 16, 17, 70])
@pytest.mark.parametrize("shape", TREE_SHAPES)
@pytest.mark.parametrize("beta", ["mixed", "one"])
@pytest.mark.parametrize("repeated_keys", [False, True], ids=["random_keys", "repeated_keys"])
def test_tiles_are_the_triangular_form(nodes, shape, beta, repeated_keys):
    layer = make_layer(
        1, [parents(shape, nodes)], 2, 2, 16, 24, dtype=torch.float64, beta=beta, repeated_keys=repeated_keys
    )
    g, beta = gates(layer.a, layer.b, layer.A_log, layer.dt_bias)
    visible, state, scale = unpack_bits(layer.ancestors[0], nodes), layer.state[0].double(), 0.25
    k = layer.k * inverse_norm(layer.k)
    out, u, G = tree_triangular(layer.q * inverse_norm(layer.q) * scale, k, layer.v, g, beta, state, visible)
    tiled = verify_tiled(layer.q, layer.k, layer.v, g, beta, state, visible, scale)
    assert relative_error(tiled.out, out) < 1e-10
    assert relative_error(tiled.u / inverse_norm(layer.k), u) < 1e-10
    path = visible[-1].nonzero()[:, 0]
    assert (
        relative_error(commit_tiled(state, layer.k, tiled.u, tiled.G, path), commit_path(state, k, u, G, path)) < 1e-10
    )


def test_operand_rounding_of_the_tiles():
    """float32 with the kernel's terms: U keeps float32's accuracy, O loses a fifth of what its bfloat16 store does."""
    layer = make_layer(1, [parents("recent", 70)], 2, 2, 64, dtype=torch.float32)
    exact = make_layer(1, [parents("recent", 70)], 2, 2, 64, dtype=torch.float64)
    visible = unpack_bits(layer.ancestors[0], 70)

    def verify(inputs, split):
        g, beta = gates(inputs.a, inputs.b, inputs.A_log, inputs.dt_bias)
        return verify_tiled(inputs.q, inputs.k, inputs.v, g, beta, inputs.state[0].to(g.dtype), visible, 0.125, split)

    expected, rounded = verify(exact, False), verify(layer, True)
    assert relative_error(rounded.u, expected.u) < 2e-6
    assert relative_error(rounded.out, expected.out) < 3.5e-4


needs_compiler = pytest.mark.skipif(GXX is None, reason="g++ is missing: it builds the CUDA source for the CPU")


def in_float64(layer):
    exact = copy.deepcopy(layer)
    for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state"):
        setattr(exact, name, getattr(layer, name).double())
    exact.stash = TreeStash(layer.stash.u.double(), layer.stash.k.double(), layer.stash.g.clone())
    return exact


@needs_compiler
@pytest.mark.parametrize(
    "trees, heads, dims, value_slice, limit, options",
    [
        ([("recent", 40)], (1, 2), (128, 128), 64, HOPPER, {}),
        ([("recent", 64)], (1, 1), (128, 128), 64, 101376, {}),
        ([("chain", 40)], (1, 1), (128, 128), 64, HOPPER, {"decay": "one"}),
        ([("star", 40)], (1, 1), (128, 128), 64, HOPPER, {"decay": "zero"}),
        ([("recent", 33), ("wide", 5), ("chain", 16)], (1, 3), (64, 64), 64, HOPPER, {}),
        ([("chain", 40)], (1, 1), (64, 64), 64, HOPPER, {"beta": "one", "repeated_keys": True}),
        ([("recent", 256), ("comb", 130)], (1, 1), (128, 128), 64, HOPPER, {}),
        ([("chain", 256), ("star", 75)], (1, 1), (128, 128), 64, HOPPER, {}),
        ([("comb", 256)], (1, 1), (128, 128), 64, HOPPER, {"decay": "one"}),
        ([("star", 250), ("roots", 256)], (1, 1), (128, 128), 64, HOPPER, {}),
        ([("recent", 176), ("chain", 97)], (1, 1), (128, 128), 64, HOPPER, {}),
        ([("chain", 80), ("roots", 70)], (1, 1), (128, 128), 64, HOPPER, {}),
        ([("recent", 128), ("star", 100)], (1, 1), (128, 128), 64, HOPPER, {"beta": "one", "repeated_keys": True}),
        ([("recent", 90), ("comb", 66)], (2, 4), (128, 128), 64, HOPPER, {}),
        ([("recent", 70)], (2, 2), (64, 128), 32, AMPERE, {"state_dtype": torch.bfloat16}),
        ([("wide", 208)], (1, 1), (128, 128), 32, AMPERE, {}),
        ([("wide", 1)], (2, 2), (64, 128), 64, HOPPER, {"state_dtype": torch.bfloat16}),
        ([("recent", 70)], (1, 2), (64, 64), 32, HOPPER, {"state_dtype": torch.bfloat16}),
    ],
    ids=[
        "qwen",
        "64_nodes_in_99_KB",
        "no_decay",
        "star",
        "ragged",
        "repeated_keys",
        "256_nodes",
        "256_chain",
        "256_comb",
        "256_star_and_roots",
        "panels_of_odd_tiles",
        "one_panel_of_odd_tiles",
        "128_nodes",
        "some_whole_heads",
        "whole_heads_of_four_slices",
        "ampere",
        "one_node",
        "bf16_state",
    ],
)
def test_cuda_source_on_the_cpu(trees, heads, dims, value_slice, limit, options):
    """Three steps of verify, accept, commit: warps in order, backwards and at different speeds, and blocks of one slice or a
    whole head, give the same bits."""
    layer = make_layer(2, [parents(*tree) for tree in trees], *heads, *dims, **options)
    state_bf16 = layer.state.dtype == torch.bfloat16
    shape = KernelShape(-(-layer.ancestors.shape[1] // 16), *dims, value_slice, state_bf16, limit)
    assert shape.fits
    scale = dims[0] ** -0.5
    again, exact = copy.deepcopy(layer), in_float64(layer)
    for step in range(3):
        out = gdn_on_cpu.verify_on_cpu(shape, layer, scale)
        whole = min(1 + step, heads[0]) if shape.computes_whole_heads else 0
        assert torch.equal(gdn_on_cpu.verify_on_cpu(shape, again, scale, order=1 + step, whole=whole), out)
        expected = gdn_tree_verify(*exact.arguments())
        # A bfloat16 state is rounded at each commit, and the error that this makes grows with the decay's memory.
        assert relative_error(out, expected) < (1e-2 if state_bf16 else 2e-3)
        assert relative_error(layer.state, exact.state) < (1e-2 if state_bf16 else 1e-6)
        assert torch.equal(layer.state, again.state) and torch.equal(layer.stash.k, again.stash.k)
        assert torch.equal(layer.stash.u, again.stash.u) and torch.equal(layer.stash.g, again.stash.g)
        if not state_bf16:
            assert relative_error(layer.stash.u, exact.stash.u) < 2e-6
        for each in (layer, again, exact):
            accept_leaf(each, step)
            each.new_nodes(20 + step)
        exact.q, exact.k, exact.v, exact.a, exact.b = (
            x.double() for x in (layer.q, layer.k, layer.v, layer.a, layer.b)
        )
    check_flush(shape, layer, exact, 1e-2 if state_bf16 else 1e-6)


@needs_compiler
def test_whole_heads_beside_a_request_left_out():
    """Its output is zero in both slices, its state and stash stay; paths of more than sixteen nodes enter."""
    layer = make_layer(3, [parents("chain", 70), parents("recent", 75), parents("chain", 66)], 2, 4, 128)
    shape = KernelShape(5, 128, 128, 64, False, HOPPER)
    assert shape.computes_whole_heads
    gdn_on_cpu.verify_on_cpu(shape, layer, 0.1)
    accept(layer, [list(range(40)), list(range(3)), list(range(17))])
    layer.new_nodes(4)
    layer.slots[1] = -1
    halves, untouched = copy.deepcopy(layer), copy.deepcopy(layer)
    out = gdn_on_cpu.verify_on_cpu(shape, layer, 0.1, whole=1, order=3)
    assert torch.equal(out, gdn_on_cpu.verify_on_cpu(shape, halves, 0.1))
    assert not out[75:150].any() and out[:70].any() and not out[70:75].any()
    assert torch.equal(layer.state, halves.state) and torch.equal(layer.stash.u, halves.stash.u)
    assert torch.equal(layer.stash.u[layer.rows[1]], untouched.stash.u[layer.rows[1]])


@needs_compiler
@pytest.mark.parametrize("nodes", [40, 100, 256])
@pytest.mark.parametrize(
    "values, outlier, state",
    [
        (2.0**60, 1.0, 1.0),
        (2.0**-60, 1.0, 2.0**-60),
        (1.0, 1.0, 2.0**40),
        (1.0, 2.0**14, 0.0),
        (0.0, 0.0, 1.0),
        (0.0, 0.0, 0.0),
    ],
    ids=str,
)
def test_numbers_of_any_size(nodes, values, outlier, state):
    """float16 terms of U are scaled to what v and the state are; all nodes together are held, an outlier among them."""
    layer = make_layer(5, [parents("recent", nodes)], 1, 1, 128)
    layer.v *= values
    layer.v[nodes // 3] *= outlier
    layer.state *= state
    exact = in_float64(layer)
    shape = KernelShape(-(-nodes // 16), 128, 128, 64, False, HOPPER)
    out, expected = gdn_on_cpu.verify_on_cpu(shape, layer, 128**-0.5), gdn_tree_verify(*exact.arguments())
    if not values and not state:
        assert not out.any() and not layer.stash.u[layer.rows.long()].any()
        return
    assert relative_error(out, expected) < 2e-3
    assert relative_error(layer.stash.u, exact.stash.u) < 2e-6


def check_flush(shape, layer, exact, tolerance):
    """Two layers, the second shifted: part of the path into slot 0, then all of it in place."""
    slots, rows = layer.slots, layer.rows
    state = torch.stack([layer.state, layer.state.flip(0)])
    stash = TreeStash(
        *(torch.stack([x, 2 * x]) for x in (layer.stash.u, layer.stash.k)), torch.stack([layer.stash.g] * 2)
    )
    expected = state.double()
    exact_stash = TreeStash(stash.u.double(), stash.k.double(), stash.g.clone())
    for length, destination in [
        (torch.full_like(slots, 3), torch.zeros_like(slots[:1]).repeat(len(slots)) if len(slots) == 1 else slots),
        (None, slots),
    ]:
        gdn_on_cpu.flush_on_cpu(shape, state, slots, destination, stash, rows, layer.pending, length)
        gdn_tree_flush(expected, slots, exact_stash, rows, layer.pending, length, destination)
        assert relative_error(state, expected) < tolerance


@needs_compiler
def test_flush_then_verify_gives_the_bits_of_verify():
    trees, shape = [parents("recent", 40)], KernelShape(3, 64, 64, 64, False, HOPPER)
    flushed, fused = (make_layer(2, trees, 1, 2, 64) for _ in range(2))
    for each in (flushed, fused):
        gdn_on_cpu.verify_on_cpu(shape, each, 0.125)
        accept_leaf(each, 4)
        each.new_nodes(5)
    stash = TreeStash(flushed.stash.u[None], flushed.stash.k[None], flushed.stash.g[None])
    gdn_on_cpu.flush_on_cpu(
        shape, flushed.state[None], flushed.slots, flushed.slots, stash, flushed.rows, flushed.pending, None
    )
    flushed.pending.clear(flushed.rows.long())
    assert torch.equal(gdn_on_cpu.verify_on_cpu(shape, flushed, 0.125), gdn_on_cpu.verify_on_cpu(shape, fused, 0.125))
    assert torch.equal(flushed.state, fused.state)


@needs_compiler
@pytest.mark.parametrize(
    "tree, options",
    [
        (("chain", 128), {}),
        (("chain", 128), {"decay": "one"}),
        (("recent", 128), {"beta": "one"}),
        (("recent", 256), {}),
        (("comb", 256), {}),
    ],
    ids=str,
)
def test_the_states_error_is_at_most_twice_that_of_float32_steps_along_the_path(tree, options):
    """SGLang's kernel takes those steps: one node after the other, all in float32."""
    layer = make_layer(1, [parents(*tree)], 1, 2, 128, **options)
    shape = KernelShape(-(-tree[1] // 16), 128, 128, 64, False, HOPPER)
    path = path_to(layer.parent[0], tree[1] - 1)
    slot = int(layer.slots[0])

    def state_after_path(dtype):
        q, k, v, a, b, A_log, dt_bias, state = (
            x.to(dtype)
            for x in (layer.q, layer.k, layer.v, layer.a, layer.b, layer.A_log, layer.dt_bias, layer.state[slot])
        )
        k = (k * inverse_norm(k)).repeat_interleave(2, dim=1)[path]
        g, beta = gates(a[path], b[path], A_log, dt_bias)
        return tree_recurrence(k, k, v[path], g, beta, state, torch.arange(len(path)) - 1)[1][-1]

    exact, stepwise = state_after_path(torch.float64), state_after_path(torch.float32)
    gdn_on_cpu.verify_on_cpu(shape, layer, 128**-0.5)
    accept(layer, [path])
    stash = TreeStash(layer.stash.u[None], layer.stash.k[None], layer.stash.g[None])
    gdn_on_cpu.flush_on_cpu(shape, layer.state[None], layer.slots, layer.slots, stash, layer.rows, layer.pending, None)
    assert relative_error(layer.state[slot], exact) < 2 * relative_error(stepwise, exact)
