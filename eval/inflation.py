"""Step inflation: the time of a speculative step over that of a plain decode step, in one run.

    python -m sgl_specflow.eval inflation --model qwen3-8b --budgets 16,64,256 --out eval/results/step_inflation_h200.json
    python -m sgl_specflow.eval inflation --model qwen3.6-27b --algorithms jetflow dflash_tfm --budgets 64 --out ...

The models are shapes with made-up weights, so nothing would ever be accepted: SGLANG_SIMULATE_ACC_LEN forces an accept
length (`simulated_accept`; a dummy tree may be too shallow for it, `measured_accept` is what came out). It is no accept
length of anything. Servers of a group run together and are measured one after the other, each with its GPU to itself at
that time; the file is written after each group. A time is the median distance between two streamed chunks of a request,
one chunk a step, with `batch` equal requests running.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from sgl_specflow.eval.arguments import need_gpu, numbers, pairs, result_file
from sgl_specflow.eval.heads import SHIPPED, tree_server
from sgl_specflow.eval.record import describe
from sgl_specflow.eval.shapes import MODELS
from sgl_specflow.eval.step_profile import profile
from sgl_specflow.launch.server import Server, start

SHARED_FLAGS = [
    "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16",
    "--cuda-graph-backend-prefill", "disabled", "--chunked-prefill-size", "8192",
]  # fmt: skip
MOST_NEW_TOKENS = 1900  # beyond the longest context
SKIPPED_CHUNKS = 8  # after the first, while requests of a batch join


async def _stream(session, url: str, tokens: list[int], new_tokens: int) -> tuple[list[float], dict]:
    """Arrival times of one request's chunks, and its last meta_info."""
    body = {
        "input_ids": tokens,
        "stream": True,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    arrivals, meta = [], {}
    async with session.post(url + "/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                arrivals.append(time.perf_counter())
                meta = json.loads(line[6:])["meta_info"]
    return arrivals, meta


async def stream_requests(url: str, prompts: list[list[int]], new_tokens: int):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120), read_bufsize=2**22) as session:
        return await asyncio.gather(*(_stream(session, url, prompt, new_tokens) for prompt in prompts))


def prompts_of(batch: int, context: int) -> list[list[int]]:
    """`batch` prompts of `context` tokens, no two alike."""
    return [[100 + (7 * i + 13 * j) % 1500 for j in range(context)] for i in range(batch)]


def profiled_step(server: Server, batch: int, context: int, accept: float, step_ms: float) -> dict:
    """`step_profile.summary` of steps in the middle of `batch` requests that run for two seconds."""
    new_tokens = min(MOST_NEW_TOKENS, int(2000 / step_ms * accept))
    return profile(server.url, lambda: asyncio.run(stream_requests(server.url, prompts_of(batch, context), new_tokens)))


def step_milliseconds(server: Server, batch: int, context: int, steps: int, accept: float) -> dict:
    """Median time of a step, and tokens a step, with `batch` requests of `context` tokens."""
    prompts = prompts_of(batch, context)
    new_tokens = max(4, int(steps * accept))
    asyncio.run(stream_requests(server.url, prompts, 2))  # the prompts enter the prefix cache
    results = asyncio.run(stream_requests(server.url, prompts, new_tokens))
    # All requests run between the last one's first chunk and the first one's last.
    begin, end = max(times[0] for times, _ in results), min(times[-1] for times, _ in results)
    gaps = []
    for times, _ in results:
        inside = [at for at in times if begin <= at <= end][SKIPPED_CHUNKS:-1]
        gaps += [b - a for a, b in zip(inside, inside[1:])]
    if len(gaps) < 10:
        raise RuntimeError(f"only {len(gaps)} steps to time at batch {batch}, context {context}")
    meta = results[0][1]
    passes = meta.get("spec_verify_ct")
    return {
        "ms": 1e3 * statistics.median(gaps),
        "ms_mean": 1e3 * statistics.fmean(gaps),
        "steps": len(gaps),
        "tokens_a_step": (meta["completion_tokens"] - 1) / passes if passes else 1.0,
    }


def wanted_servers(options: argparse.Namespace) -> list[tuple[str, int, bool]]:
    """(algorithm, budget, fp8_draft) of each tree server, in the order in which they start.

    Raises ValueError for a run of another form or algorithm."""
    if options.runs is None:
        variants = [(budget, False) for budget in options.budgets] + [(budget, True) for budget in options.fp8_budgets]
        return [(algorithm, *variant) for algorithm in options.algorithms for variant in variants]
    servers = []
    for run in options.runs.split(","):
        algorithm, budget, *more = run.split(":")
        if algorithm not in SHIPPED or not budget.isdecimal() or more not in ([], ["fp8"]):
            raise ValueError(f"--runs has {run!r}; give algorithm:budget or algorithm:budget:fp8, {', '.join(SHIPPED)}")
        servers.append((algorithm, int(budget), bool(more)))
    return servers


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """What says which servers run: options of `servers_of` and `running`."""
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--algorithms", nargs="+", choices=sorted(SHIPPED), default=["jetflow"])
    parser.add_argument("--budgets", type=numbers, default=[16, 64, 256])
    parser.add_argument("--fp8-budgets", type=numbers, default=[], help="budgets measured with fp8_draft as well")
    parser.add_argument("--runs", help="instead of these: algorithm:budget[:fp8], comma-separated, in this order")
    parser.add_argument("--backend", default="triton", help="attention backend of the tree servers' prefill")
    parser.add_argument("--simulated-accept", type=float, default=4.0)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each server (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=4, help="servers up at once (default: %(default)s)")
    parser.add_argument("--max-total-tokens", type=int, default=38912)
    parser.add_argument("--out", type=result_file, required=True)
    parser.add_argument("--logs", type=Path, default=Path(".cache/logs"))
    parser.add_argument("--commit")
    parser.add_argument("flags", nargs="*", help="further server flags, after --")


def servers_of(
    options: argparse.Namespace, plain_backends: list[str], points: list[tuple[int, int]], folder: Path
) -> dict[tuple, tuple[list[str], dict[str, str]]]:
    """Flags and environment by (algorithm, budget, fp8_draft), of plain servers by ("plain", backend, False).

    Configs of the target and its heads are written to `folder`.
    """
    shapes = MODELS[options.model]
    longest = max(context for _, context in points) + MOST_NEW_TOKENS + 300
    most = max(batch for batch, _ in points)
    target = shapes.write_target(folder, longest)
    base = [
        *("--model-path", str(target), *SHARED_FLAGS, "--max-running-requests", str(most)),
        *("--cuda-graph-max-bs-decode", str(most), "--max-total-tokens", str(options.max_total_tokens)),
        *("--tp-size", str(options.tensor_parallel), *options.flags),
    ]
    servers = {("plain", name, False): ([*base, "--attention-backend", name], {}) for name in plain_backends}
    heads: dict[bool, Path] = {}
    for algorithm, budget, fp8 in wanted_servers(options):
        causal = algorithm == "jetflow"
        if causal not in heads:
            heads[causal] = shapes.write_head(folder, longest, causal)
        if algorithm == "dflash_tfm" and not (folder / "weaver").exists():
            shapes.write_weaver(folder)
        weaver = folder / "weaver" if algorithm == "dflash_tfm" else None
        flags, environment = tree_server(algorithm, budget, heads[causal], weaver, fp8_draft=fp8)
        environment["SGLANG_SIMULATE_ACC_LEN"] = str(options.simulated_accept)
        servers[algorithm, budget, fp8] = [*base, "--attention-backend", options.backend, *flags], environment
    return servers


def groups(servers: dict, size: int) -> list[list[tuple]]:
    """The items of `servers`, `size` at a time."""
    items = list(servers.items())
    return [items[first : first + size] for first in range(0, len(items), size)]


@contextmanager
def running(
    servers: Iterable[tuple[tuple, tuple[list[str], dict]]], options: argparse.Namespace
) -> Iterator[dict[tuple, Server | Exception]]:
    """Servers that start together and stop together, by key; the error in place of one that does not come up."""

    def open_server(item):
        key, (flags, environment) = item
        algorithm, variant, fp8 = key
        log = options.logs / f"inflation-{options.model}-{algorithm}-{variant}{'-fp8' if fp8 else ''}.log"
        try:
            return key, start(flags, log=log, environment=environment, timeout=400)
        except Exception as error:
            return key, error

    opened: dict[tuple, Server | Exception] = {}
    # The kernel ends a server with the thread that started it: these threads outlive the measuring.
    with ThreadPoolExecutor(options.at_once) as pool:
        try:
            for key, outcome in pool.map(open_server, servers):
                opened[key] = outcome
            yield opened
        finally:
            for outcome in opened.values():
                if isinstance(outcome, Server):
                    outcome.stop()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval inflation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_arguments(parser)
    parser.add_argument(
        "--points", type=pairs, default="1x128,1x4096,1x32768,8x4096", help="batch x context, by commas"
    )
    parser.add_argument("--plain-backends", default="fa3,triton", help="plain decoding is tried on each")
    parser.add_argument("--steps", type=int, default=80, help="steps a point")
    parser.add_argument("--profile", type=pairs, default=[], help="points whose steps are profiled by kernel")
    options = parser.parse_args(arguments)
    need_gpu(parser)

    points, profiled = options.points, options.profile
    folder = Path(tempfile.mkdtemp(prefix="shapes_"))
    servers = servers_of(options, options.plain_backends.split(","), points, folder)
    result = {"meta": describe(options.commit), "rows": [], "profiles": [], "failures": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for group in groups(servers, options.at_once):
        with running(group, options) as opened:
            for key, server in opened.items():
                if not isinstance(server, Server):
                    _fail(result, key, error=str(server)[-2000:])
                    continue
                for point in points:
                    measure(result, key, server, point, options, profiled=point in profiled)
        add_inflation(result["rows"])
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        if "inflation" in row:
            name = f"{row['algorithm']} B={row['budget']}{' fp8' if row['fp8_draft'] else ''}"
            name += f" batch {row['batch']} context {row['context']}"
            print(
                f"{name:44} plain {row['plain_ms']:.2f} ms ({row['backend_plain']}) step {row['step_ms']:.2f} ms "
                f"inflation {row['inflation']:.3f}"
            )
    return 1 if result["failures"] else 0


def measure(result: dict, key: tuple, server: Server, point: tuple[int, int], options, profiled: bool) -> None:
    """Add one server's row, and its profile where wanted, at (batch, context) to `result`; what fails is noted there."""
    (algorithm, variant, fp8), (batch, context) = key, point
    is_plain = algorithm == "plain"
    accept = 1.0 if is_plain else options.simulated_accept
    try:
        time_ = step_milliseconds(server, batch, context, options.steps, accept)
    except Exception as error:
        _fail(result, key, point=point, error=repr(error)[:500])
        return
    print(key, f"{batch}x{context}", {name: round(value, 3) for name, value in time_.items()}, flush=True)
    row = {
        "model": options.model,
        "head_layers": MODELS[options.model].head_layers,
        "algorithm": algorithm,
        "budget": None if is_plain else variant,
        "batch": batch,
        "context": context,
        "backend_plain": variant if is_plain else None,
        "tensor_parallel": options.tensor_parallel,
        "step_ms": time_["ms"],
        "step_ms_mean": time_["ms_mean"],
        "steps": time_["steps"],
    }
    if not is_plain:
        row |= {
            "fp8_draft": fp8,
            "simulated_accept": options.simulated_accept,
            "measured_accept": time_["tokens_a_step"],
        }
    result["rows"].append(row)
    if profiled:
        try:
            steps = profiled_step(server, batch, context, accept, time_["ms"])
            where = {"model": options.model, "server": list(key), "batch": batch, "context": context}
            where |= {"tensor_parallel": options.tensor_parallel}
            result["profiles"].append(where | steps)
        except Exception as error:
            _fail(result, key, profile=point, error=repr(error)[:500])


def add_inflation(rows: list[dict]) -> None:
    """Give each tree row `plain_ms` of the best plain backend at its point, that backend's name, and `inflation`."""
    for row in rows:
        plain = [
            (other["step_ms"], other["backend_plain"])
            for other in rows
            if other["algorithm"] == "plain" and (other["batch"], other["context"]) == (row["batch"], row["context"])
        ]
        if row["algorithm"] != "plain" and plain:
            row["plain_ms"], row["backend_plain"] = min(plain)
            row["inflation"] = row["step_ms"] / row["plain_ms"]


def _fail(result: dict, key: tuple, **facts) -> None:
    result["failures"].append({"server": list(key), **facts})
    print(key, facts, flush=True)
