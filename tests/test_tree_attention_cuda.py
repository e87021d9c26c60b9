"""tree_attention.cu against float64: on the CPU through tests/cuda_on_cpu.h, and on the GPU where there is one."""

import dataclasses
import random

import pytest
import torch
from attention_cases import NAN, Case, make_inputs
from attention_on_cpu import Scratch, attention_on_cpu, build
from compiled import GXX, NVCC, assert_no_spills, compile_for_gpu, ends_well, need_nvrtc
from sgl_specflow.eval.tree_attention import splits_and_cluster, variants_of
from sgl_specflow.kernels import nvrtc
from sgl_specflow.kernels.tree_attention import cuda_kernel, tree_attention
from sgl_specflow.kernels.tree_attention.cuda_kernel import HOPPERS_SHARED_BYTES, Variant, choose, fits, grid_of
from sgl_specflow.kernels.tree_attention.cuda_variant import LONG_PREFIX, OTHER_PREFIXES, SLOWER
from sgl_specflow.kernels.tree_attention.naive import tree_attention_naive

BFLOAT, HALF = torch.bfloat16, torch.float16
FORMS = {"mma": {}, "wgmma": {"wgmma": True}}
on_cpu = pytest.mark.skipif(GXX is None, reason="g++ is missing")

# prefix lengths, nodes, (query heads, kv heads), cluster, more of Case
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
    ((500, 1), 33, (2, 1), 3, {}),  # clusters that do not divide the rows
    ((700,), 33, (4, 1), 6, {"padding": 3}),
    ((610,), 16, (4, 1), 7, {"shape": "chain"}),
]
WIDE = {"head_dim": 256}
WIDE_GRID = [
    ((0,), 1, (6, 1), 1, {**WIDE}),
    ((200, 3), 16, (6, 1), 3, {**WIDE, "padding": 2}),
    ((450,), 33, (6, 1), 2, {**WIDE, "strided": True, "dtype": HALF}),
    ((90,), 13, (12, 2), 7, {**WIDE, "sinks": True, "options": {"logit_cap": 2.0, "v_scale": 3.0}}),
]
ON_THE_GPU = [
    (prefix, nodes, heads, cluster, {"dtype": dtype, "padding": nodes // 5})
    for dtype in (BFLOAT, HALF)
    for prefix in ((0, 1, 63), (64, 65, 1000), (4133,))
    for nodes in (1, 7, 16, 64, 65, 256)
    for heads in (((8, 8), (32, 8), (32, 4), (32, 2)) if dtype == BFLOAT else ((32, 8),))
    for cluster in (None,)
] + [((100, 700), nodes, (32, 8), cluster, {}) for nodes in (16, 64) for cluster in (1, 2, 3, 4, 7, 8)]
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
    return Variant(case.dtype, group, row_groups, entry[3], capped, head_dim=case.head_dim, **changes)


def assert_attention(out, inputs):
    """Weights and results are rounded once each to q's dtype; sums are float32."""
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
    ):  # The order in which warps and lanes run shows nowhere, nor does the length of the ring.
        inputs["out"].fill_(NAN)
        shorter = variant.ring - (variant.row_groups == 2 and variant.head_dim == 128)
        other = dataclasses.replace(variant, stages=shorter, dependent=True)
        backwards = attention_on_cpu(inputs, other, reversed_order=True)
        assert torch.equal(out.view(torch.int16), backwards.view(torch.int16))


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
    "bits behind the nodes count": ("if (left < 32) values[i] &=", "if (false) values[i] &=", 20),
    "a bit early": ("<< before |", "<< (before - 1) |", 20),
    "no decay": ("[i] *= decay[i / 2]", "[i] *= 1.0f", 230),
    "one part too few": ("const float share =", "const float share = part == 1 ? 0.0f :", 70),
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
        "const unsigned slot = __shfl_sync(~0u, own_slot, key)",
        "const unsigned slot = __shfl_sync(~0u, own_slot, key ^ 1)",
        20,
    ),
    "a unit filled in another order": ("(unit / STAGES - 1) & 1", "(unit / STAGES) & 1", 650),
    "a unit read in another order": ("unit / STAGES & 1);", "(unit / STAGES + 1) & 1);", 650),
    "a unit of another stage": (
        "tiles[key_group];\n            Tile& values = shared.ring[(turn * 2 +",
        "tiles[key_group];\n            Tile& values = shared.ring[(turn * 2 + 2 +",
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
    entry = ((prefix,), 40, (2, 1), 2 if prefix == 70 else 1, {})
    inputs = inputs_of(entry)
    inputs["ancestors"][:, :, 1] |= -1 << 8
    if name == "no decay":
        inputs["q"] *= 8  # peaks that grow by more than the slack
    # Else by wgmma, of which the swizzle is the emulation's own.
    variant = variant_of(entry, **FORMS["mma" if name in BROKEN_BY_MMA else "wgmma"])

    def attends(source):
        assert_attention(attention_on_cpu(inputs, variant, source=source), inputs)

    assert ends_well(lambda: attends(text)) and not ends_well(lambda: attends(text.replace(old, new)))


SPLIT_FROM = 200  # keys: 4 tiles, fewer than some of the splits below have blocks
# nodes, (query heads, kv heads), cluster, more of Case
SPLIT_GRID = [
    (7, (4, 2), 1, {}),
    (16, (4, 1), 2, {"padding": 3, "sinks": True}),
    (17, (4, 1), 3, {"dtype": HALF, "options": {"logit_cap": 2.0, "v_scale": 3.0}}),
    (16, (4, 1), 6, {"strided": True}),
    (13, (6, 1), 2, WIDE),
    (22, (6, 1), 3, {**WIDE, "padding": 2, "sinks": True}),
]


def split_case(nodes, heads, cluster, more):
    """Requests without a prefix, a key short of the threshold, at it, and far above it."""
    return (0, SPLIT_FROM - nodes - 1, SPLIT_FROM - nodes, 500), nodes, heads, cluster, more


def shuffled(clusters: int) -> list[int]:
    return random.Random(clusters).sample(range(clusters), clusters)


def attend_in_any_order(inputs, variant, source="") -> None:
    """The same bits whichever cluster comes last, and by a second launch on the same scratch."""
    scratch = Scratch(variant, grid_of(variant, *inputs["ancestors"].shape[:2], inputs["k_pool"].shape[1]))
    expected = attention_on_cpu(inputs, variant, source=source, scratch=scratch).clone()
    assert_attention(expected, inputs)
    for order, used in ((lambda clusters: range(clusters)[::-1], scratch), (shuffled, None)):
        inputs["out"].fill_(NAN)
        out = attention_on_cpu(inputs, variant, True, source, order, used)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@on_cpu
@pytest.mark.parametrize("case, splits", [
    *((case, splits) for splits in (2, 3, 8) for case in SPLIT_GRID), (SPLIT_GRID[1], 1), (SPLIT_GRID[4], 1),
], ids=str)  # fmt: skip
def test_clusters_share_the_keys_of_a_request(case, splits):
    form = list(FORMS)[(SPLIT_GRID.index(case) + splits) % 2]
    entry = split_case(*case)
    variant = variant_of(entry, splits=splits, split_from=SPLIT_FROM, **FORMS[form])
    attend_in_any_order(inputs_of(entry), variant)


@on_cpu
def test_short_requests_are_not_split():
    """One cluster does all, to the bits of a variant without splits, and nothing goes to scratch."""
    entry = split_case(*SPLIT_GRID[0])
    inputs = inputs_of(entry)
    variant = variant_of(entry, splits=3, split_from=SPLIT_FROM)
    scratch = Scratch(variant, grid_of(variant, 4, 7, 2))
    split = attention_on_cpu(inputs, variant, scratch=scratch).clone()
    whole = attention_on_cpu(inputs, dataclasses.replace(variant, splits=1))
    assert torch.equal(split[: 2 * 7], whole[: 2 * 7])
    of_requests = (scratch.tensors[0].view(4, -1) != -1).any(1)
    assert of_requests.tolist() == [False, False, True, True]


BROKEN_SPLITS = {  # what becomes of the source
    "the first merges": ("0) == SPLITS - 1) merge", "0) == 0) merge"),
    "a counter that stays": ("(counter, SPLITS - 1)", "(counter, SPLITS)"),
    "a counter for all warps": ("* WARPS + warp;", "* WARPS;"),
    "a counter for all row blocks": ("(cluster / SPLITS * CLUSTER + rank) * WARPS", "rank * WARPS"),
    "a ticket before the lanes have met": ("parts + split);\n        __syncwarp();", "parts + split);"),
    "one part for all": ("parts + split);", "parts);"),
    "an order that depends on the last": (
        "for (int part = 0; part < PARTS; ++part) {",
        "for (int i = 0; i < PARTS; ++i) {\n const int part = (i + blockIdx.x / CLUSTER) % PARTS;",
    ),
    "a threshold that clusters see differently": ("block.nodes >= SPLIT_FROM", "block.nodes >= SPLIT_FROM + split"),
    "an empty part of a peak": ("total > 0.0f ? peak : minus_infinity, total", "peak, total"),
    "sinks of every part": ("arguments.sinks && !sum", "arguments.sinks"),
}


@on_cpu
@pytest.mark.parametrize("name", BROKEN_SPLITS)
def test_broken_splits_are_found(name):
    """But for the order of memory between clusters: here one runs after another."""
    old, new = BROKEN_SPLITS[name]
    text = cuda_kernel.SOURCE.read_text()
    assert text.count(old) == 1
    entry = split_case(16, (4, 1), 2, {"dtype": HALF, "sinks": name != "an empty part of a peak"})
    inputs = inputs_of(entry)
    if name == "an empty part of a peak":
        inputs["q"][:, :, 0], inputs["k_pool"][:, :, 0] = -64.0, 64.0  # logits far below 0
    variant = variant_of(entry, splits=8, split_from=SPLIT_FROM)
    build(variant, text)  # once for all

    def attends(source):
        attend_in_any_order(inputs, variant, source)

    assert ends_well(lambda: attends(text)) and not ends_well(lambda: attends(text.replace(old, new)))


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


AT_A_TIME = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}  # clusters of a size that an H200 runs together


@pytest.mark.parametrize("requests, nodes, kv_heads, group, head_dim, cluster, splits", [
    (1, 64, 8, 4, 128, 6, 1), (1, 256, 8, 4, 128, 2, 1), (1, 16, 8, 4, 128, 6, 2), (1, 32, 8, 4, 128, 6, 2),
    (1, 64, 4, 8, 128, 6, 1), (2, 64, 8, 4, 128, 3, 1), (2, 16, 8, 4, 128, 6, 1), (8, 16, 8, 4, 128, 2, 1),
    (8, 64, 8, 4, 128, 2, 1), (16, 256, 8, 4, 128, 2, 1), (1, 256, 32, 4, 128, 1, 1), (1, 16, 4, 8, 128, 5, 5),
    (1, 64, 4, 6, 256, 8, 1), (1, 128, 4, 6, 256, 4, 1), (1, 10, 4, 6, 256, 4, 7),
])  # fmt: skip
def test_all_clusters_run_at_once(requests, nodes, kv_heads, group, head_dim, cluster, splits):
    variant = choose(BFLOAT, requests, nodes, kv_heads, group, head_dim, False, True, AT_A_TIME.get)
    assert (variant.cluster, variant.splits) == (cluster, splits)
    assert variant.row_groups == (1 if nodes * group <= 64 and head_dim == 128 else 2)
    assert variant.shared_bytes <= HOPPERS_SHARED_BYTES


@pytest.mark.parametrize("nodes, kv_heads, group, head_dim", [(16, 8, 4, 128), (32, 8, 4, 128), (16, 4, 6, 256)])
def test_splits_gain_at_long_prefixes_and_cost_little_at_others(nodes, kv_heads, group, head_dim):
    split = choose(BFLOAT, 1, nodes, kv_heads, group, head_dim, False, True, AT_A_TIME.get)
    whole = dataclasses.replace(split, cluster=8, splits=1)
    assert split.time(LONG_PREFIX + nodes) < 0.8 * whole.time(LONG_PREFIX + nodes)
    assert all(split.time(prefix + nodes) <= SLOWER * whole.time(prefix + nodes) for prefix in OTHER_PREFIXES)
    assert dataclasses.replace(split, split_from=7).threshold == 7


def test_eval_times_the_variants_that_were_asked_for():
    served = choose(BFLOAT, 1, 16, 8, 4, 128, False, True, AT_A_TIME.get)
    asked = [splits_and_cluster(text) for text in ("1", "2", "8", "3x2", "17")]
    variants = variants_of(served, asked, 8, AT_A_TIME.get)
    assert [(variant.splits, variant.cluster) for variant in variants] == [(1, 8), (2, 6), (8, 2), (3, 2)]
    assert variants[1] == served


def test_triton_deals_out_what_does_not_run_at_once(monkeypatch):
    monkeypatch.setattr(cuda_kernel, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(cuda_kernel, "clusters_at_a_time", lambda device, size: AT_A_TIME[size])
    cuda_kernel.chosen.cache_clear()

    def at_once(requests, nodes, heads=32, kv_heads=8):
        q = torch.empty(requests * nodes, heads, 128, dtype=BFLOAT, device="meta")
        ancestors = torch.empty(requests, nodes, 8, dtype=torch.int32, device="meta")
        return cuda_kernel.runs_at_once(q, torch.empty(1, kv_heads, 128, device="meta"), ancestors)

    assert at_once(1, 16) and at_once(1, 64) and at_once(1, 256) and at_once(8, 16) and at_once(4, 64, kv_heads=4)
    assert not at_once(8, 64) and not at_once(16, 16) and not at_once(4, 256)
    assert cuda_kernel.chosen(0, BFLOAT, 1, 16, 8, 4, 128, False).splits == 2
    cuda_kernel.chosen.cache_clear()


VARIANTS = [
    Variant(dtype, group, row_groups, cluster, capped, dependent=dependent, head_dim=head_dim, **FORMS[form])
    for dtype, group, row_groups, cluster, capped, dependent, head_dim, forms in (
        (BFLOAT, 4, 2, 7, False, False, 128, ("mma", "wgmma")),
        (HALF, 4, 1, 8, False, True, 128, ("wgmma",)),
        (BFLOAT, 16, 2, 4, True, False, 128, ("mma", "wgmma")),
        (HALF, 1, 1, 1, False, False, 128, ("wgmma",)),
        (BFLOAT, 6, 2, 8, False, False, 256, ("mma", "wgmma")),
        (HALF, 8, 2, 4, True, True, 256, ("wgmma",)),
    )
    for form in forms
]
VARIANTS += [
    Variant(
        dtype, group, row_groups, cluster, capped, dependent=dependent, head_dim=head_dim, splits=splits, **FORMS[form]
    )
    for dtype, group, row_groups, cluster, capped, dependent, head_dim, splits, form in (
        (BFLOAT, 4, 1, 6, False, False, 128, 2, "wgmma"),
        (BFLOAT, 4, 2, 6, False, False, 128, 2, "mma"),
        (HALF, 4, 1, 1, True, True, 128, 8, "wgmma"),
        (BFLOAT, 6, 2, 4, False, False, 256, 7, "wgmma"),
        (BFLOAT, 6, 2, 4, False, False, 256, 7, "mma"),
    )
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
    if entry[3] is None:
        entry = (*entry[:3], variant.cluster, entry[4])
    variant = variant_of(entry, splits=variant.splits, **FORMS[form])
    assert_attention(cuda_kernel.tree_attention_cuda(**inputs, variant=variant), inputs)


@gpu
@pytest.mark.parametrize("entry", GRID + WIDE_GRID, ids=str)
def test_the_compiled_kernel_serves_all_options(entry):
    inputs = inputs_of(entry, "cuda")
    assert_attention(tree_attention(**inputs, implementation="cuda"), inputs)


@gpu
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("cluster, splits", [(4, 1), (6, 2), (3, 3), (2, 8), (1, 8)])
def test_launches_in_graphs_follow_lengths(cluster, splits, dependent):
    """Two graphs, which share scratch where there are splits; of each length the same bits again and again."""
    entry = ((900, 40), 33, (8, 2), cluster, {})
    inputs = inputs_of(entry, "cuda")
    wgmma = nvrtc.architecture(0) == "sm_90a"
    variant = variant_of(entry, wgmma=wgmma, dependent=dependent, splits=splits, split_from=300)
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
        for _ in range(100):  # clusters come last in many orders
            inputs["out"].fill_(NAN)
            graphs[1].replay()
            assert torch.equal(inputs["out"].view(torch.int16), expected.view(torch.int16))
        assert_attention(again["out"], again)


@gpu
def test_scratch_is_not_allocated_while_a_graph_is_captured():
    entry = ((40,), 9, (8, 2), 2, {})
    inputs = inputs_of(entry, "cuda")
    variant = variant_of(entry, splits=2, split_from=1)
    cuda_kernel.tree_attention_cuda(**inputs, variant=variant)
    cuda_kernel._scratch.cache_clear()
    with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cuda_kernel.tree_attention_cuda(**inputs, variant=variant)
