"""Put the rows of several result files into one, each with the run that measured it.

    python -m sgl_specflow.eval merge eval/results/acceptance_smollm2.json offline.json served.json

The first file is written (and made, if it is missing); the others are added to it in their order. The result holds `runs`,
the `meta` of each file that still has a row, and each row's `run`, an index into them; profiles of steps are kept alike.
Rows replace those of earlier files that say what was measured in the same words (KEY); rows of one file never replace each
other. What else a file holds (`drift`, `steps`, `failures`) stays until a later file has its own.
"""

import argparse
import json
import re
import sys
from pathlib import Path

KEY = (
    # Accept lengths.
    *("drafter", "method", "head", "causal", "loss", "data", "weaver", "weaver_width", "weaver_rounds", "fp8_draft"),
    *("dataset", "budget", "engine", "batch"),
    # Times of steps and kernels.
    *("model", "algorithm", "context", "server", "tensor_parallel", "requests", "nodes", "heads", "key_heads"),
    *("value_heads", "kv_heads", "head_dim", "state_dtype", "implementation", "width", "rounds", "plain_batch"),
    *("layer", "features", "depth", "page_size"),
)
LISTS = ("rows", "profiles")
COMMAND = re.compile(r"sgl_specflow\.eval[ .](\w+)")


def _key(item: dict) -> tuple:
    # A tree server's row names the plain backend that it is compared with; a plain server's is measured on its own.
    names = (*KEY, "backend_plain") if item.get("algorithm") == "plain" else KEY
    return tuple(json.dumps(item.get(name)) for name in names)


def merge(results: list[dict]) -> dict:
    """{"meta", "runs", "rows"} of result files, and "profiles" where one has any; a later file's in the place of earlier
    files' of the same KEY.

    `meta` is the last run's, for readers that know of one only.
    """
    kept: dict[str, dict[tuple, list[tuple[dict, dict]]]] = {name: {} for name in LISTS}
    others: dict = {}
    for result in results:
        known = result["runs"] if "runs" in result else [result["meta"]]
        for name in LISTS:
            of_file: dict[tuple, list[tuple[dict, dict]]] = {}
            for item in result.get(name, []):
                of_file.setdefault(_key(item), []).append((known[item.get("run", 0)], item))
            kept[name] |= of_file
        others |= {name: part for name, part in result.items() if name not in (*LISTS, "meta", "runs")}
    flat = {name: [pair for group in groups.values() for pair in group] for name, groups in kept.items()}
    runs = []
    for pairs in flat.values():
        for meta, _ in pairs:
            if meta not in runs:
                runs.append(meta)
    lists = {
        name: [item | {"run": runs.index(meta)} for meta, item in pairs]
        for name, pairs in flat.items()
        if pairs or name == "rows"
    }
    return {"meta": runs[-1] if runs else {}, "runs": runs, **lists, **others}


def check_alike(results: list[dict], paths: list[Path]) -> None:
    """Raise ValueError for a file that other evals made than those of the first, as the runs' commands say."""

    def evals(result: dict) -> set[str]:
        runs = result["runs"] if "runs" in result else [result["meta"]]
        return {name for run in runs for name in COMMAND.findall(str(run.get("command", "")))}

    first = evals(results[0])
    for result, path in zip(results, paths, strict=True):
        own = evals(result)
        if first and own and not first & own:
            raise ValueError(
                f"{path} is of eval {', '.join(sorted(own))}, {paths[0]} of {', '.join(sorted(first))}: merge files of one"
            )


def read(path: Path) -> dict:
    """A result file. Raises ValueError, which names it, for one that cannot be merged."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give a file of eval/results") from error
    try:
        runs = result["runs"] if "runs" in result else [result["meta"]]
        whole = all(0 <= item.get("run", 0) < len(runs) for name in LISTS for item in result.get(name, []))
    except (AttributeError, KeyError, TypeError):
        whole = False
    if not whole or "rows" not in result:
        raise ValueError(
            f"{path} is no result file: give one with `meta` or `runs`, and `rows` whose `run` is one of them"
        )
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the file that is extended")
    parser.add_argument("files", type=Path, nargs="+", help="what is added to it")
    options = parser.parse_args(arguments)
    known = [options.out] if options.out.exists() else []
    try:
        paths = [*known, *options.files]
        results = [read(path) for path in paths]
        check_alike(results, paths)
        result = merge(results)
    except ValueError as error:
        print(f"sgl_specflow: {error}", file=sys.stderr)
        return 1
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.out}: {len(result['rows'])} rows of {len(result['runs'])} runs")
    return 0
