"""Draw the result files that hold figures over tree budgets, as SVG files without any dependency.

    python -m sgl_specflow.eval plots --results eval/results --out docs/plots

Accept length from acceptance_smollm2.json (one chart a data set, what was computed without a server marked as offline),
speed-up and inflation from throughput_smollm2_h200.json, inflation from step_inflation_h200.json (one chart a model). A
missing file is named and left out.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from sgl_specflow.eval.line_chart import LineChart

from sgl_specflow.tree import expansion_width

Charts = dict[str, LineChart]
ABLATION = "ablation-"  # names of heads that were trained to be compared with each other, in tables


def series_of(rows: list[dict], name_of: Callable[[dict], str], value: str) -> dict[str, list[tuple[int, float]]]:
    """Points (budget, row[value]) by name; rows without a budget (plain decoding) or without the value are left out.

    Raises ValueError where two rows claim one point.
    """
    series: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get("budget") is not None and row.get(value) is not None:
            points = series.setdefault(name_of(row), {})
            if row["budget"] in points:
                raise ValueError(f"two rows of {name_of(row)!r} have budget {row['budget']}: {row}")
            points[row["budget"]] = row[value]
    return {name: list(points.items()) for name, points in series.items()}


def _charts(rows: list[dict], file: str, group: str, title: str, y_label: str, name_of, value: str) -> Charts:
    """One chart a value of row[group], of those that have a point."""
    charts = {}
    for member in dict.fromkeys(row[group] for row in rows):
        if series := series_of([row for row in rows if row[group] == member], name_of, value):
            charts[f"{file}_{member}"] = LineChart(title.format(member), y_label, series)
    return charts


def acceptance_charts(rows: list[dict]) -> Charts:
    rows = [row for row in rows if not (row["head"] or "").startswith(ABLATION)]
    heads: dict[str, set] = {}
    for row in rows:
        heads.setdefault(row["drafter"], set()).add(row["head"])

    def name_of(row: dict) -> str:
        """The drafter, its head where the rows hold several, and what else tells its lines apart."""
        name = row["drafter"] + (f" {row['head']}" if len(heads[row["drafter"]]) > 1 else "")
        if (method := row.get("method", "one_pass")) != "one_pass":
            name += f", {method.replace('_', ' ')}"
        name += ", FP8 draft" if row.get("fp8_draft") else ""
        width = row.get("weaver_width")
        name += f", w = {width}" if width and width != expansion_width(row["budget"]) else ""
        return name + (" (offline)" if row["engine"] == "offline" else "")

    title = "Accept length, SmolLM2-135M, {}"
    return _charts(rows, "accept_length", "dataset", title, "tokens a verify pass", name_of, "accept_length")


def throughput_charts(rows: list[dict]) -> Charts:
    def name_of(row: dict) -> str:
        return f"{row['drafter']}, batch {row['batch']}"

    speed_up = ("Decoding against plain, SmolLM2-135M, {}", "speed-up (plain = 1)", name_of, "speed_up")
    inflation = ("Step time against plain, SmolLM2-135M, {}", "inflation (plain = 1)", name_of, "inflation")
    return _charts(rows, "speed_up", "dataset", *speed_up) | _charts(rows, "inflation", "dataset", *inflation)


def step_inflation_charts(rows: list[dict]) -> Charts:
    def name_of(row: dict) -> str:
        other = "" if row.get("algorithm", "jetflow") == "jetflow" else f"{row['algorithm']}, "
        draft = ", FP8 draft" if row.get("fp8_draft") else ""
        draft += f", {ranks} GPUs" if (ranks := row.get("tensor_parallel", 1)) > 1 else ""
        return f"{other}batch {row['batch']}, context {row['context']}{draft}"

    def server_of(row: dict) -> tuple:
        return row["model"], row.get("tensor_parallel", 1)

    budgets: dict[tuple, set] = {}
    for row in rows:
        budgets.setdefault(server_of(row), {None}).add(row.get("budget"))
    rows = [row for row in rows if len(budgets[server_of(row)]) > 2]  # one budget is a table's, not a line's
    title = "Step time against plain, {} shapes"
    return _charts(rows, "step_inflation", "model", title, "inflation (plain = 1)", name_of, "inflation")


SOURCES: dict[str, Callable[[list[dict]], Charts]] = {
    "acceptance_smollm2.json": acceptance_charts,
    "throughput_smollm2_h200.json": throughput_charts,
    "step_inflation_h200.json": step_inflation_charts,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("eval/results"), help="folder (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs/plots"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    drawn = 0
    for name, charts_of in SOURCES.items():
        source = options.results / name
        if not source.exists():
            print(f"{source} is missing: left out")
            continue
        try:
            charts = charts_of(json.loads(source.read_text())["rows"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"{source} holds no rows that can be drawn ({type(error).__name__}: {error})", file=sys.stderr)
            return 1
        for stem, chart in charts.items():
            drawn += 1
            target = options.out / f"{stem}.svg"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(chart.svg())
            print(f"{source} -> {target}")
    if not drawn:
        print(
            f"{options.results} holds nothing to draw: give --results FOLDER with {', '.join(SOURCES)}", file=sys.stderr
        )
    return 0 if drawn else 1
