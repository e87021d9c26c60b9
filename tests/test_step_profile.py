"""The summary of a profiled step, from traces made by hand."""

import pytest
from sgl_specflow.eval.inflation import add_inflation
from sgl_specflow.eval.step_profile import summary


def kernel(name: str, begin: float, microseconds: float, launch: int, category: str = "kernel") -> dict:
    return {"cat": category, "name": name, "ts": begin, "dur": microseconds, "args": {"correlation": launch}}


def trace(steps: int, step_us: float = 100.0) -> list[dict]:
    """Steps of a target graph (two kernels of 10 µs that overlap by 5, then one of 20), a copy outside, a small graph."""
    events = []
    for step in range(steps):
        at, launch = step * step_us, 10 * step
        for graph in (launch, launch + 2):
            events.append({"cat": "cuda_runtime", "name": "cudaGraphLaunch", "args": {"correlation": graph}})
        events += [
            kernel("void gemm<1>(int)", at, 10, launch),
            kernel("void gemm<1>(int)", at + 5, 10, launch),
            kernel("attention", at + 20, 20, launch),
            kernel("Memcpy", at + 50, 3, launch + 1, "gpu_memcpy"),
            kernel("build", at + 60, 7, launch + 2),
        ]
    return events


def test_a_step_is_split_into_graphs_kernels_and_what_lies_between():
    found = summary(trace(8))
    assert found["steps"] == 6 and found["step_us"] == 100
    assert found["busy_us"] == pytest.approx(15 + 20 + 3 + 7)
    assert found["outside_us"] == pytest.approx(3)
    assert found["kernels"] == [["attention", 1, 20], ["gemm<1>(int)", 2, 15], ["build", 1, 7], ["Memcpy", 1, 3]]
    assert found["graphs"] == [
        {"kernels": 3, "replays_a_step": 1, "span_us": 40, "busy_us": 35},
        {"kernels": 1, "replays_a_step": 1, "span_us": 7, "busy_us": 7},
    ]


@pytest.mark.parametrize("events", [trace(3), [e for e in trace(8) if e["cat"] != "cuda_runtime"]])
def test_a_trace_without_whole_steps_is_refused(events):
    with pytest.raises(RuntimeError, match="in the trace"):
        summary(events)


def test_inflation_is_over_the_best_plain_backend_of_the_same_point():
    point = {"batch": 1, "context": 128}
    rows = [
        {"algorithm": "plain", "backend_plain": "triton", "step_ms": 5.0} | point,
        {"algorithm": "jetflow", "backend_plain": None, "step_ms": 6.0} | point,
        {"algorithm": "plain", "backend_plain": "fa3", "step_ms": 4.0} | point,
        {"algorithm": "plain", "backend_plain": "fa3", "step_ms": 1.0, "batch": 8, "context": 128},
        {"algorithm": "jetflow", "backend_plain": None, "step_ms": 9.0, "batch": 1, "context": 4096},
    ]
    add_inflation(rows)
    assert (rows[1]["plain_ms"], rows[1]["backend_plain"], rows[1]["inflation"]) == (4.0, "fa3", 1.5)
    assert all("inflation" not in row for i, row in enumerate(rows) if i != 1)
