"""The Triton pieces of a Weaver round equal the plain ones: in Triton's interpreter on the CPU, compiled on a GPU."""

import copy
from types import SimpleNamespace

import pytest
import torch
from compiled import GXX
from interpreted import INTERPRETING, run_interpreted
from row_linear_on_cpu import row_linear_on_cpu
from sgl_specflow.kernels import row_linear
from sgl_specflow.kernels.row_linear import MOST_ROWS
from weavers import random_weaver, weaver_config

from sgl_specflow.drafter.weaver import FoldedWeaver, steps
from sgl_specflow.drafter.weaver.construct import _Construction, _steps
from sgl_specflow.tree import Expansion

CUDA = torch.cuda.is_available() and not INTERPRETING
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
FEW_LAUNCHES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # the interpreter has no bfloat16


@pytest.mark.skipif(INTERPRETING or CUDA, reason="this is the child process, or there is a GPU")
def test_in_the_interpreter():
    """This file again, in a child process: Triton reads the variable when it is imported."""
    done = run_interpreted(__file__, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{COMPILED} passed" in done.stdout


def compiled(test):
    return pytest.mark.skipif(not (INTERPRETING or CUDA), reason="runs in a child process with TRITON_INTERPRET=1")(
        test
    )


def compare(got, expected, dtype):
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance)


ATTEND = [(1, 1, 2, 8, 8), (3, 8, 4, 8, 17), (2, 5, 1, 24, 40), (2, 40, 2, 64, 33)]
LOGITS = [(1, 1, 3, 12, 32), (2, 5, 4, 37, 48), (3, 8, 7, 16, 300)]


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("requests, count, heads, dim, first", ATTEND)
def test_attend(requests, count, heads, dim, first, dtype):
    from sgl_specflow.drafter.weaver import triton_steps

    torch.manual_seed(0)
    places = (first + count + 15) // 8 * 8
    qkv = torch.randn(requests, count, 3, heads, dim, device=DEVICE, dtype=dtype)
    angle = torch.rand(requests, count, dim // 2, device=DEVICE) * 6
    cos, sin = angle.cos(), angle.sin()
    turn = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=2)
    keys, values = (torch.randn(requests, heads, places, dim, device=DEVICE, dtype=dtype) for _ in range(2))
    visible = torch.rand(requests, count, places, device=DEVICE) < 0.5
    # Of their own call, entries see themselves and some before them.
    visible[:, :, first + count :] = False
    visible[:, :, first : first + count] &= torch.ones(count, count, dtype=torch.bool, device=DEVICE).tril()
    visible[:, :, first : first + count] |= torch.eye(count, dtype=torch.bool, device=DEVICE)
    own_keys, own_values = keys.clone(), values.clone()
    got = triton_steps.attend(qkv, turn, own_keys, own_values, first, visible)
    expected = steps.attend(qkv, turn, keys, values, first, visible)
    compare(got, expected, dtype)
    compare(own_keys, keys, dtype)
    assert torch.equal(own_values, values)


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 5])
def test_attend_to_all_before(first, dtype):
    from sgl_specflow.drafter.weaver import triton_steps

    torch.manual_seed(0)
    requests, count, heads, dim, places = 2, 9, 2, 8, 16
    qkv = torch.randn(requests, count, 3, heads, dim, device=DEVICE, dtype=dtype)
    angle = torch.rand(1, count, dim // 2, device=DEVICE) * 6
    cos, sin = angle.cos(), angle.sin()
    turn = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=2)
    keys, values = (torch.randn(requests, heads, places, dim, device=DEVICE, dtype=dtype) for _ in range(2))
    own_keys, own_values = keys.clone(), values.clone()
    got = triton_steps.attend(qkv, turn, own_keys, own_values, first, None)
    compare(got, steps.attend(qkv, turn, keys, values, first, None), dtype)
    compare(own_keys, keys, dtype)
    place = torch.arange(places, device=DEVICE)
    visible = (place <= first + torch.arange(count, device=DEVICE)[:, None]).expand(requests, -1, -1)
    compare(got, steps.attend(qkv, turn, keys, values, first, visible), dtype)


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "requests, count, rank, places, first", [(1, 1, 24, 16, 0), (3, 8, 40, 40, 0), (2, 8, 64, 48, 16)]
)
def test_enter(requests, count, rank, places, first, dtype):
    from sgl_specflow.drafter.weaver import triton_steps

    torch.manual_seed(0)
    prefix, slots, flags = 7, first + count + 2, torch.bool
    whole = lambda most: torch.randint(0, most, (requests, count), device=DEVICE)
    inside = (torch.rand(requests, count, count, device=DEVICE) < 0.5).tril()
    nodes = Expansion(first, whole(50), whole(1), whole(5), whole(max(first, 1)), inside)
    table, turn = torch.randn(50, rank, device=DEVICE, dtype=dtype), torch.randn(7, 2, 6, device=DEVICE)
    # Anything stands in rows that no round wrote, and nothing at a slot's later places in those that one did.
    visible = torch.rand(requests, slots, places, device=DEVICE) < 0.5
    visible[:, :first, :prefix], visible[:, :first, prefix + first :] = True, False
    own_visible = visible.clone()
    got = triton_steps.enter(nodes, table, turn, own_visible, prefix)
    expected = steps.enter(nodes, table, turn, visible, prefix)
    assert torch.equal(own_visible, visible) and torch.equal(got[3], expected[3]) and got[3].dtype == flags
    assert torch.equal(got[0], expected[0]) and torch.equal(got[2], expected[2])
    compare(got[1], expected[1], dtype)


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_norm_and_silu_mul(dtype):
    from sgl_specflow.drafter.weaver import triton_steps

    torch.manual_seed(0)
    for rank in (24, 64, 1024):
        x, delta = (torch.randn(2, 3, rank, device=DEVICE, dtype=dtype) for _ in range(2))
        for got, expected in zip(triton_steps.add_norm(x, delta), steps.add_norm(x, delta)):
            compare(got, expected, dtype)
        gate_up = torch.randn(2, 3, 2 * rank, device=DEVICE, dtype=dtype)
        compare(triton_steps.silu_mul(gate_up), steps.silu_mul(gate_up), dtype)


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("requests, count, depths, pool, rank", LOGITS)
def test_pool_logits(requests, count, depths, pool, rank, dtype):
    from sgl_specflow.drafter.weaver import triton_steps

    torch.manual_seed(0)
    query, table = (
        torch.randn(*shape, rank, device=DEVICE, dtype=dtype) / rank**0.5 for shape in ((requests, count), (90,))
    )
    depth = torch.randint(0, depths + 3, (requests, count), device=DEVICE)
    tokens = torch.randint(0, 90, (requests, depths, pool), device=DEVICE)
    scores = torch.randn(requests, depths, pool, device=DEVICE)
    bias = torch.randn(90, device=DEVICE)
    got = triton_steps.pool_logits(query, depth, tokens, scores, table, bias)
    compare(got, steps.pool_logits(query, depth, tokens, scores, table, bias), dtype)
    got = triton_steps.pool_logits(query, depth, tokens, scores, table, bias, normed=False)
    compare(got, steps.pool_logits(steps.states_of(query)[1], depth, tokens, scores, table, bias), dtype)


@compiled
def test_whole_trees():
    torch.manual_seed(2)
    config = weaver_config()
    embedding, lm_head = torch.randn(50, 20, device=DEVICE), torch.randn(50, 24, device=DEVICE) / 5
    proposal = torch.randn(2, 7, 24, device=DEVICE)
    scores, tokens = (proposal @ lm_head.T).topk(12, dim=-1)
    inputs = torch.tensor([3, 9], device=DEVICE), torch.randn(2, 24, device=DEVICE), proposal, tokens, scores
    trees = [
        FoldedWeaver(config, random_weaver(config), embedding, lm_head, torch.float32, kind).build_tree(
            *inputs, 33, 8, 3, 12
        )
        for kind in ("torch", "triton")
    ]
    trees[1].check()
    assert torch.equal(trees[0].token, trees[1].token) and torch.equal(trees[0].parent, trees[1].parent)


def widened(weaver):
    """The same Weaver, of the same rounded weights, that computes in float64."""
    weaver = copy.copy(weaver)
    weaver.dtype = weaver.wide = torch.float64
    wide = lambda part: tuple(map(wide, part)) if isinstance(part, tuple) else part.double()
    weaver.blocks = [{name: wide(part) for name, part in block.items()} for block in weaver.blocks]
    for name in ("proposal", "token_table", "query_table", "query_bias", "turn"):
        setattr(weaver, name, wide(getattr(weaver, name)))
    return weaver


def emulated(x, weight, bias=None, residual=None, norm=False, gated=False):
    """`row_linear` by its CUDA source on the CPU."""
    ends = row_linear.Ends(norm, bias is not None, gated, residual is not None)
    rows, x_rows = x.numel() // x.shape[-1], x.flatten(0, -2)
    variant = row_linear.choose(x.dtype, ends, rows, x.shape[-1], len(weight), 132, True)
    out = row_linear_on_cpu(variant, x_rows, weight, bias, None if residual is None else residual.flatten(0, -2))
    return out.unflatten(0, x.shape[:-1])


@compiled
@pytest.mark.skipif(not CUDA and GXX is None, reason="g++ is missing")
@pytest.mark.parametrize("dtype", FEW_LAUNCHES, ids=str)
def test_rounds_in_five_launches_a_layer(dtype, monkeypatch):
    """Two rounds' log-probabilities, against the same rounded weights in float64: no further off than the plain pieces',
    which round more often, but for chance."""
    from sgl_specflow.drafter.weaver import cuda_steps

    if not CUDA:
        monkeypatch.setattr(cuda_steps, "refusals", lambda *arguments: [])
        monkeypatch.setattr(cuda_steps, "row_linear", emulated)
    torch.manual_seed(3)
    config = weaver_config()
    ends = torch.randn(50, 20, device=DEVICE), torch.randn(50, 24, device=DEVICE) / 5
    plain, ours = (
        FoldedWeaver(config, random_weaver(config), *(part.to(dtype) for part in ends), dtype, kind)
        for kind in ("torch", "cuda")
    )
    proposal = torch.randn(1, 7, 24, device=DEVICE).to(dtype)
    scores, tokens = (proposal.float() @ ends[1].T).topk(12, dim=-1)
    inputs = torch.tensor([3], device=DEVICE), torch.randn(1, 24, device=DEVICE).to(dtype), proposal, tokens
    whole = lambda most: torch.randint(0, most, (1, 5), device=DEVICE)
    inside = (torch.rand(1, 5, 5, device=DEVICE) < 0.5).tril() | torch.eye(5, dtype=torch.bool, device=DEVICE)
    rounds = [Expansion(0, whole(50), whole(1), whole(3), whole(1), inside)]
    rounds.append(Expansion(5, whole(50), whole(1), whole(6), whole(5), inside))

    def log_probs(weaver, wide):
        construction = _Construction(weaver, weaver.steps, *inputs, scores.to(wide), 10, 1.0)
        return torch.stack([construction.log_probs(nodes).double() for nodes in rounds])

    exact = log_probs(widened(plain), torch.float64)
    plain_error, error = ((log_probs(part, torch.float32) - exact).abs().max() for part in (plain, ours))
    assert error < 2 * plain_error < 10 * torch.finfo(dtype).eps


def test_a_weaver_that_cannot_be_multiplied_is_refused_by_name():
    for dtype, changes, named in (
        (torch.float32, {}, "dtype is torch.float32"),
        (torch.float16, {"d_rank": 36, "num_heads": 3}, "d_rank is 36"),
        (torch.bfloat16, {"mlp_dim": 44}, "tensors are on cpu; mlp_dim is 44"),
    ):
        config = weaver_config(**changes)
        with pytest.raises(ValueError, match=named):
            FoldedWeaver(config, random_weaver(config), torch.randn(50, 20), torch.randn(50, 24), dtype, "cuda")
    with pytest.raises(ValueError, match="'torch', 'triton', 'cuda' or None"):
        FoldedWeaver(config, random_weaver(config), torch.randn(50, 20), torch.randn(50, 24), dtype, "cublas")


def test_few_rows_take_few_launches():
    """By default, where row_linear serves the Weaver; what is asked for runs for all rows."""
    from sgl_specflow.drafter.weaver import cuda_steps, steps, triton_steps

    def chosen(implementation, dtype=torch.bfloat16, device="cuda", **changes):
        return _steps(implementation, weaver_config(**changes), dtype, torch.device(device))

    assert chosen(None) == (triton_steps, cuda_steps)
    assert chosen(None, torch.float32) == chosen(None, mlp_dim=44) == chosen("triton") == (triton_steps, triton_steps)
    assert chosen("cuda") == (cuda_steps, cuda_steps)
    assert chosen(None, device="cpu") == chosen("torch") == (steps, steps)
    weaver = SimpleNamespace(steps="many", few_row_steps="few")
    assert [FoldedWeaver.steps_for(weaver, rows) for rows in (1, MOST_ROWS, MOST_ROWS + 1)] == ["few", "few", "many"]


COMPILED = len(ATTEND) + len(LOGITS) + 2 + 2 + 3 + 2 + (GXX is not None)
