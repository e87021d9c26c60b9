"""Time fp8_linear's kernels against bfloat16 and FP8 products of cuBLAS, on one GPU.

    python -m sgl_specflow.eval fp8_linear --out eval/results/fp8_linear.json
    python -m sgl_specflow.eval fp8_linear --sweep --rows 16 --out eval/results/fp8_linear_variants.json

The shapes are those of Qwen3-8B's draft head and LM head. One CUDA graph holds a call for each of several weights, which
together exceed the L2 cache; a figure is the median replay time over the number of calls, of which there are at least
`LEAST_CALLS`, so that the graph's own start counts little. `scaled_mm` multiplies
activations in FP8 with a scale a row, whose making is not counted. `steps` sums a step's products: `LAUNCHES` of each shape.
`max_error` is ours against the float64 product, in parts of |x| |weight row|.

`--sweep` times the variants of `fp8_linear.cu` that `fp8_linear_cuda.alternatives` names instead, fastest first:
`alone_us` is one of a row of products, `behind_us` one product and an elementwise kernel before it that writes x (as a
norm or an activation does in a layer; a dependent launch can overlap with it); both only compare variants of a shape.
`now` marks the variant that `choose` takes. Every variant's product is held to the same bits as others' of its cluster size.
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
from sgl_specflow.eval.arguments import need_gpu, numbers, result_file
from sgl_specflow.eval.record import describe
from sgl_specflow.eval.timing import microseconds
from sgl_specflow.kernels import fp8_linear_cuda
from sgl_specflow.kernels.fp8_linear import fp8_linear, fp8_linear_triton, quantise_rows
from sgl_specflow.kernels.nvrtc import architecture

BYTES_PER_SECOND = 4.8e12  # an H200's, by its data sheet
ROTATED_BYTES = 400e6  # several times the 60 MB of L2
SHAPES = {  # features, depth
    "o_proj": (4096, 4096),
    "gate_up_proj": (24576, 4096),
    "down_proj": (4096, 12288),
    "lm_head": (151936, 4096),
}
LAUNCHES = {"o_proj": 5, "gate_up_proj": 5, "down_proj": 5, "lm_head": 1}
ROWS = (16, 32, 64)
TIMES = ("ours_us", "triton_us", "bf16_us", "scaled_mm_us", "weight_floor_us")
COLUMNS = ("layer", "rows", "features", "depth", *TIMES, "max_error")
LEAST_CALLS = 16  # of one graph
FORM = ("cluster", "tile", "stages", "kept_steps", "dependent")
SWEEP_COLUMNS = ("layer", "rows", *FORM, "alone_us", "behind_us", "now")
_FEATURES_AT_ONCE = 8192


def make_weights(features: int, depth: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Copies of different bfloat16 weights, and each as `quantise_rows` makes it."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for _ in range(max(2, int(ROTATED_BYTES / (features * depth)))):
        weight = torch.randn(features, depth, device=device, dtype=torch.bfloat16, generator=generator)
        made.append((weight, *quantise_rows(weight)))
    return made


def microseconds_of(call, weights: list) -> float:
    """Median time of `call(*pair)` over the weights, in a graph of `LEAST_CALLS` or more."""
    turns = -(-LEAST_CALLS // len(weights))
    return microseconds([lambda pair=pair: call(*pair) for pair in weights * turns])


def scaled_mm_us(x: torch.Tensor, weights: list) -> float | None:
    """torch._scaled_mm with row-wise scales on both sides; None where this build or device has it not."""
    quantised, scale = quantise_rows(x)

    def call(_, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            quantised, weight.T, scale_a=scale[:, None], scale_b=weight_scale[None], out_dtype=torch.bfloat16
        )

    try:
        call(*weights[0])
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    return microseconds_of(call, weights)


def max_error(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> float:
    out, wide, worst = fp8_linear(x, weight, scale), x.double(), 0.0
    for first in range(0, weight.shape[0], _FEATURES_AT_ONCE):
        part = slice(first, first + _FEATURES_AT_ONCE)
        real = weight[part].double() * scale[part].double()[:, None]
        size = wide.norm(dim=1)[:, None] * real.norm(dim=1)
        worst = max(worst, ((out[:, part].double() - wide @ real.T).abs() / size).max().item())
    return worst


def measure(layer: str, row_counts: tuple[int, ...], device: str) -> list[dict]:
    """A row of figures for each number of rows."""
    features, depth = SHAPES[layer]
    weights, figures = make_weights(features, depth, device), []
    for rows in row_counts:
        x = torch.randn(rows, depth, device=device, generator=torch.Generator(device).manual_seed(1)).bfloat16()
        shape = {"layer": layer, "rows": rows, "features": features, "depth": depth}
        floor = {"weight_floor_us": features * depth / BYTES_PER_SECOND * 1e6}
        figures.append(shape | times(x, weights) | floor | {"max_error": max_error(x, *weights[0][1:])})
    return figures


def times(x: torch.Tensor, weights: list) -> dict:
    return {
        "ours_us": microseconds_of(lambda _, *pair: fp8_linear(x, *pair), weights),
        "triton_us": microseconds_of(lambda _, *pair: fp8_linear_triton(x, *pair), weights),
        "bf16_us": microseconds_of(lambda weight, *_: torch.matmul(x, weight.T), weights),
        "scaled_mm_us": scaled_mm_us(x, weights),
    }


def steps(figures: list[dict]) -> list[dict]:
    """The time of all products of a step, for each number of rows; None where one is missing."""
    sums = []
    for rows in dict.fromkeys(row["rows"] for row in figures):
        own = [row for row in figures if row["rows"] == rows]
        total = {"rows": rows}
        for name in TIMES:
            whole = all(row[name] is not None for row in own)
            total[name] = sum(LAUNCHES[row["layer"]] * row[name] for row in own) if whole else None
        sums.append(total)
    return sums


def variants(rows: int, features: int, depth: int) -> list[fp8_linear_cuda.Variant]:
    return fp8_linear_cuda.alternatives(torch.bfloat16, rows, depth, features, fp8_linear_cuda.multiprocessors(0))


def compile_all(row_counts: tuple[int, ...], target: str) -> None:
    """Every shape's variants into the disk cache, several at a time."""
    wanted = {form for rows in row_counts for shape in SHAPES.values() for form in variants(rows, *shape)}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(fp8_linear_cuda.compile_for, wanted, [target] * len(wanted)))


def sweep(layer: str, row_counts: tuple[int, ...], device: str) -> list[dict]:
    """A row of figures for each number of rows and each variant, fastest first. Raises AssertionError where two variants
    of a cluster size disagree."""
    features, depth = SHAPES[layer]
    weights, figures = make_weights(features, depth, device), []
    for rows in row_counts:
        normal = torch.randn(rows, depth, device=device, generator=torch.Generator(device).manual_seed(1)).bfloat16()
        now = fp8_linear_cuda.choose(normal.dtype, rows, depth, features, fp8_linear_cuda.multiprocessors(0))
        outs, own = {}, []
        for variant in variants(rows, features, depth):
            out = fp8_linear_cuda.fp8_linear_cuda(normal, *weights[0][1:], variant)
            assert torch.equal(out, outs.setdefault(variant.cluster, out)), variant
            own.append(
                {"layer": layer, "rows": rows}
                | {name: getattr(variant, name) for name in FORM}
                | form_times(normal, weights, variant)
                | {"now": variant == now}
            )
        figures += sorted(own, key=lambda row: row["behind_us"])
    return figures


def form_times(normal: torch.Tensor, weights: list, variant: fp8_linear_cuda.Variant) -> dict:
    x = normal.clone()

    def alone(_, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return fp8_linear_cuda.fp8_linear_cuda(normal, weight, scale, variant)

    def behind(_, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        torch.mul(normal, 0.5, out=x)
        return fp8_linear_cuda.fp8_linear_cuda(x, weight, scale, variant)

    return {"alone_us": microseconds_of(alone, weights), "behind_us": microseconds_of(behind, weights)}


def print_row(row: dict, columns: tuple[str, ...] = COLUMNS) -> None:
    cells = (row.get(column) for column in columns)
    texts = (f"{cell:.4g}" if isinstance(cell, float) else "-" if cell is None else str(cell) for cell in cells)
    print(" ".join(f"{text:>{max(len(column), 12)}}" for text, column in zip(texts, columns)), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval fp8_linear", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=result_file, required=True, help="JSON file to write")
    parser.add_argument("--rows", type=numbers, default=list(ROWS), help="rows of activations, by commas (%(default)s)")
    parser.add_argument("--sweep", action="store_true", help="time the variants of our kernel against each other")
    parser.add_argument("--commit", help="recorded in the file; default: git's HEAD")
    arguments = parser.parse_args(arguments)
    row_counts = tuple(arguments.rows)
    need_gpu(parser)
    meta, figures = describe(arguments.commit), []
    if arguments.sweep:
        compile_all(row_counts, architecture(0))
    columns = SWEEP_COLUMNS if arguments.sweep else COLUMNS
    print_row(dict(zip(columns, columns)), columns)
    for layer in SHAPES:
        for row in (sweep if arguments.sweep else measure)(layer, row_counts, "cuda"):
            figures.append(row)
            print_row(row, columns)
    result = {"meta": meta, "rows": figures}
    if not arguments.sweep:
        result["steps"] = steps(figures)
        for row in result["steps"]:
            print_row({"layer": "step"} | row)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
