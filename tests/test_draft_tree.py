"""`eval draft_tree`: its trees are what their kind says, and its command measures them."""

import json

import pytest
import torch
from sgl_specflow.eval import draft_tree


@pytest.mark.parametrize("kind, budget, deep", [("flat", 64, False), ("peaked", 64, True), ("peaked", 16, True)])
def test_flat_marginals_give_broad_trees_and_peaked_ones_deep_trees(kind, budget, deep, monkeypatch):
    timed = []
    monkeypatch.setattr(draft_tree, "microseconds", lambda calls: timed.append(calls[0]()) or 3.0 + len(timed))
    row = draft_tree.measure(kind, budget, 2, vocabulary=3000, device="cpu")
    assert (row["tree_depth"] == draft_tree.DEPTH) == deep and row["tree_depth"] >= 2
    assert (row["top_us"], row["build_us"], row["whole_us"]) == (4.0, 5.0, 9.0)
    assert timed[0][0].shape == (2 * draft_tree.DEPTH, draft_tree.WIDTH) and timed[1].token.shape == (2, budget)


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        draft_tree.main(["--out", str(tmp_path / "out.json")])
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_each_kind_and_size_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(draft_tree, "measure", lambda *shape: {"shape": shape})
    monkeypatch.setattr(draft_tree, "describe", lambda commit: {"commit": commit})
    out = tmp_path / "out.json"
    draft_tree.main(["--out", str(out), "--budgets", "16", "64", "--requests", "1", "--commit", "c"])
    file = json.loads(out.read_text())
    shapes = [["flat", 16, 1], ["flat", 64, 1], ["peaked", 16, 1], ["peaked", 64, 1]]
    assert file["meta"] == {"commit": "c"} and [row["shape"] for row in file["rows"]] == shapes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_it_runs_on_the_gpu():
    row = draft_tree.measure("peaked", 64, 1)
    assert row["tree_depth"] == draft_tree.DEPTH and 0 < row["build_us"] < row["whole_us"]
