"""The head's context, written for all layers at once, is what SGLang's own modules write layer by layer.

The torch form is held to SGLang's modules, on SGLang's pool; the Triton kernel to the torch form, in Triton's interpreter
(a child process, which imports no SGLang) and on a GPU where there is one.
"""

from types import SimpleNamespace

import pytest
import torch
from interpreted import INTERPRETING, run_interpreted
from sgl_specflow.kernels import context_write
from sgl_specflow.kernels.context_write import FP8, LayerBuffers, write_context_rows

parent_process = pytest.mark.skipif(INTERPRETING, reason="this is the child process")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SLOTS, POSITIONS, EPS = 320, 500, 1e-3


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETING, reason="needs CUDA")(test))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_slots(tokens: int, padding: int) -> torch.Tensor:
    """Slots from 1 on in any order; the last `padding` tokens go to slot 0, as those of padding requests do."""
    slots = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(tokens))[:tokens] + 1
    slots[tokens - padding :] = 0
    return slots


# --- the kernel and its torch form ---

CASES = [  # tokens, layers, heads, dim, turned, neox, model dtype, buffer dtype
    (1, 5, 8, 128, 128, True, F16, F16),
    (16, 5, 8, 128, 128, True, BF16, BF16),
    (7, 3, 2, 64, 64, False, F16, F16),
    (7, 2, 3, 64, 32, True, F16, F16),
    (7, 2, 3, 64, 16, False, F32, F32),
    (5, 2, 1, 80, 80, True, F32, F32),
    (5, 2, 5, 40, 24, True, F16, F16),
    (4, 1, 2, 6, 2, True, BF16, BF16),
    (9, 2, 2, 64, 64, True, BF16, FP8),
    (9, 2, 2, 64, 64, True, F16, FP8),
    (9, 2, 2, 64, 32, True, F32, F16),
    (300, 2, 2, 32, 32, True, F32, F32),
]


def inputs(case):
    tokens, layers, heads, dim, rotary, _, dtype, _ = case
    kv = drawn(tokens, layers, 2, heads, dim) * torch.logspace(-1, 1, tokens).view(-1, 1, 1, 1, 1)
    angles = torch.arange(POSITIONS)[:, None] * torch.logspace(0, -3, rotary // 2)
    positions = torch.randint(POSITIONS, (tokens,), generator=torch.Generator().manual_seed(1))
    weight = 1 + 0.3 * drawn(layers, dim, seed=2)
    return kv.to(dtype), weight, torch.cat([angles.cos(), angles.sin()], 1), positions, some_slots(tokens, tokens // 3)


def empty_buffers(case, device="cpu") -> LayerBuffers:
    """Both halves of one allocation a layer, as SGLang has them."""
    _, layers, heads, dim, _, _, _, dtype = case
    stored = torch.uint8 if dtype == FP8 else dtype
    both = [torch.full((2, SLOTS, heads, dim), 7, dtype=stored, device=device) for _ in range(layers)]
    return LayerBuffers.of([pair[0] for pair in both], [pair[1] for pair in both], dtype)


def contents(buffers: LayerBuffers) -> torch.Tensor:
    """[L, 2, slots, heads, dim], slot 0 left out."""
    pairs = [torch.stack([key, value]) for key, value in zip(buffers.keys, buffers.values)]
    return torch.stack(pairs)[:, :, 1:].cpu().view(buffers.dtype).float()


def check_case(case, device):
    kv, weight, cos_sin, positions, slots = inputs(case)
    neox, dtype, stored = case[5:]
    expected, written = empty_buffers(case), empty_buffers(case, device)
    context_write._in_torch(kv, weight, EPS, cos_sin, neox, positions, slots, expected)
    given = [x.to(device) for x in (kv, weight, cos_sin, positions, slots)]
    write_context_rows(*given[:2], EPS, given[2], neox, *given[3:], written)
    got, want = contents(written), contents(expected)
    # The sum of squares may round otherwise; then a number may, in the model's dtype and in the buffer's.
    step = max(torch.finfo(dtype).eps, 8 * torch.finfo(F32).eps) + (torch.finfo(stored).eps if stored != dtype else 0)
    # Triton's interpreter cuts a float32 to bfloat16 where a GPU rounds.
    cut = INTERPRETING and BF16 in (dtype, stored)
    assert torch.equal(got[:, 1], want[:, 1])
    assert ((got - want).abs() <= (2 if cut else 1) * step * want.abs().amax(-1, keepdim=True)).all()
    if dtype != F32 and not cut:
        assert (got == want).float().mean() > 0.999
    # Slot 0 holds what it was given, row by row or, where programs ran side by side, of several rows.
    padding = kv[slots == 0][:, :, 1].to(stored).float()
    kept = torch.stack([value[0] for value in written.values]).cpu().view(stored).float()
    for layer in range(len(kept)):
        assert not len(padding) or (padding[:, layer] == kept[layer]).any(0).all()


@pytest.mark.skipif(not INTERPRETING, reason="runs in a child process with TRITON_INTERPRET=1")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_in_the_interpreter(case):
    check_case(case, "cpu")


def check_fp8(device):
    """Values, which are only converted: every bfloat16, as 64 rows of 16 heads."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(64, 1, 1, 16, 64).view(BF16)
    kv = torch.cat([torch.ones_like(every), every], dim=2)
    stored = [torch.zeros(SLOTS, 16, 64, dtype=torch.uint8, device=device) for _ in range(2)]
    cos_sin, slots = torch.ones(POSITIONS, 64), torch.arange(64)
    given = [x.to(device) for x in (kv, torch.ones(1, 64), cos_sin, slots)]
    write_context_rows(
        *given[:2], EPS, given[2], True, given[3], given[3], LayerBuffers.of(stored[:1], stored[1:], FP8)
    )
    assert torch.equal(stored[1][:64], given[0][:, 0, 1].to(FP8).view(torch.uint8))


@pytest.mark.skipif(not INTERPRETING, reason="runs in a child process with TRITON_INTERPRET=1")
def test_rows_of_fp8_in_the_interpreter():
    check_fp8("cpu")


@parent_process
def test_the_triton_kernel_holds_in_the_interpreter():
    run = run_interpreted(__file__, "-x", "-k", "test_rows and interpreter")
    assert run.returncode == 0 and f"{len(CASES) + 1} passed" in run.stdout, run.stdout + run.stderr


@gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_on_the_gpu(case):
    check_case(case, "cuda")


@gpu
def test_rows_of_fp8_on_the_gpu():
    check_fp8("cuda")


@gpu
def test_rows_in_a_cuda_graph():
    from sgl_specflow.runtime.commit_graph import cuda_recorder

    case = (16, 5, 8, 128, 128, True, BF16, BF16)
    kv, weight, cos_sin, positions, slots = [x.cuda() for x in inputs(case)]
    eager, replayed = empty_buffers(case, "cuda"), empty_buffers(case, "cuda")
    other = kv.flip(0).contiguous()
    replay = cuda_recorder()(lambda: write_context_rows(kv, weight, EPS, cos_sin, True, positions, slots, replayed))
    kv.copy_(other)
    replay()
    write_context_rows(other, weight, EPS, cos_sin, True, positions, slots, eager)
    assert torch.equal(contents(replayed), contents(eager))


@parent_process
def test_wrong_arguments_are_named():
    case = (4, 2, 2, 64, 64, True, F32, F32)
    kv, weight, cos_sin, positions, slots = inputs(case)
    buffers = empty_buffers(case)
    with pytest.raises(ValueError, match="must be contiguous"):
        write_context_rows(kv.transpose(0, 1), weight, EPS, cos_sin, True, positions, slots, buffers)
    with pytest.raises(ValueError, match=r"wants a norm \[L, D\]"):
        write_context_rows(kv, weight[:1], EPS, cos_sin, True, positions, slots, buffers)
    with pytest.raises(ValueError, match="are alike"):
        LayerBuffers.of(buffers.keys, buffers.values, BF16)


# --- SGLang's modules ---

HIDDEN = 24
HEADS = [  # layers, heads, dim, turned, neox, dtype, pool dtype, tokens
    (3, 2, 64, 64, True, F32, F32, 1),
    (3, 2, 64, 64, True, F32, F32, 300),
    (2, 3, 64, 32, True, F32, F32, 17),
    (2, 1, 128, 128, False, F32, F32, 33),
    (2, 2, 40, 16, False, F32, F32, 9),
    (5, 8, 128, 128, True, BF16, BF16, 16),
    (2, 2, 64, 32, False, BF16, BF16, 64),
    (2, 2, 64, 64, True, BF16, FP8, 20),
    (2, 2, 64, 64, True, F32, BF16, 20),
]


def make_head(layers, heads, dim, turned, neox, dtype, **rope):
    """The modules of SGLang's draft model that make context: its own attention class, norm, rotary embedding. Weights are
    small whole numbers, so that every way to add up a product gives the same."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.models.dflash import DFlashAttention, DFlashDraftModel

    class Head(torch.nn.Module):
        prepare_context_hidden_for_kv = DFlashDraftModel.prepare_context_hidden_for_kv

    head, generator = Head(), torch.Generator().manual_seed(4)
    head.layers = torch.nn.ModuleList()
    for index in range(layers):
        attention = DFlashAttention.__new__(DFlashAttention)
        torch.nn.Module.__init__(attention)
        attention.num_kv_heads, attention.head_dim, attention.v_scale = heads, dim, None
        attention.q_size, attention.kv_size = 2 * heads * dim, heads * dim
        attention.qkv_proj = torch.nn.Module()
        weight = torch.randint(-2, 3, (4 * heads * dim, HIDDEN), generator=generator).to(dtype)
        attention.qkv_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        attention.qkv_proj.quant_method, attention.qkv_proj.bias = UnquantizedLinearMethod(), None
        attention.k_norm = RMSNorm(dim, eps=EPS).to(dtype)
        attention.k_norm.weight.data.copy_(1 + 0.3 * drawn(dim, seed=index))
        attention.rotary_emb = get_rope(dim, turned, POSITIONS, 10000.0, is_neox_style=neox, dtype=dtype, **rope)
        attention.attn = SimpleNamespace(layer_id=index, k_scale=None, v_scale=None)
        layer = torch.nn.Module()
        layer.self_attn = attention
        head.layers.append(layer)
    return head


def make_pool(layers, heads, dim, dtype, pool_class=None):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = (pool_class or MHATokenToKVPool)(SLOTS - 1, 1, dtype, heads, dim, layers, "cpu", False)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(7)
    return pool


def pool_contents(pool) -> list[torch.Tensor]:
    return [buffer[1:].view(pool.dtype).float() for buffer in (*pool.k_buffer, *pool.v_buffer)]


def written_both_ways(head, pools, tokens):
    """(writer, pool as it writes, pool as SGLang's modules write layer by layer)."""
    from sgl_specflow.runtime.context_write import ContextWriter

    dtype = head.layers[0].self_attn.k_norm.weight.dtype
    context = torch.randint(-2, 3, (tokens, HIDDEN), generator=torch.Generator().manual_seed(6)).to(dtype)
    positions = torch.randint(POSITIONS, (tokens,), generator=torch.Generator().manual_seed(7))
    slots = some_slots(tokens, tokens // 4)
    writer, other = ContextWriter(head), ContextWriter(head)
    writer.bind(pools[0])
    other.bind(pools[1])
    with torch.inference_mode():
        writer.write(context, slots, positions)
        other._write_by_layer(context, slots, positions)
    return writer, *map(pool_contents, pools)


def turn_as_on_a_gpu(head):
    """SGLang's kernels turn in float32 whatever the dtype; its PyTorch turns in the dtype."""
    for layer in head.layers:
        attention = layer.self_attn
        own = attention.apply_k_rope
        attention.apply_k_rope = lambda positions, k, own=own: own(positions, k.float()).to(k.dtype)


@parent_process
@pytest.mark.parametrize("case", HEADS, ids=str)
def test_all_layers_at_once_is_layer_by_layer(case):
    layers, heads, dim, turned, neox, dtype, stored, tokens = case
    head = make_head(layers, heads, dim, turned, neox, dtype)
    turn_as_on_a_gpu(head)
    writer, at_once, by_layer = written_both_ways(
        head, [make_pool(layers, heads, dim, stored) for _ in range(2)], tokens
    )
    assert writer.stacked is not None and writer.stacked.weight.shape == (layers * 2 * heads * dim, HIDDEN)
    for got, want in zip(at_once, by_layer):
        assert torch.equal(got, want)
        assert (want != 7).any()


@parent_process
@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_scaled_ropes_are_read_from_their_module(kind):
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    head = make_head(2, 2, 64, 64, True, F32, rope_scaling=scaling)
    plain = make_head(2, 2, 64, 64, True, F32)
    rotary = head.layers[0].self_attn.rotary_emb
    assert not torch.equal(rotary.cos_sin_cache[:POSITIONS], plain.layers[0].self_attn.rotary_emb.cos_sin_cache)
    writer, at_once, by_layer = written_both_ways(head, [make_pool(2, 2, 64, F32) for _ in range(2)], 50)
    assert writer.stacked is not None
    for got, want in zip(at_once, by_layer):
        assert torch.equal(got, want)


def with_bias(head):
    for layer in head.layers:
        layer.self_attn.qkv_proj.bias = torch.ones(len(layer.self_attn.qkv_proj.weight))


def with_value_scale(head):
    for layer in head.layers:
        layer.self_attn.v_scale = 0.5


def with_two_ropes(head):
    from sglang.srt.layers.rotary_embedding import get_rope

    head.layers[1].self_attn.rotary_emb = get_rope(64, 64, POSITIONS, 500.0, dtype=F32)


def with_two_epsilons(head):
    head.layers[1].self_attn.k_norm.variance_epsilon = 0.5


def with_gemma_norm(head):
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    for layer in head.layers:
        layer.self_attn.k_norm = GemmaRMSNorm(64)


def with_its_own_attention(head):
    from sglang.srt.models.dflash import DFlashAttention

    class Doubled(DFlashAttention):
        def kv_proj_only(self, x):
            return tuple(2 * part for part in super().kv_proj_only(x))

    head.layers[0].self_attn.__class__ = Doubled


def with_context_of_each_layer(head):
    class Scaled(type(head)):
        def prepare_context_hidden_for_kv(self, layer, context):
            return context * (1 + layer.self_attn.attn.layer_id)

    head.__class__ = Scaled


def with_a_rounded_table(head):
    head.layers[0].self_attn.rotary_emb.use_fallback_kernel = True


@parent_process
@pytest.mark.parametrize(
    "change",
    [
        with_bias,
        with_value_scale,
        with_two_ropes,
        with_two_epsilons,
        with_gemma_norm,
        with_its_own_attention,
        with_context_of_each_layer,
        with_a_rounded_table,
    ],
)
def test_other_heads_keep_sglangs_own_way(change, monkeypatch):
    # get_rope hands out one module a shape: what a test changes there must not outlive it.
    from sglang.srt.layers.rotary_embedding import factory

    monkeypatch.setattr(factory, "_ROPE_DICT", {})
    head = make_head(2, 2, 64, 64, True, F32)
    change(head)
    writer, got, want = written_both_ways(head, [make_pool(2, 2, 64, F32) for _ in range(2)], 9)
    assert writer.stacked is None and writer.buffers is None
    assert all(map(torch.equal, got, want))


@parent_process
def test_a_quantised_projection_keeps_sglangs_own_way():
    from sgl_specflow.runtime.context_write import StackedLayers

    head = make_head(2, 2, 64, 64, True, F32)
    head.layers[1].self_attn.qkv_proj.quant_method = object()
    assert StackedLayers.of(head) is None


@parent_process
def test_other_pools_keep_sglangs_own_way():
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class Another(MHATokenToKVPool):
        def _store_kv_layer(self, *arguments):
            super()._store_kv_layer(*arguments)

    head = make_head(2, 2, 64, 64, True, BF16)
    assert written_both_ways(head, [make_pool(2, 2, 64, BF16, Another) for _ in range(2)], 9)[0].stacked is None
    head.layers[1].self_attn.attn.k_scale = 2.0
    assert written_both_ways(head, [make_pool(2, 2, 64, BF16) for _ in range(2)], 9)[0].stacked is not None
    assert written_both_ways(head, [make_pool(2, 2, 64, FP8) for _ in range(2)], 9)[0].stacked is None
