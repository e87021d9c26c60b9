"""`regenerate`: prompts in, the target's own continuations out, in shards that a later run goes on from.

Heads learn the target's distribution, so text from elsewhere teaches the wrong thing.
"""

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.training.config import RegenerateConfig
from sgl_specflow.training.prompts import Prompt, TestRows, openings, self_written, train_prompts, turn_start
from sgl_specflow.training.responses import Response, save_responses

MAX_TURN_TOKENS = 128

# (prompts, max_new_tokens, temperature) -> continuations, cut after the stop token.
Generate = Callable[[list[list[int]], int, float], list[list[int]]]


class EngineGenerator:
    """Continuations through an `sglang.Engine` in this process: any target that SGLang serves. Close it at the end."""

    def __init__(self, target: str, flags: str):
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        load_plugins()  # The CPU reference platform is a plugin.
        arguments = ["--model-path", target, "--log-level", "error", *shlex.split(flags)]
        self.engine = Engine(server_args=prepare_server_args(arguments))

    def __call__(self, prompts: list[list[int]], max_new_tokens: int, temperature: float = 0.0) -> list[list[int]]:
        sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        return [list(answer["output_ids"]) for answer in answers]

    def close(self) -> None:
        self.engine.shutdown()


def regenerate(config: RegenerateConfig, generate: Generate, tokenizer) -> list[Path]:
    """Write what is missing of the run and return its shards.

    A shard is one batch of prompts of like length. A run that was cut goes on behind its last whole shard; the folder's
    run.json refuses another config (SpecflowConfigError).
    """
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    _claim(out, config)
    start = time.monotonic()
    prompts = _prompts(config, generate, tokenizer, out)
    work, shards = list(_work(config, prompts)), []
    bar = tqdm(total=sum(len(batch) for _, batch in work), unit="response", mininterval=5)
    written = 0
    for number, (temperature, batch) in enumerate(work):
        path = out / f"responses-{number:05d}.npz"
        if not path.exists():
            if shards and config.minutes and time.monotonic() - start > 60 * config.minutes:
                break
            answers = generate([prompt.tokens for prompt in batch], config.max_new_tokens, temperature)
            written += sum(map(len, answers))
            save_responses(
                [
                    Response(
                        prompt.source,
                        torch.tensor(prompt.tokens + answer),
                        len(prompt.tokens),
                        prompt.held_out,
                        temperature == 0,
                    )
                    for prompt, answer in zip(batch, answers, strict=True)
                    if answer
                ],
                path,
            )
            bar.set_postfix_str(f"{written / (time.monotonic() - start):.0f} tokens/s", refresh=False)
        shards.append(path)
        bar.update(len(batch))
    bar.close()
    return shards


def _prompts(config: RegenerateConfig, generate: Generate, tokenizer, out: Path) -> list[Prompt]:
    """Every prompt of the run; the self-written ones are kept in prompts.json, since they are sampled."""
    test_rows = TestRows.of(config.data)
    train = [
        prompt
        for source in ("gsm8k", "mbpp")
        if source in config.sources
        for prompt in train_prompts(config.data, source, tokenizer, config.held_out)
    ]
    test_rows.refuse(train)
    prompts = list(train)
    if "self_written" in config.sources:
        kept = out / "prompts.json"
        if not kept.exists():
            start, begun = turn_start(tokenizer), list(openings(config.self_written, train, config.seed))
            tokens = tokenizer([start + text for text in begun], add_special_tokens=False)["input_ids"]
            ends = generate(tokens, MAX_TURN_TOKENS, 1.0)
            stop = tokenizer.eos_token_id
            whole = [text + tokenizer.decode(end[:-1]) for text, end in zip(begun, ends) if end and end[-1] == stop]
            scratch = out / ".prompts.part"
            scratch.write_text(json.dumps(whole))
            scratch.rename(kept)
        prompts += self_written(json.loads(kept.read_text()), tokenizer, test_rows, config.held_out)
    fitting = [prompt for prompt in prompts if len(prompt.tokens) <= config.max_prompt_tokens]
    if all(prompt.held_out for prompt in fitting):
        raise SpecflowConfigError(
            given=f"{len(prompts)} prompts, {len(fitting)} of at most {config.max_prompt_tokens} tokens, all held out",
            allowed="some that can be trained on",
            todo="lower held_out, raise max_prompt_tokens, or name more sources",
        )
    return fitting


def _work(config: RegenerateConfig, prompts: list[Prompt]) -> Iterator[tuple[float, list[Prompt]]]:
    """(temperature, batch): held-out prompts greedily, then a greedy round of the rest, then the sampled ones."""
    most = max([1, *config.repeats.values()])
    held_out = [prompt for prompt in prompts if prompt.held_out]
    rest = [prompt for prompt in prompts if not prompt.held_out]
    sampled = [p for _ in range(most - 1) for p in rest]
    taken: dict[int, int] = {}
    again = []
    for prompt in sampled:
        taken[id(prompt)] = taken.get(id(prompt), 0) + 1
        if taken[id(prompt)] < config.repeats.get(prompt.source, 1):
            again.append(prompt)
    for temperature, group in ((0.0, held_out), (0.0, rest), (config.temperature, again)):
        generator = torch.Generator().manual_seed(config.seed)
        # Like lengths share a batch; batches come in random order, so that a run cut short still has all kinds.
        ordered = sorted(group, key=lambda prompt: len(prompt.tokens))
        batches = [ordered[first : first + config.shard] for first in range(0, len(ordered), config.shard)]
        yield from (
            (temperature, batches[index]) for index in torch.randperm(len(batches), generator=generator).tolist()
        )


def corpus_responses(folder: str | Path, tokenizer, held_out: int) -> list[Response]:
    """The data sets' own answers to the same train prompts, for the ablation: text that the target did not write."""
    test_rows, responses = TestRows.of(folder), []
    stop = [tokenizer.eos_token_id]
    for source in ("gsm8k", "mbpp"):
        prompts = train_prompts(folder, source, tokenizer, held_out)
        test_rows.refuse(prompts)
        for prompt in prompts:
            answer = tokenizer(prompt.answer, add_special_tokens=False)["input_ids"] + stop
            tokens = torch.tensor(prompt.tokens + answer)
            responses.append(Response(source, tokens, len(prompt.tokens), prompt.held_out, greedy=False))
    return responses


def _claim(out: Path, config: RegenerateConfig) -> None:
    """Tie the folder to this config; how long to run and where it lies may change."""
    said = {name: value for name, value in asdict(config).items() if name not in ("minutes", "out", "engine_flags")}
    mark = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    run = out / "run.json"
    if not run.exists():
        run.write_text(json.dumps({"sha256": mark, "config": said}, indent=2) + "\n")
    elif (known := json.loads(run.read_text()))["sha256"] != mark:
        other = sorted(name for name in said if known["config"].get(name) != said[name])
        raise SpecflowConfigError(
            given=f"{out}, which holds a run with other {', '.join(other)}",
            allowed="the config that the run began with, to go on, or an empty folder",
            todo="give another out",
        )
