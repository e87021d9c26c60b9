"""Answer a file of prompts, row by row, so that an interruption loses nothing and repeats nothing.

    python -m sgl_specflow.launch batch prompts.jsonl --out answers.jsonl --url http://127.0.0.1:30000
    python -m sgl_specflow.launch batch prompts.jsonl --out answers.jsonl --model-path Qwen/Qwen3-8B -- \\
        --speculative-algorithm jetflow --speculative-draft-model-path JetSpec/jetspec-qwen3-8b

Input rows: {"prompt": str} or {"messages": [{"role": str, "content": str}, ...]}, optionally with "id" (any value) and
"sampling_params" (SGLang's, on top of the command line's). Other keys are ignored.
Output rows, in the order in which they finish: {"id", "index", "text", "meta", "input_sha256"}; `index` is the input
line, counted from 0, and `meta` holds finish_reason, prompt_tokens, tokens, steps and accept_length (null for plain
decoding). Each row is on the disk before the next one is taken. Run the same command again to go on, and to retry the
failed rows, which OUT.errors lists. An OUT that was made from other prompts or sampling parameters is refused.
"""

import argparse
import fcntl
import json
import math
import os
import sys
import threading
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from sgl_specflow.launch.generation import (
    Answer,
    Backend,
    EngineBackend,
    Job,
    RequestFailed,
    ServerBackend,
    ServerGone,
    answer_all,
)
from tqdm import tqdm

_BAD_ROWS_SHOWN = 20


class BatchError(Exception):
    """The batch cannot start, or not go on, as asked."""


def read_jobs(path: Path, defaults: dict) -> tuple[list[Job], list[str]]:
    """The jobs of a JSON lines file, and one message `file:line: reason` for each bad row. Empty lines are passed over."""
    jobs, bad = [], []
    line_of: dict[str, int] = {}
    with path.open("rb") as stream:
        for index, line in enumerate(stream):
            if not line.strip():
                continue
            try:
                job = _job(index, json.loads(line), defaults)
                first = line_of.setdefault(json.dumps(job.id, sort_keys=True), index + 1)
                if first != index + 1:
                    raise ValueError(
                        f'"id" {job.id!r} is that of line {first} too; a row without one is given its place, from 0'
                    )
                jobs.append(job)
            except (ValueError, RecursionError) as error:
                bad.append(f"{path}:{index + 1}: {error}")
    return jobs, bad


def _job(index: int, row: object, defaults: dict) -> Job:
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, not {type(row).__name__}")
    prompt, messages, sampling_params = row.get("prompt"), row.get("messages"), row.get("sampling_params") or {}
    if (prompt is None) == (messages is None):
        raise ValueError('a row needs "prompt" or "messages", and not both')
    if prompt is not None and not (isinstance(prompt, str) and prompt):
        raise ValueError('"prompt" must be a string that is not empty')
    if messages is not None and not (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages)
    ):
        raise ValueError('"messages" must be a list of objects with "role" and "content"')
    if not isinstance(sampling_params, dict):
        raise ValueError('"sampling_params" must be an object')
    if sampling_params.get("n", 1) != 1:
        raise ValueError('"n" in "sampling_params" must be 1: give a row for each completion')
    return Job(index, row.get("id", index), prompt, messages, {**defaults, **sampling_params})


class AnswerFile:
    """OUT: one JSON row an answer, each on the disk before `append` returns. Holds a lock while open."""

    def __init__(self, path: Path, jobs: Sequence[Job]):
        """Raises BatchError when another run holds `path` or when it was not made from `jobs`."""
        self.path = path
        self._is_new = not path.exists()
        self._stream = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._stream.close()
            raise BatchError(f"another run is writing {path}") from None
        try:
            self.answered = self._read(jobs)
        except BaseException:
            self._stream.close()
            raise

    def append(self, row: dict) -> None:
        _write_row(self._stream, row)

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *_) -> None:
        if self._is_new and not os.fstat(self._stream.fileno()).st_size:
            self.path.unlink(missing_ok=True)  # a run that never began leaves nothing
        self._stream.close()

    def _read(self, jobs: Sequence[Job]) -> set[int]:
        expected = {job.index: job.input_sha256 for job in jobs}
        answered = set()
        self._stream.seek(0)
        data = self._stream.read()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                index, digest = row["index"], row["input_sha256"]
            except (ValueError, KeyError, TypeError):
                raise BatchError(f"{self.path}:{number}: not a row that a batch wrote; give another --out") from None
            if expected.get(index) != digest:
                raise BatchError(
                    f"{self.path}:{number}: made from other prompts or sampling parameters (input line {index + 1}); "
                    "give another --out, or remove it"
                )
            if index in answered:
                raise BatchError(f"{self.path}:{number}: input line {index + 1} is answered twice")
            answered.add(index)
        self._stream.truncate(whole)  # A torn last line: its row is asked again.
        return answered


def _write_row(stream: BinaryIO, row: dict) -> None:
    data = memoryview(json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
    while data:
        data = data[stream.write(data) :]
    os.fsync(stream.fileno())


def answer_row(job: Job, answer: Answer) -> dict:
    return {
        "id": job.id,
        "index": job.index,
        "text": answer.text,
        "meta": {
            "finish_reason": answer.finish_reason,
            "prompt_tokens": answer.prompt_tokens,
            "tokens": len(answer.tokens),
            "steps": answer.steps,
            "accept_length": answer.accept_length,
        },
        "input_sha256": job.input_sha256,
    }


async def answer_into(
    answers: AnswerFile, errors: Path, backend: Backend, jobs: Sequence[Job], total: int, concurrency: int
) -> int:
    """Answer `jobs`, append their rows, and return how many failed. `total` counts the earlier runs' rows too."""
    # tqdm's own lock is a semaphore whose resource tracker Engine.shutdown kills.
    tqdm.set_lock(threading.RLock())
    failed = decoded = steps = 0
    with (
        errors.open("wb", buffering=0) as error_stream,
        tqdm(total=total, initial=total - len(jobs), unit="row") as bar,
    ):
        async for job, outcome in answer_all(backend, jobs, concurrency):
            if isinstance(outcome, RequestFailed):
                failed += 1
                row = {"id": job.id, "index": job.index, "error": str(outcome), "input_sha256": job.input_sha256}
                _write_row(error_stream, row)
            else:
                answers.append(answer_row(job, outcome))
                decoded, steps = decoded + outcome.decoded_tokens, steps + outcome.steps
            bar.set_postfix_str(f"failed {failed}, {decoded / max(steps, 1):.2f} tokens a step", refresh=False)
            bar.update()
    return failed


def run(options: argparse.Namespace, server_flags: Sequence[str]) -> int:
    defaults = {"temperature": options.temperature, "max_new_tokens": options.max_new_tokens}
    jobs, bad = read_jobs(options.prompts, defaults)
    if bad:
        shown = "\n".join(bad[:_BAD_ROWS_SHOWN])
        more = f"\n... and {len(bad) - _BAD_ROWS_SHOWN} more" if len(bad) > _BAD_ROWS_SHOWN else ""
        if not options.skip_bad:
            raise BatchError(f"{shown}{more}\n{len(bad)} bad rows; --skip-bad leaves them out")
        print(f"{shown}{more}\nleaving out {len(bad)} bad rows", file=sys.stderr)
    if not jobs:
        raise BatchError(f"{options.prompts} has no rows to answer")

    errors = options.out.with_name(options.out.name + ".errors")
    failed = 0
    with AnswerFile(options.out, jobs) as answers:
        open_jobs = [job for job in jobs if job.index not in answers.answered]
        if open_jobs:
            if options.url:
                backend = ServerBackend(options.url)
            else:
                backend = EngineBackend(["--model-path", options.model_path, *server_flags])
            work = answer_into(answers, errors, backend, open_jobs, len(jobs), options.concurrency)
            failed = backend.run(work)
    if not failed:
        errors.unlink(missing_ok=True)
    earlier = len(jobs) - len(open_jobs)
    print(f"{options.out}: {len(jobs) - failed} of {len(jobs)} rows ({earlier} from earlier runs)", file=sys.stderr)
    if failed:
        print(f"{failed} rows failed: see {errors}, and run the same command again to retry them", file=sys.stderr)
    return 1 if failed else 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} was given; give 1 or more")
    return value


def _url(text: str) -> str:
    try:
        parts = urllib.parse.urlsplit(text)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an open bracket; of .port: none, or one too large
        sound = False
    if not sound:
        raise argparse.ArgumentTypeError(f"{text} was given; give http://HOST:PORT")
    return text


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} was given; give a number from 0 on")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", type=Path, help="JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; an unfinished one is continued")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", type=_url, help="a running SGLang server")
    where.add_argument("--model-path", help="run sglang.Engine here; its other flags follow after --")
    parser.add_argument("--concurrency", type=_positive, default=64, help="requests in flight (default: %(default)s)")
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=512, help="for rows that do not say (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=_temperature, default=0.0, help="likewise (default: %(default)s, greedy)")
    parser.add_argument("--skip-bad", action="store_true", help="leave out bad input rows instead of stopping")


def main(options: argparse.Namespace, server_flags: Sequence[str]) -> int:
    """The exit status: 0 all rows answered, 1 some failed or the server went away, 2 cannot start, 130 interrupted."""
    again = f"the answers so far are in {options.out}; run the same command again to go on"
    try:
        return run(options, server_flags)
    except (BatchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ServerGone as error:
        print(f"error: {error}\n{again}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted: {again}", file=sys.stderr)
        return 130
