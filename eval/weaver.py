"""Time the Weaver's construction of trees in a CUDA graph, Qwen3.6-27B shapes with random weights, on one GPU.

    python -m sgl_specflow.eval weaver --out eval/results/weaver_construction_h200.json

One graph holds a whole construction from pools to tree (prefix, all rounds, layout), for one budget, width, number of
rounds and batch; a figure is the median replay time. The head's pass, the pools and the verify pass are not in it:
--step-ms BATCH:BUDGET:MS gives a measured step of the server, of which the rows of the default width then state the share.
"""

import argparse
import functools
import itertools
import json

import torch
from sgl_specflow.eval.arguments import need_gpu, result_file
from sgl_specflow.eval.record import describe
from sgl_specflow.eval.shapes import WEAVER_27B, random_weaver
from sgl_specflow.eval.timing import microseconds

from sgl_specflow.drafter.weaver import FoldedWeaver, WeaverConfig
from sgl_specflow.tree import expansion_rounds, expansion_width

VOCABULARY = 248320
CHILDREN = 16


def make_weaver(
    config: WeaverConfig, vocabulary: int, device: str, dtype: torch.dtype, implementation: str | None = None
) -> FoldedWeaver:
    """Random weights of the given shape over a random embedding and LM head."""
    tensors = random_weaver(config, device)
    embedding, lm_head = (
        torch.randn(vocabulary, width, device=device, dtype=dtype) / width**0.5
        for width in (config.d_embed, config.d_model)
    )
    return FoldedWeaver(config, tensors, embedding, lm_head, dtype, implementation)


def make_inputs(config: WeaverConfig, vocabulary: int, batch: int, device: str, dtype: torch.dtype) -> tuple:
    """One step's inputs of `FoldedWeaver.build_tree`."""
    tokens = torch.rand(batch, config.depth, vocabulary, device=device).topk(config.candidate_pool_size).indices
    scores = torch.randn(tokens.shape, device=device).mul(3).sort(descending=True).values
    return (
        torch.randint(0, vocabulary, (batch,), device=device),
        torch.randn(batch, config.d_model, device=device, dtype=dtype),
        torch.randn(batch, config.depth, config.d_model, device=device, dtype=dtype),
        tokens,
        scores,
    )


def _steps(items: list[str]) -> dict[tuple[int, int], float]:
    parts = (item.split(":") for item in items)
    return {(int(batch), int(budget)): float(ms) for batch, budget, ms in parts}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval weaver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=result_file, required=True, help="JSON file to write")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument(
        "--rounds", type=int, nargs="*", default=[], help="instead of the default of a budget and width"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--implementations",
        type=lambda text: text.split(","),
        default=["triton", "cuda"],
        help="of a round's pieces, by commas: triton, cuda (both)",
    )
    parser.add_argument("--step-ms", nargs="*", default=[], help="BATCH:BUDGET:MS of a server's step, default width")
    parser.add_argument("--commit", help="recorded in the file; default: git's HEAD")
    options = parser.parse_args(arguments)
    need_gpu(parser)
    steps = _steps(options.step_ms)
    shapes = list(itertools.product(options.batches, options.budgets, options.widths, options.rounds or [None]))
    rows = []
    meta = describe(options.commit) | {"config": WEAVER_27B.to_dict(), "vocabulary": VOCABULARY, "children": CHILDREN}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for implementation in options.implementations:
        weaver = make_weaver(WEAVER_27B, VOCABULARY, "cuda", torch.bfloat16, implementation)
        for batch, budget, width, rounds in shapes:
            inputs = make_inputs(WEAVER_27B, VOCABULARY, batch, "cuda", torch.bfloat16)
            rounds = rounds or expansion_rounds(budget, width)
            build = functools.partial(weaver.build_tree, *inputs, budget, width, rounds, CHILDREN)
            step = steps.get((batch, budget)) if width == expansion_width(budget) else None
            taken = microseconds([build])
            row = {"implementation": implementation, "budget": budget, "width": width, "batch": batch, "rounds": rounds}
            row |= {"construct_us": taken, "step_ms": step, "share": taken / 1000 / step if step else None}
            rows.append(row)
            print(json.dumps(row), flush=True)
            options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
