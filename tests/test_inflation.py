"""`eval inflation`: which servers run, what is written of them, and the shapes that it measures."""

import argparse
import json

import pytest
from sgl_specflow.eval.inflation import add_inflation, add_server_arguments, prompts_of, servers_of, wanted_servers
from sgl_specflow.eval.shapes import MODELS

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.weaver import load_weaver_config


def options(**given) -> argparse.Namespace:
    return argparse.Namespace(**{"runs": None, "algorithms": ["jetflow"], "budgets": [], "fp8_budgets": [], **given})


def test_all_combinations_or_the_named_runs_in_their_order():
    combined = options(algorithms=["jetflow", "ddtree"], budgets=[16, 64], fp8_budgets=[64])
    assert wanted_servers(combined) == [
        (algorithm, budget, fp8)
        for algorithm in ("jetflow", "ddtree")
        for budget, fp8 in ((16, False), (64, False), (64, True))
    ]
    named = options(runs="dflash_tfm:64:fp8,jetflow:16", budgets=[256])
    assert wanted_servers(named) == [("dflash_tfm", 64, True), ("jetflow", 16, False)]


@pytest.mark.parametrize("runs", ["eagle:16", "jetflow:many", "jetflow:16:bf16", "jetflow:16:fp8:fp8"])
def test_a_run_of_another_form_is_refused(runs):
    with pytest.raises(ValueError, match="give algorithm:budget"):
        wanted_servers(options(runs=runs))


def test_all_servers_of_a_run_have_its_ranks_and_flags(tmp_path):
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    given = [
        "--model",
        "qwen3-8b",
        "--runs",
        "jetflow:16",
        "--tensor-parallel",
        "2",
        "--out",
        str(tmp_path / "out.json"),
    ]
    servers = servers_of(parser.parse_args([*given, "--", "--sleep-on-idle"]), ["fa3", "triton"], [(1, 128)], tmp_path)
    assert set(servers) == {("plain", "fa3", False), ("plain", "triton", False), ("jetflow", 16, False)}
    for flags, _ in servers.values():
        assert flags[flags.index("--tp-size") + 1] == "2" and "--sleep-on-idle" in flags


def test_inflation_is_against_the_best_plain_backend_at_the_same_point():
    def row(algorithm, batch, context, ms, backend=None):
        return {"algorithm": algorithm, "batch": batch, "context": context, "step_ms": ms, "backend_plain": backend}

    rows = [
        *(row("plain", 1, 128, 5.0, "triton"), row("plain", 1, 128, 4.0, "fa3"), row("plain", 8, 128, 2.0, "fa3")),
        *(row("jetflow", 1, 128, 6.0), row("ddtree", 8, 128, 3.0), row("jetflow", 1, 4096, 7.0)),
    ]
    add_inflation(rows)
    assert (rows[3]["plain_ms"], rows[3]["backend_plain"], rows[3]["inflation"]) == (4.0, "fa3", 1.5)
    assert (rows[4]["plain_ms"], rows[4]["inflation"]) == (2.0, 1.5)
    assert "inflation" not in rows[5], "nothing plain was measured there"
    assert all("inflation" not in plain for plain in rows[:3])


def test_prompts_of_a_batch_share_no_prefix():
    prompts = prompts_of(8, 300)
    assert [len(prompt) for prompt in prompts] == [300] * 8 and len({prompt[0] for prompt in prompts}) == 8


@pytest.mark.parametrize("name", MODELS)
def test_target_and_heads_of_a_models_shapes_fit(name, tmp_path):
    shapes = MODELS[name]
    target = json.loads((shapes.write_target(tmp_path, 5000) / "config.json").read_text())
    for causal in (True, False):
        head = HeadConfig.from_dict(json.loads((shapes.write_head(tmp_path, 5000, causal) / "config.json").read_text()))
        assert (head.causal_head, head.hidden_size, head.vocab_size) == (
            causal,
            target["hidden_size"],
            target["vocab_size"],
        )
        assert max(head.target_layer_ids) < target["num_hidden_layers"]
        assert head.max_position_embeddings == target["max_position_embeddings"] == 5000


def test_only_shapes_with_a_published_weaver_write_one(tmp_path):
    with pytest.raises(ValueError, match="qwen3.6-27b"):
        MODELS["qwen3-8b"].write_weaver(tmp_path)
    shapes = MODELS["qwen3.6-27b"]
    weaver = load_weaver_config(shapes.write_weaver(tmp_path))
    assert weaver == shapes.weaver and weaver.d_model == shapes.target["hidden_size"]
