"""Plain decoding and tree speculative decoding of the same prompts, by two servers one after the other, side by side.

Both servers run in float32, where greedy tree decoding must give exactly the tokens of plain decoding. The last line
reads `quickstart: prompts=8 identical=N accept_length=X plain_steps=S tree_steps=T`: S decode steps of the plain server
(tokens after each prompt's first), T verify passes of the tree server, X = its decoded tokens / T. The exit status is 0
only if all texts are identical.
"""

import argparse
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from shutil import get_terminal_size

from sgl_specflow.launch.batch import BatchError, read_jobs
from sgl_specflow.launch.generation import Answer, Job, RequestFailed, ServerBackend, ServerGone, answer_all
from sgl_specflow.launch.server import ServerError, start

import sgl_specflow

PROMPTS = Path(__file__).with_name("prompts.jsonl")
SHIPPED_HEAD = Path(sgl_specflow.__file__).parent / "drafter" / "heads" / "smollm2-135m-jetflow"
# Long enough for the texts, short enough for a CPU.
NEW_TOKENS = 96
# A CPU pays for each node.
TREE_NODES = 16
START_SECONDS = 600
ANSWER_SECONDS = 900


class QuickstartError(Exception):
    """A server answered otherwise than this comparison needs."""


@dataclass(frozen=True)
class Comparison:
    """One prompt, answered by both servers."""

    job: Job
    plain: Answer
    tree: Answer

    @property
    def identical(self) -> bool:
        return self.plain.tokens == self.tree.tokens and self.plain.text == self.tree.text


# On a GPU: Triton's products of float32 default to TF32, which would make plain decoding itself inexact, and SGLang's
# fused CUDA kernels for norms and activations have no float32.
EXACT_FLOAT32 = {"TRITON_F32_DEFAULT": "ieee", "SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}


def server_flags(model: str, on_gpu: bool, dtype: str = "float32") -> list[str]:
    """Flags of both servers. The CPU platform brings its own device, attention and sampling defaults."""
    flags = ["--model-path", model, "--dtype", dtype, "--max-running-requests", "8", "--max-total-tokens", "16384"]
    if on_gpu:
        # FlashAttention and FlashInfer have no float32.
        flags += ["--attention-backend", "triton", "--mem-fraction-static", "0.3"]
    return flags


def tree_flags(algorithm: str, head: str | Path, nodes: int) -> list[str]:
    return [
        "--speculative-algorithm", algorithm,
        "--speculative-draft-model-path", str(head),
        "--speculative-num-draft-tokens", str(nodes),
    ]  # fmt: skip


def answers_of(label: str, flags: Sequence[str], jobs: Sequence[Job], log: Path) -> list[Answer]:
    """Start a server with `flags`, answer `jobs` in their order, stop it."""
    say(f"{label}: starting the server (log: {log})")
    begun = time.monotonic()
    with start(flags, log=log, timeout=START_SECONDS, environment=EXACT_FLOAT32) as server:
        say(f"{label}: up after {time.monotonic() - begun:.0f} s; sending {len(jobs)} prompts")
        begun = time.monotonic()
        backend = ServerBackend(server.url, request_seconds=ANSWER_SECONDS)

        async def collect() -> dict[int, Answer]:
            answers = {}
            async for job, outcome in answer_all(backend, jobs, concurrency=len(jobs)):
                if isinstance(outcome, RequestFailed):
                    raise QuickstartError(f"{label}: {job.id}: {outcome}; the end of {log}:\n{server.log_tail()}")
                answers[job.index] = outcome
                say(f"{label}: {len(answers)} of {len(jobs)} ({job.id}, {len(outcome.tokens)} tokens)")
            return answers

        try:
            answers = backend.run(collect())
        except ServerGone as error:
            raise QuickstartError(f"{label}: {error}; the end of {log}:\n{server.log_tail()}") from error
    say(f"{label}: answered in {time.monotonic() - begun:.0f} s, server stopped")
    return [answers[job.index] for job in jobs]


def compare(jobs: Sequence[Job], plain: Sequence[Answer], tree: Sequence[Answer]) -> list[Comparison]:
    """Pair the answers. Raises QuickstartError if the tree server did not speculate: equality would say nothing."""
    for job, answer in zip(jobs, tree, strict=True):
        if answer.decoded_tokens and not answer.verify_steps:
            raise QuickstartError(f"the tree server reports no verify step for prompt {job.id!r}: it did not speculate")
    return [Comparison(*row) for row in zip(jobs, plain, tree, strict=True)]


def render(comparison: Comparison, width: int) -> str:
    """The prompt, the two texts in columns, and the figures, `width` characters wide."""
    plain, tree = comparison.plain, comparison.tree
    column = (width - 3) // 2
    question = comparison.job.prompt or comparison.job.messages[-1]["content"]
    verdict = "identical" if comparison.identical else "DIFFERENT"
    lines = [f"── {comparison.job.id} ".ljust(width, "─"), *_wrapped(question, width), ""]
    left = ["plain", f"{plain.steps} decode steps", "", "", *_wrapped(plain.text, column)]
    accept_length = f"accept length {tree.accept_length or 0:.2f}"
    right = ["jetflow", f"{tree.steps} verify steps", accept_length, "", *_wrapped(tree.text, column)]
    lines += [f"{a:<{column}} │ {b}".rstrip() for a, b in zip_longest(left, right, fillvalue="")]
    return "\n".join([*lines, f"=> {verdict}", ""])


def _wrapped(text: str, width: int) -> list[str]:
    return [part for line in text.strip().splitlines() for part in textwrap.wrap(line.expandtabs(4), width) or [""]]


def summary(comparisons: Sequence[Comparison]) -> str:
    identical = sum(comparison.identical for comparison in comparisons)
    plain_steps = sum(comparison.plain.steps for comparison in comparisons)
    tree_steps = sum(comparison.tree.steps for comparison in comparisons)
    tree_tokens = sum(comparison.tree.decoded_tokens for comparison in comparisons)
    return (
        f"quickstart: prompts={len(comparisons)} identical={identical} "
        f"accept_length={tree_tokens / max(tree_steps, 1):.2f} plain_steps={plain_steps} tree_steps={tree_steps}"
    )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> int:
    import torch

    jobs, bad = read_jobs(options.prompts, {"temperature": 0.0, "max_new_tokens": options.max_new_tokens})
    if bad or not jobs:
        raise BatchError("\n".join(bad) or f"{options.prompts} is empty")
    if not (options.head / "config.json").is_file():
        raise BatchError(f"no draft head in {options.head}")
    on_gpu = torch.cuda.is_available()
    say(f"device: {torch.cuda.get_device_name() if on_gpu else 'CPU, the reference platform: correct, and slow'}")
    flags = server_flags(str(options.model_path), on_gpu)
    plain = answers_of("plain", flags, jobs, options.logs / "server-plain.log")
    tree = answers_of(
        "jetflow", flags + tree_flags("jetflow", options.head, TREE_NODES), jobs, options.logs / "server-jetflow.log"
    )
    comparisons = compare(jobs, plain, tree)
    width = max(60, get_terminal_size().columns)
    for comparison in comparisons:
        print(render(comparison, width))
    print(summary(comparisons))
    return 0 if all(comparison.identical for comparison in comparisons) else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-path", type=Path, required=True, help="folder of SmolLM2-135M-Instruct (get_smollm2.py)"
    )
    parser.add_argument("--head", type=Path, default=SHIPPED_HEAD, help="JetFlow head (default: the shipped one)")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines as for batch (default: shipped)")
    parser.add_argument("--max-new-tokens", type=int, default=NEW_TOKENS, help="default: %(default)s")
    parser.add_argument("--logs", type=Path, default=Path(".cache/logs"), help="folder (default: %(default)s)")


def main(options: argparse.Namespace, _: Sequence[str] = ()) -> int:
    """The exit status: 0 all identical, 1 not so, 2 it could not be compared, 130 interrupted."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # Leaves through the server's `with`.
    try:
        return run(options)
    except (BatchError, QuickstartError, ServerError, OSError) as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("\ninterrupted; the server is stopped")
        return 130


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
