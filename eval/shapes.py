"""Published models by their shapes alone, to measure step times without weights (`--load-format dummy`)."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_specflow.drafter.make import head_config
from sgl_specflow.drafter.weaver import WeaverConfig, save_weaver
from sgl_specflow.drafter.weaver.checkpoint import expected_shapes


@dataclass(frozen=True)
class Shapes:
    """A target's `config.json` and the shapes of its public head."""

    target: dict
    head_layers: int
    head_intermediate: int
    head_heads: tuple[int, int]
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    weaver: WeaverConfig | None = None

    def write_target(self, folder: Path, context: int) -> Path:
        """A folder of the target's config for `context` positions."""
        return _write_config(folder / "target", self.target | {"max_position_embeddings": context})

    def head_config(self, context: int, causal: bool) -> dict:
        """The `config.json` of a head, causal or bidirectional, for `context` positions."""
        return head_config(
            hidden_size=self.target["hidden_size"],
            intermediate_size=self.head_intermediate,
            num_hidden_layers=self.head_layers,
            num_attention_heads=self.head_heads[0],
            num_key_value_heads=self.head_heads[1],
            head_dim=128,
            vocab_size=self.target["vocab_size"],
            num_target_layers=self.target["num_hidden_layers"],
            target_layer_ids=list(self.target_layer_ids),
            mask_token_id=self.mask_token_id,
            causal_head=causal,
            rope_theta=float(self.target["rope_theta"]),
            max_position_embeddings=context,
        )

    def write_head(self, folder: Path, context: int, causal: bool) -> Path:
        """A folder of that config."""
        name = "causal_head" if causal else "bidirectional_head"
        return _write_config(folder / name, self.head_config(context, causal))

    def write_weaver(self, folder: Path) -> Path:
        """A folder of a Weaver of these shapes with random weights: a Weaver has no dummy loader."""
        if self.weaver is None:
            raise ValueError("no Weaver's shapes are published for this target: dflash_tfm is measured on qwen3.6-27b")
        save_weaver(folder / "weaver", self.weaver, random_weaver(self.weaver, "cpu"))
        return folder / "weaver"


def _write_config(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def random_weaver(config: WeaverConfig, device: str) -> dict[str, torch.Tensor]:
    """Float32 tensors of a Weaver, random and of a norm that keeps activations near one."""
    torch.manual_seed(0)
    return {
        name: torch.ones(shape, device=device)
        if len(shape) == 1
        else torch.randn(shape, device=device) / shape[1] ** 0.5
        for name, shape in expected_shapes(config).items()
    }


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

# The published size, 56.7 million parameters, is that of three layers of width 1024 with an inner width of 3072.
WEAVER_27B = WeaverConfig(
    d_model=5120,
    d_embed=5120,
    d_rank=1024,
    num_layers=3,
    num_heads=16,
    mlp_dim=3072,
    depth=15,
    candidate_pool_size=512,
)

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
    "qwen3.6-27b": Shapes(
        target=_QWEN3
        | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "num_attention_heads": 24,
            "num_hidden_layers": 64,
            "num_key_value_heads": 4,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rope_type": "default"},
            "rope_theta": 10000000,
            "vocab_size": 248320,
        },
        head_layers=5,
        head_intermediate=17408,
        head_heads=(32, 8),
        target_layer_ids=(1, 16, 31, 46, 61),
        mask_token_id=248070,
        weaver=WEAVER_27B,
    ),
}
