"""Training of a Weaver on the CPU with a tiny random target: it learns what its head's marginals cannot say."""

import json
import sys

import pytest
import torch
from test_first_head import PROMPT, VOCABULARY, responses, target, tiny_config  # noqa: F401
from weavers import random_weaver, weaver_config

from sgl_specflow.drafter.checkpoint import save_head
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.drafter.weaver import FoldedWeaver, ReferenceWeaver, load_weaver
from sgl_specflow.training import weaver as weaver_training
from sgl_specflow.training.blocks import sample_blocks
from sgl_specflow.training.responses import save_responses
from sgl_specflow.training.trainer import TrainSettings, train
from sgl_specflow.training.weaver import (
    WeaverSettings,
    accept_lengths,
    draft,
    initial_weaver,
    mean_accept_lengths,
    train_weaver,
    weaver_loss,
)


def tiny_weaver(**changes):
    shape = dict(d_model=32, d_embed=32, d_rank=48, num_heads=4, mlp_dim=64, K=5, candidate_pool_size=24)
    return weaver_config(**{**shape, **changes})


@pytest.fixture(scope="module")
def head(target, responses):  # noqa: F811
    config = tiny_config(False)
    settings = TrainSettings(minutes=5, steps=60, learning_rate=5e-3, sequences=8, anchors=8)
    return ReferenceHead(config, train(config, target, responses, settings)[0])


def some_drafts(head, target, responses, pool=24):  # noqa: F811
    torch.manual_seed(3)
    tokens, prompt_lengths, lengths = weaver_training._pad(responses[:6], 8, "cpu")
    blocks = sample_blocks(tokens, prompt_lengths, lengths, head.config, anchors=10, reveal=0.0)
    return tokens, blocks, draft(head, target, tokens, blocks, pool)


@pytest.mark.parametrize("loss", ["forward_kl", "cross_entropy"])
def test_an_overfitted_weavers_trees_beat_the_heads_own(head, target, responses, loss):  # noqa: F811
    config = tiny_weaver()
    settings = WeaverSettings(minutes=5, steps=350, loss=loss, learning_rate=3e-3, sequences=8, anchors=16)
    tensors, history = train_weaver(config, head, target, responses, settings)
    assert [entry["step"] for entry in history] == [100, 200, 300, 350]
    assert history[-1]["loss"] < 0.7 * history[-1]["marginal_loss"]
    folded = FoldedWeaver(config, tensors, target.embedding, target.lm_head, torch.float32)
    seen = [response for response in responses if not response.held_out]
    rows = mean_accept_lengths(head, target, folded, seen, (8, 16), width=4)
    length = {(row["drafter"], row["budget"]): row["accept_length"] for row in rows if row["source"] == "all"}
    assert length["dflash_tfm", 8] > 1.15 * length["ddtree", 8]
    assert length["dflash_tfm", 16] > 1.15 * length["ddtree", 16]
    assert length["dflash_tfm", 16] > length["chain", 6]


def test_training_starts_from_the_heads_marginals(head, target, responses):  # noqa: F811
    _, _, drafts = some_drafts(head, target, responses)
    config = tiny_weaver()
    loss, marginal = weaver_loss(ReferenceWeaver(config, initial_weaver(config, 0)), target, drafts, "forward_kl")
    torch.testing.assert_close(loss, marginal)


def test_drafts_are_what_came_true_and_what_the_head_said(head, target, responses):  # noqa: F811
    tokens, blocks, drafts = some_drafts(head, target, responses)
    final = target.states(tokens)[1]
    at = blocks.positions.flatten(0, 1)
    for m in range(0, at.shape[0], 7):
        row, anchor = m // 10, at[m, 0].item()
        assert torch.equal(drafts.committed[m], final[row, anchor - 1])
        for i in range(5):
            if drafts.inside[m, i]:
                assert drafts.path[m, i + 1] == tokens[row, anchor + i + 1]
                # The teacher's row chose the token of depth i + 1 (greedy responses).
                assert torch.equal(drafts.teacher[m, i], final[row, anchor + i])
        assert torch.equal(drafts.path[m, :1], tokens[row, anchor : anchor + 1])
    scores = drafts.proposal @ target.lm_head.T
    torch.testing.assert_close(scores.gather(2, drafts.pool_tokens), drafts.pool_scores)
    assert (drafts.pool_scores[..., -1:] >= scores.sort(-1, descending=True).values[..., 23:24] - 1e-5).all()


def test_nodes_below_a_token_outside_its_pool_do_not_count(head, target, responses):  # noqa: F811
    _, _, drafts = some_drafts(head, target, responses, pool=6)
    outside = ~drafts.in_pool
    assert outside.any() and not outside.all()
    for m in range(len(outside)):
        first = outside[m].tolist().index(True) if outside[m].any() else 5
        counted = drafts.weights[m] > 0
        assert torch.equal(counted, drafts.inside[m] & (torch.arange(5) <= first))


@pytest.mark.parametrize("loss", ["forward_kl", "cross_entropy"])
def test_the_loss_is_its_definition(head, target, responses, loss):  # noqa: F811
    _, _, drafts = some_drafts(head, target, responses, pool=6)
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
        p = (drafts.teacher[m, i] @ target.lm_head.T).softmax(-1)[drafts.pool_tokens[m, i]]
        if loss == "forward_kl":
            single = (p * ((p / p.sum()).log() - q[m, i])).sum()
        elif drafts.in_pool[m, i]:
            single = -q[m, i][drafts.pool_tokens[m, i] == drafts.path[m, i + 1]].sum()
        else:
            continue
        total += drafts.weights[m, i] * single
        weight += drafts.weights[m, i]
    torch.testing.assert_close(got, total / weight, rtol=1e-4, atol=1e-5)


def test_offline_lengths_are_the_true_continuation_inside_the_tree(head, target, responses):  # noqa: F811
    config = tiny_weaver()
    folded = FoldedWeaver(config, random_weaver(config), target.embedding, target.lm_head, torch.float32)
    tokens = responses[0].tokens
    lengths = accept_lengths(head, target, folded, tokens, PROMPT, (1, 16, 48), width=4, at_once=7)
    assert (lengths["dflash_tfm", 1] == 1).all() and (lengths["chain", 6] <= 6).all()
    remaining = len(tokens) - 1 - torch.arange(PROMPT, len(tokens) - 1)
    for length in lengths.values():
        assert (length >= 1).all() and (length - 1 <= remaining).all() and len(length) == len(remaining)
    together = accept_lengths(head, target, folded, tokens, PROMPT, (16,), width=4, at_once=100)
    assert torch.equal(together["dflash_tfm", 16], lengths["dflash_tfm", 16])


def test_the_command_trains_exports_and_measures(head, target, responses, tmp_path, monkeypatch, capsys):  # noqa: F811
    target.model.save_pretrained(tmp_path / "target")
    save_head(tmp_path / "head", head.config, head.tensors)
    save_responses(responses, tmp_path / "responses.npz")
    given = (
        f"--target {tmp_path}/target --head {tmp_path}/head --responses {tmp_path}/responses.npz --out {tmp_path}/out"
    )
    given += " --minutes 1 --steps 4 --rank 16 --layers 1 --heads 2 --mlp 16 --pool 12 --budgets 8 --held-out 3"
    monkeypatch.setattr(sys, "argv", ["weaver", *given.split()])
    weaver_training.main()
    config, tensors = load_weaver(tmp_path / "out")
    assert config.depth == 5 and tensors["token_in.weight"].dtype == torch.bfloat16
    run = json.loads((tmp_path / "out" / "training.json").read_text())
    assert {row["drafter"] for row in run["accept_length"]} == {"dflash_tfm", "ddtree", "chain"}
    assert "| all | dflash_tfm | 8 |" in (tmp_path / "out" / "README.md").read_text()
    assert "dflash_tfm budget   8" in capsys.readouterr().out


def test_nothing_to_train_on_is_said(head, target):  # noqa: F811
    with pytest.raises(ValueError, match="none of 0 responses"):
        train_weaver(tiny_weaver(), head, target, [], WeaverSettings(minutes=1))
    with pytest.raises(ValueError, match="loss is 'reverse'"):
        WeaverSettings(minutes=1, loss="reverse")
    assert VOCABULARY > 24
