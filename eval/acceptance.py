"""Accept length and tokens a second of draft heads through the served engine, plain decoding beside them.

    python -m sgl_specflow.eval acceptance --model-path FOLDER --data ../shared/data --budgets 16,64,256 \
        --out eval/results/acceptance_smollm2.json

Each drafter is NAME=ALGORITHM:HEAD, by default the shipped heads; the Weaver of dflash_tfm follows as :WEAVER. Greedy, on
test prompts, `--batch` requests at once. Rows that the file holds stay where they are not measured again (see `eval
merge`), those of `python -m sgl_specflow.training evaluate` (engine "offline") among them. Tokens a second count whole
requests, prompts included; with --parallel servers share the device and are measured one at a time. With --together they
are measured at the same time, which tells accept lengths only: their rows have no tokens_per_second.
"""

import argparse
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import torch
from sgl_specflow.eval.arguments import numbers, result_file
from sgl_specflow.eval.heads import HEADS, SHIPPED, tree_server
from sgl_specflow.eval.lossless import answers_in_order
from sgl_specflow.eval.merge import merge
from sgl_specflow.eval.prompts import rows as test_rows
from sgl_specflow.eval.record import describe
from sgl_specflow.launch.generation import Answer, Job
from sgl_specflow.launch.server import start

DATASETS = ("gsm8k", "mbpp", "mt_bench")
DRAFTERS = [f"{name}={name}:" + ":".join(str(HEADS / part) for part in parts) for name, parts in SHIPPED.items()]


ServerSettings = dict[tuple[str, int | None], tuple[list[str], dict[str, str], Path | None]]


def base_flags(model: str, dtype: str, batch: int, more: list[str]) -> list[str]:
    """Flags that plain and tree servers share; `more` come last and win."""
    flags = ["--model-path", model, "--dtype", dtype, "--max-running-requests", str(batch)]
    if torch.cuda.is_available():
        flags += ["--attention-backend", "triton", "--mem-fraction-static", "0.3", "--max-total-tokens", "32768"]
    return flags + more


def server_settings(base: list[str], drafters: list[str], budgets: list[int]) -> ServerSettings:
    """Flags, environment and head of each server by (drafter, budget); ("plain", None) is the first.

    drafters: NAME=ALGORITHM:HEAD[:WEAVER] each.
    """
    servers: ServerSettings = {("plain", None): (base, {}, None)}
    for text in drafters:
        name, _, rest = text.partition("=")
        algorithm, head, *weaver = rest.split(":")
        for budget in budgets:
            flags, environment = tree_server(algorithm, budget, head, *weaver)
            servers[name, budget] = [*base, *flags], environment, Path(head)
    return servers


def row(
    drafter: str,
    head: Path | None,
    budget: int | None,
    dataset: str,
    batch: int,
    done: list[Answer],
    seconds: float | None,
) -> dict:
    """One line of the result file; accept_length is 1 for plain decoding. seconds: None where others ran beside."""
    facts = json.loads((head / "training.json").read_text()) if head and (head / "training.json").exists() else {}
    tokens, decoded = sum(len(answer.tokens) for answer in done), sum(answer.decoded_tokens for answer in done)
    return {
        "drafter": drafter,
        "head": head.name if head else None,
        "loss": facts.get("loss"),
        "data": facts.get("data"),
        "dataset": dataset,
        "budget": budget,
        "accept_length": decoded / max(1, sum(answer.steps for answer in done)),
        "prompts": len(done),
        "engine": "sglang",
        "batch": batch,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else None,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval acceptance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of the prompt files")
    parser.add_argument("--out", type=result_file, required=True)
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS, help="NAME=ALGORITHM:HEAD[:WEAVER]")
    parser.add_argument("--budgets", type=numbers, default=[16, 32, 64, 128, 256])
    parser.add_argument("--datasets", type=lambda text: text.split(","), default=list(DATASETS))
    parser.add_argument("--rows", type=int, default=200, help="prompts a data set (MT-Bench has 80)")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parallel", type=int, default=1, help="servers up at once (default: 1)")
    parser.add_argument("--together", action="store_true", help="measure the --parallel servers at the same time")
    parser.add_argument("--logs", type=Path, default=Path(".cache/logs"))
    parser.add_argument("--commit")
    parser.add_argument("flags", nargs="*", help="further server flags, after --")
    options = parser.parse_args(arguments)

    params = {"temperature": 0.0, "max_new_tokens": options.tokens}
    jobs = {
        name: [Job(i, i, None, chat, params) for i, chat in enumerate(test_rows(options.data, name)[: options.rows])]
        for name in options.datasets
    }
    base = base_flags(options.model_path, options.dtype, options.batch, options.flags)
    servers = server_settings(base, options.drafters, options.budgets)
    kept = [json.loads(options.out.read_text())] if options.out.exists() else []
    result = {"meta": describe(options.commit), "rows": []}
    alone = nullcontext() if options.together else threading.Lock()
    writing = threading.Lock()

    def measure(key: tuple) -> None:
        flags, environment, head = servers[key]
        with start(flags, log=options.logs / f"acceptance-{key[0]}-{key[1]}.log", environment=environment) as server:
            with alone:
                answers_in_order(server, next(iter(jobs.values()))[: options.batch], options.batch)  # warm
                for dataset, of_dataset in jobs.items():
                    begun = time.monotonic()
                    done = answers_in_order(server, of_dataset, options.batch)
                    seconds = None if options.together else time.monotonic() - begun
                    last = row(key[0], head, key[1], dataset, options.batch, done, seconds)
                    rate = "" if seconds is None else f", {last['tokens_per_second']:.0f} tokens/s"
                    print(
                        f"{key[0]:12} budget {key[1]} {dataset:9} accept length {last['accept_length']:.2f}{rate} "
                        f"({len(done)} prompts)",
                        flush=True,
                    )
                    with writing:
                        result["rows"].append(last)
                        options.out.parent.mkdir(parents=True, exist_ok=True)
                        options.out.write_text(json.dumps(merge([*kept, result]), indent=1) + "\n")

    with ThreadPoolExecutor(options.parallel) as pool:
        for outcome in [pool.submit(measure, key) for key in servers]:
            outcome.result()
    return 0
