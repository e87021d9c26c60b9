"""A head's folder: the public configs parse, and every wrong one is refused by the name of what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_specflow.drafter.checkpoint import (
    INDEX,
    check_checkpoint,
    check_shapes,
    expected_shapes,
    load_tensors,
    save_head,
)
from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.make import head_config, make_random_head, random_tensors
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.errors import SpecflowConfigError

PUBLIC = sorted((Path(__file__).parent / "public_heads").glob("*.json"))
TINY = head_config(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=40,
    num_target_layers=4,
    target_layer_ids=[0, 3],
    mask_token_id=39,
    causal_head=True,
    block_size=4,
)


@pytest.fixture
def folder(tmp_path):
    make_random_head(TINY, tmp_path)
    return tmp_path


def rewrite(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    raw["dflash_config"] |= changes.pop("dflash_config", {})
    (folder / "config.json").write_text(json.dumps(raw | changes))


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.stem)
def test_public_head_config_parses_to_its_published_figures(path):
    config = HeadConfig.from_dict(json.loads(path.read_text()))
    layers, hidden, inner, heads, kv, targets, target_layers, theta, window = {
        "qwen3-8b-dflash": (5, 4096, 12288, 32, 8, [1, 9, 17, 25, 33], 36, 1e6, []),
        "qwen3-8b-jetflow": (5, 4096, 12288, 32, 8, [1, 9, 17, 25, 33], 36, 1e6, []),
        "qwen3.6-27b-dflash": (5, 5120, 17408, 32, 8, [1, 16, 31, 46, 61], 64, 1e7, [2048] * 4),
        "qwen3.5-35b-a3b-dflash": (8, 2048, 6144, 32, 4, [1, 10, 19, 28, 37], 40, 1e7, []),
    }[path.stem]
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (layers, hidden, inner)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (heads, kv, 128)
    assert (list(config.target_layer_ids), config.num_target_layers, config.rope_theta) == (
        targets,
        target_layers,
        theta,
    )
    assert [w for w in map(config.layer_window, range(layers)) if w] == window
    assert config.causal_head == path.stem.endswith("jetflow") and config.block_size == 16
    shapes = expected_shapes(config)
    assert shapes["fc.weight"] == (hidden, 5 * hidden) and len(shapes) == 3 + 11 * layers
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    check_shapes({name: tuple(tensor.shape) for name, tensor in meta.items()}, config, path.stem)


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.stem)
def test_public_head_runs_at_its_exact_shape(path):
    """On the meta device at full width; the same config scaled down runs with numbers."""
    raw = json.loads(path.read_text())
    config = HeadConfig.from_dict(raw)
    tensors = {
        name: torch.empty(shape, device="meta", dtype=torch.bfloat16) for name, shape in expected_shapes(config).items()
    }
    head = ReferenceHead(config, tensors)
    where = torch.arange(3, device="meta")
    context = head.context_kv(
        head.project_context(torch.empty(3, config.context_size, device="meta", dtype=torch.bfloat16)), where
    )
    block = torch.empty(16, config.hidden_size, device="meta", dtype=torch.bfloat16)
    assert head.forward(block, torch.arange(16, device="meta"), context).shape == (16, config.hidden_size)

    small = raw | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    small["dflash_config"] = raw["dflash_config"] | (
        {"target_hidden_size": 64} if "target_hidden_size" in raw["dflash_config"] else {}
    )
    config = HeadConfig.from_dict(small)
    head = ReferenceHead(config, random_tensors(config))
    context = head.context_kv(head.project_context(torch.randn(9, config.context_size)), torch.arange(9))
    assert head.forward(torch.randn(16, 64), torch.arange(9, 25), context).isfinite().all()


def test_a_head_survives_writing_and_reading_in_one_file_and_in_shards(folder, monkeypatch):
    config, tensors = HeadConfig.load(folder), load_tensors(folder)
    monkeypatch.setattr("sgl_specflow.drafter.checkpoint.MAX_SHARD_BYTES", 2000)
    save_head(folder / "shards", config, tensors)
    assert (folder / "shards" / INDEX).is_file() and len(list((folder / "shards").glob("*.safetensors"))) > 2
    assert check_checkpoint(folder / "shards") == config
    again = load_tensors(folder / "shards")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"dtype": "float99"}, "dtype 'float99'"),
        ({"block_size": 100000}, "block_size 100000"),
        ({"attention_bias": True}, "attention_bias"),
        ({"dflash_config": {"conv_kernel_size": 3}}, "conv_kernel_size"),
        ({"dflash_config": {"target_layer_ids": [0, 4]}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": []}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 40}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id"),
        ({"dflash_config": {"target_hidden_size": 8}}, "target_hidden_size"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"block_size": 1}, "block_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type"),
        ({"intermediate_size": 25}, "mlp.gate_proj.weight"),
        ({"num_hidden_layers": 3, "layer_types": None}, "missing layers.2"),
        ({"num_hidden_layers": 1, "layer_types": None}, "unexpected layers.1"),
    ],
    ids=str,
)
def test_a_wrong_config_is_refused_by_name(folder, changes, named):
    rewrite(folder, **changes)
    with pytest.raises(SpecflowConfigError, match=named):
        check_checkpoint(folder)


def test_rope_theta_is_read_from_both_places():
    nested = {key: value for key, value in TINY.items() if key != "rope_theta"}
    nested["rope_parameters"] = {"rope_theta": 5e6, "rope_type": "default"}
    assert HeadConfig.from_dict(nested).rope_theta == 5e6
    assert HeadConfig.from_dict(TINY | {"rope_theta": 7e6}).rope_theta == 7e6


def test_half_a_checkpoint_is_refused(folder, monkeypatch):
    for name, named in (("config.json", "config.json"), ("model.safetensors", "lacks model.safetensors")):
        hidden = (folder / name).rename(folder / "away")
        with pytest.raises(SpecflowConfigError, match=named):
            check_checkpoint(folder)
        hidden.rename(folder / name)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(SpecflowConfigError, match="cut off"):
        check_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(weights)
    monkeypatch.setattr("sgl_specflow.drafter.checkpoint.MAX_SHARD_BYTES", 2000)
    save_head(folder, HeadConfig.load(folder), load_tensors(folder))
    next(iter(sorted(folder.glob("*.safetensors")))).unlink()
    with pytest.raises(SpecflowConfigError, match="half a checkpoint.*model-00001"):
        check_checkpoint(folder)


def test_missing_unexpected_and_misshapen_tensors_are_all_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"]
    tensors["lm_head.weight"] = torch.zeros(2, 2)
    tensors["norm.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SpecflowConfigError) as caught:
        check_checkpoint(folder)
    for named in ("missing fc.weight", "unexpected lm_head.weight", "norm.weight is [3]"):
        assert named in str(caught.value)


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ({"hidden_size": 32}, "hidden_size 16, the target has 32"),
        ({"vocab_size": 39}, "mask_token_id 39"),
        ({"num_hidden_layers": 6}, "num_target_layers 4"),
        ({"num_hidden_layers": 3}, "target_layer_ids"),
    ],
    ids=str,
)
def test_another_target_is_refused_by_name(target, named):
    config = HeadConfig.from_dict(TINY)
    own = {"hidden_size": 16, "vocab_size": 40, "num_hidden_layers": 4}
    config.check_against_target(**own)
    with pytest.raises(SpecflowConfigError, match=named):
        config.check_against_target(**(own | target))
