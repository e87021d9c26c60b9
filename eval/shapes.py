"""Published models by their shapes alone, to measure step times without weights (`--load-format dummy`)."""

import json
from dataclasses import dataclass
from pathlib import Path

from sgl_specflow.drafter.make import head_config


@dataclass(frozen=True)
class Shapes:
    """A target's `config.json` and the shapes of its public head."""

    target: dict
    head_layers: int
    head_intermediate: int
    head_heads: tuple[int, int]
    target_layer_ids: tuple[int, ...]
    mask_token_id: int

    def write(self, folder: Path, context: int) -> tuple[Path, Path]:
        """Folders of the target and of a causal head, both for `context` positions."""
        target, head = folder / "target", folder / "head"
        config = self.target | {"max_position_embeddings": context}
        head_dict = head_config(
            hidden_size=config["hidden_size"],
            intermediate_size=self.head_intermediate,
            num_hidden_layers=self.head_layers,
            num_attention_heads=self.head_heads[0],
            num_key_value_heads=self.head_heads[1],
            head_dim=128,
            vocab_size=config["vocab_size"],
            num_target_layers=config["num_hidden_layers"],
            target_layer_ids=list(self.target_layer_ids),
            mask_token_id=self.mask_token_id,
            causal_head=True,
            rope_theta=float(config["rope_theta"]),
            max_position_embeddings=context,
        )
        for path, content in ((target, config), (head, head_dict)):
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.json").write_text(json.dumps(content, indent=1))
        return target, head


_QWEN3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}

MODELS = {
    "qwen3-8b": Shapes(
        target=_QWEN3
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
        head_layers=5,
        head_intermediate=12288,
        head_heads=(32, 8),
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151669,
    ),
    "qwen3-30b-a3b": Shapes(
        target=_QWEN3
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "router_aux_loss_coef": 0.001,
        },
        head_layers=5,
        head_intermediate=6144,
        head_heads=(32, 4),
        target_layer_ids=(1, 12, 23, 34, 45),
        mask_token_id=151669,
    ),
}
