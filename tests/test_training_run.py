"""Training runs on a tiny target: they learn, resume exactly, and share a step over processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from served import make_small_head
from training_cases import answers, tiny_run, tiny_target

from sgl_specflow.drafter.checkpoint import load_tensors
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.training.export import export, facts, start_of
from sgl_specflow.training.offline_accept import OfflineDrafter, accept_lengths
from sgl_specflow.training.trainer import Trainer
from sgl_specflow.tree import build_tree_by_heap
from sgl_specflow.verify.acceptance import accept


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def trainer(target, responses, **changes) -> Trainer:
    config = tiny_run(**changes)
    return Trainer(config, config.head.config(target.model.config), target, responses)


def drafter(target, run: Trainer) -> OfflineDrafter:
    return OfflineDrafter(ReferenceHead(run.head_config, run.exported), target)


def test_a_head_that_overfits_a_tiny_target_accepts_nine_tenths_of_its_block(target):
    """Under two minutes on one CPU core. 36 decoded tokens: six whole blocks."""
    learnt = answers(target, 6, 37)
    shape = dict(intermediate_size=128)
    run = trainer(
        target, learnt, steps=300, row_tokens=258, learning_rate=1e-2, reveal=0.1, teacher_temperature=0.2, head=shape
    )
    run.run()
    lengths = accept_lengths(drafter(target, run), learnt, [64], chains=[6])
    assert lengths["tree-64"]["all"] > 0.9 * run.head_config.block_size
    assert lengths["tree-64"]["all"] >= lengths["chain-6"]["all"] > 0.9 * run.head_config.block_size


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "cross_entropy"])
@pytest.mark.parametrize("causal", [True, False])
def test_every_loss_and_kind_of_head_learns(target, loss, causal):
    responses = answers(target, 24, 24, held_out=4)
    run = trainer(target, responses, steps=100, loss=loss, head=dict(causal=causal))
    before = run.validate()
    run.run()
    losses = [row["loss"] for row in run.progress.history if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    assert run.validate()["tree-64"]["all"] > before["tree-64"]["all"]


@pytest.mark.parametrize("changes", [{}, {"optimizer": "adamw", "ema": 0.9, "rows": 2}])
def test_an_interrupted_run_goes_on_bit_for_bit(target, tmp_path, changes):
    responses = answers(target, 16, 20)
    whole, first, second = (trainer(target, responses, steps=8, **changes) for _ in range(3))
    whole.run()
    first.run(until=3)
    first.save(tmp_path / "checkpoint.pt")
    second.load(tmp_path / "checkpoint.pt")
    second.run()
    assert second.progress.step == 8
    for name, tensor in whole.exported.items():
        assert torch.equal(second.exported[name], tensor), name
    with pytest.raises(SpecflowConfigError, match="checkpoint of another head"):
        trainer(target, responses, **changes, head=dict(layers=1)).load(tmp_path / "checkpoint.pt")
    for name, value in (("loss", "reverse_kl"), ("seed", 7), ("ema", 0.5)):
        with pytest.raises(SpecflowConfigError, match=f"a run with other {name}"):
            trainer(target, responses, **(changes | {name: value})).load(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("content", [None, b"junk", b"steps: 3"])
def test_a_file_that_is_no_checkpoint_is_refused(target, tmp_path, content):
    if content is not None:
        (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(SpecflowConfigError, match="cannot be read as a checkpoint"):
        trainer(target, answers(target, 2, 8)).load(tmp_path / "checkpoint.pt")
    with pytest.raises(SpecflowConfigError, match="cannot be read as a checkpoint"):
        trainer(target, answers(target, 2, 8), initial=str(tmp_path / "checkpoint.pt"))


TWO_PROCESSES = """
import sys, torch
from test_training_run import answers, tiny_target, trainer
from sgl_specflow.training.trainer import start_processes
start_processes()
target = tiny_target()
run = trainer(target, answers(target, 16, 20), steps=6)
run.run()
run.save(sys.argv[1])
"""


def test_two_processes_take_the_steps_of_one_with_two_rows(target, tmp_path):
    """Over gloo, started as torchrun starts them."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=0",
        "--rdzv-backend=c10d",
    ]
    command += ["--rdzv-endpoint=localhost:0", str(tmp_path / "two.py"), str(tmp_path / "two.pt")]
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=170)
    alone = trainer(target, answers(target, 16, 20), steps=6, rows=2)
    alone.run()
    two = torch.load(tmp_path / "two.pt", weights_only=True)["weights"]
    for name, tensor in alone.exported.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_offline_passes_are_those_of_a_walk_that_drafts_one_tree_at_a_time(target, causal):
    """Against the heap builder and the reference head on one answer and anchor at a time."""
    responses = answers(target, 5, 24)
    run = trainer(target, responses, steps=60, head=dict(causal=causal))
    run.run()
    offline, config = drafter(target, run), run.head_config
    lengths = accept_lengths(offline, responses, [8])["tree-8"]["all"]
    head, passes, committed = offline.head, 0, 0
    for response in responses:
        tokens, place = response.tokens, response.prompt_length
        context = head.project_context(target.states(tokens[None])[0][0])
        committed += len(tokens) - 1 - place
        while place < len(tokens) - 1:
            block = torch.full((config.block_size,), config.mask_token_id)
            block[0] = tokens[place]
            before = head.context_kv(context[:place], torch.arange(place))
            hidden = head.forward(target.embedding[block], place + torch.arange(config.block_size), before)
            log_probs = (hidden[1:] @ target.lm_head.T).log_softmax(-1)
            values, candidates = log_probs.detach().topk(16)
            tree = build_tree_by_heap(int(tokens[place]), values.tolist(), candidates.tolist(), 8)
            true = torch.nn.functional.pad(tokens, (0, 8), value=-1)
            place += int(accept(tree, true[place + 1 + tree.depth], config.depth).length)
            passes += 1
    assert lengths == pytest.approx(committed / passes)


def test_trees_gain_from_budget_and_refresh_keeps_its_budget(target):
    responses = answers(target, 12, 24)
    run = trainer(target, responses, steps=80)
    run.run()
    offline = drafter(target, run)
    lengths = accept_lengths(offline, responses, [4, 16, 64], refreshed=[16], chains=[6])
    assert lengths["tree-4"]["all"] <= lengths["tree-16"]["all"] <= lengths["tree-64"]["all"]
    assert 1 <= lengths["refresh-16"]["all"] <= run.head_config.block_size
    read = offline.read(responses)
    tree = offline.refreshed_tree(read, read.prompt, 16)
    tree.check()
    assert tree.budget == 16 and (tree.node_count == 16).all()


def test_an_exported_head_is_whole_and_its_files_are_small(target, tmp_path, monkeypatch):
    responses = answers(target, 12, 16, held_out=2)
    run = trainer(target, responses, steps=2)
    run.run()
    run.validate()
    monkeypatch.setattr("sgl_specflow.drafter.checkpoint.MAX_SHARD_BYTES", 20_000)
    record = facts(run.config, run.head_config, run, responses, "regenerated")
    export(tmp_path / "head", run.head_config, run.exported, record)
    assert len(list((tmp_path / "head").glob("*.safetensors"))) > 1
    for name, tensor in load_tensors(tmp_path / "head").items():
        assert torch.equal(tensor, run.exported[name].bfloat16())
    card = (tmp_path / "head" / "README.md").read_text()
    assert "JetFlow (causal)" in card and "tree-64" in card and "forward_kl, teacher temperature 1.0, 2 steps" in card


def test_nothing_to_train_on_is_said(target):
    with pytest.raises(SpecflowConfigError, match="none of which can be trained on"):
        trainer(target, answers(target, 2, 8, held_out=2))
    with pytest.raises(SpecflowConfigError, match="other sources"):
        trainer(target, answers(target, 2, 8), sources=["gsm8k"])


@pytest.mark.parametrize("causal, kind", [(True, "causal"), (False, "bidirectional")])
def test_a_card_says_what_a_head_began_as(tmp_path, causal, kind):
    head = make_small_head(tmp_path / "head", causal=causal)
    assert start_of(str(head)) == "the weights of head" and start_of("") == "random weights"
    (head / "training.json").write_text(json.dumps({"steps": 633, "minutes": 1.54, "date": "2026-11-29"}))
    assert start_of(str(head)) == f"an earlier {kind} head of 633 steps (1.5 minutes, 2026-11-29)"
