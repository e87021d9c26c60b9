"""A tiny random target, its greedy answers, and head shapes that fit it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.make import head_config
from sgl_specflow.training.config import HeadShape, TrainConfig
from sgl_specflow.training.responses import Response
from sgl_specflow.training.target_states import FrozenTarget

VOCABULARY, PROMPT, STOP = 48, 6, 5
MASK = VOCABULARY - 1
LAYERS = (0, 2)


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(shape)
    model.generation_config.eos_token_id = STOP
    return model.eval()


def tiny_target() -> FrozenTarget:
    return FrozenTarget(tiny_model(), LAYERS)


def tiny_head(causal: bool, block_size: int = 6, **more) -> HeadConfig:
    return HeadConfig.from_dict(
        head_config(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCABULARY,
            num_target_layers=4,
            target_layer_ids=list(LAYERS),
            mask_token_id=MASK,
            causal_head=causal,
            block_size=block_size,
            **more,
        )
    )


def answers(target: FrozenTarget, count: int, new_tokens: int, held_out: int = 0) -> list[Response]:
    """Greedy answers without the mask token and without an early end."""
    prompts = torch.randint(0, MASK, (count, PROMPT), generator=torch.Generator().manual_seed(3))
    written = target.model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        do_sample=False,
        suppress_tokens=[MASK, STOP],
    )
    return [Response("made", row, PROMPT, held_out=index < held_out) for index, row in enumerate(written)]


def tiny_run(**changes) -> TrainConfig:
    shape = dict(block_size=6, layers=2, intermediate_size=48, mask_token_id=MASK, target_layers=list(LAYERS))
    shape |= changes.pop("head", {})
    settings = dict(
        target="", responses=[], out="", row_tokens=256, anchors=64, loss_chunk=16, steps=40, learning_rate=5e-3
    )
    return TrainConfig(**(settings | changes), head=HeadShape(**shape))
