"""tree_attention.cu against float64: on the CPU through tests/cuda_on_cpu.h, and on the GPU where there is one."""

import ctypes
import dataclasses
import math
import random

import pytest
import torch
from attention_cases import NAN, Case, make_inputs
from attention_on_cpu import Scratch, attention_on_cpu, build
from compiled import GXX, NVCC, assert_no_spills, compile_for_gpu, ends_well, need_nvrtc
from sgl_specflow.kernels import nvrtc
from sgl_specflow.kernels.tree_attention import cuda_kernel, tree_attention
from sgl_specflow.kernels.tree_attention.cuda_kernel import HOPPERS_SHARED_BYTES, Variant, choose, fits, grid_of
from sgl_specflow.kernels.tree_attention.naive import tree_attention_naive

BFLOAT, HALF = torch.bfloat16, torch.float16
FORMS = {"mma": {}, "wgmma": {"wgmma": True}}
on_cpu = pytest.mark.skipif(GXX is None, reason="g++ is missing")

# prefix lengths, nodes, (query heads, kv heads), splits, more of Case
GRID = [
    ((0,), 1, (1, 1), 1, {}),
    ((63,), 1, (4, 1), 2, {}),
    ((64, 0, 130), 7, (4, 2), 4, {}),
    ((65,), 16, (4, 1), 8, {"dtype": HALF}),
    ((1000,), 16, (4, 1), 4, {"index_dtype": torch.int32}),
    ((1, 200), 16, (8, 1), 2, {"padding": 5}),  # 128 rows
    ((1000, 3), 7, (16, 1), 8, {"strided": True}),
    ((100,), 64, (1, 1), 2, {}),
    ((64,), 64, (4, 1), 8, {"dtype": HALF, "strided": True}),
    ((1000,), 64, (4, 1), 1, {"shape": "bidirectional"}),
    ((31, 300), 65, (4, 1), 4, {"padding": 9}),
    ((0, 65), 65, (1, 1), 1, {}),
    ((63,), 65, (8, 1), 2, {"shape": "chain"}),
    ((40,), 13, (3, 1), 2, {}),  # heads of a node in two warps
    ((40,), 37, (5, 1), 4, {}),  # and in two blocks
    ((20,), 256, (1, 1), 2, {"shape": "chain"}),
    ((1,), 256, (4, 1), 4, {}),
    ((150,), 130, (2, 1), 8, {"sinks": True, "options": {"k_scale": 0.5, "v_scale": 3.0}}),
    ((70, 0), 7, (2, 1), 2, {"sinks": True, "options": {"logit_cap": 2.0}}),
    ((500, 1), 33, (2, 1), 3, {}),  # blocks that do not divide the rows
    ((700,), 33, (4, 1), 6, {"padding": 3}),
    ((610,), 16, (4, 1), 7, {"shape": "chain"}),
    ((1900, 200), 7, (2, 1), 32, {"dtype": HALF}),
    ((40,), 3, (2, 1), 5, {"sinks": True}),  # one tile, which one block finishes
]
GRID += (
    [  # shares with a rest of 16 keys and without, by one block and by eight
        ((prefix,), 16, (4, 1), 1, {}) for prefix in (1, 15, 16, 17, 47, 48, 49, 64)
    ]
    + [((prefix,), 33, (2, 1), 8, {}) for prefix in (479, 511, 992, 4095, 4096, 4097)]
    + [
        ((1000, 4096, 0, 17), 16, (8, 1), 4, {}),
        ((2032, 1024), 7, (2, 1), 16, {"dtype": HALF, "sinks": True}),
    ]
)
WIDE = {"head_dim": 256}
WIDE_GRID = [
    ((0,), 1, (6, 1), 1, {**WIDE}),
    ((200, 3), 16, (6, 1), 3, {**WIDE, "padding": 2}),
    ((450,), 33, (6, 1), 2, {**WIDE, "strided": True, "dtype": HALF}),
    ((90,), 13, (12, 2), 7, {**WIDE, "sinks": True, "options": {"logit_cap": 2.0, "v_scale": 3.0}}),
    ((700,), 5, (6, 1), 1, {**WIDE}),  # a group without rows, and more tiles than the ring holds
]
ON_THE_GPU = [
    (prefix, nodes, heads, splits, {"dtype": dtype, "padding": nodes // 5})
    for dtype in (BFLOAT, HALF)
    for prefix in ((0, 1, 63), (64, 65, 1000), (4133,))
    for nodes in (1, 7, 16, 64, 65, 256)
    for heads in (((8, 8), (32, 8), (32, 4), (32, 2)) if dtype == BFLOAT else ((32, 8),))
    for splits in (None,)
] + [((100, 700), nodes, (32, 8), splits, {}) for nodes in (16, 64) for splits in (1, 2, 3, 4)]
ON_THE_GPU += [
    (prefix, nodes, heads, None, {"head_dim": 256, "padding": nodes // 5})
    for prefix in ((0, 1, 63), (4133,))
    for nodes in (1, 16, 64, 130)
    for heads in ((24, 4), (16, 2))
]


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")(test))


def case_of(entry) -> Case:
    prefix, nodes, heads, _, more = entry
    more = {"dtype": BFLOAT, "head_dim": 128} | more
    return Case("cuda", prefix=prefix, nodes=nodes, heads=heads, value_dim=more["head_dim"], **more)


def inputs_of(entry, device="cpu") -> dict:
    """make_inputs with q and out of strides of their own; the last node sees nothing of the tree."""
    inputs = make_inputs(case_of(entry), device)
    rows, heads, dim = inputs["q"].shape
    for name in ("q", "out"):
        wide = torch.full((rows, heads + 3, dim), NAN, dtype=inputs["q"].dtype, device=device)
        wide[:, 2:-1] = inputs[name]
        inputs[name] = wide[:, 2:-1]
    inputs["ancestors"][:, -1] = 0
    return inputs


def variant_of(entry, **changes) -> Variant:
    case = case_of(entry)
    group = case.heads[0] // case.heads[1]
    capped = "logit_cap" in case.options
    row_groups = 1 if case.nodes * group <= 64 and case.head_dim == 128 else 2
    options = {"splits": entry[3], "capped": capped, "head_dim": case.head_dim} | changes
    return Variant(case.dtype, group, row_groups, **options)


def assert_attention(out, inputs):
    """Weights and results are rounded once each to q's dtype, sums of other blocks to much less."""
    exact = dict(inputs, q=inputs["q"].double(), out=None)
    expected = tree_attention_naive(**exact)
    size = tree_attention_naive(**dict(exact, v_pool=inputs["v_pool"].double().abs()))
    allowed = torch.finfo(out.dtype).eps / 2 * (expected.abs() + size) + 2e-5
    assert ((out.double() - expected).abs() <= allowed).all()  # NaN is not


ON_THE_CPU = [(entry, "wgmma") for entry in GRID + WIDE_GRID]
ON_THE_CPU += [(entry, "mma") for entry in GRID[1::3] + WIDE_GRID[1::2]]


@on_cpu
@pytest.mark.parametrize("entry, form", ON_THE_CPU, ids=str)
def test_the_cuda_source_attends(entry, form):
    inputs = inputs_of(entry)
    variant = variant_of(entry, **FORMS[form])
    out = attention_on_cpu(inputs, variant).clone()
    assert_attention(out, inputs)
    if entry in (
        *GRID[2::4],
        WIDE_GRID[2],
    ):  # The order in which warps and lanes run, and their speeds, show nowhere, nor does the length of the ring.
        shorter = variant.ring - (variant.row_groups == 2 and variant.head_dim == 128)
        other = dataclasses.replace(variant, stages=shorter)
        for warps in (1, 2, 3):
            inputs["out"].fill_(NAN)
            again = attention_on_cpu(inputs, other, warps=warps)
            assert torch.equal(out.view(torch.int16), again.view(torch.int16))


@on_cpu
@pytest.mark.parametrize("splits", [1, 3, 8, 16])
def test_shares_are_all_keys_and_even(splits):
    """No block has more whole tiles than it must, nor a rest where it need not."""
    library, share = build(variant_of(((0,), 1, (1, 1), splits, {}))), (ctypes.c_int * 3)()
    for keys in range(1, 4400):
        most, end, rests = 0, 0, 0
        for rank in range(splits):
            library.share_on_cpu(keys, rank, share)
            first, tiles, rest = share
            most, rests = max(most, tiles), rests + rest
            if tiles or rest:
                assert first - 16 * rest == end
                end = first + 64 * tiles
        assert keys <= end < keys + (16 if rests else 64)
        assert most == math.ceil(math.ceil(keys / 64) / splits) - (rests > 0)


@on_cpu
@pytest.mark.parametrize("growth", [0.0, 3.0, 40.0])
def test_weights_of_a_stale_peak_are_exact(growth):
    """Logits that grow along the keys: never by more than the slack, at times, at every tile."""
    inputs = inputs_of(((700,), 16, (4, 1), 1, {}))
    keys = inputs["prefix_slots"].long()
    inputs["q"][:, :, 0] = 1.0
    inputs["k_pool"][keys, :, 0] = (torch.arange(700) // 64 * growth)[:, None].to(BFLOAT)
    variant = variant_of(((700,), 16, (4, 1), 1, {}), **FORMS["wgmma"])
    assert_attention(attention_on_cpu(inputs, variant), inputs)


@on_cpu
def test_the_cuda_source_writes_its_rows_alone():
    inputs = inputs_of(GRID[2])
    attention_on_cpu(inputs, variant_of(GRID[2]))
    wide = inputs["out"]._base
    assert wide[:, :2].isnan().all() and wide[:, -1:].isnan().all() and not inputs["out"].isnan().any()


@on_cpu
def test_rows_that_see_nothing_are_zero_and_bits_behind_the_nodes_do_not_count():
    entry = ((0,), 40, (2, 1), 2, {})
    inputs = inputs_of(entry)
    inputs["ancestors"][:, -3:] = 0
    expected = attention_on_cpu(inputs, variant_of(entry)).clone()
    assert (expected[-3:] == 0).all() and (expected[:-3] != 0).any()
    inputs["ancestors"][:, :, 1] |= -1 << 8
    inputs["ancestors"] = torch.nn.functional.pad(inputs["ancestors"], (0, 3), value=-1)
    assert torch.equal(attention_on_cpu(inputs, variant_of(entry)), expected)


BROKEN = {  # what becomes of the source, and the prefix that shows it
    "bits behind the nodes count": ("return left < 64 ?", "return false ?", 20),
    "a bit early": ("<< before |", "<< (before - 1) |", 20),
    "no decay": ("[i] *= decay[i / 2]", "[i] *= 1.0f", 230),
    "one part too few": ("const float own_share =", "const float own_share = part == 1 ? 0.0f :", 70),
    "a key group too few": ("if (key_group == 0) rows.add(numbers);", "", 230),
    "a part at another scale": ("shares[i] = weight * __uint_as_float(notes[i].z)", "shares[i] = weight", 70),
    "a rest of other keys": ("slot_of(share.first - REST +", "slot_of(share.first +", 30),
    "a rest that is left out": ("if (share.rest && has_rows", "if (false && has_rows", 30),
    "numbers that are not waited for": ("part) most = max(most, greatest(fours[i][part]));", "part) {}", 70),
    "parts that stay": ("store_words(four_of(i, part), absent);", ";", 70),
    "notes that stay": ("if (lane < blocks) store_words(", "if (lane < 0) store_words(", 70),
    "parts of rows that are not there": ("if (!block.row_exists(row)) continue;\n#if HALF", "#if HALF", 70),
    "all blocks merge the same rows": ("row = rank + SPLITS * warp", "row = SPLITS * warp", 70),
    "unswizzled keys": ("(piece ^ row) & 7]", "piece & 7]", 20),
    "a turn too early": (
        "            copy_async_wait<STAGES - 2>();",
        "            copy_async_wait<STAGES - 1>();",
        650,
    ),
    "a stage too early": ("int stage = 0, free_stage = 0;", "int stage = 0, free_stage = 1;", 650),
    "a slot of another key": (
        "slots[i] = __shfl_sync(~0u, own_slot, key)",
        "slots[i] = __shfl_sync(~0u, own_slot, key ^ 1)",
        20,
    ),
    "a unit's slot of another key": (
        "slot = __shfl_sync(~0u, own_slot, row % 32)",
        "slot = __shfl_sync(~0u, own_slot, row % 32 ^ 1)",
        20,
    ),
    "a unit filled in another order": ("(unit / STAGES - 1) & 1", "(unit / STAGES) & 1", 650),
    "a unit read in another order": ("unit / STAGES & 1);", "(unit / STAGES + 1) & 1);", 650),
    "a unit of another stage": (
        "add_values(ring(turn * 2 - 1));",
        "add_values(ring(turn * 2 + 1));",
        650,
    ),
}
BROKEN_BY_MMA = ("a turn too early", "a stage too early", "a slot of another key")  # where all warps copy


@on_cpu
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_source_is_found(name):
    """The cases tell a wrong kernel from a right one."""
    old, new, prefix = BROKEN[name]
    text = cuda_kernel.SOURCE.read_text()
    assert text.count(old) == 1
    # 80 rows, or 40, whose keys two groups share.
    group = 1 if name == "a key group too few" else 2
    entry = ((prefix,), 40, (group, 1), 2 if prefix == 70 else 1, {})
    inputs = inputs_of(entry)
    inputs["ancestors"][:, :, 1] |= -1 << 8
    if name == "no decay":
        inputs["q"] *= 8  # peaks that grow by more than the slack
    # Else by wgmma, of which the swizzle is the emulation's own.
    variant = variant_of(entry, **FORMS["mma" if name in BROKEN_BY_MMA else "wgmma"])

    def attends(source):
        assert_attention(attention_on_cpu(inputs, variant, source=source), inputs)

    assert ends_well(lambda: attends(text)) and not ends_well(lambda: attends(text.replace(old, new)))


def shuffled(groups: int) -> list[int]:
    return random.Random(groups).sample(range(groups), groups)


@on_cpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_launches_follow_one_another_on_one_scratch(dtype, form):
    """The same bits in any order, and by a second launch on the scratch of the first."""
    entry = ((0, 500, 57, 200), 7, (4, 2), 4, {"dtype": dtype, "sinks": True})
    inputs, variant = inputs_of(entry), variant_of(entry, **FORMS[form])
    scratch = Scratch(variant, grid_of(variant, 4, 7, 2))
    expected = attention_on_cpu(inputs, variant, scratch=scratch).clone()
    assert_attention(expected, inputs)
    for order, used in ((lambda groups: range(groups)[::-1], scratch), (shuffled, None)):
        inputs["out"].fill_(NAN)
        out = attention_on_cpu(inputs, variant, True, "", order, used)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


PARTS = {  # entry, and what becomes of its inputs: sizes at which float16 parts could go wrong
    "tiny": (((300,), 9, (4, 1), 3, {}), lambda inputs: inputs["v_pool"].mul_(2.0**-118)),
    "huge": (((300,), 9, (4, 1), 3, {}), lambda inputs: inputs["v_pool"].mul_(2.0**110)),
    "columns far apart": (((300,), 9, (4, 1), 3, {}), lambda inputs: inputs["v_pool"][:, :, ::2].mul_(2.0**24)),
    # The second part has 257 keys: 257 * 255 = 2^16 - 1, just below a power of two.
    "below a power of two": (
        ((570,), 7, (4, 1), 2, {"shape": "bidirectional"}),
        lambda inputs: (inputs["q"].zero_(), inputs["v_pool"].fill_(255 / 128)),
    ),
}


@on_cpu
@pytest.mark.parametrize("name", PARTS)
def test_parts_keep_values_of_any_size(name):
    entry, change = PARTS[name]
    inputs = inputs_of(entry)
    change(inputs)
    out = attention_on_cpu(inputs, variant_of(entry, wgmma=True))
    exact = dict(inputs, q=inputs["q"].double(), out=None)
    expected = tree_attention_naive(**exact)
    size = tree_attention_naive(**dict(exact, v_pool=inputs["v_pool"].double().abs()))
    allowed = torch.finfo(BFLOAT).eps / 2 * (expected.abs() + size) + 2.0**-133
    assert ((out.double() - expected).abs() <= allowed).all()


@on_cpu
def test_rows_that_see_nothing_in_any_part_are_zero():
    entry = ((0,), 100, (1, 1), 2, {})
    inputs = inputs_of(entry)  # whose last node sees nothing
    out = attention_on_cpu(inputs, variant_of(entry, wgmma=True))
    assert_attention(out, inputs)
    assert (out[-1] == 0).all() and (out[:-1] != 0).any()


def test_what_the_kernel_does_not_take():
    def takes(entry=((5,), 7, (4, 2), 1, {}), **changes):
        inputs = make_inputs(case_of(entry), "cpu") | changes
        names = ("q", "k_pool", "v_pool", "prefix_indptr", "prefix_slots", "node_slots", "ancestors")
        return fits(*(inputs[name] for name in names), inputs.get("sliding_window", -1), inputs["sinks"], inputs["out"])

    assert takes() and takes(sinks=torch.zeros(4))
    assert not takes(sliding_window=0)
    assert not takes(sinks=torch.zeros(4, dtype=BFLOAT))
    assert not takes(((5,), 7, (4, 2), 1, {"dtype": torch.float32}))
    assert not takes(((5,), 7, (4, 2), 1, {"pool_dtype": torch.float8_e4m3fn}))
    assert not takes(((5,), 7, (17, 1), 1, {}))
    assert not takes(((5,), 257, (1, 1), 1, {}))
    assert not takes(((1,) * 17, 2, (1, 1), 1, {}))
    assert not takes(q=torch.zeros(7, 4, 132, dtype=BFLOAT)[:, :, 4:])
    assert not takes(q=torch.zeros(7, 4, 132, dtype=BFLOAT)[:, :, :128])
    assert not takes(k_pool=torch.zeros(20, 2, 64, dtype=BFLOAT))
    assert takes(((5,), 7, (6, 1), 1, WIDE)) and not takes(((5,), 7, (6, 1), 1, {"head_dim": 192}))


@pytest.mark.parametrize("requests, nodes, kv_heads, group, head_dim, splits", [
    (1, 64, 8, 4, 128, 8), (1, 256, 8, 4, 128, 2), (1, 16, 8, 4, 128, 16), (1, 32, 8, 4, 128, 16), (1, 48, 8, 4, 128, 8),
    (1, 64, 4, 8, 128, 8), (2, 64, 8, 4, 128, 4), (2, 16, 8, 4, 128, 8), (8, 16, 8, 4, 128, 2), (1, 16, 2, 8, 128, 32),
    (8, 64, 8, 4, 128, 1), (16, 256, 8, 4, 128, 1), (1, 256, 32, 4, 128, 1), (1, 16, 4, 8, 128, 32),
    (1, 64, 4, 6, 256, 11), (1, 128, 4, 6, 256, 5), (1, 10, 4, 6, 256, 32),
])  # fmt: skip
def test_all_blocks_run_at_once(requests, nodes, kv_heads, group, head_dim, splits):
    variant = choose(BFLOAT, requests, nodes, kv_heads, group, head_dim, False, True, 132)
    assert variant.splits == splits
    assert variant.row_groups == (1 if nodes * group <= 64 and head_dim == 128 else 2)
    assert variant.shared_bytes <= HOPPERS_SHARED_BYTES < 2 * variant.shared_bytes  # a multiprocessor runs one
    blocks = math.prod(grid_of(variant, requests, nodes, kv_heads))
    assert splits == 1 or blocks <= 132 and (splits == 32 or blocks + blocks // splits > 132)


def test_triton_deals_out_what_does_not_run_at_once(monkeypatch):
    monkeypatch.setattr(cuda_kernel, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(cuda_kernel, "blocks_at_once", lambda device: 132)
    cuda_kernel.chosen.cache_clear()

    def at_once(requests, nodes, heads=32, kv_heads=8):
        q = torch.empty(requests * nodes, heads, 128, dtype=BFLOAT, device="meta")
        ancestors = torch.empty(requests, nodes, 8, dtype=torch.int32, device="meta")
        return cuda_kernel.runs_at_once(q, torch.empty(1, kv_heads, 128, device="meta"), ancestors)

    assert at_once(1, 16) and at_once(1, 64) and at_once(1, 256) and at_once(8, 16) and at_once(4, 64)
    assert at_once(1, 256, heads=64, kv_heads=16)  # 128 blocks, none of which shares
    assert not at_once(8, 64) and not at_once(16, 16) and not at_once(4, 256)
    assert cuda_kernel.chosen(0, BFLOAT, 1, 16, 8, 4, 128, False).splits == 16
    cuda_kernel.chosen.cache_clear()


VARIANTS = [
    Variant(dtype, group, row_groups, splits, capped, head_dim=head_dim, **FORMS[form])
    for dtype, group, row_groups, splits, capped, head_dim, forms in (
        (BFLOAT, 4, 2, 8, False, 128, ("mma", "wgmma")),
        (HALF, 4, 1, 16, False, 128, ("mma", "wgmma")),
        (BFLOAT, 16, 2, 4, True, 128, ("mma", "wgmma")),
        (HALF, 1, 1, 1, False, 128, ("mma", "wgmma")),
        (BFLOAT, 8, 2, 32, False, 128, ("wgmma",)),
        (BFLOAT, 6, 2, 11, False, 256, ("wgmma",)),  # by mma a word is spilt, on no device that is served
        (HALF, 8, 2, 4, True, 256, ("mma", "wgmma")),
        (BFLOAT, 6, 2, 32, False, 256, ("mma", "wgmma")),
        (HALF, 6, 2, 32, False, 256, ("wgmma",)),
    )
    for form in forms
]


@pytest.mark.skipif(NVCC is None, reason="nvcc is missing")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_cuda_source_compiles_without_spills(variant, tmp_path):
    for target in ["sm_90a"] if variant.wgmma else ["sm_90a", "sm_100a"]:
        report = compile_for_gpu(cuda_kernel.SOURCE, variant.defines(), target, tmp_path / "kernel.cubin")
        assert_no_spills(report)
        assert "serialized" not in report, report  # wgmma that cannot run ahead


def test_nvrtc_compiles_it(tmp_path, monkeypatch):
    need_nvrtc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variant in (*VARIANTS[:4], VARIANTS[-1]):
        assert b"tree_attention" in cuda_kernel.compile_for(variant, "sm_90a")


@gpu
@pytest.mark.parametrize(
    "entry, form",
    [(entry, list(FORMS)[(i + j) % len(FORMS)]) for i, entry in enumerate(ON_THE_GPU) for j in (0, 3)],
    ids=str,
)
def test_the_compiled_kernel_attends(entry, form):
    if form != "mma" and nvrtc.architecture(0) != "sm_90a":
        pytest.skip("wgmma is Hopper's alone")
    inputs = inputs_of(entry, "cuda")
    case = case_of(entry)
    (heads, kv_heads), requests = case.heads, len(case.prefix)
    group, dim = heads // kv_heads, case.head_dim
    variant = cuda_kernel.chosen(0, case.dtype, requests, case.nodes, kv_heads, group, dim, False)
    variant = variant_of(entry, splits=entry[3] or variant.splits, **FORMS[form])
    assert_attention(cuda_kernel.tree_attention_cuda(**inputs, variant=variant), inputs)


@gpu
@pytest.mark.parametrize("entry", GRID + WIDE_GRID, ids=str)
def test_the_compiled_kernel_serves_all_options(entry):
    inputs = inputs_of(entry, "cuda")
    assert_attention(tree_attention(**inputs, implementation="cuda"), inputs)


@gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 8, 16])
def test_launches_in_graphs_follow_lengths(splits):
    """Two graphs, which share scratch where there are splits; of each length the same bits again and again."""
    entry = ((900, 40), 33, (8, 2), splits, {})
    inputs = inputs_of(entry, "cuda")
    variant = variant_of(entry, wgmma=nvrtc.architecture(0) == "sm_90a")
    cuda_kernel.tree_attention_cuda(**inputs, variant=variant)
    graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    for graph in graphs:
        with torch.cuda.graph(graph):
            cuda_kernel.tree_attention_cuda(**inputs, variant=variant)
            again = dict(inputs, q=inputs["out"].clone(), out=torch.empty_like(inputs["out"]))
            cuda_kernel.tree_attention_cuda(**again, variant=variant)
    for bounds in ([0, 900, 940], [0, 1, 1], [0, 0, 700], [0, 512, 513], [0, 266, 533]):
        inputs["prefix_indptr"].copy_(torch.tensor(bounds, dtype=torch.int32))
        inputs["out"].fill_(NAN)
        graphs[0].replay()
        expected = inputs["out"].clone()
        assert_attention(expected, inputs)
        for _ in range(100):  # blocks come last in many orders
            inputs["out"].fill_(NAN)
            graphs[1].replay()
            assert torch.equal(inputs["out"].view(torch.int16), expected.view(torch.int16))
        assert_attention(again["out"], again)


@gpu
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("bits", [-1, 0x7FFF, 0x7F80, 0x7C00], ids=hex)
def test_no_number_looks_like_one_that_is_absent(dtype, bits):
    """Infinite numbers, and NaN of all bits set, which is what scratch is between launches: the launch ends, the request has
    them, and the next finds scratch as it must be."""
    entry = ((900, 40), 33, (8, 2), 4, {"dtype": dtype})
    inputs = inputs_of(entry, "cuda")
    variant = variant_of(entry)
    expected = cuda_kernel.tree_attention_cuda(**inputs, variant=variant).clone()
    number, slots = (
        torch.tensor(bits, dtype=torch.int16, device="cuda").view(dtype),
        inputs["prefix_slots"][:300].long(),
    )
    for pools in (("k_pool",), ("v_pool",), ("k_pool", "v_pool")):
        spoilt = inputs | {name: inputs[name].clone() for name in pools}
        for name in pools:
            spoilt[name][slots] = number
        out = cuda_kernel.tree_attention_cuda(**spoilt, variant=variant)
        torch.cuda.synchronize()
        first = out[: out.shape[0] // 2]
        assert torch.isfinite(out[out.shape[0] // 2 :]).all() and not torch.equal(first, expected[: len(first)])
        assert torch.equal(cuda_kernel.tree_attention_cuda(**inputs, variant=variant), expected)


@gpu
def test_more_blocks_than_run_at_once_are_refused():
    """Those that wait would wait for ever."""
    entry = ((3000,) * 16, 64, (32, 8), 2, {})
    inputs = inputs_of(entry, "cuda")
    with pytest.raises(Exception, match="COOPERATIVE_LAUNCH_TOO_LARGE"):
        cuda_kernel.tree_attention_cuda(**inputs, variant=variant_of(entry))


@gpu
def test_scratch_is_not_allocated_while_a_graph_is_captured():
    entry = ((40,), 9, (8, 2), 2, {})
    inputs = inputs_of(entry, "cuda")
    variant = variant_of(entry)
    cuda_kernel.tree_attention_cuda(**inputs, variant=variant)
    cuda_kernel._scratch.cache_clear()
    with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cuda_kernel.tree_attention_cuda(**inputs, variant=variant)
