"""Put the rows of several result files into one, each with the run that measured it.

    python -m sgl_specflow.eval merge eval/results/acceptance_smollm2.json offline.json served.json

The first file is written (and made, if it is missing); the others are added to it in their order. The result holds `runs`,
the `meta` of each file that still has a row, and each row's `run`, an index into them; profiles of steps are kept alike.
A row replaces an earlier one that says what was measured in the same words (KEY).
"""

import argparse
import json
from pathlib import Path

KEY = (
    # Accept lengths.
    *("drafter", "method", "head", "causal", "loss", "data", "weaver", "weaver_width", "weaver_rounds", "fp8_draft"),
    *("dataset", "budget", "engine", "batch"),
    # Times of steps and kernels.
    *("model", "algorithm", "context", "server", "tensor_parallel", "requests", "nodes", "heads", "key_heads"),
    *("value_heads", "kv_heads", "head_dim", "state_dtype", "implementation", "width", "rounds", "plain_batch"),
)
LISTS = ("rows", "profiles")


def _key(item: dict) -> tuple:
    # A tree server's row names the plain backend that it is compared with; a plain server's is measured on its own.
    names = (*KEY, "backend_plain") if item.get("algorithm") == "plain" else KEY
    return tuple(json.dumps(item.get(name)) for name in names)


def merge(results: list[dict]) -> dict:
    """{"meta", "runs", "rows"} of result files, and "profiles" where one has any; later ones in the place of earlier ones
    of the same KEY.

    `meta` is the last run's, for readers that know of one only.
    """
    kept: dict[str, dict[tuple, tuple[dict, dict]]] = {name: {} for name in LISTS}
    for result in results:
        known = result.get("runs", [result["meta"]])
        for name in LISTS:
            kept[name] |= {_key(item): (known[item.get("run", 0)], item) for item in result.get(name, [])}
    runs = []
    for items in kept.values():
        for meta, _ in items.values():
            if meta not in runs:
                runs.append(meta)
    lists = {
        name: [item | {"run": runs.index(meta)} for meta, item in items.values()]
        for name, items in kept.items()
        if items or name == "rows"
    }
    return {"meta": runs[-1] if runs else {}, "runs": runs, **lists}


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
