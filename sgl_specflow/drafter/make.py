"""Draft heads with random weights: for tests, and to try a server before a trained head exists."""

from pathlib import Path
from typing import Any

import torch

from sgl_specflow.drafter.checkpoint import expected_shapes, save_head
from sgl_specflow.drafter.config import HeadConfig


def head_config(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    vocab_size: int,
    num_target_layers: int,
    target_layer_ids: list[int],
    mask_token_id: int,
    causal_head: bool,
    block_size: int = 16,
    rope_theta: float = 10000.0,
    rms_norm_eps: float = 1e-6,
    max_position_embeddings: int = 32768,
    dtype: str = "bfloat16",
    layer_types: list[str] | None = None,
    sliding_window: int | None = None,
) -> dict[str, Any]:
    """The content of a head's `config.json` in the public format."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": block_size,
        "dflash_config": {
            "causal_head": causal_head,
            "mask_token_id": mask_token_id,
            "target_hidden_size": hidden_size,
            "target_layer_ids": list(target_layer_ids),
        },
        "dtype": dtype,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "layer_types": layer_types or ["full_attention"] * num_hidden_layers,
        "max_position_embeddings": max_position_embeddings,
        "num_attention_heads": num_attention_heads,
        "num_hidden_layers": num_hidden_layers,
        "num_key_value_heads": num_key_value_heads,
        "num_target_layers": num_target_layers,
        "rms_norm_eps": rms_norm_eps,
        "rope_theta": rope_theta,
        "sliding_window": sliding_window,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding_window is not None,
        "vocab_size": vocab_size,
    }


def random_tensors(
    config: HeadConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Every tensor of the head: matrices normal with deviation 1/sqrt(inputs), norms one; the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.ones(shape)
            if len(shape) == 1
            else torch.randn(shape, generator=generator, dtype=torch.float32) / shape[1] ** 0.5
        ).to(device, dtype)
        for name, shape in expected_shapes(config).items()
    }


def make_random_head(
    config: dict[str, Any] | HeadConfig, folder: str | Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> HeadConfig:
    """Write a whole checkpoint folder of random weights, of either kind, and return its config.

    Raises SpecflowConfigError where `config` (the content of a `config.json`, or parsed) is not supported.
    """
    if not isinstance(config, HeadConfig):
        config = HeadConfig.from_dict(config)
    save_head(folder, config, random_tensors(config, seed, dtype))
    return config
