"""Heads trained here, in a server: SGLang's own loader reads them, and offline and served accept length agree."""

import pytest
import torch
from served import generate, make_small_target, serve, tree_flags
from test_serving_greedy import greedy, prompts
from transformers import AutoModelForCausalLM

from sgl_specflow.drafter.checkpoint import load_tensors
from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.training.config import HeadShape, TrainConfig
from sgl_specflow.training.export import export, facts
from sgl_specflow.training.offline_accept import OfflineDrafter, accept_lengths
from sgl_specflow.training.responses import Response
from sgl_specflow.training.target_states import FrozenTarget
from sgl_specflow.training.trainer import Trainer

BUDGET, NEW_TOKENS, MASK = 8, 40, 15


@pytest.mark.parametrize("algorithm", ["jetflow", "ddtree"])
def test_offline_and_served_accept_length_agree(algorithm, tmp_path, monkeypatch):
    """Within 2 %, on the same prompts; the head's files are sharded with an index."""
    folder = make_small_target(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shape = HeadShape(
        causal=algorithm == "jetflow",
        layers=2,
        intermediate_size=64,
        block_size=8,
        mask_token_id=MASK,
        target_layers=[0, 1],
    )
    head_config = shape.config(model.config)
    target = FrozenTarget(model, head_config.target_layer_ids)
    ids = prompts(32, seed=40)
    written = [
        model.generate(
            torch.tensor([p]), attention_mask=torch.ones(1, len(p)), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        for p in ids
    ]
    responses = [Response("made", row[0], len(p), False) for p, row in zip(ids, written)]
    config = TrainConfig(
        target=str(folder), responses=[], out="", head=shape, steps=60, row_tokens=512, anchors=64, loss_chunk=64
    )
    run = Trainer(config, head_config, target, responses)
    run.run()
    monkeypatch.setattr("sgl_specflow.drafter.checkpoint.MAX_SHARD_BYTES", 100_000)
    export(tmp_path / "head", head_config, run.exported, facts(config, head_config, run, responses, "regenerated"))
    assert len(list((tmp_path / "head").glob("*.safetensors"))) > 1

    flags = tree_flags(algorithm, tmp_path / "head", BUDGET)
    with serve(folder, tmp_path / "log", *flags) as server:
        answers = generate(server, [greedy(p, NEW_TOKENS) for p in ids], at_once=4)
    served = [Response("made", torch.tensor(p + a["output_ids"]), len(p), True) for p, a in zip(ids, answers)]
    head = ReferenceHead(HeadConfig.load(tmp_path / "head"), load_tensors(tmp_path / "head", torch.float32))
    offline = accept_lengths(OfflineDrafter(head, target), served, [BUDGET])[f"tree-{BUDGET}"]["all"]
    assert offline > 1.3
    passes = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    decoded = sum(answer["meta_info"]["completion_tokens"] - 1 for answer in answers)
    assert decoded / passes == pytest.approx(offline, rel=0.02)
