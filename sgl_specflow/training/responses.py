"""Responses on disk: token ids only, in shards of compressed NumPy arrays, about 1.1 bytes a token."""

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgl_specflow.errors import SpecflowConfigError


@dataclass(frozen=True)
class Response:
    """A prompt and its response, stop token included, in `tokens` [T] int64.

    held_out: its prompt validates and is never trained on. greedy: the target's greedy answer, cut at most at the end.
    """

    source: str
    tokens: Tensor
    prompt_length: int
    held_out: bool
    greedy: bool = True


def save_responses(responses: list[Response], path: str | Path) -> None:
    """Write one shard; it appears whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.concatenate([response.tokens.numpy() for response in responses])
    scratch = path.with_name(f".{path.name}.part")
    with scratch.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=tokens.astype(np.uint16 if tokens.max() < 2**16 else np.uint32),
            lengths=np.array([len(response.tokens) for response in responses], dtype=np.uint32),
            prompt_lengths=np.array([response.prompt_length for response in responses], dtype=np.uint32),
            held_out=np.array([response.held_out for response in responses]),
            greedy=np.array([response.greedy for response in responses]),
            sources=np.array([response.source for response in responses]),
        )
    scratch.rename(path)


def load_responses(places: Iterable[str | Path] | str | Path) -> list[Response]:
    """All shards of files and folders, in the order of their names.

    Raises SpecflowConfigError where a place holds none.
    """
    files = []
    for place in [places] if isinstance(places, str | Path) else places:
        found = sorted(Path(place).glob("*.npz")) if Path(place).is_dir() else [Path(place)]
        if not found or not all(path.is_file() for path in found):
            raise SpecflowConfigError(
                given=f"responses {place}, which holds no .npz file",
                allowed="a file or folder that `python -m sgl_specflow.training regenerate` wrote",
                todo="run regenerate first",
            )
        files += found
    return [response for path in files for response in _checked(path)]


def _checked(path: Path) -> list[Response]:
    try:
        return _load(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, AttributeError) as error:
        raise SpecflowConfigError(
            given=f"{path}, which cannot be read as responses ({type(error).__name__}: {error})",
            allowed="a file or folder that `python -m sgl_specflow.training regenerate` wrote",
            todo="give another, or delete it and run regenerate again",
        ) from error


def _load(path: Path) -> list[Response]:
    with np.load(path) as file:
        lengths = file["lengths"].astype(np.int64)
        tokens = torch.from_numpy(file["tokens"].astype(np.int64))
        greedy = file["greedy"] if "greedy" in file else np.zeros(len(lengths), dtype=bool)
        rows = zip(
            file["sources"], lengths, lengths.cumsum(), file["prompt_lengths"], file["held_out"], greedy, strict=True
        )
        return [
            Response(str(source), tokens[end - length : end], int(prompt_length), bool(held_out), bool(is_greedy))
            for source, length, end, prompt_length, held_out, is_greedy in rows
        ]
