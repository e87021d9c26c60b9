"""Time tree_attention against SGLang's tree verify (its Triton extend kernel with a custom mask) on one GPU.

    python -m sgl_specflow.eval.tree_attention --out eval/results/tree_attention.json

One CUDA graph holds a call for each of several input sets, which together exceed the L2 cache; a figure is the median
replay time over the number of calls. Pool slots are drawn at random, as in a pool long in use. A row is one of our
kernels ("implementation") at one shape; --points takes the few shapes that decide serving, --implementations the kernels.

    python -m sgl_specflow.eval tree_attention --splits 1 4 8 16 --out eval/results/tree_attention_splits.json

--splits times variants of the CUDA kernel at SPLIT_POINTS instead: so many blocks share the keys of the same rows (see
tree_attention.cu), as far as all run at once; `chosen` marks the variant that serving takes.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from sgl_specflow.eval.arguments import need_gpu, result_file
from sgl_specflow.eval.record import describe
from sgl_specflow.eval.timing import microseconds
from sgl_specflow.kernels.tree_attention import (
    TreeAttentionConfig,
    TreeAttentionScratch,
    UnsupportedTreeAttention,
    ancestor_matrix,
    tree_attention,
)
from sgl_specflow.kernels.tree_attention.cuda_kernel import chosen, tree_attention_cuda

BYTES_PER_SECOND = 4.3e12  # measured device-to-device copy of an H200
FLOP_PER_SECOND = 790e12  # measured bf16 matrix product of an H200
ROTATED_BYTES = 400e6  # several times the 60 MB of L2
SHAPES = [
    *((1, context, nodes) for context in (128, 1024, 4096, 16384, 32768) for nodes in (16, 64, 128, 256)),
    *((batch, context, 64) for batch in (4, 16) for context in (1024, 4096, 16384)),
]
# (batch, context, nodes, query heads, kv heads, head dimension) of Qwen3-8B, of Qwen3-30B-A3B and of Qwen3.6-27B
POINTS = [
    *((batch, context, nodes, 32, 8, 128) for nodes in (16, 64, 256) for batch, context in ((1, 128), (1, 4096))),
    (1, 32768, 64, 32, 8, 128),
    (8, 4096, 16, 32, 8, 128),
    (8, 4096, 64, 32, 8, 128),
    *((1, context, nodes, 32, 4, 128) for nodes in (16, 64) for context in (128, 4096)),
    *((1, context, nodes, 24, 4, 256) for context, nodes in ((128, 64), (4096, 16), (4096, 64), (4096, 128))),
]
IMPLEMENTATIONS = ("cuda", "triton")
SPLIT_POINTS = [(1, context, nodes, 32, 8, 128) for nodes in (16, 64) for context in (128, 1024, 4096, 32768)]


@dataclass
class Problem:
    """Inputs of one verify pass of one layer, `sets` times over."""

    batch: int
    context: int
    nodes: int
    heads: int
    kv_heads: int
    head_dim: int
    sets: list[dict]
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    ancestors: torch.Tensor
    depth: torch.Tensor
    prefix_indptr: torch.Tensor

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


def make_problem(batch: int, context: int, nodes: int, heads: int, kv_heads: int, head_dim: int) -> Problem:
    torch.manual_seed(0)
    kv_bytes = batch * (context + nodes) * kv_heads * head_dim * 4
    num_sets = max(2, min(64, int(ROTATED_BYTES / kv_bytes)))
    per_set = batch * (context + nodes)
    slots = torch.randperm(num_sets * per_set, device="cuda").view(num_sets, per_set)
    parent = [-1] + [int(torch.randint(max(0, j - 8), j, ())) for j in range(1, nodes)]
    words, depth = torch.zeros(nodes, (nodes + 31) // 32, dtype=torch.int64), [0] * nodes
    for j, above in enumerate(parent):
        if above >= 0:
            words[j], depth[j] = words[above], depth[above] + 1
        words[j, j // 32] |= 1 << (j % 32)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    return Problem(
        batch,
        context,
        nodes,
        heads,
        kv_heads,
        head_dim,
        sets=[
            {
                "q": normal(batch * nodes, heads, head_dim),
                "out": torch.full((batch * nodes, heads, head_dim), float("nan"), device="cuda", dtype=torch.bfloat16),
                "prefix_slots": slots[i, : batch * context].contiguous(),
                "node_slots": slots[i, batch * context :].contiguous(),
            }
            for i in range(num_sets)
        ],
        k_pool=normal(num_sets * per_set, kv_heads, head_dim),
        v_pool=normal(num_sets * per_set, kv_heads, head_dim),
        ancestors=words.cuda().expand(batch, -1, -1).contiguous(),
        depth=torch.tensor(depth, device="cuda").expand(batch, -1).contiguous(),
        prefix_indptr=torch.arange(batch + 1, device="cuda", dtype=torch.int32) * context,
    )


def our_calls(problem: Problem, config: TreeAttentionConfig | None = None, implementation: str | None = None) -> list:
    """A call for each set, on scratch that they share as layers do."""
    scratch = None
    if config is None and implementation in (None, "triton"):
        scratch = TreeAttentionScratch.allocate(
            problem.batch,
            (problem.nodes,),
            problem.heads,
            problem.kv_heads,
            problem.head_dim,
            problem.head_dim,
            torch.bfloat16,
            "cuda",
        )

    return calls_of(problem, partial(tree_attention, implementation=implementation, scratch=scratch, config=config))


def calls_of(problem: Problem, attend: Callable[..., torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
    """A call of `attend`, which takes `tree_attention`'s arguments, for each set."""

    def call(tensors: dict) -> torch.Tensor:
        return attend(
            tensors["q"],
            problem.k_pool,
            problem.v_pool,
            problem.prefix_indptr,
            tensors["prefix_slots"],
            tensors["node_slots"],
            problem.ancestors,
            problem.depth,
            problem.scale,
            out=tensors["out"],
        )

    return [partial(call, tensors) for tensors in problem.sets]


def sglang_calls(problem: Problem) -> list:
    """The call of triton_backend.py:forward_extend in target verify with a FULL_MASK (SGLang 0.5.23)."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    batch, nodes, keys = problem.batch, problem.nodes, problem.context + problem.nodes
    mask = torch.ones(batch, nodes, keys, dtype=torch.bool, device="cuda")
    mask[:, :, problem.context :] = ancestor_matrix(problem.ancestors, nodes)
    mask = mask.flatten()
    query_indptr = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * nodes
    mask_indptr = torch.arange(batch + 1, device="cuda", dtype=torch.int64) * nodes * keys

    def call(tensors: dict, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        extend_attention_fwd(
            tensors["q"],
            k,
            v,
            tensors["out"],
            problem.k_pool,
            problem.v_pool,
            query_indptr,
            problem.prefix_indptr,
            tensors["prefix_slots"],
            mask,
            True,
            mask_indptr,
            nodes,
            1.0,
            1.0,
            problem.scale,
            logit_cap=0.0,
        )
        return tensors["out"]

    return [
        lambda tensors=tensors, k=problem.k_pool[tensors["node_slots"]], v=problem.v_pool[tensors["node_slots"]]: call(
            tensors, k, v
        )
        for tensors in problem.sets
    ]


def max_abs_error(problem: Problem, calls: list[Callable[[], torch.Tensor]]) -> float:
    """Of the first set, against the naive version on the same bfloat16 inputs with float32 arithmetic."""
    problem.sets[0]["out"].fill_(float("nan"))
    ours = calls[0]().float().clone()
    return (ours - our_calls(problem, implementation="naive")[0]().float()).abs().max().item()


def measure(
    batch: int,
    context: int,
    nodes: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    with_sglang: bool,
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
) -> list[dict]:
    """A row for each implementation that serves the shape."""
    problem = make_problem(batch, context, nodes, heads, kv_heads, head_dim)
    sglang_us = microseconds(sglang_calls(problem), replays=10) if with_sglang else None
    read_floor = batch * (context + nodes) * kv_heads * head_dim * 4 / BYTES_PER_SECOND * 1e6
    matmul_floor = 4 * batch * nodes * heads * head_dim * (context + nodes) / FLOP_PER_SECOND * 1e6
    rows = []
    for implementation in implementations:
        try:
            error = max_abs_error(problem, our_calls(problem, implementation=implementation))
        except UnsupportedTreeAttention:
            continue
        ours_us = microseconds(our_calls(problem, implementation=implementation))
        rows.append(
            {
                "batch": batch,
                "context": context,
                "nodes": nodes,
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "implementation": implementation,
                "max_abs_error": error,
                "ours_us": ours_us,
                "sglang_us": sglang_us,
                "ratio": sglang_us / ours_us if with_sglang else None,
                "kv_read_floor_us": read_floor,
                "matmul_floor_us": matmul_floor,
                "times_floor": ours_us / max(read_floor, matmul_floor),
            }
        )
    return rows


def measure_splits(
    batch: int, context: int, nodes: int, heads: int, kv_heads: int, head_dim: int, splits: list[int]
) -> list[dict]:
    """A row for each variant of the CUDA kernel with so many splits, to those that are served."""
    problem, device = make_problem(batch, context, nodes, heads, kv_heads, head_dim), torch.cuda.current_device()
    served = chosen(device, torch.bfloat16, batch, nodes, kv_heads, heads // kv_heads, head_dim, False)
    rows = []
    for number in sorted({*splits, served.splits}):
        if number > served.splits:
            continue
        calls = calls_of(problem, partial(tree_attention_cuda, variant=replace(served, splits=number)))
        rows.append(
            {
                "batch": batch,
                "context": context,
                "nodes": nodes,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "splits": number,
                "chosen": number == served.splits,
                "max_abs_error": max_abs_error(problem, calls),
                "ours_us": microseconds(calls),
            }
        )
    return rows


COLUMNS = (
    "batch",
    "context",
    "nodes",
    "kv_heads",
    "head_dim",
    "implementation",
    "sglang_us",
    "ours_us",
    "ratio",
    "kv_read_floor_us",
    "matmul_floor_us",
    "times_floor",
    "max_abs_error",
)


SPLIT_COLUMNS = (
    "batch",
    "context",
    "nodes",
    "kv_heads",
    "head_dim",
    "splits",
    "chosen",
    "ours_us",
    "max_abs_error",
)


def print_row(row: dict, columns: tuple[str, ...]) -> None:
    values = [row[name] for name in columns]
    cells = (f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value) for value in values)
    print(" ".join(f"{cell:>{len(name)}}" for cell, name in zip(cells, columns)), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval tree_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=result_file, required=True, help="JSON file to write")
    parser.add_argument("--only-ours", action="store_true", help="skip SGLang's kernel (where sglang is missing)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: Qwen3-8B)")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--points", action="store_true", help="the few shapes that decide serving, not the whole grid")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument(
        "--splits", nargs="+", type=int, help="time variants of the CUDA kernel with so many splits instead"
    )
    parser.add_argument("--commit", help="recorded in the file; default: git's HEAD")
    arguments = parser.parse_args(arguments)
    need_gpu(parser)
    meta = describe(arguments.commit)
    rows = []
    heads = arguments.heads, arguments.kv_heads, arguments.head_dim
    if arguments.splits:
        shapes, columns = SPLIT_POINTS, SPLIT_COLUMNS
        measured = partial(measure_splits, splits=arguments.splits)
    else:
        shapes, columns = POINTS if arguments.points else [(*shape, *heads) for shape in SHAPES], COLUMNS
        options = {"with_sglang": not arguments.only_ours, "implementations": tuple(arguments.implementations)}
        measured = partial(measure, **options)
    print(" ".join(columns))
    for shape in shapes:
        for row in measured(*shape):
            rows.append(row)
            print_row(row, columns)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
