"""Time what stands between the draft head's logits and a tree in one step, in a CUDA graph, on one GPU.

    python -m sgl_specflow.eval draft_tree --out eval/results/draft_tree_h200.json

Logits are random and of two kinds: "flat", whose tokens are all about as likely, as those of made-up weights are, and
"peaked", where a token of each depth has most of the probability, as a trained head's have; trees are broad or deep with
them. top_us is the choice of each depth's candidates (`best_tokens`), build_us the tree of them (`tree_from_marginals`);
figures are median replay times.
"""

import argparse
import functools
import json

import torch
from sgl_specflow.eval.arguments import need_gpu, result_file
from sgl_specflow.eval.record import describe
from sgl_specflow.eval.timing import microseconds
from sgl_specflow.kernels.tree_step import best_tokens, tree_from_marginals

from sgl_specflow.tree import TokenTree

DEPTH, WIDTH, VOCABULARY = 15, 16, 151936  # of a block of 16, the default width, Qwen3's
KINDS = {"flat": (0.05, 0.0), "peaked": (1.0, 14.0)}  # deviation of the logits, and what the likeliest has above it


def random_logits(kind: str, requests: int, vocabulary: int, device: str) -> torch.Tensor:
    """bfloat16 [requests * DEPTH, vocabulary]."""
    deviation, above = KINDS[kind]
    logits = torch.randn(requests * DEPTH, vocabulary, generator=torch.Generator().manual_seed(0)) * deviation
    logits[:, 17] += above
    return logits.to(device, torch.bfloat16)


def candidates(logits: torch.Tensor, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and tokens, both [requests, DEPTH, WIDTH]."""
    values, tokens, total = best_tokens(logits, WIDTH)
    shape = requests, DEPTH, WIDTH
    return (values - total[:, None]).view(shape), tokens.view(shape)


def measure(kind: str, budget: int, requests: int, vocabulary: int = VOCABULARY, device: str = "cuda") -> dict:
    logits = random_logits(kind, requests, vocabulary, device)
    log_probs, tokens = candidates(logits, requests)
    build = functools.partial(tree_from_marginals, torch.zeros_like(tokens[:, 0, 0]), log_probs, tokens, budget)
    tree: TokenTree = build()
    row = {
        "kind": kind,
        "requests": requests,
        "budget": budget,
        "depth": DEPTH,
        "width": WIDTH,
        "vocabulary": vocabulary,
    }
    top, taken = (microseconds([call] * 8) for call in (functools.partial(best_tokens, logits, WIDTH), build))
    return row | {"tree_depth": int(tree.depth.max()), "top_us": top, "build_us": taken, "whole_us": top + taken}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval draft_tree", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=result_file, required=True, help="JSON file to write")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--commit", help="recorded in the file; default: git's HEAD")
    options = parser.parse_args(arguments)
    need_gpu(parser)
    rows = []
    for kind in KINDS:
        for requests in options.requests:
            for budget in options.budgets:
                rows.append(measure(kind, budget, requests))
                print(json.dumps(rows[-1]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"meta": describe(options.commit), "rows": rows}, indent=1) + "\n")
