"""Put the rows of several result files into one, each with the run that measured it.

    python -m sgl_specflow.eval merge eval/results/acceptance_smollm2.json offline.json served.json

The first file is written (and made, if it is missing); the others are added to it in their order. The result holds `runs`,
the `meta` of each file that still has a row, and each row's `run`, an index into them. A row replaces an earlier one of
the same drafter, method, head, Weaver, data set, budget, width, engine and batch (KEY).
"""

import argparse
import json
from pathlib import Path

KEY = (
    *("drafter", "method", "head", "causal", "loss", "data", "weaver", "weaver_width", "weaver_rounds", "fp8_draft"),
    *("dataset", "budget", "engine", "batch"),
)


def merge(results: list[dict]) -> dict:
    """{"meta", "runs", "rows"} of result files, later rows in the place of earlier ones of the same KEY.

    `meta` is the last run's, for readers that know of one only.
    """
    rows: dict[tuple, tuple[dict, dict]] = {}
    for result in results:
        runs = result.get("runs", [result["meta"]])
        for row in result["rows"]:
            meta = runs[row.get("run", 0)]
            rows[tuple(json.dumps(row.get(name)) for name in KEY)] = meta, row
    runs = []
    for meta, _ in rows.values():
        if meta not in runs:
            runs.append(meta)
    numbered = [row | {"run": runs.index(meta)} for meta, row in rows.values()]
    return {"meta": runs[-1] if runs else {}, "runs": runs, "rows": numbered}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the file that is extended")
    parser.add_argument("files", type=Path, nargs="+", help="what is added to it")
    options = parser.parse_args(arguments)
    known = [options.out] if options.out.exists() else []
    result = merge([json.loads(path.read_text()) for path in [*known, *options.files]])
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.out}: {len(result['rows'])} rows of {len(result['runs'])} runs")
    return 0
