"""Greedy tree decoding of a target that SGLang quantises to FP8 as it loads it, against plain decoding, token by token.

    python -m sgl_specflow.eval quantised_target --model-path FOLDER --data DATA \
        --out eval/results/quantised_target_smollm2_h200.json

Both servers take the bfloat16 weights with `--quantization fp8`. On Hopper, SGLang 0.5.23 then gives each output channel
of a linear layer's weight a scale, and each token's activations one of their own, their largest magnitude over 448, for
each product anew; the LM head stays in bfloat16. So no scale depends on what else is in the batch. But a sum taken in
another order may round otherwise, as in bfloat16 (eval near_ties), and an activation whose rounding to FP8 (three bits
after the first) turns with it moves by a sixteenth of itself or more. The control, plain decoding at CONTROL_BATCH against
itself at batch 1, says by how much plain decoding's own logits differ after the same prefix (SmolLM2: some tenths).

For each prompt whose tokens differ this gives the first position of difference, the two tokens, and the gap of their
log-probabilities, which is that of their logits: by the plain server and by the tree server as they decoded (`gap_plain`,
`gap_tree`; each is at least 0, since each chose its own token; null where the other token is none of its five likeliest),
and by the plain server that reads the same prefix as a prompt (`gap_prefill`, above 0 where plain decoding's token is the
likelier). gap_plain + gap_tree is how far the two disagree about the two logits, |gap_plain - gap_prefill| how far the
plain server disagrees with itself. In the control's row the tree server's names hold plain decoding's at CONTROL_BATCH.

The weights in float32 are no reference here, as they are to near_ties: unquantised they are another model. So there is no
bound, and the exit status says only that all was measured. Answers are not compared after their first difference.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from sgl_specflow.eval.arguments import need_gpu, result_file
from sgl_specflow.eval.backends import Decoded, TopTokenBackend, empty_prefix_cache
from sgl_specflow.eval.heads import HEADS, SHIPPED, tree_server
from sgl_specflow.eval.lossless import answers_in_order
from sgl_specflow.eval.near_ties import counts, gap, parting
from sgl_specflow.eval.prompts import rows as test_rows
from sgl_specflow.eval.record import describe
from sgl_specflow.launch.generation import Job
from sgl_specflow.launch.quickstart import server_flags
from sgl_specflow.launch.server import Server, start

QUANTISATION = "fp8"
CONTROL_BATCH = 8
START_SECONDS = 900

Prefill = Callable[[list[int]], dict[int, float]]
"""From a prefix to the log-probabilities (natural) of the likeliest tokens after it."""


def prefill_of(server: Server) -> Prefill:
    backend = TopTokenBackend(server.url)
    params = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}

    def prefill(prefix: list[int]) -> dict[int, float]:
        empty_prefix_cache(server.url)  # it holds the keys and values that decoding wrote
        return backend.run(backend.continuation(prefix, params)).top[0]

    return prefill


def divergence(index: int, plain: Decoded, tree: Decoded, prefill: Prefill) -> dict | None:
    """Prompt `index`'s first difference and its gaps (natural log units); None if the answers are equal.

    Where one answer merely ends before the other, the missing token and all gaps are None.
    """
    found = parting(index, plain, tree)
    if found is None:
        return None
    at, ours, theirs = found["token"], found["plain_token"], found["tree_token"]
    if ours is None or theirs is None:
        return found | dict.fromkeys(("gap_plain", "gap_tree", "gap_prefill"))
    return found | {
        "gap_plain": gap(plain.top[at], ours, theirs),
        "gap_tree": gap(tree.top[at], theirs, ours),
        "gap_prefill": gap(prefill(plain.prompt + plain.tokens[:at]), ours, theirs),
    }


def compare(plain: list[Decoded], tree: list[Decoded], prefill: Prefill) -> dict:
    """The part of a row that two lists of answers to the same prompts give. Means are over what has both gaps."""
    row = counts(plain, [divergence(i, a, b, prefill) for i, (a, b) in enumerate(zip(plain, tree, strict=True))])
    gaps = [(item["gap_plain"], item["gap_tree"], item["gap_prefill"]) for item in row["divergences"]]
    servers = [ours + theirs for ours, theirs, _ in gaps if None not in (ours, theirs)]
    itself = [abs(ours - read) for ours, _, read in gaps if None not in (ours, read)]
    return row | {
        "mean_disagreement": mean(servers) if servers else None,
        "mean_prefill_disagreement": mean(itself) if itself else None,
    }


def accept_length(answers: list[Decoded]) -> float:
    """Tokens a verify pass; each answer's first token is prefill's. RuntimeError for an answer without such passes."""
    if not all(answer.verify_steps for answer in answers):
        raise RuntimeError("the tree server reports no verify step for a prompt: it did not speculate")
    return sum(len(answer.tokens) - 1 for answer in answers) / sum(answer.verify_steps for answer in answers)


def summary(rows: list[dict]) -> str:
    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return "\n".join(
        f"quantised_target: {row['algorithm']} batch={row['batch']} identical={row['identical']} of {row['prompts']} "
        f"mean_disagreement={figure(row['mean_disagreement'])} "
        f"mean_prefill_disagreement={figure(row['mean_prefill_disagreement'])} "
        f"accept_length={figure(row['accept_length'])}"
        for row in rows
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval quantised_target",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", required=True, help="weights that are not quantised")
    parser.add_argument("--data", type=Path, required=True, help="folder of the prompt files")
    parser.add_argument("--out", type=result_file, required=True)
    parser.add_argument("--heads", type=Path, default=HEADS, help="folder of the heads (default: the shipped ones)")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--parallel", type=int, choices=(1, 2), default=1, help="servers at once (default: 1)")
    parser.add_argument("--prompts", type=int, default=24, help="of GSM8K (default: 24)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--logs", type=Path, default=Path(".cache/logs"))
    parser.add_argument("--commit")
    parser.add_argument("flags", nargs="*", help="further server flags, after --")
    options = parser.parse_args(arguments)
    need_gpu(parser)

    params = {"temperature": 0.0, "max_new_tokens": options.tokens}
    chats = test_rows(options.data, "gsm8k")[: options.prompts]
    jobs = [Job(i, i, None, messages, params) for i, messages in enumerate(chats)]
    base = [*server_flags(options.model_path, True, "bfloat16"), *options.flags]
    base += ["--quantization", QUANTISATION]
    tree_flags, environment = tree_server("jetflow", options.budget, options.heads / SHIPPED["jetflow"][0])
    result = {"meta": describe(options.commit) | {"dtype": "bfloat16", "quantization": QUANTISATION}, "rows": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def tree_answers() -> tuple[list[Decoded], float]:
        log = options.logs / "quantised-target-jetflow.log"
        with start([*base, *tree_flags], log=log, environment=environment, timeout=START_SECONDS) as server:
            answers = answers_in_order(server, jobs, 1, TopTokenBackend)
        return answers, accept_length(answers)

    def add_row(row: dict) -> None:
        result["rows"].append(row)
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    with ThreadPoolExecutor(1) as pool:
        tree = pool.submit(tree_answers)
        if options.parallel == 1:
            tree.result()
        with start(base, log=options.logs / "quantised-target-plain.log", timeout=START_SECONDS) as server:
            plain, control = (answers_in_order(server, jobs, batch, TopTokenBackend) for batch in (1, CONTROL_BATCH))
            row = {"algorithm": "plain", "budget": None, "batch": CONTROL_BATCH, "plain_batch": 1}
            add_row(row | {"accept_length": None} | compare(plain, control, prefill_of(server)))
            row = {"algorithm": "jetflow", "budget": options.budget, "batch": 1, "plain_batch": 1}
            answers, length = tree.result()
            add_row(row | {"accept_length": length} | compare(plain, answers, prefill_of(server)))
    print(summary(result["rows"]))
    return 0
