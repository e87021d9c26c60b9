"""The conv1d on a tree: every node's output is that of a plain causal convolution along its own path."""

import pytest
import torch
import torch.nn.functional as F
from gdn_cases import TREE_SHAPES, parents, path_to
from interpreted import INTERPRETING, run_interpreted
from sgl_specflow.kernels.gdn_tree.conv import commit_windows, nearest_ancestors, tree_conv

from sgl_specflow.tree import ancestor_bits

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
IMPLEMENTATIONS = (["triton"] if INTERPRETING or DEVICE == "cuda" else []) + ([] if INTERPRETING else ["naive"])


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def trees(rows: list[list[int]]) -> torch.Tensor:
    nodes = max(map(len, rows))
    return ancestor_bits(torch.tensor([row + [-1] * (nodes - len(row)) for row in rows])).to(DEVICE)


def make(rows, channels, dtype, seed=0, layers=2):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    nodes, requests = max(map(len, rows)), len(rows)
    x = normal(requests * nodes, channels + 8)[:, :channels]
    window = normal(layers, requests + 3, channels, 3)
    inputs = torch.zeros(layers, requests + 1, nodes, channels, dtype=dtype, device=DEVICE)
    slots = (torch.randperm(requests + 2, generator=generator)[:requests] + 1).to(DEVICE, torch.int32)
    return x, window, inputs, slots, normal(channels, 4), normal(channels)


CASES = [[parents(shape, nodes)] for shape in TREE_SHAPES for nodes in (1, 2, 5, 40)]
CASES += [[parents("wide", 40), parents("chain", 3), parents("star", 33)]]


@pytest.mark.parametrize("rows", CASES, ids=lambda rows: "-".join(str(len(row)) for row in rows))
def test_the_table_names_the_nearest_ancestors(rows, implementation):
    table = nearest_ancestors(trees(rows), 3, implementation=implementation)
    for r, row in enumerate(rows):
        for i in range(len(row)):
            above = path_to(row, i)[-2::-1]
            assert table[r, i].tolist() == (above + [-1, -2, -3])[:3]


@pytest.mark.parametrize("rows", CASES, ids=lambda rows: "-".join(str(len(row)) for row in rows))
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_node_is_convolved_along_its_own_path(rows, with_bias, implementation):
    x, window, inputs, slots, weight, bias = make(rows, 24, torch.float32)
    bias = bias if with_bias else None
    table = nearest_ancestors(trees(rows), 3)
    out = tree_conv(x, window[1], slots, table, weight, bias, "silu", inputs=inputs[1], implementation=implementation)
    nodes = table.shape[1]
    for r, row in enumerate(rows):
        for i in range(len(row)):
            path = [r * nodes + node for node in path_to(row, i)]
            line = torch.cat([window[1, int(slots[r])], x[path].T], 1)
            expected = F.silu(F.conv1d(line[None], weight[:, None], bias, groups=24))[0, :, -1]
            torch.testing.assert_close(out[r * nodes + i], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(inputs[1, : len(rows)].flatten(0, 1), x)
    assert not inputs[1, len(rows)].any()


def test_more_channels_than_a_program_serves(implementation):
    """Three programs a node of the convolution, two a layer of the commit; the naive one against itself is no news."""
    rows, channels = [parents("wide", 6)], 1100
    x, window, inputs, slots, weight, bias = make(rows, channels, torch.float32)
    other = x.clone(), window.clone(), inputs.clone()
    table = nearest_ancestors(trees(rows), 3)
    path, length = torch.tensor([[0, 1]]).to(DEVICE), torch.tensor([2]).to(DEVICE)
    results = []
    for (own_x, own_window, own_inputs), kind in (((x, window, inputs), implementation), (other, "naive")):
        out = tree_conv(
            own_x, own_window[1], slots, table, weight, bias, inputs=own_inputs[1], implementation=kind
        )  # fmt: skip
        commit_windows(own_window, own_inputs, slots, path, length, implementation=kind)
        results.append((out, own_inputs, own_window))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(results[0][1], results[1][1]) and torch.equal(results[0][2], results[1][2])


def test_a_request_without_a_slot_is_left_out(implementation):
    rows = [parents("wide", 9), parents("chain", 9)]
    x, window, inputs, slots, weight, _ = make(rows, 24, torch.float32)
    slots[0] = -1
    before = window.clone()
    out = tree_conv(x, window[0], slots, nearest_ancestors(trees(rows), 3), weight, implementation=implementation)
    assert not out[:9].any() and out[9:].any()
    path, length = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE), torch.tensor([1, 0], device=DEVICE)
    commit_windows(window, inputs, slots, path, length, implementation=implementation)
    assert torch.equal(window, before)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_window_slides_over_the_accepted_path(length, elsewhere, implementation):
    row = parents("chain", 12)
    x, window, inputs, slots, _, _ = make([row, row], 24, torch.float32)
    inputs[:, :2] = torch.randn(2, 2, 12, 24).to(DEVICE)
    path = torch.tensor([[0, 2, 3, 5, 6, 9, 11, -1], [0, 1, 2, 3, 4, 5, 6, -1]]).to(DEVICE)
    free = next(i for i in range(1, 5) if i not in slots.tolist())
    destination = torch.tensor([free, -1], dtype=torch.int32, device=DEVICE) if elsewhere else None
    expected = window.clone()
    for r, slot in enumerate(slots.tolist()):
        line = torch.cat([window[:, slot], inputs[:, r, path[r, :length]].transpose(1, 2)], 2)[:, :, -3:]
        if not elsewhere:
            expected[:, slot] = line
        elif r == 0:
            expected[:, free] = line
    commit_windows(
        window,
        inputs,
        slots,
        path,
        torch.full((2,), length).to(DEVICE),
        destination,
        implementation=implementation,
    )
    assert torch.equal(window, expected)


def test_bfloat16_is_summed_in_float32(implementation):
    rows = [parents("recent", 20)]
    x, window, _, slots, weight, bias = make(rows, 24, torch.bfloat16)
    table = nearest_ancestors(trees(rows), 3)
    exact = tree_conv(
        x.double(), window[0].double(), slots, table, weight.double(), bias.double(), implementation="naive"
    )
    out = tree_conv(x, window[0], slots, table, weight, bias, implementation=implementation)
    assert (out.double() - exact).norm() / exact.norm() < 3e-3


def test_ancestors_are_rounded_to_the_window_as_plain_decoding_would(implementation):
    rows = [parents("chain", 8)]
    x, window, inputs, slots, weight, _ = make(rows, 24, torch.float32)
    window, inputs = window.half(), inputs.half()
    out = tree_conv(
        x, window[0], slots, nearest_ancestors(trees(rows), 3), weight, inputs=inputs[0], implementation=implementation
    )
    line = torch.cat([window[0, int(slots[0])].float(), x.half().float().T], 1)
    for i in range(8):
        taps = torch.cat([line[:, i : i + 3], x[i][:, None]], 1)
        torch.testing.assert_close(out[i], F.silu((taps * weight).sum(1)), rtol=1e-5, atol=1e-5)
    assert torch.equal(inputs[0, 0], x.half())


def test_wrong_shapes_are_refused_by_name():
    rows = [parents("wide", 9)]
    x, window, _, slots, weight, _ = make(rows, 24, torch.float32)
    table = nearest_ancestors(trees(rows), 3)
    with pytest.raises(ValueError, match="tree_conv takes"):
        tree_conv(x, window[0], slots, table, weight[:, :3])
    with pytest.raises(ValueError, match="ancestors are int32"):
        nearest_ancestors(trees(rows).long(), 3)
    with pytest.raises(ValueError, match="'triton', 'naive'"):
        tree_conv(x, window[0], slots, table, weight, implementation="cuda")


@pytest.mark.skipif(INTERPRETING, reason="this is the child process")
def test_triton_in_its_interpreter():
    """In a child process: the interpreter must be chosen before Triton is imported."""
    run = run_interpreted(__file__, "-p", "no:cacheprovider", "-k", "triton")
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-3000:]
