"""`eval experts`: experts counted by a real server's recorder, and the bytes that they stand for."""

import json

import pytest
import torch
from injected import plugin_environment
from served import EXPERTS, LAYERS, generate, make_small_head, make_small_moe_target, serve, tree_flags
from sgl_specflow.eval import experts, inflation
from sgl_specflow.eval.experts import (
    FOLDER_VARIABLE,
    RECORDER_FLAGS,
    add_floor,
    bytes_read,
    distinct_experts,
    draft_bytes,
    main,
    recorded_passes,
    uniform_experts,
)
from sgl_specflow.eval.shapes import MODELS
from sgl_specflow.launch.server import Server
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from sgl_specflow.drafter.config import HeadConfig

SHAPES = MODELS["qwen3-30b-a3b"]
BUDGET = 12
NOTHING_CAPTURES = """
import torch

def register():
    # What SGLang's recorder asks of any device.
    torch.cpu.is_current_stream_capturing = lambda: False
    torch.cpu.empty_cache = lambda: None
"""


def test_the_recorder_of_a_tree_server_counts_its_verify_passes(tmp_path):
    target = make_small_moe_target(tmp_path / "target")
    head = make_small_head(tmp_path / "head", causal=True)
    flags = [*tree_flags("jetflow", head, BUDGET), *RECORDER_FLAGS]
    records = tmp_path / "records"
    environment = {FOLDER_VARIABLE: str(records), **plugin_environment(tmp_path / "plugin", NOTHING_CAPTURES)}
    with serve(target, tmp_path / "log", *flags, environment=environment) as server:
        request = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True},
        }
        answers = []
        passes = recorded_passes(server.url, records, lambda: answers.extend(generate(server, [request])))
    assert passes.shape[1:] == (LAYERS, EXPERTS["num_experts"])
    per_token = EXPERTS["num_experts_per_tok"]
    verified = (passes.sum(-1) == BUDGET * per_token).all(-1)
    # Overlap scheduling runs one step more than is wanted.
    assert 0 <= verified.sum() - answers[0]["meta_info"]["spec_verify_ct"] <= 1
    distinct = distinct_experts(passes, BUDGET, per_token)
    assert len(distinct) == LAYERS and all(per_token < layer <= EXPERTS["num_experts"] for layer in distinct)


def test_passes_of_other_sizes_are_left_out():
    passes = torch.zeros(4, 2, 6, dtype=torch.int64)
    passes[0, :, :2] = 4  # 4 tokens, experts 0 and 1
    passes[1, 0, :4], passes[1, 1, 1:3] = 2, torch.tensor([5, 3])
    passes[2, :, :2] = 9  # a prefill; pass 3 is a draft's
    assert distinct_experts(passes, 4, 2) == [3.0, 2.0]
    with pytest.raises(RuntimeError, match="no pass of 5 tokens among 4"):
        distinct_experts(passes, 5, 2)


def test_uniform_routing_by_throwing():
    draw = torch.Generator().manual_seed(0)
    thrown = torch.rand(2000, 16, 12, generator=draw).topk(3).indices.flatten(1)
    mean = sum(len(set(row)) for row in thrown.tolist()) / 2000
    assert abs(uniform_experts(12, 3, 16) - mean) < 0.05 and uniform_experts(12, 3, 1) == pytest.approx(3)


def test_bytes_are_those_of_the_models_own_tensors():
    config = Qwen3MoeConfig(**{k: v for k, v in SHAPES.target.items() if k not in ("architectures", "model_type")})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {name: tensor.numel() for name, tensor in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    read = sum(sizes.values()) - experts - sizes["model.embed_tokens.weight"]
    layers = SHAPES.target["num_hidden_layers"]
    got = bytes_read(SHAPES.target, [64.0] * layers, batch=1, context=0)
    assert got == pytest.approx(2 * (read + experts / 2), rel=1e-4)  # norms are not counted
    kept = bytes_read(SHAPES.target, [64.0] * layers, batch=2, context=1000) - got
    assert kept == 2 * 2 * 1000 * layers * 2 * SHAPES.target["num_key_value_heads"] * SHAPES.target["head_dim"]


def test_the_floor_is_over_the_plain_row_of_the_same_point():
    head = HeadConfig.from_dict(SHAPES.head_config(4096, causal=True))
    whole, half = (draft_bytes(SHAPES.target, head, 1, 0, fp8) for fp8 in (False, True))
    assert half == whole / 2 > 0 and draft_bytes(SHAPES.target, head, 1, 4096) > whole
    rows = [
        {"algorithm": "plain", "batch": 1, "context": 128, "target_gb": 4.0},
        {"algorithm": "jetflow", "batch": 1, "context": 128, "target_gb": 9.0, "draft_gb": 1.0},
        {"algorithm": "jetflow", "batch": 8, "context": 128, "target_gb": 9.0, "draft_gb": 1.0},
    ]
    add_floor(rows)
    assert [row.get("floor_inflation") for row in rows] == [None, 2.5, None]


class Stand(Server):
    def stop(self):
        self.url = "stopped"


def test_a_run_writes_a_row_a_server_and_what_failed(tmp_path, monkeypatch):
    """Servers whose passes send each token to eight experts of its own; one server does not start."""
    started = []

    def start(flags, log, environment, timeout):
        nodes = int(flags[flags.index("--speculative-num-draft-tokens") + 1]) if "jetflow" in flags else 1
        if nodes == 32:
            raise RuntimeError("no memory")
        assert flags[-len(RECORDER_FLAGS) :] == RECORDER_FLAGS and environment[FOLDER_VARIABLE] not in started
        started.append(environment[FOLDER_VARIABLE])
        return Stand(str(nodes), None, log)

    def passes(url, folder, run):
        assert str(folder) in started
        run()
        counts = torch.zeros(5, SHAPES.target["num_hidden_layers"], 128, dtype=torch.int64)
        counts[1:4, :, : 8 * min(int(url), 16)] = max(1, int(url) // 16)
        return counts

    asked = []

    async def stream(url, prompts, new_tokens):
        asked.append((url, len(prompts), len(prompts[0]), new_tokens))

    monkeypatch.setattr(inflation, "start", start)
    monkeypatch.setattr(experts, "need_gpu", lambda parser: None)
    monkeypatch.setattr(experts, "recorded_passes", passes)
    monkeypatch.setattr(experts, "stream_requests", stream)
    out = tmp_path / "out" / "experts.json"
    words = ["--model", "qwen3-30b-a3b", "--budgets", "16,32,64", "--points", "1x300", "--at-once", "2"]
    assert main([*words, "--out", str(out), "--logs", str(tmp_path), "--commit", "here"]) == 1
    result = json.loads(out.read_text())
    plain, small, large = result["rows"]
    assert [(row["algorithm"], row["budget"], row["distinct"]) for row in result["rows"]] == [
        ("plain", None, 8.0),
        ("jetflow", 16, 128.0),
        ("jetflow", 64, 128.0),
    ]
    assert asked == [("1", 1, 300, 40), ("16", 1, 300, 160), ("64", 1, 300, 160)]
    assert "floor_inflation" not in plain and small["floor_inflation"] == large["floor_inflation"] > 4
    assert [failure["server"] for failure in result["failures"]] == [["jetflow", 32, False]]


def test_a_model_without_experts_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--model", "qwen3-8b", "--out", str(tmp_path / "out.json")])
    assert "qwen3-8b has no experts; give qwen3-30b-a3b" in capsys.readouterr().err
