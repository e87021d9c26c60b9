"""Training data that the target writes itself: its responses to train-split prompts and to prompts of its own.

Heads learn the target's distribution, so text from elsewhere teaches the wrong thing (DESIGN.md section 8:
regenerated data beats corpus data). Token ids only are stored.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MAX_PROMPT_TOKENS = 384
MBPP_TRAIN = range(601, 975)
# Rows of the train splits that launch/prompts.jsonl ships: measured on, so never trained on.
SHIPPED_GSM8K_ROW, SHIPPED_MBPP_TASK = 2, 605


@dataclass(frozen=True)
class Prompt:
    """A chat prompt up to the start of the assistant's turn. `held_out` prompts validate and are never trained on."""

    source: str
    tokens: list[int]
    held_out: bool = False


@dataclass(frozen=True)
class Response:
    """A prompt and the target's response, stop token included, in `tokens` [T] int64."""

    source: str
    tokens: Tensor
    prompt_length: int
    held_out: bool


def train_prompts(data_folder: str | Path, tokenizer, held_out: int) -> list[Prompt]:
    """GSM8K-train questions and MBPP-train tasks as chat prompts; the last `held_out` of each are marked so.
    Shipped ones are left out.

    Raises FileNotFoundError where `data_folder` lacks gsm8k_train.jsonl or mbpp.jsonl.
    """
    rows = {name: Path(data_folder, f"{name}.jsonl").read_text().splitlines() for name in ("gsm8k_train", "mbpp")}
    texts = {
        "gsm8k": [
            json.loads(row)["question"] for index, row in enumerate(rows["gsm8k_train"]) if index != SHIPPED_GSM8K_ROW
        ],
        "mbpp": [
            task["text"] + "\nYour code should pass these tests:\n" + "\n".join(task["test_list"])
            for task in map(json.loads, rows["mbpp"])
            if task["task_id"] in MBPP_TRAIN and task["task_id"] != SHIPPED_MBPP_TASK
        ],
    }
    return [
        Prompt(source, chat_tokens(tokenizer, text), held_out=index >= len(group) - held_out)
        for source, group in texts.items()
        for index, text in enumerate(group)
    ]


def chat_tokens(tokenizer, text: str) -> list[int]:
    """The chat template around one user turn, up to where the assistant speaks."""
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def self_written_prompts(model, tokenizer, count: int, batch_size: int, held_out: int) -> Iterator[Prompt]:
    """Instructions that the target writes when it is given only the start of a user turn, sampled at temperature 1."""
    marker = "\0"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    start = tokenizer(chat.split(marker)[0], add_special_tokens=False)["input_ids"]
    seen = set()
    for first in range(0, count, batch_size):
        starts = [start] * min(batch_size, count - first)
        for written in generate(model, tokenizer, starts, max_new_tokens=128, temperature=1.0):
            text = tokenizer.decode(written[:-1]).strip()
            if written[-1] == model.generation_config.eos_token_id and 12 <= len(text) and text not in seen:
                yield Prompt("self-written", chat_tokens(tokenizer, text), held_out=len(seen) < held_out)
                seen.add(text)


@torch.inference_mode()
def generate(model, tokenizer, prompts: list[list[int]], max_new_tokens: int, temperature: float) -> list[list[int]]:
    """One batch of the target's continuations, cut after the stop token. temperature 0 is greedy."""
    width = max(map(len, prompts))
    padding = model.generation_config.pad_token_id
    ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, **sampling)
    stop = model.generation_config.eos_token_id
    rows = [row[width:] for row in out.tolist()]
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]


def write_responses(
    model,
    tokenizer,
    data_folder: str | Path,
    minutes: float,
    batch_size: int,
    max_new_tokens: int = 256,
    held_out: int = 48,
) -> list[Response]:
    """Answer every prompt greedily, then again at temperature 0.8, until the time is spent.

    The order, so that a short run still has all kinds: held-out prompts, then a random mix of the rest.
    """
    end = time.monotonic() + 60 * minutes
    prompts = train_prompts(data_folder, tokenizer, held_out)
    # As many of its own as of the others, but at most a quarter of the time.
    written_until = time.monotonic() + 60 * minutes / 4
    for prompt in self_written_prompts(model, tokenizer, len(prompts), batch_size, held_out):
        prompts.append(prompt)
        if time.monotonic() > written_until:
            break
    prompts = [prompt for prompt in prompts if len(prompt.tokens) <= MAX_PROMPT_TOKENS]
    responses = []
    for temperature, batch in _batches(prompts, batch_size):
        if responses and time.monotonic() > end:
            break
        texts = generate(model, tokenizer, [prompt.tokens for prompt in batch], max_new_tokens, temperature)
        responses += [
            Response(prompt.source, torch.tensor(prompt.tokens + text), len(prompt.tokens), prompt.held_out)
            for prompt, text in zip(batch, texts)
        ]
    return responses


def _batches(prompts: list[Prompt], batch_size: int) -> Iterator[tuple[float, list[Prompt]]]:
    """(temperature, prompts of like length): held-out, greedy, then sampled without end."""
    yield from ((0.0, batch) for batch in _cut([prompt for prompt in prompts if prompt.held_out], batch_size))
    rest = [prompt for prompt in prompts if not prompt.held_out]
    temperature = 0.0
    while rest:
        batches = _cut(rest, batch_size)
        yield from ((temperature, batches[index]) for index in torch.randperm(len(batches)).tolist())
        temperature = 0.8


def _cut(prompts: list[Prompt], batch_size: int) -> list[list[Prompt]]:
    ordered = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    return [ordered[first : first + batch_size] for first in range(0, len(ordered), batch_size)]


def save_responses(responses: list[Response], path: str | Path) -> None:
    """Store as compressed NumPy arrays, about 1.5 bytes a token."""
    np.savez_compressed(
        path,
        tokens=np.concatenate([response.tokens.numpy() for response in responses]).astype(np.uint32),
        lengths=np.array([len(response.tokens) for response in responses]),
        prompt_lengths=np.array([response.prompt_length for response in responses]),
        held_out=np.array([response.held_out for response in responses]),
        sources=np.array([response.source for response in responses]),
    )


def load_responses(path: str | Path) -> list[Response]:
    """What `save_responses` stored."""
    with np.load(path) as file:
        ends = file["lengths"].cumsum()
        tokens = torch.from_numpy(file["tokens"].astype(np.int64))
        rows = zip(file["sources"], file["lengths"], ends, file["prompt_lengths"], file["held_out"])
        return [
            Response(str(source), tokens[end - length : end], int(prompt_length), bool(held_out))
            for source, length, end, prompt_length, held_out in rows
        ]
