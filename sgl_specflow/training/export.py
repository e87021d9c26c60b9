"""`export`: a run's weights as a head in the public format, with the facts of its training and a model card."""

import dataclasses
import datetime
import json
from collections import Counter
from pathlib import Path

import torch

from sgl_specflow.drafter.checkpoint import save_head
from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.training.config import TrainConfig
from sgl_specflow.training.evaluate import TRAINING
from sgl_specflow.training.responses import Response

CARD = """---
license: apache-2.0
base_model: {base_model}
---
# {name}: a {kind} draft head for {base_model}

Public DFlash format (`config.json`, safetensors; embedding and LM head are the target's). Made by
`python -m sgl_specflow.training train` of sgl_specflow, {date}, on {device}, torch {torch}. The run in numbers:
`training.json`.

- **Target**: {target_note}
- **Data**: {data_note}
- **Training**: {loss}, teacher temperature {temperature}, {steps} steps ({minutes:.1f} minutes), {anchors} blocks of
  {block_size} a step, {optimizer} at {learning_rate}; {epochs} passes over the data. Last loss {last_loss:.3f} nats.
  From {start}.
- **Size**: {layers} layers, {parameters:.1f} million parameters; target layers {target_layers}; mask token {mask}.

Held-out prompts of the train splits, greedy, offline (tokens a verify pass, the bonus token included):

{accept}
"""


def facts(config: TrainConfig, head: HeadConfig, trainer, responses: list[Response], data: str) -> dict:
    """What a head's training.json says. data: "regenerated" or "corpus"."""
    used = [r for r in responses if not r.held_out and (not config.sources or r.source in config.sources)]
    lengths = [row["accept_length"] for row in trainer.progress.history if "accept_length" in row]
    losses = [row for row in trainer.progress.history if "loss" in row]
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "causal": head.causal_head,
        "loss": config.loss,
        "data": data,
        "start": start_of(config.initial),
        "steps": trainer.progress.step,
        "minutes": trainer.progress.minutes,
        "epochs": losses[-1]["epochs"] if losses else 0,
        "last_loss": losses[-1]["loss"] if losses else float("nan"),
        "training_responses": dict(Counter(r.source for r in used)),
        "training_tokens": sum(len(r.tokens) - r.prompt_length for r in used),
        "held_out_accept_length": lengths[-1] if lengths else {},
        "config": dataclasses.asdict(config),
        "history": trainer.progress.history,
    }


def export(folder: str | Path, head: HeadConfig, tensors: dict[str, torch.Tensor], run: dict, card: dict | None = None):
    """Write config.json, bfloat16 safetensors under 16 MB a file with an index, training.json and README.md.

    card: base_model, target_note and data_note of the model card; by default what the run knows.
    """
    folder = Path(folder)
    save_head(folder, head, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    (folder / TRAINING).write_text(json.dumps(run, indent=1) + "\n")
    (folder / "README.md").write_text(model_card(folder.name, head, tensors, run, card or {}))


def model_card(name: str, head: HeadConfig, tensors: dict[str, torch.Tensor], run: dict, card: dict) -> str:
    config, target = run["config"], Path(run["config"]["target"]).name
    written = ", ".join(f"{count} {source}" for source, count in run["training_responses"].items())
    origin = "written by the target itself" if run["data"] == "regenerated" else "the data sets' own answers"
    lengths = run["held_out_accept_length"]
    sources = list(next(iter(lengths.values()))) if lengths else []
    rows = [f"| {s} | " + " | ".join(f"{mean[s]:.2f}" for mean in lengths.values()) + " |" for s in sources]
    header = ["| prompts | " + " | ".join(lengths) + " |", "| --- |" + " --- |" * len(lengths)] if lengths else []
    return CARD.format(
        name=name,
        kind="JetFlow (causal)" if head.causal_head else "DFlash (bidirectional)",
        base_model=card.get("base_model", target),
        target_note=card.get("target_note", config["target"]),
        data_note=card.get("data_note", f"{written} responses, {run['training_tokens']} tokens, {origin}; no test row"),
        anchors=config["anchors"] * config["rows"],
        block_size=head.block_size,
        optimizer=config["optimizer"],
        temperature=config["teacher_temperature"],
        learning_rate=config["learning_rate"],
        layers=head.num_hidden_layers,
        parameters=sum(tensor.numel() for tensor in tensors.values()) / 1e6,
        target_layers=list(head.target_layer_ids),
        mask=head.mask_token_id,
        accept="\n".join(header + rows),
        start=run["start"],
        **{key: run[key] for key in ("date", "device", "torch", "loss", "steps", "minutes", "epochs", "last_loss")},
    )


def start_of(initial: str) -> str:
    """What a run's weights began as, in words."""
    if not initial:
        return "random weights"
    run = Path(initial) / TRAINING
    if not run.exists():
        return f"the weights of {Path(initial).name}"
    kind = "causal" if HeadConfig.load(initial).causal_head else "bidirectional"
    run = json.loads(run.read_text())
    return f"an earlier {kind} head of {run['steps']} steps ({run['minutes']:.1f} minutes, {run['date']})"
