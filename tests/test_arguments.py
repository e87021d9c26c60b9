"""What all commands of `eval` refuse alike, before anything is started or measured."""

import argparse
import os
import subprocess
import sys

import pytest
from sgl_specflow.eval.arguments import numbers, pairs, result_file


def test_numbers_by_commas():
    assert numbers("16") == [16] and numbers("1, 64,256") == [1, 64, 256]
    for text in ("", "0", "16,", "16,-1", "1.5", "abc"):
        with pytest.raises(argparse.ArgumentTypeError, match="whole numbers from 1 on"):
            numbers(text)


def test_pairs_by_commas():
    assert pairs("1x64") == [(1, 64)] and pairs("1x64,4x128") == [(1, 64), (4, 128)]
    for text, named in (
        ("1x64,4", "give pairs"),
        ("1x2x3", "give pairs"),
        ("", "whole numbers"),
        ("0x64", "whole numbers"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=named):
            pairs(text)


def test_a_result_file_can_be_written(tmp_path):
    assert result_file(str(tmp_path / "new" / "deep" / "a.json")) == tmp_path / "new" / "deep" / "a.json"
    file = tmp_path / "file"
    file.touch()
    assert result_file(str(file)) == file and not (tmp_path / "new").exists()
    for bad in (tmp_path, file / "below"):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
            result_file(str(bad))
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if not os.access(closed, os.W_OK):  # root may write anywhere
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
            result_file(str(closed / "a.json"))


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "throughput --model-path M --data /nope --out OUT",
            "error: No such file or directory: /nope/gsm8k_test.jsonl",
        ),
        ("lossless --model-path M --data /nope --out OUT --budgets 0", "give whole numbers from 1 on, by commas"),
        ("gdn --out OUT --shapes 1x64,4", "give pairs, by commas, as 1x64,4x128"),
        ("gdn --out OUT --heads 16,48", "give key heads, value heads and dimension"),
        ("inflation --model qwen3-8b --out OUT", "needs a CUDA GPU"),
        ("tree_attention --out OUT", "needs a CUDA GPU"),
        ("quantised_target --model-path M --data /nope --out OUT", "needs a CUDA GPU"),
    ],
)
def test_commands_end_with_one_line_and_no_traceback(tmp_path, words, message):
    command = [sys.executable, "-m", "sgl_specflow.eval", *words.replace("OUT", str(tmp_path / "out.json")).split()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out.json").exists()
