"""Training data: prompts, the refusal of test rows, generation, shards that a later run goes on from, run configs."""

import json
from dataclasses import replace

import pytest
import torch
from tiny_models import make_tiny_llama
from training_cases import MASK, PROMPT, tiny_model
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.training import __main__ as command
from sgl_specflow.training.__main__ import greedy, main
from sgl_specflow.training.config import AblateConfig, EvaluateConfig, HeadShape, RegenerateConfig, TrainConfig, load
from sgl_specflow.training.evaluate import continuations
from sgl_specflow.training.lockstep import GreedyGenerator, LockstepGenerator
from sgl_specflow.training.prompts import Prompt, TestRows, chat_tokens, openings, self_written, train_prompts
from sgl_specflow.training.regenerate import corpus_responses, regenerate
from sgl_specflow.training.responses import Response, load_responses, save_responses

LONG = "A farmer has twelve cows and sells three of them each year to buy hay for those that stay. " * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data folder in small, with the real field names."""
    folder = tmp_path_factory.mktemp("data")
    task = lambda number: {"task_id": number, "text": f"Task {number}.", "code": "x", "test_list": ["assert x"]}
    files = {
        "gsm8k_train": [{"question": f"How many are {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(12)],
        "gsm8k_test": [{"question": LONG, "answer": "1"}],
        "math500": [{"problem": "What is one?", "answer": "1"}],
        "mt_bench": [{"question_id": 1, "category": "x", "turns": ["Write to a duck.", "Now to two ducks."]}],
        "mbpp": [task(number) for number in (11, 12, 601, 602, 605, 606)],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path_factory.mktemp("model"), layers=1))


def test_train_prompts_are_train_rows_in_the_chat_template_without_the_shipped_ones(folder, tokenizer):
    prompts = train_prompts(folder, "gsm8k", tokenizer, held_out=2)
    assert len(prompts) == 11 and "How many are 2 and 2?" not in [p.text for p in prompts]
    assert [p.held_out for p in prompts] == [False] * 9 + [True] * 2
    chat = [{"role": "user", "content": prompts[3].text}]
    template = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompts[3].tokens == template
    assert [p.text.split(".")[0] for p in train_prompts(folder, "mbpp", tokenizer, 0)] == [
        "Task 601",
        "Task 602",
        "Task 606",
    ]
    assert chat_tokens(tokenizer, []) == []


def test_test_rows_are_refused_by_hash_however_they_are_written(folder, tokenizer):
    rows = TestRows.of(folder)
    for text in (
        "what is ONE",
        "Now to two ducks!",
        LONG + " And then?",
        "Task 11.\nYour code should pass these tests:\nassert x",
    ):
        assert text in rows, text
        with pytest.raises(SpecflowConfigError, match="a row of a test set"):
            rows.refuse([Prompt("x", "fine", []), Prompt("x", text, [])])
    assert "How many are 3 and 3?" not in rows and "Task 601." not in rows
    kept = self_written([" What is one? ", "Tell me of ducks.", "short", "Tell me of ducks."], tokenizer, rows, 0)
    assert [prompt.text for prompt in kept] == ["Tell me of ducks."]


def test_a_missing_test_set_is_no_licence_to_train_on_it(folder, tmp_path):
    for file in folder.glob("*.jsonl"):
        if file.name != "math500.jsonl":
            (tmp_path / file.name).write_text(file.read_text())
    with pytest.raises(FileNotFoundError, match="math500"):
        TestRows.of(tmp_path)


def test_openings_are_starts_of_train_prompts_common_ones_and_none(folder, tokenizer):
    train = train_prompts(folder, "gsm8k", tokenizer, held_out=2)
    written = list(openings(200, train, seed=0))
    assert written == list(openings(200, train, seed=0)) and written != list(openings(200, train, seed=1))
    assert "" in written and any(text.startswith("How many are") for text in written) and "Explain" in written
    assert not any("10 and 10" in text or "11 and 11" in text for text in written)


def test_lockstep_decoding_is_greedy_decoding():
    model = tiny_model()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, MASK, (n,), generator=generator).tolist() for n in (3, 6, 9, 4, 12, 5, 7)]
    written = LockstepGenerator(model, batch=3)(prompts, 20)
    for prompt, text in zip(prompts, written, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert text == out[0, len(prompt) :].tolist()
    with pytest.raises(ValueError, match="LlamaForCausalLM only"):
        LockstepGenerator(torch.nn.Linear(1, 1), 2)


def tiny_qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    return Qwen3ForCausalLM(Qwen3Config(**shape, num_key_value_heads=2, vocab_size=48, eos_token_id=None)).eval()


@pytest.mark.parametrize("make, kind", [(tiny_model, LockstepGenerator), (tiny_qwen3, GreedyGenerator)])
def test_answers_are_greedy_and_end_at_any_of_the_models_stop_tokens(make, kind):
    model = make()
    prompts = [torch.randint(0, MASK, (n,)).tolist() for n in (3, 9, 6, 4)]
    model.generation_config.eos_token_id = None
    whole = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        whole.append(out[0, len(prompt) :].tolist())
    stops = [whole[0][7], whole[1][4]]
    model.generation_config.eos_token_id = stops
    model.generation_config.repetition_penalty = 3.0  # not the target's own distribution
    generate = greedy(model)
    assert type(generate) is kind
    generate.batch = 3
    ends = [next((i for i, token in enumerate(text, 1) if token in stops), 20) for text in whole]
    assert min(ends) < 20
    assert generate(prompts, 20) == [text[:end] for text, end in zip(whole, ends)]


def test_lockstep_regeneration_of_another_model_is_refused(folder, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(command, "_model", lambda target, dtype: tiny_qwen3())
    monkeypatch.setattr("sgl_specflow.training.target_states.load_tokenizer", lambda target: tokenizer)
    with pytest.raises(
        SpecflowConfigError, match="backend lockstep with somewhere, a Qwen3ForCausalLM.*backend=engine"
    ):
        command.regenerate(["target=somewhere", f"data={folder}", f"out={tmp_path}/out", "backend=lockstep"])


def test_lockstep_samples_follow_the_target():
    """First tokens of 4000 samples against the softmax: total variation below what chance gives four of 10,000 times."""
    model, prompt = tiny_model(), [3, 9, 14]
    written = LockstepGenerator(model, batch=4000, seed=1)([prompt] * 4000, 1, temperature=1.0)
    counts = torch.bincount(torch.tensor([text[0] for text in written]), minlength=48) / 4000
    expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    assert (counts - expected).abs().sum() / 2 < 0.06


class Scripted:
    """A target that answers with the prompt's length, and is cut off after some batches."""

    def __init__(self, stop: int, batches: int = 10**9):
        self.stop, self.batches, self.temperatures = stop, batches, []

    def __call__(self, prompts, max_new_tokens, temperature=0.0):
        if len(self.temperatures) == self.batches:
            raise KeyboardInterrupt
        self.temperatures.append(temperature)
        return [[10 + len(prompt) % 7, 20, self.stop][-max_new_tokens:] for prompt in prompts]


def test_a_regeneration_that_was_cut_goes_on_and_gives_what_an_uncut_one_gives(folder, tokenizer, tmp_path):
    config = RegenerateConfig(
        target="t", data=str(folder), out=str(tmp_path / "cut"), sources=["gsm8k", "mbpp"], repeats={"mbpp": 3},
        held_out=1, shard=4, temperature=0.5,
    )  # fmt: skip
    stop = tokenizer.eos_token_id
    with pytest.raises(KeyboardInterrupt):
        regenerate(config, Scripted(stop, batches=3), tokenizer)
    assert len(list((tmp_path / "cut").glob("*.npz"))) == 3
    rest = Scripted(stop)
    shards = regenerate(config, rest, tokenizer)
    regenerate(replace(config, out=str(tmp_path / "whole")), Scripted(stop), tokenizer)
    for one, other in zip(load_responses(shards), load_responses(tmp_path / "whole"), strict=True):
        assert torch.equal(one.tokens, other.tokens) and (one.source, one.greedy) == (other.source, other.greedy)
    responses = load_responses(shards)
    assert [r.source for r in responses if r.held_out] == ["mbpp", "gsm8k"] or sum(r.held_out for r in responses) == 2
    assert sum(not r.greedy for r in responses) == 4 and rest.temperatures.count(0.5) == 1
    with pytest.raises(SpecflowConfigError, match="other temperature"):
        regenerate(replace(config, temperature=0.7), rest, tokenizer)


def test_self_written_prompts_are_kept_between_runs(folder, tokenizer, tmp_path):
    config = RegenerateConfig(
        target="t", data=str(folder), out=str(tmp_path), sources=["gsm8k", "self_written"], self_written=40, held_out=1
    )
    regenerate(config, Scripted(tokenizer.eos_token_id), tokenizer)
    kept = json.loads((tmp_path / "prompts.json").read_text())
    assert len(kept) == 40
    assert {"gsm8k", "self_written"} == {r.source for r in load_responses(tmp_path)}


def test_corpus_responses_are_the_data_sets_own_answers(folder, tokenizer):
    responses = corpus_responses(folder, tokenizer, held_out=1)
    first = responses[0]
    assert tokenizer.decode(first.tokens[first.prompt_length : -1]) == "#### 0"
    assert first.tokens[-1] == tokenizer.eos_token_id and not first.greedy
    assert sum(r.held_out for r in responses) == 2


def test_responses_survive_storing(tmp_path):
    given = [
        Response("a", torch.arange(9), PROMPT, True),
        Response("b", torch.arange(70000, 70004), 2, False, greedy=False),
    ]
    save_responses(given, tmp_path / "x" / "responses-0.npz")
    for one, other in zip(load_responses([tmp_path / "x"]), given, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert [vars(one)[k] for k in ("source", "prompt_length", "held_out", "greedy")] == [
            vars(other)[k] for k in ("source", "prompt_length", "held_out", "greedy")
        ]
    with pytest.raises(SpecflowConfigError, match="run regenerate first"):
        load_responses(tmp_path)


def test_a_run_is_one_yaml_file_and_overrides(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "target: t\nresponses: [r]\nout: o\nsteps: 5\nlearning_rate: 1e-3\nhead: {causal: false, layers: 2}\n"
    )
    config = load(TrainConfig, path, ["head.layers=3", "loss=reverse_kl", "minutes=2"])
    assert config.head == HeadShape(causal=False, layers=3) and config.learning_rate == 1e-3
    assert (config.steps, config.loss, config.minutes) == (5, "reverse_kl", 2.0)


@pytest.mark.parametrize(
    "words, message",
    [
        (["steps=5"], "no target, responses, out"),
        (["target=t", "responses=[r]", "out=o", "setps=5"], r"\['setps'\]"),
        (["target=t", "responses=[r]", "out=o", "steps=five"], "steps 'five'"),
        (["target=t", "responses=r", "out=o", "steps=5"], "responses 'r'"),
        (["target=t", "responses=[r]", "out=o"], "neither steps nor minutes"),
        (["target=t", "responses=[r]", "out=o", "steps=5", "loss=kl"], "loss 'kl'"),
        (["target=t", "responses=[r]", "out=o", "steps=5", "anchors=100", "loss_chunk=64"], "divides anchors"),
        (["target=t", "responses=[r]", "out=o", "steps=5", "head.layrs=5"], r"\['layrs'\]"),
    ],
)
def test_a_wrong_run_config_is_refused_by_name(words, message):
    with pytest.raises(SpecflowConfigError, match=message):
        load(TrainConfig, None, words)


def test_other_configs_refuse_too(tmp_path):
    with pytest.raises(SpecflowConfigError, match="backend 'vllm'"):
        load(RegenerateConfig, None, ["target=t", "data=d", "out=o", "backend=vllm"])
    with pytest.raises(SpecflowConfigError, match="cannot be read"):
        load(EvaluateConfig, tmp_path / "none.yaml", [])


@pytest.mark.parametrize(
    "words",
    [
        "steps=0", "steps=-1", "minutes=-1", "minutes=.nan", "rows=0", "anchors=0", "loss_chunk=0", "row_tokens=-5",
        "decay=0", "teacher_temperature=0", "learning_rate=.nan", "gradient_clip=-1", "warm_up=2", "ema=1.0", "reveal=-1",
        "seed=-1", "seed=99999999999", "weight_decay=-1",
        "validation_budgets=[16, 1]", "validation_responses=0", "dtype=int8",
    ],
)  # fmt: skip
def test_a_train_value_out_of_range_is_refused_by_name(words):
    """A negative number of steps, for one, would never be reached."""
    name = words.split("=")[0]
    with pytest.raises(SpecflowConfigError, match=f"given {name} "):
        load(TrainConfig, None, ["target=t", "responses=[r]", "out=o", "steps=5", words])


@pytest.mark.parametrize(
    "words",
    [
        "sources=[]", "repeats={tweets: 2}", "repeats={mbpp: 0}", "self_written=-1", "held_out=-1", "temperature=-1",
        "temperature=.nan", "max_new_tokens=0", "max_prompt_tokens=0", "shard=0", "minutes=-1",
    ],
)  # fmt: skip
def test_a_regenerate_value_out_of_range_is_refused_by_name(words):
    name = words.split("=")[0]
    with pytest.raises(SpecflowConfigError, match=f"given {name} "):
        load(RegenerateConfig, None, ["target=t", "data=d", "out=o", words])


@pytest.mark.parametrize(
    "words",
    [
        "heads=[]", "datasets=[]", "datasets=[tweets]", "rows=0", "rows=-1", "budgets=[16, 1]", "path_refresh=[2]",
        "width=0", "max_new_tokens=1", "weaver_widths=[-1]", "weavers={h/: w}", "dtype=int8",
    ],
)  # fmt: skip
def test_an_evaluate_value_out_of_range_is_refused_by_name(words):
    """A Weaver of a folder that no head is spelled like would silently not be measured."""
    name = words.split("=")[0]
    with pytest.raises(SpecflowConfigError, match=f"given {name} "):
        load(EvaluateConfig, None, ["target=t", "data=d", "heads=[h]", "out=o", words])


@pytest.mark.parametrize(
    "text, words, message",
    [
        ("- a", ["steps=3"], "steps=3, where .* has no names"),
        ("head: x", ["head.layers=3"], "head.layers=3, where .* has no names"),
        ("steps: 3", ["steps.x.y=3"], "steps.x.y=3, where .* has no names"),
        ("1: a\nb: c", [], "1, 'b'"),
        ("", ["steps=["], "steps=\\["),
        (b"\xff\xfe\x00", [], "cannot be read"),
    ],
)
def test_a_config_of_another_form_is_refused(tmp_path, text, words, message):
    (tmp_path / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecflowConfigError, match=message):
        load(TrainConfig, tmp_path / "run.yaml", words)


def test_kept_continuations_of_other_data_sets_are_refused(folder, tokenizer, tmp_path):
    save_responses([Response("gsm8k", torch.tensor([1, 2, 3]), 1, True)], tmp_path / "kept.npz")
    words = ["target=t", f"data={folder}", "heads=[h]", "out=o", f"continuations={tmp_path}/kept.npz"]
    assert len(continuations(load(EvaluateConfig, None, [*words, "datasets=[gsm8k]"]), tokenizer, None)) == 1
    with pytest.raises(SpecflowConfigError, match="no answer to mbpp, mt_bench"):
        continuations(load(EvaluateConfig, None, words), tokenizer, None)


def test_an_output_folder_that_is_a_file_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "run").write_text("x")
    for kind, words in (
        (TrainConfig, ["target=t", "responses=[r]", "steps=3"]),
        (RegenerateConfig, ["target=t", "data=d"]),
        (AblateConfig, ["target=t", "data=d", "responses=[r]", "steps=3"]),
    ):
        with pytest.raises(SpecflowConfigError, match="run, a file"):
            load(kind, None, [*words, f"out={tmp_path}/run"])


def test_kept_continuations_of_another_number_of_prompts_are_refused(folder, tokenizer, tmp_path):
    kept = [Response("gsm8k", torch.tensor([1, 2, 3]), 1, True)] * 2
    save_responses(kept, tmp_path / "kept.npz")
    words = [
        "target=t",
        f"data={folder}",
        "heads=[h]",
        "out=o",
        f"continuations={tmp_path}/kept.npz",
        "datasets=[gsm8k]",
    ]
    with pytest.raises(SpecflowConfigError, match="2 answers of gsm8k.*1 of gsm8k, as rows 200 asks"):
        continuations(load(EvaluateConfig, None, words), tokenizer, None)


@pytest.mark.parametrize("line", ['{"question": "How many', "[]", '{"answer": "1"}'])
def test_a_broken_line_of_a_data_file_is_named(folder, tokenizer, tmp_path, line):
    (tmp_path / "gsm8k_train.jsonl").write_text('{"question": "a", "answer": "b"}\n\n' + line + "\n")
    with pytest.raises(SpecflowConfigError, match="gsm8k_train.jsonl, line 3"):
        train_prompts(tmp_path, "gsm8k", tokenizer, 0)


@pytest.mark.parametrize("change", [{"held_out": 1000}, {"max_prompt_tokens": 1}])
def test_a_run_with_nothing_to_train_on_is_refused(folder, tokenizer, tmp_path, change):
    sources = dict(sources=["gsm8k", "mbpp"], repeats={}, self_written=0)
    config = RegenerateConfig(target="", data=str(folder), out=str(tmp_path / "out"), **sources, **change)
    with pytest.raises(SpecflowConfigError, match="held_out"):
        regenerate(config, lambda prompts, *_: [[1]] * len(prompts), tokenizer)


def test_a_file_that_holds_no_responses_is_refused(tmp_path):
    (tmp_path / "other.npz").write_text("steps: 3")
    with pytest.raises(SpecflowConfigError, match="other.npz, which cannot be read as responses"):
        load_responses(tmp_path)


@pytest.mark.parametrize("command", ["regenerate", "train"])
def test_the_command_names_a_target_that_is_not_there(tmp_path, folder, monkeypatch, capsys, command):
    save_responses([Response("gsm8k", torch.tensor([1, 2, 3, 4]), 1, False)], tmp_path / "r.npz")
    words = ["backend=lockstep", f"data={folder}"]
    if command == "train":
        words = [f"responses=[{tmp_path}/r.npz]", "steps=1"]
    monkeypatch.setattr("sys.argv", ["training", command, f"target={tmp_path}/none", f"out={tmp_path}/out", *words])
    assert main() == 1
    assert f"given the target {tmp_path}/none" in capsys.readouterr().err


def test_a_head_cannot_read_the_targets_last_layer():
    model = tiny_model().config
    with pytest.raises(SpecflowConfigError, match="cannot capture the last layer"):
        HeadShape(mask_token_id=MASK, target_layers=[0, 3]).config(model)
    assert HeadShape(mask_token_id=MASK).config(model).target_layer_ids == (1, 2)
