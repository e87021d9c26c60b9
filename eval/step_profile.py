"""Where the time of one step goes, kernel by kernel: SGLang's own profiler (`/start_profile`), summed up."""

import gzip
import json
import re
import statistics
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

WARM_SECONDS, PROFILED_SECONDS = 0.4, 0.4
NAME_LENGTH = 110


def profile(url: str, run: Callable[[], object]) -> dict:
    """`summary` of what the server at `url` does in the middle of `run`, which sends a request and waits for it.

    Raises RuntimeError where the request ends before the profile does, or where no trace appears.
    """
    with tempfile.TemporaryDirectory(prefix="trace_") as folder:
        request = threading.Thread(target=run, daemon=True)
        request.start()
        time.sleep(WARM_SECONDS)
        _post(url + "/start_profile", {"output_dir": folder, "with_stack": False, "record_shapes": False})
        time.sleep(PROFILED_SECONDS)
        alive = request.is_alive()
        _post(url + "/stop_profile", {})
        request.join(120)
        if not alive or request.is_alive():
            raise RuntimeError("the profiled request did not run through the whole profile, or did not end")
        traces = list(Path(folder).glob("*.trace.json.gz"))
        if len(traces) != 1:
            raise RuntimeError(f"{len(traces)} traces, expected one")
        return summary(json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"])


def _post(url: str, body: dict) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def summary(events: list[dict]) -> dict:
    """Microseconds a step, from a Chrome trace.

    A step is what lies between two replays of the graph with the most kernels, the target's pass.

    Returns `steps`; `step_us`, the mean time from one such replay to the next; `busy_us`, the part of it in which a
    kernel or copy runs; `graphs`, one entry a graph of the step in its order: kernels, span_us (first start to last end),
    busy_us; `outside_us`, kernels and copies outside any graph; `kernels`, [name, calls a step, microseconds a step] from
    the longest on, a time in which an earlier kernel still ran counted for that one alone (Hopper starts kernels early).
    """
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
    graph_launches = {
        e["args"]["correlation"]
        for e in events
        if "GraphLaunch" in e.get("name", "") and "correlation" in e.get("args", {})
    }
    replays: dict[int, list[dict]] = defaultdict(list)
    outside = []
    for kernel in kernels:
        launch = kernel["args"].get("correlation")
        (replays[launch] if launch in graph_launches else outside).append(kernel)
    if not replays:
        raise RuntimeError("no replayed CUDA graph in the trace")
    spans = sorted((_span(group) for group in replays.values()), key=lambda span: span["begin"])
    most = max(span["kernels"] for span in spans)
    starts = [span["begin"] for span in spans if span["kernels"] == most]
    if len(starts) < 4:
        raise RuntimeError(f"{len(starts)} steps in the trace")
    # The first and the last step are cut by the profile's ends.
    begin, end, steps = starts[1], starts[-1], len(starts) - 2
    inside = sorted((kernel for kernel in kernels if begin <= kernel["ts"] < end), key=lambda kernel: kernel["ts"])
    of_name: dict[str, list[float]] = defaultdict(list)
    for kernel, alone in zip(inside, _alone(inside)):
        of_name[short_name(kernel["name"])].append(alone)
    return {
        "steps": steps,
        "step_us": (end - begin) / steps,
        "busy_us": _busy(inside) / steps,
        "graphs": _graphs([span for span in spans if begin <= span["begin"] < end], steps),
        "outside_us": sum(kernel["dur"] for kernel in outside if begin <= kernel["ts"] < end) / steps,
        "kernels": [
            [name, len(times) / steps, sum(times) / steps]
            for name, times in sorted(of_name.items(), key=lambda item: -sum(item[1]))
        ],
    }


def short_name(name: str) -> str:
    """A kernel's name without its template arguments' tail and its parameters."""
    return re.sub(r"\s+", " ", name.removeprefix("void "))[:NAME_LENGTH]


def _span(group: list[dict]) -> dict:
    begin, end = min(k["ts"] for k in group), max(k["ts"] + k["dur"] for k in group)
    first = min(group, key=lambda kernel: kernel["ts"])["name"]
    return {"begin": begin, "first": first, "kernels": len(group), "span_us": end - begin, "busy_us": _busy(group)}


def _graphs(spans: list[dict], steps: int) -> list[dict]:
    """Median span and busy time of each graph, told apart by its first kernel and their number, in the order of their first
    replay."""
    of_graph: dict[tuple, list[dict]] = defaultdict(list)
    for span in spans:
        of_graph[span["kernels"], span["first"]].append(span)
    return [
        {
            "kernels": size,
            "replays_a_step": len(group) / steps,
            **{name: statistics.median(span[name] for span in group) for name in ("span_us", "busy_us")},
        }
        for (size, _), group in of_graph.items()
    ]


def _alone(kernels: list[dict]) -> list[float]:
    """The part of each kernel's time, in order of their starts, in which none that started before it ran."""
    parts, until = [], float("-inf")
    for kernel in kernels:
        end = kernel["ts"] + kernel["dur"]
        parts.append(max(0.0, end - max(until, kernel["ts"])))
        until = max(until, end)
    return parts


def _busy(kernels: list[dict]) -> float:
    """Length of the union of the kernels' intervals."""
    return sum(_alone(sorted(kernels, key=lambda kernel: kernel["ts"])))
