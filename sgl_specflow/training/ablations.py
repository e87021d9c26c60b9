"""`ablate`: what the papers' choices are worth on one target: heads that differ in one thing each, of the same number of
steps on rows of the same size, and their offline accept lengths.

A head is named `ablation-CASE`; its rows in the JSON carry the case's loss and data. Two cases go on from another case's
head with the same settings but the loss: a reverse KL has no gradient towards what its head does not say yet.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.training.config import AblateConfig, EvaluateConfig, TrainConfig
from sgl_specflow.training.evaluate import evaluate
from sgl_specflow.training.export import export, facts
from sgl_specflow.training.responses import Response
from sgl_specflow.training.target_states import FrozenTarget
from sgl_specflow.training.trainer import Trainer

PREFIX = "ablation-"


@dataclass(frozen=True)
class Case:
    """One head: what differs from the config. corpus: the data sets' own answers instead of the target's. start: the case
    whose head it goes on from."""

    causal: bool = True
    loss: str = "forward_kl"
    teacher_temperature: float | None = None
    sources: tuple[str, ...] = ()
    corpus: bool = False
    start: str = ""


# A reverse KL against a sharpened teacher is dominated by tokens that the teacher all but excludes: it gets temperature 1,
# and so does a forward KL to compare it with.
CASES = {
    "causal-forward_kl": Case(),
    "bidirectional-forward_kl": Case(causal=False),
    "causal-cross_entropy": Case(loss="cross_entropy"),
    "causal-forward_kl-T1": Case(teacher_temperature=1.0),
    "causal-reverse_kl-T1": Case(loss="reverse_kl", teacher_temperature=1.0),
    "causal-train_split": Case(sources=("gsm8k", "mbpp")),
    "causal-corpus": Case(corpus=True),
    "continued-forward_kl-T1": Case(teacher_temperature=1.0, start="causal-forward_kl-T1"),
    "continued-reverse_kl-T1": Case(loss="reverse_kl", teacher_temperature=1.0, start="causal-forward_kl-T1"),
}


def train_config(config: AblateConfig, case: Case) -> TrainConfig:
    """One case's training; its `out` is not used."""
    changes = {} if case.teacher_temperature is None else {"teacher_temperature": case.teacher_temperature}
    if case.start:
        changes["initial"] = str(folder_of(config, case.start))
    return TrainConfig(
        **{"teacher_temperature": config.teacher_temperature, **changes},
        target=config.target,
        responses=config.responses,
        out=config.out,
        head=dataclasses.replace(config.head, causal=case.causal),
        steps=config.steps,
        loss=case.loss,
        reveal=config.reveal,
        row_tokens=config.row_tokens,
        anchors=config.anchors,
        loss_chunk=config.loss_chunk,
        learning_rate=config.learning_rate,
        sources=list(case.sources),
        dtype=config.dtype,
    )


def folder_of(config: AblateConfig, name: str) -> Path:
    return Path(config.out) / f"{PREFIX}{name}"


def ablate(
    config: AblateConfig,
    target: FrozenTarget,
    model_config,
    responses: list[Response],
    corpus: Callable[[], list[Response]],
    answers: list[Response],
) -> dict:
    """Train and measure the cases whose rows are not in OUT/acceptance.json yet, which is written after each: a run that was
    cut goes on.

    model_config: the target's, for the head's shape. corpus: gives the data sets' own answers. answers: the target's
    greedy answers to test prompts, as `evaluate.continuations` gives them.

    Returns the file's content. Raises SpecflowConfigError for an unknown case, and where a case's start is neither measured
    nor named before it.
    """
    cases = config.cases or list(CASES)
    if unknown := [name for name in cases if name not in CASES]:
        raise SpecflowConfigError(
            given=f"cases {unknown}", allowed=", ".join(CASES), todo="name some of these, or none for all"
        )
    out = Path(config.out) / "acceptance.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    result = json.loads(out.read_text()) if out.exists() else {"rows": []}
    done = {row["head"].removeprefix(PREFIX) for row in result["rows"]}
    for name in cases:
        case = CASES[name]
        if name in done:
            continue
        if case.start and case.start not in done:
            raise SpecflowConfigError(
                given=f"case {name} without {case.start}, from which it goes on",
                allowed=f"{case.start} before it",
                todo=f"name {case.start} in cases too",
            )
        data, run = corpus() if case.corpus else responses, train_config(config, case)
        head = run.head.config(model_config)
        target.capture(head.target_layer_ids)
        trainer = Trainer(run, head, target, data)
        trainer.warm_up()
        trainer.run()
        kind = "corpus" if case.corpus else "regenerated"
        export(folder_of(config, name), head, trainer.exported, facts(run, head, trainer, data, kind))
        measured = evaluate(
            EvaluateConfig(
                target=config.target,
                data=config.data,
                heads=[str(folder_of(config, name))],
                out=str(folder_of(config, name) / "acceptance.json"),
                datasets=config.datasets,
                rows=config.rows,
                budgets=config.budgets,
                path_refresh=[],
                max_new_tokens=config.max_new_tokens,
                commit=config.commit,
            ),
            target,
            answers,
        )
        result = {
            "meta": measured["meta"] | {"config": dataclasses.asdict(config)},
            "rows": result["rows"] + measured["rows"],
        }
        out.write_text(json.dumps(result, indent=1) + "\n")
        done.add(name)
        print(f"{name}: {trainer.progress.step} steps, loss {trainer.progress.history[-1]['loss']:.3f}", flush=True)
        del trainer
        if target.embedding.is_cuda:
            torch.cuda.empty_cache()
    return result
