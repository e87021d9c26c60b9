"""What the commands' options have in common: numbers and pairs by commas, a file to write, and that there is a GPU."""

import argparse
import os
from pathlib import Path

import torch


def numbers(text: str) -> list[int]:
    """Whole numbers from 1 on, by commas."""
    items = text.split(",")
    if not all(item.strip().isdecimal() and int(item) > 0 for item in items):
        raise argparse.ArgumentTypeError(f"{text!r} was given; give whole numbers from 1 on, by commas, as 16,64")
    return [int(item) for item in items]


def pairs(text: str) -> list[tuple[int, int]]:
    """Two of them at a time: [(1, 64), (4, 128)] of '1x64,4x128'."""
    found = [tuple(numbers(pair.replace("x", ","))) for pair in text.split(",")]
    if any(len(pair) != 2 for pair in found):
        raise argparse.ArgumentTypeError(f"{text!r} was given; give pairs, by commas, as 1x64,4x128")
    return found


def result_file(text: str) -> Path:
    """A path that can be written, now and not only when hours have been measured."""
    path = Path(text)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} was given, which cannot be written; give a file in a folder of yours"
        )
    return path


def need_gpu(parser: argparse.ArgumentParser) -> None:
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
