"""Small random models with a tokenizer, made offline. Each is a Hugging Face folder."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

BOS, EOS = 0, 1
_SPECIAL = ["<s>", "</s>"]


def make_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer of `vocab` entries: 2 special, 256 bytes, the rest two-letter merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = [(a, b) for a in letters for b in letters]
    merges = pairs[: vocab - len(alphabet) - len(_SPECIAL)]
    tokens = _SPECIAL + alphabet + [a + b for a, b in merges]
    if len(tokens) != vocab:
        raise ValueError(f"vocab={vocab} was given; this tokenizer allows 258 to {258 + len(pairs)}.")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
    ).save_pretrained(folder)


def save_random(config, folder, seed: int, head_scale: float = 4.0) -> Path:
    """Write a model whose random weights keep greedy text varied; `head_scale` sets how far apart its logits lie."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.normal_(generator=generator)
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.zero_()
                continue
            # Unit-variance maps.
            scale = head_scale if name.startswith("lm_head") else 1.5
            fan_in = 1 if "embed_tokens" in name else parameter.shape[-1]
            parameter.normal_(generator=generator).mul_(scale / fan_in**0.5)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    return folder


def _save(config, folder, seed: int) -> Path:
    make_tokenizer(save_random(config, folder, seed), config.vocab_size)
    return Path(folder)


def _shape(vocab: int, layers: int, **more) -> dict:
    return dict(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **more,
    )


def make_tiny_llama(folder, vocab: int = 320, layers: int = 4, seed: int = 0) -> Path:
    return _save(LlamaConfig(**_shape(vocab, layers)), folder, seed)


def make_tiny_qwen3(folder, vocab: int = 320, layers: int = 4, seed: int = 0) -> Path:
    return _save(Qwen3Config(**_shape(vocab, layers)), folder, seed)


def make_tiny_qwen3_moe(
    folder, vocab: int = 320, layers: int = 4, seed: int = 0, experts: int = 8, chosen: int = 2
) -> Path:
    config = Qwen3MoeConfig(
        **_shape(vocab, layers),
        moe_intermediate_size=32,
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    )
    return _save(config, folder, seed)
