"""Training of a Weaver on the CPU with a tiny random target: it learns what its head's marginals cannot say."""

import dataclasses
import json
import sys

import pytest
import torch
from training_cases import PROMPT, VOCABULARY, answers, tiny_run, tiny_target
from weavers import random_weaver, weaver_config

from sgl_specflow.drafter.checkpoint import save_head
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.drafter.weaver import FoldedWeaver, ReferenceWeaver, load_weaver, save_weaver
from sgl_specflow.training import weaver as weaver_training
from sgl_specflow.training.blocks import make_blocks, sample_blocks
from sgl_specflow.training.config import EvaluateConfig
from sgl_specflow.training.evaluate import evaluate, table
from sgl_specflow.training.head import TrainingHead
from sgl_specflow.training.offline_accept import verify_passes, walk
from sgl_specflow.training.responses import save_responses
from sgl_specflow.training.rows import pack
from sgl_specflow.training.trainer import Trainer
from sgl_specflow.training.weaver import (
    WeaverDrafter,
    WeaverSettings,
    draft,
    initial_weaver,
    mean_accept_lengths,
    train_weaver,
    weaver_loss,
)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def responses(target):
    return answers(target, 48, 32, held_out=8)


def tiny_weaver(**changes):
    shape = dict(d_model=32, d_embed=32, d_rank=48, num_heads=4, mlp_dim=64, K=5, candidate_pool_size=24)
    return weaver_config(**{**shape, **changes})


@pytest.fixture(scope="module")
def head(target, responses):
    config = tiny_run(steps=60, head=dict(causal=False))
    run = Trainer(config, config.head.config(target.model.config), target, responses)
    run.run()
    return ReferenceHead(run.head_config, run.exported)


def packed(head):
    return TrainingHead(head.config, head.tensors, torch.float32, fast=False)


def some_drafts(head, target, responses, pool=24):
    """Drafts at 60 anchors of a row of six documents of unequal lengths."""
    documents = [dataclasses.replace(r, tokens=r.tokens[: 38 - 3 * i]) for i, r in enumerate(responses[:6])]
    batch = pack(documents, 256)
    blocks = sample_blocks(batch.row, head.config, 60, 0.0, 7.0, torch.Generator().manual_seed(3))
    return documents, batch, blocks, draft(packed(head), target, batch, blocks, pool)


@pytest.mark.parametrize("loss", ["forward_kl", "cross_entropy"])
def test_an_overfitted_weavers_trees_beat_the_heads_own(head, target, responses, loss):
    config = tiny_weaver()
    settings = WeaverSettings(minutes=5, steps=350, loss=loss, learning_rate=3e-3, sequences=8, anchors=16)
    tensors, history = train_weaver(config, head, target, responses, settings)
    assert [entry["step"] for entry in history] == [100, 200, 300, 350]
    assert history[-1]["loss"] < 0.7 * history[-1]["marginal_loss"]
    folded = FoldedWeaver(config, tensors, target.embedding, target.lm_head, torch.float32)
    seen = [response for response in responses if not response.held_out]
    rows = mean_accept_lengths(WeaverDrafter(head, target, folded, nodes=4), seen, (8, 16))
    length = {(row["drafter"], row["budget"]): row["accept_length"] for row in rows if row["source"] == "all"}
    assert length["dflash_tfm", 8] > 1.15 * length["ddtree", 8]
    assert length["dflash_tfm", 16] > 1.15 * length["ddtree", 16]
    assert length["dflash_tfm", 16] > length["chain", 6]


def test_training_starts_from_the_heads_marginals(head, target, responses):
    *_, drafts = some_drafts(head, target, responses)
    config = tiny_weaver()
    loss, marginal = weaver_loss(ReferenceWeaver(config, initial_weaver(config, 0)), target, drafts, "forward_kl")
    torch.testing.assert_close(loss, marginal)


def test_drafts_are_what_came_true_and_what_the_head_said(head, target, responses):
    documents, batch, blocks, drafts = some_drafts(head, target, responses)
    starts = torch.tensor([0] + [len(document.tokens) for document in documents]).cumsum(0).tolist()
    seen = set()
    for m in range(60):
        document = starts.index(blocks.first[m].item())
        tokens, anchor = documents[document].tokens, blocks.positions[m, 0].item()
        final = target.states(tokens[None])[1][0]
        seen.add(document)
        torch.testing.assert_close(drafts.committed[m], final[anchor - 1])
        assert drafts.inside[m].sum() == min(5, len(tokens) - 1 - anchor)
        assert drafts.path[m, 0] == tokens[anchor]
        for i in range(drafts.inside[m].sum()):
            assert drafts.path[m, i + 1] == tokens[anchor + i + 1]
            # What the target says of the pool where it chose the token of depth i + 1.
            said = (final[anchor + i] @ target.lm_head.T).log_softmax(-1)
            torch.testing.assert_close(drafts.teacher[m, i], said[drafts.pool_tokens[m, i]], rtol=1e-4, atol=1e-4)
            assert drafts.depth_weights[m, i].item() == pytest.approx(torch.tensor(-i / 7.0).exp().item())
    assert seen == set(range(6))
    scores = drafts.proposal @ target.lm_head.T
    torch.testing.assert_close(scores.gather(2, drafts.pool_tokens), drafts.pool_scores)
    assert (drafts.pool_scores[..., -1:] >= scores.sort(-1, descending=True).values[..., 23:24] - 1e-5).all()


def test_an_anchor_that_no_state_chose_does_not_count(head, target, responses):
    batch = pack([dataclasses.replace(responses[0], prompt_length=1)], 64)
    blocks = make_blocks(batch.row, head.config, torch.tensor([0, 1]), torch.zeros(2, 1, dtype=torch.long), 7.0)
    assert draft(packed(head), target, batch, blocks, 24).inside.any(-1).tolist() == [False, True]


def test_an_adapter_of_fewer_depths_gets_the_first_ones(head, target, responses):
    _, batch, blocks, whole = some_drafts(head, target, responses)
    short = draft(packed(head), target, batch, blocks, 24, depth=3)
    assert torch.equal(short.path, whole.path[:, :4])
    for name in ("proposal", "pool_tokens", "pool_scores", "depth_weights", "teacher"):
        torch.testing.assert_close(getattr(short, name), getattr(whole, name)[:, :3])


def test_nodes_below_a_token_outside_its_pool_do_not_count(head, target, responses):
    *_, drafts = some_drafts(head, target, responses, pool=6)
    outside = ~drafts.in_pool
    assert outside.any() and not outside.all()
    for m in range(len(outside)):
        first = outside[m].tolist().index(True) if outside[m].any() else 5
        counted = drafts.weights[m] > 0
        assert torch.equal(counted, drafts.inside[m] & (torch.arange(5) <= first))


@pytest.mark.parametrize("loss", ["forward_kl", "cross_entropy"])
def test_the_loss_is_its_definition(head, target, responses, loss):
    _, batch, blocks, drafts = some_drafts(head, target, responses, pool=6)
    final = target.states(batch.tokens)[1].flatten(0, 1)[batch.source]
    config = tiny_weaver(candidate_pool_size=6)
    weaver = ReferenceWeaver(config, random_weaver(config, dtype=torch.float32))
    got, _ = weaver_loss(weaver, target, drafts, loss)
    depth = torch.arange(5).expand(len(drafts.path), -1)
    chain = torch.ones(5, 5, dtype=torch.bool).tril().expand(len(drafts.path), -1, -1)
    states = weaver.node_states(drafts.committed, drafts.proposal, target.embedding[drafts.path[:, :-1]], depth, chain)
    rows = target.lm_head[drafts.pool_tokens]
    q = weaver.pool_logits(states, drafts.pool_scores, rows).log_softmax(-1)
    total, weight = 0.0, 0.0
    for m, i in drafts.weights.nonzero().tolist():
        p = (final[blocks.anchors[m] + i] @ target.lm_head.T).softmax(-1)[drafts.pool_tokens[m, i]]
        if loss == "forward_kl":
            single = (p * ((p / p.sum()).log() - q[m, i])).sum()
        elif drafts.in_pool[m, i]:
            single = -q[m, i][drafts.pool_tokens[m, i] == drafts.path[m, i + 1]].sum()
        else:
            continue
        total += drafts.weights[m, i] * single
        weight += drafts.weights[m, i]
    torch.testing.assert_close(got, total / weight, rtol=1e-4, atol=1e-5)


def accepted(tree, true) -> int:
    """Tokens that one pass commits: the true continuation inside a tree of one request, and the bonus token."""
    parent, token = tree.parent[0].tolist(), tree.token[0].tolist()
    node, length = 0, 1
    for wanted in true:
        nodes = [n for n in range(1, tree.node_count[0]) if parent[n] == node and token[n] == wanted]
        if not nodes:
            break
        node, length = nodes[0], length + 1
    return length


def test_offline_passes_are_those_of_drafts_at_each_anchor(head, target, responses):
    """Answers of unequal lengths walked at once, against each alone with the pools of `draft`."""
    config = tiny_weaver()
    folded = FoldedWeaver(config, random_weaver(config), target.embedding, target.lm_head, torch.float32)
    drafter = WeaverDrafter(head, target, folded, nodes=4, rounds=3)
    some = [dataclasses.replace(r, tokens=r.tokens[: 38 - 4 * i]) for i, r in enumerate(responses[:5])]
    together = verify_passes(drafter.read(some), lambda *at: drafter.conditional_tree(*at, 16), 5).tolist()
    for response, passes in zip(some, together, strict=True):
        batch, place, count = pack([response], 64), PROMPT, 0
        while place < len(response.tokens) - 1:
            anchor = torch.tensor([place])
            blocks = make_blocks(batch.row, head.config, anchor, torch.zeros(1, 1, dtype=torch.long), 7.0)
            d = draft(packed(head), target, batch, blocks, 24)
            root = response.tokens[anchor]
            inputs = root, d.committed, d.proposal, d.pool_tokens, d.pool_scores
            tree = folded.build_tree(*inputs, 16, 4, 3, drafter.width)
            length = accepted(tree, response.tokens[place + 1 :].tolist())
            place, count = place + length, count + 1
        assert passes == count


def test_accept_lengths_are_tokens_a_pass(head, target, responses):
    config = tiny_weaver()
    folded = FoldedWeaver(config, random_weaver(config), target.embedding, target.lm_head, torch.float32)
    drafter = WeaverDrafter(head, target, folded, nodes=4)
    some = [dataclasses.replace(r, source="even" if i % 2 else "odd") for i, r in enumerate(responses[:5])]
    too_short = dataclasses.replace(some[0], tokens=some[0].tokens[: PROMPT + 1])
    rows = mean_accept_lengths(drafter, [*some, too_short], (2, 16, 48))
    assert [row["source"] for row in rows] == ["even"] * 7 + ["odd"] * 7 + ["all"] * 7
    length = {(row["source"], row["drafter"], row["budget"]): row["accept_length"] for row in rows}
    greatest = {2: 2, 6: 6, 16: 6, 48: 6}
    assert all(1 <= mean <= greatest[budget] for (_, _, budget), mean in length.items())
    for name, budget in {key[1:] for key in length}:
        passes = {s: n * 31 / length[s, name, budget] for s, n in (("odd", 3), ("even", 2), ("all", 5))}
        assert passes["all"] == pytest.approx(passes["odd"] + passes["even"], rel=1e-3)
    assert {row["source"]: row["responses"] for row in rows} == {"odd": 3, "even": 2, "all": 5}
    assert {row["width"] for row in rows if row["drafter"] == "dflash_tfm"} == {4}
    assert mean_accept_lengths(drafter, [too_short], (16,)) == []


def test_evaluate_measures_a_heads_weaver_at_every_width_and_budget(head, target, responses, tmp_path):
    config, weights = tiny_weaver(), random_weaver(tiny_weaver())
    save_head(tmp_path / "head", head.config, head.tensors)
    save_weaver(tmp_path / "weaver", config, weights)
    answered = [dataclasses.replace(r, source="gsm8k" if i % 2 else "mbpp") for i, r in enumerate(responses[:6])]
    run = EvaluateConfig(
        target="",
        data="",
        heads=[str(tmp_path / "head")],
        out=str(tmp_path / "rows.json"),
        datasets=["gsm8k", "mbpp"],
        budgets=[4, 16],
        weavers={str(tmp_path / "head"): str(tmp_path / "weaver")},
        weaver_widths=[1, 0],
    )
    rows = evaluate(run, target, answered)["rows"]
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    grown = {(r["dataset"], r["budget"], r["weaver_width"]): r for r in rows if r["drafter"] == "dflash_tfm"}
    settings = {(4, 2, 2), (4, 1, 3), (16, 8, 2), (16, 1, 15)}  # budget, width and rounds; the wide ones by default
    assert grown.keys() == {(d, b, w) for d in ("gsm8k", "mbpp") for b, w, _ in settings}
    assert {(b, w, r["weaver_rounds"]) for (_, b, w), r in grown.items()} == settings
    folded = FoldedWeaver(config, load_weaver(tmp_path / "weaver")[1], target.embedding, target.lm_head, torch.float32)
    for width in (1, 8):
        expected = mean_accept_lengths(WeaverDrafter(head, target, folded, width), answered, (16,))
        for line in expected:
            if line["drafter"] == "dflash_tfm" and line["source"] != "all":
                assert grown[line["source"], 16, width]["accept_length"] == line["accept_length"]
    assert {r["drafter"] for r in rows} == {"ddtree", "dflash", "dflash_tfm"}
    lines = [line.split() for line in table({"rows": rows}).splitlines()]
    kinds = {("one_pass", "4:"), ("chain", "6:"), ("one_pass", "w1"), ("one_pass", "w2"), ("one_pass", "w8")}
    assert {(line[1], line[2] if line[2][0] == "w" else line[3]) for line in lines} == kinds and len(lines) == 10


def test_evaluate_keeps_what_it_measured_before_a_stop_in_the_order_asked(
    head, target, responses, tmp_path, monkeypatch
):
    save_head(tmp_path / "head", head.config, head.tensors)
    save_weaver(tmp_path / "weaver", tiny_weaver(), random_weaver(tiny_weaver()))
    run = EvaluateConfig(
        target="",
        data="",
        heads=[str(tmp_path / "head")],
        out=str(tmp_path / "rows.json"),
        datasets=["gsm8k"],
        budgets=[16, 4],
        weavers={str(tmp_path / "head"): str(tmp_path / "weaver")},
        weaver_widths=[2, 0, 1],
    )
    left = [walk] * 3  # of (16, 2), (4, 2) and (16, 8): the default of 4 nodes is 2, measured already
    monkeypatch.setattr("sgl_specflow.training.evaluate.walk", lambda *given: left.pop()(*given))
    with pytest.raises(IndexError):
        evaluate(run, target, [dataclasses.replace(r, source="gsm8k") for r in responses[:3]])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(r["drafter"], r["budget"], r.get("weaver_width")) for r in rows] == [
        ("ddtree", 16, None),
        ("ddtree", 4, None),
        ("dflash", 6, None),
        ("dflash_tfm", 16, 2),
        ("dflash_tfm", 4, 2),
        ("dflash_tfm", 16, 8),
    ]


def test_the_command_trains_exports_and_measures(head, target, responses, tmp_path, monkeypatch, capsys):
    target.model.save_pretrained(tmp_path / "target")
    save_head(tmp_path / "head", head.config, head.tensors)
    # A sampled answer is trained on, but says nothing of greedy decoding.
    stored = [dataclasses.replace(r, greedy=i % 8 != 0) for i, r in enumerate(responses)]
    save_responses(stored, tmp_path / "responses.npz")
    given = (
        f"--target {tmp_path}/target --head {tmp_path}/head --responses {tmp_path}/responses.npz --out {tmp_path}/out"
    )
    given += " --minutes 1 --steps 4 --rank 16 --layers 1 --heads 2 --mlp 16 --pool 12 --budgets 8 --held-out 9"
    monkeypatch.setattr(sys, "argv", ["weaver", *given.split()])
    weaver_training.main()
    config, tensors = load_weaver(tmp_path / "out")
    assert config.depth == 5 and tensors["token_in.weight"].dtype == torch.bfloat16
    run = json.loads((tmp_path / "out" / "training.json").read_text())
    assert {row["drafter"] for row in run["accept_length"]} == {"dflash_tfm", "ddtree", "chain"}
    assert {row["responses"] for row in run["accept_length"]} == {7} and run["training_responses"] == 40
    assert "| all | dflash_tfm | 8 |" in (tmp_path / "out" / "README.md").read_text()
    assert "dflash_tfm budget   8" in capsys.readouterr().out


def test_nothing_to_train_on_is_said(head, target):
    with pytest.raises(ValueError, match="none of 0 responses"):
        train_weaver(tiny_weaver(), head, target, [], WeaverSettings(minutes=1))
    with pytest.raises(ValueError, match="loss is 'reverse'"):
        WeaverSettings(minutes=1, loss="reverse")
    assert VOCABULARY > 24
