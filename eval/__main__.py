"""python -m sgl_specflow.eval COMMAND: the figures in README, docs and eval/results come from these, and offline accept
lengths from `sgl_specflow.training evaluate` and `ablate`."""

import importlib
import sys

from sgl_specflow.launch.server import end_servers_on_sigterm

COMMANDS = {
    "acceptance": "accept length and tokens a second of draft heads through the server",
    "draft_tree": "from the draft head's logits to a tree, on a GPU",
    "experts": "distinct experts a pass, and the floor of step inflation that they imply, on a GPU",
    "fp8_linear": "products with FP8 weights against cuBLAS, on a GPU",
    "gdn": "Gated Delta Net tree verify against SGLang's recurrent one, on a GPU",
    "inflation": "the time of a speculative step over a plain one, full-size shapes, on a GPU",
    "lossless": "greedy tree decoding against plain decoding, token for token",
    "merge": "the rows of several result files in one, each with the run that measured it",
    "near_ties": "where greedy decoding in bfloat16 diverges, and the gap of the logits there",
    "plots": "the result files as SVG charts in docs/plots",
    "quantised_target": "greedy tree decoding of a target that SGLang quantises to FP8, against plain, on a GPU",
    "row_linear": "products of few rows with their ends, every form of the kernel, on a GPU",
    "throughput": "decoded tokens a second beside plain decoding, servers up together, rounds in turn",
    "tree_attention": "tree attention against SGLang's tree verify, on a GPU",
    "weaver": "the Weaver's construction of trees in a CUDA graph, on a GPU",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print("usage: python -m sgl_specflow.eval COMMAND [options]\n", file=sys.stderr)
        for name, purpose in COMMANDS.items():
            print(f"  {name:16} {purpose}", file=sys.stderr)
        return 2
    end_servers_on_sigterm()
    try:
        return importlib.import_module(f"sgl_specflow.eval.{sys.argv[1]}").main(sys.argv[2:]) or 0
    except (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
