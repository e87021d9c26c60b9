"""Tokens a second of decoding, tree servers beside plain decoding, in rounds that take turns.

    python -m sgl_specflow.eval throughput --model-path FOLDER --data ../shared/data \
        --out eval/results/throughput_smollm2_h200.json

All servers are up at once and measured one at a time: every round asks each of them the same prompts, greedy, in groups
sent together (of each size of `--batches`), with an empty prefix cache. Decoding is timed at the client from streamed
chunks, from the moment when the whole group has its first chunk to its last chunk, so that prefill is not in it
(`tokens_per_second`); `request_tokens_per_second` counts all tokens from sending on. Figures are of all rounds together;
`rounds` gives tokens_per_second by round, so that drift shows. `step_ms` is the mean time of a step from a request's first
chunk to its last, `inflation` that over plain decoding's, `speed_up` the ratio of tokens_per_second; at batch 1 speed_up
= accept_length / inflation.
"""

import argparse
import json
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from sgl_specflow.eval.acceptance import DRAFTERS, base_flags, server_settings
from sgl_specflow.eval.arguments import numbers, result_file
from sgl_specflow.eval.backends import Streamed, StreamingBackend, empty_prefix_cache
from sgl_specflow.eval.lossless import answers_in_order
from sgl_specflow.eval.prompts import rows as test_rows
from sgl_specflow.eval.record import describe
from sgl_specflow.launch.generation import Job
from sgl_specflow.launch.server import Server, start

START_SECONDS = 900


@dataclass
class Tally:
    """Sums over groups of requests sent together. Times in seconds."""

    prompts: int = 0
    """Of one round; all else is of all rounds."""
    tokens: int = 0
    """All that were generated."""
    timed_tokens: int = 0
    """Those of decode_seconds."""
    decode_seconds: float = 0.0
    request_seconds: float = 0.0
    decoded_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    """Over the requests, each from its first chunk to its last."""
    rounds: list[float] = field(default_factory=list)
    """Tokens a second of decoding, by round."""

    def add_group(self, group: list[Streamed]) -> None:
        begin = max(answer.arrivals[0] for answer in group)
        end = max(answer.arrivals[-1] for answer in group)
        self.tokens += sum(answer.counts[-1] for answer in group)
        self.timed_tokens += sum(answer.tokens_after(begin) for answer in group)
        self.decode_seconds += end - begin
        self.request_seconds += end - min(answer.sent for answer in group)
        self.decoded_tokens += sum(answer.decoded_tokens for answer in group)
        self.steps += sum(answer.steps for answer in group)
        self.step_seconds += sum(answer.arrivals[-1] - answer.arrivals[0] for answer in group)

    def add_round(self, groups: list[list[Streamed]]) -> None:
        self.prompts = sum(map(len, groups))
        before = self.timed_tokens, self.decode_seconds
        for group in groups:
            self.add_group(group)
        self.rounds.append((self.timed_tokens - before[0]) / (self.decode_seconds - before[1]))

    @property
    def tokens_per_second(self) -> float:
        return self.timed_tokens / self.decode_seconds

    @property
    def step_ms(self) -> float:
        return 1e3 * self.step_seconds / self.steps


def row(drafter: str, budget: int | None, batch: int, dataset: str, tally: Tally, plain: Tally) -> dict:
    """One line of the result file; plain decoding's own compares it to itself."""
    return {
        "drafter": drafter,
        "budget": budget,
        "batch": batch,
        "dataset": dataset,
        "prompts": tally.prompts,
        "tokens": tally.tokens,
        "decode_seconds": tally.decode_seconds,
        "tokens_per_second": tally.tokens_per_second,
        "request_tokens_per_second": tally.tokens / tally.request_seconds,
        "accept_length": tally.decoded_tokens / tally.steps,
        "step_ms": tally.step_ms,
        "plain_step_ms": plain.step_ms,
        "inflation": tally.step_ms / plain.step_ms,
        "speed_up": tally.tokens_per_second / plain.tokens_per_second,
        "rounds": tally.rounds,
    }


def one_round(server: Server, jobs: list[Job], batch: int) -> list[list[Streamed]]:
    """All jobs in groups of `batch`, on an empty prefix cache."""
    empty_prefix_cache(server.url)
    groups = [jobs[i : i + batch] for i in range(0, len(jobs), batch)]
    return [answers_in_order(server, group, batch, StreamingBackend) for group in groups]


def _stop(opened: Future) -> None:
    if opened.exception() is None:
        opened.result().stop()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of the prompt files")
    parser.add_argument("--out", type=result_file, required=True)
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS, help="NAME=ALGORITHM:HEAD[:WEAVER]")
    parser.add_argument("--budgets", type=numbers, default=[16, 64, 256])
    parser.add_argument("--dataset", default="gsm8k", help="gsm8k, mbpp or mt_bench (default: gsm8k)")
    parser.add_argument("--rows", type=int, default=64, help="prompts (default: 64)")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batches", type=numbers, default=[1], help="requests at once, comma-separated (default: 1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--logs", type=Path, default=Path(".cache/logs"))
    parser.add_argument("--commit")
    parser.add_argument("flags", nargs="*", help="further server flags, after --")
    options = parser.parse_args(arguments)

    params = {"temperature": 0.0, "max_new_tokens": options.tokens}
    chats = test_rows(options.data, options.dataset)[: options.rows]
    jobs = [Job(i, i, None, chat, params) for i, chat in enumerate(chats)]
    base = base_flags(options.model_path, options.dtype, max(options.batches), options.flags)
    settings = server_settings(base, options.drafters, options.budgets)
    meta = describe(options.commit) | {"dtype": options.dtype}
    tallies = {(*key, batch): Tally() for batch in options.batches for key in settings}
    # The kernel ends a server with the thread that started it: these threads outlive the measuring.
    with ThreadPoolExecutor(len(settings)) as pool, ExitStack() as stack:
        opened = {}
        for key, (flags, environment, _) in settings.items():
            log = options.logs / f"throughput-{key[0]}-{key[1]}.log"
            opened[key] = pool.submit(start, flags, log=log, environment=environment, timeout=START_SECONDS)
            stack.callback(_stop, opened[key])
        servers = {key: future.result() for key, future in opened.items()}
        for server in servers.values():
            for batch in options.batches:
                one_round(server, jobs[:batch], batch)  # warm
        options.out.parent.mkdir(parents=True, exist_ok=True)
        for number in range(options.rounds):
            for (drafter, budget, batch), tally in tallies.items():
                tally.add_round(one_round(servers[drafter, budget], jobs, batch))
                name = f"{drafter} budget {budget} batch {batch}"
                print(f"round {number + 1}: {name}: {tally.rounds[-1]:.1f} tokens/s", flush=True)
            # After each round: stopping the servers takes a while, and later rounds may not end.
            rows = [row(*key, options.dataset, tally, tallies["plain", None, key[2]]) for key, tally in tallies.items()]
            options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    for line in rows:
        print(
            f"{line['drafter']:10} budget {line['budget']} batch {line['batch']}: {line['tokens_per_second']:.1f} "
            f"tokens/s, accept length {line['accept_length']:.2f}, step {line['step_ms']:.2f} ms, "
            f"inflation {line['inflation']:.3f}, speed-up {line['speed_up']:.2f}"
        )
    return 0
