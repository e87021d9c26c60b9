"""Time fp8_linear's kernels against bfloat16 and FP8 products of cuBLAS, on one GPU.

    python -m sgl_specflow.eval fp8_linear --out eval/results/fp8_linear.json

The shapes are those of Qwen3-8B's draft head and LM head. One CUDA graph holds a call for each of several weights, which
together exceed the L2 cache; a figure is the median replay time over the number of calls. `scaled_mm` multiplies
activations in FP8 with a scale a row, whose making is not counted. `steps` sums a step's products: `LAUNCHES` of each shape.
`max_error` is ours against the float64 product, in parts of |x| |weight row|.
"""

import argparse
import json
from pathlib import Path

import torch
from sgl_specflow.eval.record import describe
from sgl_specflow.eval.timing import microseconds
from sgl_specflow.kernels.fp8_linear import fp8_linear, fp8_linear_triton, quantise_rows

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
_FEATURES_AT_ONCE = 8192


def make_weights(features: int, depth: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Copies of different bfloat16 weights, and each as `quantise_rows` makes it."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for _ in range(max(2, int(ROTATED_BYTES / (features * depth)))):
        weight = torch.randn(features, depth, device=device, dtype=torch.bfloat16, generator=generator)
        made.append((weight, *quantise_rows(weight)))
    return made


def scaled_mm_us(x: torch.Tensor, weights: list) -> float | None:
    """torch._scaled_mm with row-wise scales on both sides; None where this build or device has it not."""
    quantised, scale = quantise_rows(x)

    def call(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            quantised, weight.T, scale_a=scale[:, None], scale_b=weight_scale[None], out_dtype=torch.bfloat16
        )

    try:
        call(*weights[0][1:])
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    return microseconds([lambda pair=pair: call(*pair[1:]) for pair in weights])


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
        "ours_us": microseconds([lambda w=w: fp8_linear(x, *w[1:]) for w in weights]),
        "triton_us": microseconds([lambda w=w: fp8_linear_triton(x, *w[1:]) for w in weights]),
        "bf16_us": microseconds([lambda w=w: torch.matmul(x, w[0].T) for w in weights]),
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


def print_row(row: dict) -> None:
    cells = (row.get(column) for column in COLUMNS)
    texts = (f"{cell:.4g}" if isinstance(cell, float) else "-" if cell is None else str(cell) for cell in cells)
    print(" ".join(f"{text:>{max(len(column), 12)}}" for text, column in zip(texts, COLUMNS)), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="rows of activations, by commas (%(default)s)")
    parser.add_argument("--commit", help="recorded in the file; default: git's HEAD")
    arguments = parser.parse_args(arguments)
    row_counts = tuple(int(rows) for rows in arguments.rows.split(","))
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    meta, figures = describe(arguments.commit), []
    print_row(dict(zip(COLUMNS, COLUMNS)))
    for layer in SHAPES:
        for row in measure(layer, row_counts, "cuda"):
            figures.append(row)
            print_row(row)
    totals = steps(figures)
    for row in totals:
        print_row({"layer": "step"} | row)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"meta": meta, "rows": figures, "steps": totals}, indent=1) + "\n")


if __name__ == "__main__":
    main()
