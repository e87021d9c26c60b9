"""`training ablate`: cases differ in what their names say, a run goes on where it was cut, and heads are measured alike."""

import dataclasses
import json

import pytest
from training_cases import LAYERS, MASK, answers, tiny_target

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.training import __main__ as command
from sgl_specflow.training.ablations import CASES, ablate, folder_of, train_config
from sgl_specflow.training.config import AblateConfig, HeadShape


def config(folder, **changes) -> AblateConfig:
    shape = HeadShape(block_size=6, layers=2, intermediate_size=48, mask_token_id=MASK, target_layers=list(LAYERS))
    sizes = dict(row_tokens=256, anchors=64, loss_chunk=16, rows=3, datasets=["gsm8k"], budgets=[8], max_new_tokens=12)
    return AblateConfig(
        target="", data="", responses=["r"], out=str(folder), steps=3, head=shape, **{**sizes, **changes}
    )


def test_each_case_differs_from_the_first_in_what_its_name_says(tmp_path):
    first = dataclasses.asdict(train_config(config(tmp_path), CASES["causal-forward_kl"]))
    differences = {}
    for name, case in CASES.items():
        own = dataclasses.asdict(train_config(config(tmp_path), case))
        differences[name] = {key: own[key] for key in own if own[key] != first[key]}
    temperature = {"teacher_temperature": 1.0}
    start = {"initial": str(tmp_path / "ablation-causal-forward_kl-T1")} | temperature
    assert differences == {
        "causal-forward_kl": {},
        "bidirectional-forward_kl": {"head": first["head"] | {"causal": False}},
        "causal-cross_entropy": {"loss": "cross_entropy"},
        "causal-forward_kl-T1": temperature,
        "causal-reverse_kl-T1": temperature | {"loss": "reverse_kl"},
        "causal-train_split": {"sources": ["gsm8k", "mbpp"]},
        "causal-corpus": {},
        "continued-forward_kl-T1": start,
        "continued-reverse_kl-T1": start | {"loss": "reverse_kl"},
    }


def test_heads_are_trained_measured_and_not_trained_again(tmp_path, monkeypatch):
    target = tiny_target()
    written = answers(target, 12, 16, held_out=2)
    tests = [dataclasses.replace(r, source="gsm8k", held_out=True) for r in answers(target, 3, 12)]
    asked = []

    def corpus():
        asked.append(True)
        return written

    def run(*cases):
        monkeypatch.setattr("sgl_specflow.training.evaluate.describe", lambda commit: {"commit": commit})
        return ablate(config(tmp_path, cases=list(cases)), target, target.model.config, written, corpus, tests)

    with pytest.raises(SpecflowConfigError, match="causal-forward_kl-T1"):
        run("continued-reverse_kl-T1")
    with pytest.raises(SpecflowConfigError, match="sideways"):
        run("sideways")
    first = run("bidirectional-forward_kl")
    assert not HeadConfig.load(folder_of(config(tmp_path), "bidirectional-forward_kl")).causal_head and not asked
    names = ("bidirectional-forward_kl", "causal-corpus", "causal-forward_kl-T1", "continued-reverse_kl-T1")
    second = run(*names)
    assert json.loads((tmp_path / "acceptance.json").read_text()) == second and asked == [True]
    assert second["rows"][: len(first["rows"])] == first["rows"], "measured again"
    heads = [row["head"] for row in second["rows"]]
    assert len(heads) == len(names) * len(first["rows"]) and heads.count("ablation-bidirectional-forward_kl") == len(
        first["rows"]
    )
    of_head = {row["head"]: row for row in second["rows"]}
    assert list(of_head) == [f"ablation-{name}" for name in names]
    facts = {name: (of_head[f"ablation-{name}"]["loss"], of_head[f"ablation-{name}"]["data"]) for name in names}
    assert facts == {
        "bidirectional-forward_kl": ("forward_kl", "regenerated"),
        "causal-corpus": ("forward_kl", "corpus"),
        "causal-forward_kl-T1": ("forward_kl", "regenerated"),
        "continued-reverse_kl-T1": ("reverse_kl", "regenerated"),
    }
    assert all(row["steps"] == 3 and row["accept_length"] >= 1 for row in second["rows"])


def test_the_command_asks_for_the_data_sets_own_prompts_and_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    """From the words of the command to the first case, with the pieces that need a model replaced."""
    seen = {}
    monkeypatch.setattr(command, "_model", lambda target, dtype: tiny_target().model)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda target: "tokenizer")
    monkeypatch.setattr("sgl_specflow.training.responses.load_responses", lambda places: [places])
    monkeypatch.setattr(
        "sgl_specflow.training.evaluate.continuations", lambda config, *rest: seen.update(config=config)
    )
    monkeypatch.setattr(
        "sgl_specflow.training.ablations.ablate", lambda *given: seen.update(given=given) or {"rows": []}
    )
    words = ["target=t", "data=d", "responses=[r]", f"out={tmp_path}", "steps=3", "rows=5", "cases=[causal-corpus]"]
    monkeypatch.setattr("sys.argv", ["training", "ablate", *words])
    assert command.main() == 0
    asked = seen["config"]
    assert (asked.rows, asked.data, asked.datasets) == (5, "d", ["gsm8k", "mbpp", "mt_bench"])
    config_, target, model_config, responses, _, _ = seen["given"]
    assert config_.cases == ["causal-corpus"] and model_config is target.model.config and responses == [["r"]]
    for wrong in ("steps=0", "budgets=[1]", "datasets=[gsm9k]", "responses=[]", "teacher_temperature=0"):
        monkeypatch.setattr("sys.argv", ["training", "ablate", *words, wrong])
        assert command.main() == 1 and wrong.split("=")[0] in capsys.readouterr().err
