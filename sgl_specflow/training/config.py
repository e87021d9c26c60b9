"""One YAML file a run: a flat mapping onto one of the dataclasses below, with `name=value` overrides from the command.

target: smollm2
responses: [responses]
out: run
head: {causal: true, layers: 5}
"""

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.make import head_config
from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.training.losses import KINDS

DTYPES = ("auto", "float32", "bfloat16", "float16")
MOST_SEED = 2**31 - 1


@dataclass(frozen=True)
class HeadShape:
    """The head's shape; width, attention heads, vocabulary and RoPE base are the target's.

    target_layers: whose outputs the head reads, ascending from 0; none given: five spread from the second to the last
    but one. The last layer's output cannot be had: SGLang 0.5.23 captures a layer's output as the next one's input.
    """

    causal: bool = True
    layers: int = 5
    intermediate_size: int = 1024
    block_size: int = 16
    mask_token_id: int = 0
    target_layers: list[int] = field(default_factory=list)

    def config(self, target) -> HeadConfig:
        """The `config.json` for a Hugging Face text config `target`."""
        total = target.num_hidden_layers
        head_dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
        rope = getattr(target, "rope_parameters", None) or {}
        spread = sorted({round(1 + step * (total - 3) / 4) for step in range(5)}) if total > 3 else [0]
        layers = list(self.target_layers) or spread
        if max(layers) > total - 2:
            raise SpecflowConfigError(
                given=f"target_layers {layers} of a target with {total} layers",
                allowed=f"layers 0 to {total - 2}: SGLang 0.5.23 cannot capture the last layer's output",
                todo="leave the last layer out",
            )
        return HeadConfig.from_dict(
            head_config(
                hidden_size=target.hidden_size,
                intermediate_size=self.intermediate_size,
                num_hidden_layers=self.layers,
                num_attention_heads=target.num_attention_heads,
                num_key_value_heads=target.num_key_value_heads,
                head_dim=head_dim,
                vocab_size=target.vocab_size,
                num_target_layers=total,
                target_layer_ids=layers,
                mask_token_id=self.mask_token_id,
                causal_head=self.causal,
                block_size=self.block_size,
                rope_theta=float(rope.get("rope_theta") or getattr(target, "rope_theta", None) or 10000.0),
                max_position_embeddings=target.max_position_embeddings,
            )
        )


@dataclass(frozen=True)
class TrainConfig:
    """`train`: one head. Training ends after `steps` or `minutes`, whichever comes first, and the learning rate follows
    that progress; give `steps` where two runs must be equal.

    Attributes:
        target: folder of the target. responses: files or folders that `regenerate` wrote. out: where checkpoint.pt,
            the head's folder `head` and history.jsonl go.
        loss: forward_kl, reverse_kl or cross_entropy. teacher_temperature: of the target's distribution in the KL
            losses; below 1 for heads that draft for greedy decoding. decay: of the loss's weight with depth,
            exp(-(i - 1 - revealed) / decay) at the block's position i.
        reveal: part of the blocks that reveal path tokens (causal heads; for path refresh).
        row_tokens, anchors: context tokens and blocks of one row; on a GPU row_tokens, and anchors x block_size, are
            multiples of 128. rows: rows a step and process (gradient accumulation).
        optimizer: muon (matrices; the rest AdamW) or adamw.
        ema: decay of an exponential average that is exported instead of the weights; 0: none.
        sources: only responses of these sources; none: all.
        initial: a checkpoint.pt or head folder to start from, or none.
        validate_minutes, checkpoint_minutes: between two of them; 0: only at the end.
    """

    target: str
    responses: list[str]
    out: str
    head: HeadShape = field(default_factory=HeadShape)
    minutes: float = 1e9
    steps: int = 10**9
    loss: str = "forward_kl"
    teacher_temperature: float = 1.0
    decay: float = 5.0
    reveal: float = 0.25
    row_tokens: int = 16384
    anchors: int = 3072
    rows: int = 1
    loss_chunk: int = 384
    optimizer: str = "muon"
    learning_rate: float = 4e-3
    vector_learning_rate: float = 1e-3
    warm_up: float = 0.03
    weight_decay: float = 0.01
    gradient_clip: float = 1.0
    ema: float = 0.0
    seed: int = 0
    sources: list[str] = field(default_factory=list)
    initial: str = ""
    validate_minutes: float = 0.0
    validation_responses: int = 96
    validation_budgets: list[int] = field(default_factory=lambda: [16, 64])
    checkpoint_minutes: float = 0.0
    dtype: str = "auto"
    fast: bool | None = None

    def __post_init__(self):
        _choice("loss", self.loss, KINDS)
        _choice("optimizer", self.optimizer, ("muon", "adamw"))
        _choice("dtype", self.dtype, DTYPES)
        _at_least(self, 1, "steps", "rows", "anchors", "loss_chunk", "row_tokens", "validation_responses")
        _at_least(self, 2, "validation_budgets")
        _at_least(self, 0, "weight_decay", "validate_minutes", "checkpoint_minutes", "vector_learning_rate")
        _folder(self)
        _seed(self)
        _above_0(self, "minutes", "teacher_temperature", "decay", "learning_rate", "gradient_clip")
        for name in ("reveal", "warm_up", "ema"):
            if not 0 <= getattr(self, name) <= 1:
                _out_of_range(name, getattr(self, name), "0 to 1")
        if self.ema == 1:
            _out_of_range("ema", self.ema, "a decay below 1, or 0 for no average")
        if self.anchors % self.loss_chunk and self.anchors > self.loss_chunk:
            raise SpecflowConfigError(
                given=f"anchors {self.anchors} and loss_chunk {self.loss_chunk}",
                allowed="a loss_chunk (blocks whose logits are held at once) that divides anchors",
                todo="change one",
            )
        if self.steps >= 10**9 and self.minutes >= 1e9:
            raise SpecflowConfigError(given="neither steps nor minutes", allowed="one of them", todo="say when to stop")


@dataclass(frozen=True)
class RegenerateConfig:
    """`regenerate`: prompts in, the target's own continuations out, in shards under `out`.

    Attributes:
        data: folder with gsm8k_train.jsonl, mbpp.jsonl, and the test files whose rows are refused.
        sources: what is answered: gsm8k, mbpp, self_written. repeats: answers a prompt by source, the first greedy, the
            rest sampled at `temperature`; 1 where a source is not named.
        self_written: prompts that the target writes itself. held_out: prompts a source kept for validation.
        backend: engine (SGLang) or lockstep (this package's own batch decoding of Llama models on one GPU, without
            SGLang). engine_flags: SGLang server flags as one string.
        minutes: stop after the batch in which they are over; 0: all prompts.
        shard: responses a shard and a batch.
    """

    target: str
    data: str
    out: str
    sources: list[str] = field(default_factory=lambda: ["gsm8k", "mbpp", "self_written"])
    repeats: dict[str, int] = field(default_factory=dict)
    self_written: int = 8000
    held_out: int = 48
    temperature: float = 0.8
    max_new_tokens: int = 256
    max_prompt_tokens: int = 384
    shard: int = 4096
    backend: str = "engine"
    engine_flags: str = ""
    minutes: float = 0.0
    seed: int = 0

    def __post_init__(self):
        _choice("backend", self.backend, ("engine", "lockstep"))
        _not_empty("sources", self.sources)
        for name in ("sources", "repeats"):
            for source in getattr(self, name):
                _choice(name, source, ("gsm8k", "mbpp", "self_written"))
        _at_least(self, 1, "repeats", "max_new_tokens", "max_prompt_tokens", "shard")
        _at_least(self, 0, "self_written", "held_out", "minutes")
        _folder(self)
        _seed(self)
        _above_0(self, "temperature")


@dataclass(frozen=True)
class EvaluateConfig:
    """`evaluate`: offline accept lengths of heads over test prompts, into one JSON.

    Attributes:
        heads: head folders. out: the JSON file. rows: prompts a data set (MT-Bench has 80).
        budgets: tree budgets; the chain of a block is measured too. path_refresh: budgets of two passes, causal heads.
        weavers: a head folder's Weaver adapter, by that folder. weaver_widths: nodes that it expands at once, each
            measured at each budget in the orders given, with the default number of rounds; 0 is the server's default
            width. The wider, the fewer rounds and the sooner measured.
        continuations: a file that keeps the target's greedy answers between runs, or none.
        width: children considered a depth, SGLang's --speculative-eagle-topk; 16 is what this package serves.
        commit: the code's commit, where it runs outside its checkout.
        fp8_draft: draft with weights rounded as the server's option of that name rounds them.
    """

    target: str
    data: str
    heads: list[str]
    out: str
    datasets: list[str] = field(default_factory=lambda: ["gsm8k", "mbpp", "mt_bench"])
    rows: int = 200
    budgets: list[int] = field(default_factory=lambda: [16, 32, 64, 128, 256])
    path_refresh: list[int] = field(default_factory=lambda: [16, 32, 64, 128, 256])
    weavers: dict[str, str] = field(default_factory=dict)
    weaver_widths: list[int] = field(default_factory=lambda: [0, 16, 8, 4, 1])
    width: int = 16
    max_new_tokens: int = 256
    continuations: str = ""
    dtype: str = "auto"
    commit: str = ""
    fp8_draft: bool = False

    def __post_init__(self):
        _choice("dtype", self.dtype, DTYPES)
        _not_empty("heads", self.heads)
        _datasets(self)
        for head in self.weavers:
            _choice("weavers of the head", head, tuple(self.heads))
        _at_least(self, 1, "rows", "width")
        # An answer of one token has no verify pass; a tree of one node drafts nothing, and a refresh halves its tree first.
        _at_least(self, 2, "budgets", "max_new_tokens")
        _at_least(self, 4, "path_refresh")
        _at_least(self, 0, "weaver_widths")


@dataclass(frozen=True)
class AblateConfig:
    """`ablate`: heads that differ in one thing each, trained for as many steps, and their offline accept lengths.

    Attributes:
        target, responses, head, reveal, row_tokens, anchors, loss_chunk, learning_rate, teacher_temperature, dtype: as
            `train` has them. data: as `regenerate` has it, train splits included (one case trains on the data sets' own
            answers).
        out: a folder: a head of each case, and acceptance.json. steps: of every case.
        cases: names of `ablations.CASES`, in order; none: all. datasets, rows, budgets, max_new_tokens, continuations,
            commit: as `evaluate` has them.
    """

    target: str
    data: str
    responses: list[str]
    out: str
    steps: int
    head: HeadShape = field(default_factory=HeadShape)
    cases: list[str] = field(default_factory=list)
    teacher_temperature: float = 0.25
    reveal: float = 0.15
    row_tokens: int = 16384
    anchors: int = 3072
    loss_chunk: int = 384
    learning_rate: float = 5e-3
    datasets: list[str] = field(default_factory=lambda: ["gsm8k", "mbpp", "mt_bench"])
    rows: int = 200
    budgets: list[int] = field(default_factory=lambda: [16, 64])
    max_new_tokens: int = 256
    continuations: str = ""
    dtype: str = "auto"
    commit: str = ""

    def __post_init__(self):
        _choice("dtype", self.dtype, DTYPES)
        _not_empty("responses", self.responses)
        _datasets(self)
        _at_least(self, 1, "steps", "rows", "row_tokens", "anchors", "loss_chunk")
        _at_least(self, 2, "budgets", "max_new_tokens")
        _above_0(self, "teacher_temperature", "learning_rate")
        _folder(self)


_Config = typing.TypeVar("_Config")


def load(kind: type[_Config], path: str | Path | None, overrides: list[str]) -> _Config:
    """Read a YAML file (none: only overrides) and `name=value` words; a dot reaches into `head`, values are YAML.

    Raises SpecflowConfigError for an unknown or missing name, and for a value of another type, all by name.
    """
    given = {}
    if path is not None:
        try:
            given = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SpecflowConfigError(
                given=f"{path}, which cannot be read ({error})", allowed="a YAML mapping", todo="give the run's config"
            ) from error
    for word in overrides:
        name, _, value = word.partition("=")
        *above, last = name.split(".")
        place = given
        for part in above:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise SpecflowConfigError(
                given=f"{word} ({_one_line(error)})",
                allowed="name=value with a YAML value",
                todo="mend or quote the value",
            ) from error
        if not isinstance(place, dict):
            raise SpecflowConfigError(
                given=f"{word}, where {path or 'the command line'} has no names",
                allowed="name=value, and a dot where a mapping is, as in head.layers=5",
                todo="mend the name, or make it a mapping",
            )
        place[last] = value
    return _build(kind, given, str(path or "the command line"))


def _build(kind: type, given: Any, source: str):
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    if not isinstance(given, dict) or set(given) - set(fields):
        unknown = sorted(set(given) - set(fields), key=str) if isinstance(given, dict) else given
        raise SpecflowConfigError(given=f"{unknown} in {source}", allowed=f"{', '.join(fields)}", todo="mend the name")
    missing = [
        name
        for name, item in fields.items()
        if name not in given and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SpecflowConfigError(
            given=f"no {', '.join(missing)} in {source}", allowed="a value for each", todo="add them, or name=value"
        )
    return kind(**{name: _typed(name, value, hints[name], source) for name, value in given.items()})


def _typed(name: str, value: Any, hint: Any, source: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{source}, {name}")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and isinstance(value, list):
        return [_typed(name, item, arguments[0], source) for item in value]
    if origin is dict and isinstance(value, dict):
        return {key: _typed(name, item, arguments[1], source) for key, item in value.items()}
    allowed = tuple(arguments) if origin not in (list, dict) and arguments else (hint,)
    if float in allowed and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as a string.
        except ValueError:
            pass
    if origin not in (list, dict) and isinstance(value, allowed) and (not isinstance(value, bool) or bool in allowed):
        return value
    raise SpecflowConfigError(
        given=f"{name} {value!r} in {source}", allowed=f"{getattr(hint, '__name__', hint)}", todo="mend the value"
    )


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SpecflowConfigError(given=f"{name} {value!r}", allowed=", ".join(allowed), todo="give one of them")


def _not_empty(name: str, values: list) -> None:
    if not values:
        _out_of_range(name, values, "one entry at least")


def _datasets(config) -> None:
    _not_empty("datasets", config.datasets)
    for dataset in config.datasets:
        _choice("datasets", dataset, ("gsm8k", "mbpp", "mt_bench"))


def _folder(config) -> None:
    """Refuse an `out` that is a file now, not when the first result is written."""
    if Path(config.out).is_file():
        raise SpecflowConfigError(
            given=f"out {config.out}, a file", allowed="a folder, new or not", todo="name another"
        )


def _seed(config) -> None:
    """Seeds of steps and rows are made of it, below 2^63."""
    if not 0 <= config.seed <= MOST_SEED:
        _out_of_range("seed", config.seed, f"0 to {MOST_SEED}")


def _at_least(config, least: int, *names: str) -> None:
    """Refuse a smaller value of a field, or in one."""
    for name in names:
        given = getattr(config, name)
        values = given.values() if isinstance(given, dict) else given if isinstance(given, list) else [given]
        if not all(value >= least for value in values):  # NaN is no number of at least anything
            _out_of_range(name, given, f"{least} or more")


def _above_0(config, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            _out_of_range(name, getattr(config, name), "a number above 0")


def _out_of_range(name: str, value: Any, allowed: str) -> None:
    raise SpecflowConfigError(given=f"{name} {value!r}", allowed=allowed, todo="mend the value")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
