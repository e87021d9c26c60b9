"""Greedy tree decoding against plain decoding of the same server build, token for token, in float32.

    python -m sgl_specflow.eval lossless --model-path FOLDER --data ../shared/data --out eval/results/lossless.json

Every combination of algorithm, budget and page size starts one server and answers all prompts at each batch size. The
file is written after each server; a second run with the same --out measures what is missing.
"""

import argparse
import itertools
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from sgl_specflow.eval.arguments import numbers, result_file
from sgl_specflow.eval.heads import HEADS, SHIPPED, tree_server
from sgl_specflow.eval.prompts import mixed
from sgl_specflow.eval.record import describe
from sgl_specflow.launch.generation import Answer, Job, RequestFailed, ServerBackend, answer_all
from sgl_specflow.launch.quickstart import EXACT_FLOAT32, server_flags
from sgl_specflow.launch.server import Server, start

REQUEST_SECONDS = 3600


def answers_in_order(
    server: Server, jobs: list[Job], batch: int, backend_class: type[ServerBackend] = ServerBackend
) -> list:
    """Every job's answer, `batch` of them in flight. Raises RuntimeError where the server refuses or fails one."""
    backend = backend_class(server.url, request_seconds=REQUEST_SECONDS)

    async def collect() -> list:
        done = {}
        async for job, outcome in answer_all(backend, jobs, concurrency=batch):
            if isinstance(outcome, RequestFailed):
                raise RuntimeError(f"prompt {job.index}: {outcome}\n{server.log_tail()}")
            done[job.index] = outcome
        return [done[job.index] for job in jobs]

    return backend.run(collect())


def answers(
    flags: list[str], jobs: list[Job], batches: list[int], log: Path, environment: dict[str, str] | None = None
) -> dict[int, list[Answer]]:
    """One server, all jobs at each batch size."""
    with start(flags, log=log, environment=EXACT_FLOAT32 | (environment or {}), timeout=900) as server:
        return {batch: answers_in_order(server, jobs, batch) for batch in batches}


def compare(plain: list[Answer], tree: list[Answer]) -> dict:
    """Counts of one run; the first difference is given in full."""
    different = [i for i, (a, b) in enumerate(zip(plain, tree)) if a.tokens != b.tokens]
    row = {
        "prompts": len(plain),
        "tokens": sum(len(a.tokens) for a in plain),
        "identical": len(plain) - len(different),
        "plain_steps": sum(a.steps for a in plain),
        "tree_steps": sum(a.steps for a in tree),
        "accept_length": sum(a.decoded_tokens for a in tree) / max(1, sum(a.steps for a in tree)),
    }
    if different:
        first = different[0]
        at = next((j for j, (x, y) in enumerate(zip(plain[first].tokens, tree[first].tokens)) if x != y), None)
        row["first_difference"] = {"prompt": first, "token": at}
    return row


def wanted_runs(options: argparse.Namespace) -> dict[tuple[str, int, int], list[int]]:
    """Batch sizes by server (algorithm, budget, page size)."""
    if options.runs is None:
        return {key: options.batches for key in itertools.product(options.algorithms, options.budgets, options.pages)}
    runs: dict[tuple[str, int, int], list[int]] = {}
    for item in options.runs.split(","):
        algorithm, budget, page, batch = item.split(":")
        runs.setdefault((algorithm, int(budget), int(page)), []).append(int(batch))
    return runs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval lossless", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of the prompt files")
    parser.add_argument("--out", type=result_file, required=True)
    parser.add_argument("--heads", type=Path, default=HEADS, help="folder of the heads (default: the shipped ones)")
    parser.add_argument("--algorithms", type=lambda text: text.split(","), default=list(SHIPPED))
    parser.add_argument("--budgets", type=numbers, default=[2, 16, 64])
    parser.add_argument("--pages", type=numbers, default=[1, 16])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--runs", help="instead of all combinations: algorithm:budget:page:batch, comma-separated")
    parser.add_argument("--parallel", type=int, default=1, help="servers at once; several fit one GPU (default: 1)")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--logs", type=Path, default=Path(".cache/logs"))
    parser.add_argument("--commit")
    parser.add_argument("flags", nargs="*", help="further server flags, after --")
    options = parser.parse_args(arguments)

    params = {"temperature": 0.0, "max_new_tokens": options.tokens}
    jobs = [Job(i, i, None, messages, params) for i, messages in enumerate(mixed(options.data, options.prompts))]
    base = [*server_flags(options.model_path, torch.cuda.is_available()), *options.flags]
    result = (
        json.loads(options.out.read_text()) if options.out.exists() else {"meta": describe(options.commit), "rows": []}
    )
    runs = wanted_runs(options)
    done = {(r["algorithm"], r["budget"], r["page_size"], r["batch"]) for r in result["rows"]}

    missing = {key: [batch for batch in batches if (*key, batch) not in done] for key, batches in runs.items()}
    missing = {key: batches for key, batches in missing.items() if batches}
    writing = threading.Lock()

    def measure(key: tuple[str, int, int], plain: Future) -> None:
        algorithm, budget, page = key
        begun = time.monotonic()
        tree_flags, environment = tree_server(algorithm, budget, *(options.heads / name for name in SHIPPED[algorithm]))
        flags = [*base, "--page-size", str(page), *tree_flags]
        log = options.logs / f"lossless-{algorithm}-{budget}-{page}.log"
        tree = answers(flags, jobs, missing[key], log, environment)
        expected = plain.result()
        with writing:
            for batch in missing[key]:
                row = {"algorithm": algorithm, "budget": budget, "page_size": page, "batch": batch}
                result["rows"].append(row | compare(expected[batch], tree[batch]))
                print(json.dumps(result["rows"][-1]), f"({time.monotonic() - begun:.0f} s)", flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    with ThreadPoolExecutor(options.parallel) as pool:
        every = sorted({batch for batches in missing.values() for batch in batches})
        if every:
            plain = pool.submit(answers, base, jobs, every, options.logs / "lossless-plain.log")
        for outcome in [pool.submit(measure, key, plain) for key in missing]:
            outcome.result()
    wrong = [row for row in result["rows"] if row["identical"] != row["prompts"]]
    print(f"lossless: runs={len(result['rows'])} identical={len(result['rows']) - len(wrong)}")
    return 1 if wrong else 0
