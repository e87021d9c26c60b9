"""The training loop of a draft head: frozen target, packed rows, one step or wall-clock budget, exact resumption.

What a step trains on is a function of (seed, step, process) alone: rows come from `Rows`, anchors from a generator
seeded by the row's number. So a checkpoint needs no random state, and n processes with one row each take the step that
one process with n rows takes.
"""

import json
import math
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from sgl_specflow.drafter.checkpoint import expected_shapes, load_tensors
from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.training.blocks import Blocks, sample_blocks
from sgl_specflow.training.config import TrainConfig
from sgl_specflow.training.head import TrainingHead
from sgl_specflow.training.losses import distillation_loss, teacher_log_probs
from sgl_specflow.training.offline_accept import OfflineDrafter, accept_lengths
from sgl_specflow.training.optimizer import HeadOptimizer, schedule
from sgl_specflow.training.responses import Response
from sgl_specflow.training.rows import Batch, Rows
from sgl_specflow.training.target_states import FrozenTarget

STEPS_AHEAD = 3  # steps that the host may queue before it waits for the device, so that the clock tells the truth
REPORT_STEPS = 50


def initial_tensors(config: HeadConfig, target: FrozenTarget, seed: int) -> dict[str, Tensor]:
    """Float32 starting weights on the target's device: matrices normal (0.02), outputs of layers smaller, norms one.

    The final norm starts as the target's, whose scale the LM head expects.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        tensor = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor /= math.sqrt(2 * config.num_hidden_layers)
        tensors[name] = tensor.to(target.embedding.device)
    tensors["norm.weight"] = target.model.model.norm.weight.detach().float().clone()
    return tensors


def block_hidden(head: TrainingHead, target: FrozenTarget, batch: Batch, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """(the head's hidden states [A, S, H] at all blocks, the target's final-normed hidden states [T, H])."""
    hidden, final = (states.flatten(0, 1)[batch.source] for states in target.states(batch.tokens))
    embeddings = target.embedding[blocks.tokens]
    return head.forward(hidden, batch.row.positions, embeddings, blocks), final


def row_loss(head: TrainingHead, target: FrozenTarget, batch: Batch, config: TrainConfig, seed: int) -> Tensor:
    """The loss of one row with fresh random blocks, drawn from `seed`."""
    generator = torch.Generator(batch.row.tokens.device).manual_seed(seed)
    reveal = config.reveal if head.config.causal_head else 0.0
    blocks = sample_blocks(batch.row, head.config, config.anchors, reveal, config.decay, generator)
    hidden, final = block_hidden(head, target, batch, blocks)
    table = None
    if config.loss != "cross_entropy":
        table = teacher_log_probs(final, target.lm_head, config.teacher_temperature)
    return distillation_loss(
        # Position 0 is the anchor itself and predicts nothing.
        hidden[:, 1:].flatten(0, 1),
        config.loss,
        target.lm_head,
        table,
        rows=(blocks.targets[:, 1:] - 1).clamp(min=0).flatten(),
        labels=batch.row.tokens[blocks.targets[:, 1:]].flatten(),
        weights=blocks.weights[:, 1:].flatten(),
        chunk=config.loss_chunk * (head.config.block_size - 1),
    )[0]


@dataclass
class Progress:
    """What a checkpoint holds beside tensors; history: {step, minutes, loss, ...} every REPORT_STEPS steps."""

    step: int = 0
    minutes: float = 0.0
    history: list[dict] = field(default_factory=list)


class Trainer:
    """One run. `run` trains to the end, or to `until` steps; `weights` are float32, `exported` what should be served."""

    def __init__(self, config: TrainConfig, head: HeadConfig, target: FrozenTarget, responses: list[Response]):
        self.config, self.head_config, self.target = config, head, target
        self.device = target.embedding.device
        self.processes, self.process = _processes()
        usable = [r for r in responses if not r.held_out and len(r.tokens) - r.prompt_length >= 2]
        usable = [r for r in usable if not config.sources or r.source in config.sources]
        if not usable:
            raise SpecflowConfigError(
                given=f"{len(responses)} responses, none of which can be trained on",
                allowed="some of two response tokens, not held out, of the sources asked for",
                todo="regenerate more, or name other sources",
            )
        self.rows = Rows(usable, config.row_tokens, config.seed)
        self.held_out = _validation_set(responses, config.validation_responses)
        tensors = initial_tensors(head, target, config.seed)
        if config.initial:
            tensors = {name: t.to(self.device) for name, t in _stored_tensors(config.initial, head).items()}
        self.weights = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        self.average = {name: tensor.detach().clone() for name, tensor in tensors.items()} if config.ema else None
        self.optimizer = HeadOptimizer(self.weights, config)
        self.progress = Progress()
        cuda = self.device.type == "cuda"
        fast = cuda if config.fast is None else config.fast
        self.head = TrainingHead(head, self.weights, torch.bfloat16 if cuda else torch.float32, fast)

    @property
    def exported(self) -> dict[str, Tensor]:
        """The average where there is one, else the weights."""
        chosen = self.weights if self.average is None else self.average
        return {name: tensor.detach() for name, tensor in chosen.items()}

    def warm_up(self) -> None:
        """Compile, before the clock starts: one row forward and backward, whose gradients are thrown away."""
        start = time.monotonic()
        row_loss(self.head, self.target, self.rows[0].to(self.device), self.config, 0).backward()
        for tensor in self.weights.values():
            tensor.grad = None
        self._synchronize()
        self._say(f"first row, compiling included: {time.monotonic() - start:.1f} s")

    def run(self, until: int | None = None) -> None:
        """Train on, from wherever the run stands."""
        config, progress = self.config, self.progress
        begun, before = time.monotonic(), progress.minutes
        pending, losses = deque(), []
        validated = saved = progress.minutes
        while True:
            progress.minutes = before + (time.monotonic() - begun) / 60
            done = self._done()
            if done >= 1 or progress.step == until:
                break
            losses.append(self._step(done))
            progress.step += 1
            if self.device.type == "cuda":
                pending.append(torch.cuda.Event())
                pending[-1].record()
                if len(pending) > STEPS_AHEAD:
                    pending.popleft().synchronize()
            if progress.step % REPORT_STEPS == 0:
                self._report(losses)
            if config.validate_minutes and progress.minutes - validated >= config.validate_minutes:
                validated = progress.minutes
                self.validate()
            if config.checkpoint_minutes and progress.minutes - saved >= config.checkpoint_minutes:
                saved = progress.minutes
                self.save(Path(config.out) / "checkpoint.pt")
        self._synchronize()
        if losses:
            self._report(losses)

    def _done(self) -> float:
        """Part of the run that is over, the same number in every process."""
        progress = self.progress
        done = progress.step / self.config.steps
        if self.config.minutes < 1e9:
            clock = torch.tensor(progress.minutes / self.config.minutes, dtype=torch.float64)
            if self.processes > 1:
                clock = clock.to(self.device)
                dist.all_reduce(clock, dist.ReduceOp.MAX)
            done = max(done, clock.item())
        return done

    def _step(self, done: float) -> Tensor:
        config, total = self.config, 0.0
        for part in range(config.rows):
            number = (self.progress.step * config.rows + part) * self.processes + self.process
            batch = self.rows[number].to(self.device)
            loss = row_loss(self.head, self.target, batch, config, config.seed * 1_000_003 + number) / config.rows
            loss.backward()
            total = total + loss.detach()
        if self.processes > 1:
            self._average_gradients()
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), config.gradient_clip)
        self.optimizer.step(schedule(done, config.warm_up))
        if self.average is not None:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.average.values()), list(self.weights.values()), 1 - config.ema)
        return total

    def _average_gradients(self) -> None:
        """Mean over processes, in one message."""
        gradients = [tensor.grad for tensor in self.weights.values()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.processes
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(mean.view_as(gradient))

    def _report(self, losses: list[Tensor]) -> None:
        progress = self.progress
        row = {"step": progress.step, "minutes": round(progress.minutes, 3), "loss": torch.stack(losses).mean().item()}
        row["epochs"] = round(self.rows.epoch_of(progress.step * self.config.rows * self.processes), 3)
        losses.clear()
        progress.history.append(row)
        if progress.step % (10 * REPORT_STEPS) == 0 or self._done() >= 1:
            self._say(json.dumps(row))

    def validate(self) -> dict:
        """Held-out accept lengths, tree and chain; kept in the history. Nothing without held-out greedy answers."""
        if not self.held_out or self.process:
            return {}
        dtype = self.target.embedding.dtype
        head = ReferenceHead(self.head_config, {name: tensor.to(dtype) for name, tensor in self.exported.items()})
        drafter = OfflineDrafter(head, self.target)
        chains = [self.head_config.block_size]
        lengths = accept_lengths(drafter, self.held_out, self.config.validation_budgets, chains=chains)
        row = {"step": self.progress.step, "minutes": round(self.progress.minutes, 3), "accept_length": lengths}
        self.progress.history.append(row)
        self._say("held out: " + ", ".join(f"{name} {mean['all']:.3f}" for name, mean in lengths.items()))
        return lengths

    def save(self, path: str | Path) -> None:
        """Everything that `load` needs to go on as if never interrupted. The file appears whole; process 0 writes."""
        if self.process:
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.part")
        torch.save(
            {
                "head": self.head_config.raw,
                "config": _what_steps_depend_on(self.config),
                "weights": {name: tensor.detach() for name, tensor in self.weights.items()},
                "average": self.average,
                "optimizer": self.optimizer.state_dict(),
                "progress": vars(self.progress),
            },
            scratch,
        )
        scratch.rename(path)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint of the same config. Raises SpecflowConfigError for another head, another config (what
        ends, validates and writes a run may differ), and a file that is no checkpoint."""
        stored = _read_checkpoint(path, self.device)
        said = _what_steps_depend_on(self.config)
        known = stored.get("config", said)  # older checkpoints do not say
        if other := sorted(name for name in said if known.get(name) != said[name]):
            raise SpecflowConfigError(
                given=f"{path}, a checkpoint of a run with other {', '.join(other)}",
                allowed="a checkpoint of the run that this config describes",
                todo="give another out folder, or the run's own config",
            )
        if stored["head"] != self.head_config.raw:
            raise SpecflowConfigError(
                given=f"{path}, a checkpoint of another head",
                allowed="a checkpoint of the run that this config describes",
                todo="give another out folder, or the run's own config",
            )
        with torch.no_grad():
            for name, tensor in self.weights.items():
                tensor.copy_(stored["weights"][name])
        if self.average is not None:
            self.average = stored["average"]
        self.optimizer.load_state_dict(stored["optimizer"])
        self.progress = Progress(**stored["progress"])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _say(self, line: str) -> None:
        if self.process == 0:
            print(line, flush=True)


def start_processes() -> torch.device:
    """Under torchrun: join the process group (NCCL, or gloo without CUDA). The device of this process."""
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(local)
    return torch.device("cuda", local) if cuda else torch.device("cpu")


def _processes() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def _what_steps_depend_on(config: TrainConfig) -> dict:
    """The settings that a run may not change on its way; the head and its shape are compared apart."""
    names = ("loss", "teacher_temperature", "decay", "reveal", "row_tokens", "anchors", "rows", "sources", "seed")
    return {name: getattr(config, name) for name in (*names, "optimizer", "ema")}


def _read_checkpoint(path: str | Path, device) -> dict:
    try:
        stored = torch.load(path, map_location=device, weights_only=True)
        if isinstance(stored, dict) and {"head", "weights", "average", "optimizer", "progress"} <= set(stored):
            return stored
        reason = "it holds something else"
    except FileNotFoundError:
        reason = "it is not there"
    except Exception as error:  # torch's unpickler raises whatever the bytes lead it to
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    raise SpecflowConfigError(
        given=f"{path}, which cannot be read as a checkpoint ({reason})",
        allowed="the checkpoint.pt of a run of `python -m sgl_specflow.training train`",
        todo="give another place, or train first",
    )


def _validation_set(responses: list[Response], count: int) -> list[Response]:
    """Held-out greedy answers, the same number of each source."""
    of_source: dict[str, list[Response]] = {}
    for response in responses:
        if response.held_out and response.greedy:
            of_source.setdefault(response.source, []).append(response)
    return [r for group in of_source.values() for r in group[: max(1, count // len(of_source))]]


def _stored_tensors(place: str, head: HeadConfig) -> dict[str, Tensor]:
    """Float32 weights from a checkpoint.pt, or from a head's folder."""
    if Path(place).is_dir():
        return load_tensors(place, torch.float32)
    stored = _read_checkpoint(place, "cpu")
    weights = stored["average"] or stored["weights"]
    wrong = {name: tuple(t.shape) for name, t in weights.items()} != expected_shapes(head)
    if wrong:
        raise SpecflowConfigError(
            given=f"initial {place}, whose tensors have other shapes",
            allowed="a head of the same shape",
            todo="give another, or none",
        )
    return weights
