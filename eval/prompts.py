"""Rows of the data sets as chat messages."""

import itertools
import json
from pathlib import Path

MBPP_TEST = range(11, 511)


def rows(data: Path, dataset: str) -> list[list[dict]]:
    """The test rows of one data set ("gsm8k", "mbpp" or "mt_bench": first turns), each as chat messages."""
    if dataset == "gsm8k":
        texts = [row["question"] for row in _lines(data / "gsm8k_test.jsonl")]
    elif dataset == "mbpp":
        texts = [
            row["text"] + "\nYour code should pass these tests:\n" + "\n".join(row["test_list"])
            for row in _lines(data / "mbpp.jsonl")
            if row["task_id"] in MBPP_TEST
        ]
    elif dataset == "mt_bench":
        texts = [row["turns"][0] for row in _lines(data / "mt_bench.jsonl")]
    else:
        raise ValueError(f"dataset is {dataset!r}; give gsm8k, mbpp or mt_bench")
    return [[{"role": "user", "content": text}] for text in texts]


def mixed(data: Path, count: int) -> list[list[dict]]:
    """`count` prompts, taken in turn from the three data sets."""
    sources = [rows(data, name) for name in ("gsm8k", "mbpp", "mt_bench")]
    return list(itertools.islice(itertools.chain.from_iterable(zip(*sources)), count))


def _lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
