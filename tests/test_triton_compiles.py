"""The Triton kernels compile for Hopper where no GPU is: the interpreter, which the other tests use here, takes code that
the compiler refuses, and says nothing of registers.

A stand-in for Triton's driver names the target, and every launch stops once its kernel is compiled.
"""

import importlib
import os
import subprocess

import pytest
import torch
import triton
from sgl_specflow.kernels import context_write, fp8_linear
from sgl_specflow.kernels.gdn_tree import conv
from sgl_specflow.kernels.tree_attention import select_config, triton_kernel
from sgl_specflow.kernels.tree_step import accept_and_plan, best_tokens, empty_tree, force_path, stage
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sgl_specflow.drafter.weaver import triton_steps
from sgl_specflow.tree import Expansion

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
HOPPER_MULTIPROCESSORS = 132


class HopperDriver:
    """What Triton asks of its driver before it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Kernels compiled so far, in the order of their launches."""
    kernels = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", HopperDriver())
    return kernels


def spills(kernel, folder) -> bool:
    """Whether registers of a compiled kernel did not fit: a stack beyond some scratch of its own."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    return int(usage.split("STACK:")[1].split()[0]) > 64


ATTENTION = [  # nodes, heads, kv heads, head dimension, dtype, options
    (64, 32, 8, 128, torch.bfloat16, {}),
    (256, 32, 8, 128, torch.bfloat16, {}),
    (16, 32, 8, 128, torch.bfloat16, {}),
    (4, 32, 8, 128, torch.bfloat16, {"sliding_window": 2047}),
    (64, 16, 4, 256, torch.bfloat16, {"logit_cap": 30.0}),
    (64, 9, 3, 64, torch.float16, {}),
    (64, 9, 3, 64, torch.float32, {}),
]


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_tree_attention(compiled, monkeypatch, tmp_path, case):
    nodes, heads, kv_heads, dim, dtype, options = case
    monkeypatch.setattr(triton_kernel, "_has_dependent_launch", lambda device: True)
    monkeypatch.setattr(triton_kernel, "_multiprocessors", lambda device: HOPPER_MULTIPROCESSORS)
    select_config.cache_clear()
    pool = torch.zeros(512, kv_heads, dim, dtype=dtype)
    triton_kernel.tree_attention_triton(
        torch.zeros(nodes, heads, dim, dtype=dtype),
        pool,
        pool.clone(),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(512, dtype=torch.int32),
        torch.zeros(nodes, dtype=torch.int64),
        torch.zeros(1, nodes, -(-nodes // 32), dtype=torch.int32),
        torch.zeros(1, nodes, dtype=torch.int64),
        dim**-0.5,
        **options,
    )
    select_config.cache_clear()
    assert len(compiled) == 2
    assert [spills(kernel, tmp_path) for kernel in compiled] == [False, False]


def module(name: str):
    """A module of tree_step, whose package has functions of the same names."""
    return importlib.import_module(f"sgl_specflow.kernels.tree_step.{name}")


@pytest.mark.parametrize("nodes", [64, 256])
def test_the_small_kernels_of_a_step(compiled, monkeypatch, tmp_path, nodes):
    requests, cpu = 3, torch.device("cpu")
    monkeypatch.setattr(stage, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(module("best_tokens"), "runs_triton", lambda tensor: True)
    monkeypatch.setattr(module("accept"), "runs_triton", lambda tensor: True)
    monkeypatch.setattr(module("force"), "runs_triton", lambda tensor: True)
    table, rows = torch.zeros(9, 5000, dtype=torch.int32), torch.zeros(requests, dtype=torch.int64)
    tree = empty_tree(requests, nodes, cpu)
    stage.window_slots(table, rows, rows, nodes)
    stage.pack_rows(table, rows, rows, torch.zeros(requests + 1, dtype=torch.int32), table[0])
    stage.stage_bits(tree.ancestors, tree.depth, tree.ancestors, tree.ancestors, tree.depth)
    best_tokens(torch.zeros(15, 151936, dtype=torch.bfloat16), 16)
    accept_and_plan(tree, tree.token, 15, tree.token, rows)
    force_path(tree, 4)
    assert [spills(kernel, tmp_path) for kernel in compiled] == [False] * 8


@pytest.mark.parametrize("case", [(15, 4096, 12288), (15, 151936, 4096), (120, 4096, 4096), (300, 576, 1008)], ids=str)
def test_fp8_linear(compiled, monkeypatch, tmp_path, case):
    rows, features, depth = case
    weight = torch.zeros(1, dtype=fp8_linear.FP8).expand(features, depth)
    fp8_linear.fp8_linear_triton(torch.zeros(rows, depth, dtype=torch.bfloat16), weight, torch.ones(features))
    assert [spills(kernel, tmp_path) for kernel in compiled] == [False]


CONTEXT = [  # layers, kv heads, dimension, turned, neox, model dtype, buffer dtype
    (5, 8, 128, 128, True, torch.bfloat16, torch.bfloat16),
    (5, 8, 128, 128, True, torch.bfloat16, torch.float8_e4m3fn),
    (5, 2, 256, 64, True, torch.bfloat16, torch.bfloat16),
    (2, 3, 64, 64, False, torch.float16, torch.float16),
    (6, 32, 128, 128, True, torch.float32, torch.float32),
]


@pytest.mark.parametrize("case", CONTEXT, ids=str)
def test_the_heads_context(compiled, monkeypatch, tmp_path, case):
    layers, heads, dim, turned, neox, dtype, stored = case
    monkeypatch.setattr(context_write, "runs_triton", lambda tensor: True)
    pool = torch.zeros(9, heads, dim, dtype=torch.uint8 if stored == context_write.FP8 else stored)
    buffers = context_write.LayerBuffers.of([pool] * layers, [pool] * layers, stored)
    kv, slots = torch.zeros(16, layers, 2, heads, dim, dtype=dtype), torch.zeros(16, dtype=torch.int64)
    table, norm = torch.zeros(99, turned), torch.zeros(layers, dim)
    context_write.write_context_rows(kv, norm, 1e-6, table, neox, slots, slots, buffers)
    assert [spills(kernel, tmp_path) for kernel in compiled] == [False]
    if dtype == stored == torch.bfloat16 and turned == dim:
        # No number is written alone.
        assert "st.global.b16" not in compiled[0].asm["ptx"] and "st.global.v" in compiled[0].asm["ptx"]


def test_convolution_on_a_tree(compiled):
    requests, nodes, channels = 2, 64, 256
    x = torch.zeros(requests * nodes, channels, dtype=torch.bfloat16)
    ancestors = torch.zeros(requests, nodes, 2, dtype=torch.int32)
    window, slots = torch.zeros(5, channels, 3, dtype=torch.bfloat16), torch.zeros(requests, dtype=torch.int32)
    table = conv.nearest_ancestors(ancestors, 3, implementation="triton")
    weight = torch.zeros(channels, 4, dtype=torch.bfloat16)
    conv.tree_conv(x, window, slots, table, weight, activation="silu", implementation="triton")
    assert len(compiled) == 2


def test_the_weavers_pieces(compiled, tmp_path):
    requests, count, rank, heads, places = 2, 8, 1024, 16, 80
    half = torch.bfloat16
    caches = torch.zeros(2, requests, heads, places, rank // heads, dtype=half)
    qkv = torch.zeros(requests, count, 3, heads, rank // heads, dtype=half)
    turn, visible = (
        torch.zeros(requests, count, 2, rank // heads),
        torch.zeros(requests, count, places, dtype=torch.bool),
    )
    triton_steps.attend(qkv, turn, *caches, 16, visible)
    triton_steps.attend(qkv, turn[:1], *caches, 0, None)
    x = torch.zeros(requests, count, rank, dtype=half)
    triton_steps.add_norm(x, x.clone())
    triton_steps.silu_mul(torch.zeros(requests, count, 2 * rank, dtype=half))
    depth = torch.zeros(requests * count, dtype=torch.int64)
    tokens, scores = torch.zeros(requests, 15, 512, dtype=torch.int64), torch.zeros(requests, 15, 512)
    table = torch.zeros(100, rank, dtype=half)
    for normed in (False, True):
        triton_steps.pool_logits(x, depth, tokens, scores, table, torch.zeros(100), normed)
    row = torch.zeros(requests, count, dtype=torch.int64)
    nodes = Expansion(0, row, row, row, row, torch.zeros(requests, count, count, dtype=torch.bool))
    triton_steps.enter(nodes, table, turn[0], visible, 16)
    assert len(compiled) == 7
    assert [spills(kernel, tmp_path) for kernel in compiled] == [False] * 7


@pytest.mark.parametrize(
    "budget, width, keep, pool", [(64, 32, 16, 512), (256, 32, 16, 512), (128, 64, 16, 1024), (16, 1, 8, 64)]
)
def test_the_conditional_trees_builder(compiled, monkeypatch, tmp_path, budget, width, keep, pool):
    expansion = module("expansion")
    requests, depths = 2, 15
    root, marginals = torch.zeros(requests, dtype=torch.int64), torch.zeros(requests, depths, pool)
    tokens = torch.zeros(marginals.shape, dtype=torch.int64)
    known = expansion.root(root, budget)
    # Torch's own tree of marginals needs real numbers.
    tree = empty_tree(requests * depths, width, root.device)
    monkeypatch.setattr(expansion, "tree_from_marginals", lambda *given: tree)
    guesses = expansion.guess(marginals, width)
    chosen = expansion.choose(known, guesses, tokens, root, width, 0)
    log_probs = torch.zeros(requests, width, pool)
    known = expansion.absorb(known, chosen, log_probs, tokens, keep)
    expansion.lay_out(root, known, depths)
    assert [(kernel.name, spills(kernel, tmp_path)) for kernel in compiled] == [
        (kernel.name, False) for kernel in compiled
    ]
    assert len(compiled) == 7
