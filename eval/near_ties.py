"""Where greedy tree decoding in bfloat16 leaves plain decoding, and by what gap of the logits: near ties and no more.

    python -m sgl_specflow.eval near_ties --model-path FOLDER --data DATA --out eval/results/near_ties_smollm2_h200.json

In float32 the two agree token for token (eval lossless). In bfloat16 the same sum taken in another order (another batch
size, another number of query rows) rounds otherwise, and where two logits lie closer than that, the greedy choice may
turn. For each prompt whose tokens differ this gives the first position of difference, the two tokens, and the gap of
their logits: by the plain server and by the tree server as they decoded (`gap_bf16`, `gap_bf16_tree`; each is at least
0, since each server chose its own token; null where the other token is none of its five likeliest), and by the same
weights in float32 over the common prefix (`gap_float32`, above 0 where plain decoding's token is the likelier; in Hugging
Face Transformers: log-probabilities of a server would not say how large the logits are). The control is plain decoding
against itself at another batch size.

gap_bf16 + gap_bf16_tree is how far the two servers disagree about the two logits, after the same prefix. It is given in
units of the top logit's rounding to bfloat16, |logit| * 2^-8 (`units`). Up to LARGEST_UNITS that is a near tie. Beyond, it
is plain decoding's own rounding if the tree server's gap is nearer to the float32 one than plain decoding's is
(`error_bf16`, `error_bf16_tree`). Anything else is unexplained, and the exit status 1. Answers are not compared after
their first difference.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from sgl_specflow.eval.arguments import numbers, result_file
from sgl_specflow.eval.backends import Decoded, TopTokenBackend
from sgl_specflow.eval.heads import HEADS, SHIPPED, tree_server
from sgl_specflow.eval.lossless import answers_in_order
from sgl_specflow.eval.prompts import mixed
from sgl_specflow.eval.record import describe
from sgl_specflow.launch.generation import Job
from sgl_specflow.launch.quickstart import server_flags
from sgl_specflow.launch.server import start

BFLOAT16_ROUNDING = 2.0**-8
"""The largest relative error of one rounding to bfloat16, which keeps eight bits."""

LARGEST_UNITS = 4.0
"""Largest disagreement that counts as a near tie, in roundings of the top logit. Each of the two logits may fall on either
side of a rounding in each of the two servers."""

Logits = Callable[[list[int]], torch.Tensor]


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first position where two answers differ, an answer that ends before the other included; None if equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def parting(index: int, plain: Decoded, tree: Decoded) -> dict | None:
    """Prompt `index`'s first position of difference and the two tokens there; None if the answers are equal.

    Where one answer merely ends before the other, the missing token is None.
    """
    at = first_difference(plain.tokens, tree.tokens)
    if at is None:
        return None
    ours, theirs = (answer.tokens[at] if at < len(answer.tokens) else None for answer in (plain, tree))
    return {"prompt": index, "token": at, "plain_token": ours, "tree_token": theirs}


def divergence(index: int, plain: Decoded, tree: Decoded, exact: Logits) -> dict | None:
    """Prompt `index`'s first difference and its gaps (natural log units); None if the answers are equal.

    Where one answer merely ends before the other, the missing token and all gaps are None.
    """
    found = parting(index, plain, tree)
    if found is None:
        return None
    at, ours, theirs = found["token"], found["plain_token"], found["tree_token"]
    names = ("gap_float32", "gap_bf16", "gap_bf16_tree", "top_logit", "units", "error_bf16", "error_bf16_tree")
    gaps: dict[str, float | None] = dict.fromkeys(names)
    if ours is not None and theirs is not None:
        logits = exact(plain.prompt + plain.tokens[:at])
        exact_gap = gaps["gap_float32"] = (logits[ours] - logits[theirs]).item()
        gaps["gap_bf16"] = gap(plain.top[at], ours, theirs)
        gaps["gap_bf16_tree"] = gap(tree.top[at], theirs, ours)
        gaps["top_logit"] = logits.max().item()
        if None not in (gaps["gap_bf16"], gaps["gap_bf16_tree"]):
            disagreement = gaps["gap_bf16"] + gaps["gap_bf16_tree"]
            gaps["units"] = disagreement / (abs(gaps["top_logit"]) * BFLOAT16_ROUNDING)
            gaps["error_bf16"] = abs(gaps["gap_bf16"] - exact_gap)
            gaps["error_bf16_tree"] = abs(gaps["gap_bf16_tree"] + exact_gap)
    return found | gaps


def gap(top: dict[int, float], chosen: int, other: int) -> float | None:
    """By how much (natural log units) `chosen` is likelier than `other`; None where one is not among `top`."""
    return top[chosen] - top[other] if chosen in top and other in top else None


def counts(plain: list[Decoded], found: list[dict | None]) -> dict:
    """What a row says of plain decoding's answers and their first differences, None where the other is equal."""
    divergences = [item for item in found if item is not None]
    unequal = {item["prompt"]: item["token"] for item in divergences}
    return {
        "prompts": len(plain),
        "identical": len(plain) - len(divergences),
        "tokens_compared": sum(unequal.get(i, len(answer.tokens)) for i, answer in enumerate(plain)),
        "divergences": divergences,
    }


def compare(plain: list[Decoded], tree: list[Decoded], exact: Logits) -> dict:
    """The part of a row that two lists of answers to the same prompts give."""
    row = counts(plain, [divergence(i, a, b, exact) for i, (a, b) in enumerate(zip(plain, tree, strict=True))])
    return row | {
        "largest_gap": max((abs(item["gap_float32"] or 0.0) for item in row["divergences"]), default=0.0),
        "largest_units": max((item["units"] or 0.0 for item in row["divergences"]), default=0.0),
    }


def unexplained(rows: list[dict]) -> list[dict]:
    """Divergences of tree servers that are no near ties: beyond LARGEST_UNITS and further from float32 than plain
    decoding, a token that the other server does not hold likely at all, or an answer that merely ended."""
    trees = [item for row in rows if row["algorithm"] != "plain" for item in row["divergences"]]
    return [
        item
        for item in trees
        if item["units"] is None or (item["units"] > LARGEST_UNITS and item["error_bf16_tree"] >= item["error_bf16"])
    ]


class ExactLogits:
    """The model in float32, in this process."""

    def __init__(self, model: str):
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        self.model.to(self.device).eval()

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> torch.Tensor:
        """Logits after `tokens`, float32 [vocabulary], on the CPU."""
        return self.model(torch.tensor([tokens], device=self.device), logits_to_keep=1).logits[0, -1].cpu()


def summary(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        name = "control: plain" if row["algorithm"] == "plain" else f"{row['algorithm']} budget {row['budget']}"
        lines.append(
            f"{name} at batch {row['batch']} against plain at batch {row['plain_batch']}: {row['identical']} of "
            f"{row['prompts']} identical; largest float32 gap {row['largest_gap']:.4f}, "
            f"the servers disagree by {row['largest_units']:.2f} roundings of the top logit"
        )
    trees = [row for row in rows if row["algorithm"] != "plain"]
    lines.append(
        f"near_ties: divergences={sum(len(row['divergences']) for row in trees)} "
        f"largest_gap={max(row['largest_gap'] for row in trees):.4f} "
        f"largest_units={max(row['largest_units'] for row in trees):.2f} allowed_units={LARGEST_UNITS} "
        f"unexplained={len(unexplained(rows))}"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval near_ties", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of the prompt files")
    parser.add_argument("--out", type=result_file, required=True)
    parser.add_argument("--heads", type=Path, default=HEADS, help="folder of the heads (default: the shipped ones)")
    parser.add_argument("--algorithms", type=lambda text: text.split(","), default=["jetflow"])
    parser.add_argument("--budgets", type=numbers, default=[16, 64])
    parser.add_argument("--batches", type=numbers, default=[1, 8], help="the first is the control's reference")
    parser.add_argument("--parallel", type=int, default=1, help="servers at once; several fit one GPU (default: 1)")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--logs", type=Path, default=Path(".cache/logs"))
    parser.add_argument("--commit")
    parser.add_argument("flags", nargs="*", help="further server flags, after --")
    options = parser.parse_args(arguments)

    params = {"temperature": 0.0, "max_new_tokens": options.tokens}
    jobs = [Job(i, i, None, messages, params) for i, messages in enumerate(mixed(options.data, options.prompts))]
    base = [*server_flags(options.model_path, torch.cuda.is_available(), "bfloat16"), *options.flags]
    servers: dict[tuple[str, int | None], tuple[list[str], dict[str, str]]] = {("plain", None): (base, {})}
    for algorithm in options.algorithms:
        for budget in options.budgets:
            flags, environment = tree_server(algorithm, budget, *(options.heads / name for name in SHIPPED[algorithm]))
            servers[algorithm, budget] = [*base, *flags], environment

    def decode(key: tuple[str, int | None]) -> dict[int, list[Decoded]]:
        log = options.logs / f"near-ties-{key[0]}-{key[1]}.log"
        flags, environment = servers[key]
        with start(flags, log=log, environment=environment, timeout=900) as server:
            answers = {batch: answers_in_order(server, jobs, batch, TopTokenBackend) for batch in options.batches}
        if key[0] != "plain" and not all(answer.verify_steps for done in answers.values() for answer in done):
            raise RuntimeError(f"the server of {key} reports no verify step for a prompt: it did not speculate")
        return answers

    meta = describe(options.commit) | {"dtype": "bfloat16", "allowed_units": LARGEST_UNITS}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    exact, plain, rows = ExactLogits(options.model_path), {}, []
    with ThreadPoolExecutor(options.parallel) as pool:
        for (algorithm, budget), by_batch in zip(servers, pool.map(decode, servers)):
            plain = plain or by_batch  # plain decoding's are the first
            for batch, answers in by_batch.items():
                against = options.batches[0] if algorithm == "plain" else batch
                if (algorithm, batch) == ("plain", against):
                    continue
                row = {"algorithm": algorithm, "budget": budget, "batch": batch, "plain_batch": against}
                rows.append(row | compare(plain[against], answers, exact))
            options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    print(summary(rows))
    return 1 if unexplained(rows) else 0
