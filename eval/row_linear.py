"""Time the variants of row_linear on a Weaver layer's products, Qwen3.6-27B shapes, on one GPU.

    python -m sgl_specflow.eval row_linear --out eval/results/row_linear_h200.json

One CUDA graph holds a call for each of several weights, which together exceed the L2 cache; `us` is the median replay time
over the number of calls. The calls follow each other, so a dependent one overlaps with the one before it, as all of a layer
do but the one behind attention. `torch_us` is the bare product by torch, without its ends. `now` marks the variant that
`choose` takes. Variants of the same number of warps are held to the same bits.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F
from sgl_specflow.eval.arguments import need_gpu, result_file
from sgl_specflow.eval.record import describe
from sgl_specflow.eval.shapes import WEAVER_27B
from sgl_specflow.eval.timing import microseconds
from sgl_specflow.kernels import row_linear
from sgl_specflow.kernels.nvrtc import architecture

from sgl_specflow.drafter.weaver import WeaverConfig

ROTATED_BYTES = 200e6  # several times the 60 MB of L2
ROWS = (8, 16, 32)
FORM = ("warps", "tile", "dependent")


def products(config: WeaverConfig) -> dict[str, tuple[row_linear.Ends, int, int]]:
    """Ends, depth and features of a layer's products, as `cuda_steps` has them."""
    rank, inner = config.d_rank, config.mlp_dim
    return {
        "qkv": (row_linear.Ends(norm=True, bias=True), rank, 3 * rank),
        "o": (row_linear.Ends(residual=True), rank, rank),
        "gate_up": (row_linear.Ends(norm=True, bias=True, gated=True), rank, 2 * inner),
        "down": (row_linear.Ends(bias=True, residual=True), inner, rank),
    }


def variants(ends: row_linear.Ends, depth: int, features: int, rows: int) -> list[row_linear.Variant]:
    return row_linear.alternatives(torch.bfloat16, ends, rows, depth, features, *row_linear.abilities(0))


def compile_all(row_counts: list[int]) -> None:
    """Every product's variants into the disk cache, several at a time."""
    pairs = itertools.product(products(WEAVER_27B).values(), row_counts)
    wanted = {form for shape, rows in pairs for form in variants(*shape, rows)}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(row_linear.compile_for, wanted, [architecture(0)] * len(wanted)))


def measure(
    product: str, ends: row_linear.Ends, depth: int, features: int, rows: int, forms: int | None = None
) -> list[dict]:
    """A row of figures for each variant (of the first `forms`, if given), fastest first. Raises AssertionError where two
    variants of a number of warps disagree."""
    torch.manual_seed(0)
    random = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    weights = [random(features, depth) / depth**0.5 for _ in range(max(2, int(ROTATED_BYTES / (2 * features * depth))))]
    x, bias = random(rows, depth), random(features) if ends.bias else None
    residual = random(rows, features) if ends.residual else None
    now = row_linear.choose(x.dtype, ends, rows, depth, features, *row_linear.abilities(0))
    torch_us = microseconds([functools.partial(F.linear, x, weight) for weight in weights])
    outs, figures = {}, []
    for form in variants(ends, depth, features, rows)[:forms]:
        arguments = bias, residual, ends.norm, ends.gated, form
        out = row_linear.row_linear(x, weights[0], *arguments)
        assert torch.equal(out, outs.setdefault(form.warps, out)), form
        taken = microseconds([functools.partial(row_linear.row_linear, x, weight, *arguments) for weight in weights])
        row = {"product": product, "rows": rows} | {name: getattr(form, name) for name in FORM}
        figures.append(row | {"us": taken, "torch_us": torch_us, "now": form == now})
    return sorted(figures, key=lambda row: row["us"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval row_linear", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=result_file, required=True, help="JSON file to write")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of x (%(default)s)")
    parser.add_argument("--commit", help="recorded in the file; default: git's HEAD")
    options = parser.parse_args(arguments)
    need_gpu(parser)
    compile_all(options.rows)
    rows = []
    for (product, shape), count in itertools.product(products(WEAVER_27B).items(), options.rows):
        for row in measure(product, *shape, count):
            rows.append(row)
            print(json.dumps(row), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    meta = describe(options.commit) | {"config": WEAVER_27B.to_dict()}
    options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
