"""Training of a head, on the CPU with a tiny random target: it learns, and it cannot see the future."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.make import head_config
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.training.blocks import sample_blocks
from sgl_specflow.training.losses import forward_kl
from sgl_specflow.training.offline_accept import accept_lengths, mean_accept_length
from sgl_specflow.training.responses import Response, load_responses, save_responses
from sgl_specflow.training.target_states import FrozenTarget
from sgl_specflow.training.trainer import TrainSettings, batch_loss, block_hidden, initial_tensors, pad, train

VOCABULARY, PROMPT = 48, 6
MASK = VOCABULARY - 1


def tiny_config(causal: bool) -> HeadConfig:
    return HeadConfig.from_dict(
        head_config(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCABULARY,
            num_target_layers=3,
            target_layer_ids=[0, 2],
            mask_token_id=MASK,
            causal_head=causal,
            block_size=6,
        )
    )


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return FrozenTarget(LlamaForCausalLM(shape), (0, 2))


@pytest.fixture(scope="module")
def responses(target) -> list[Response]:
    prompts = torch.randint(0, MASK, (48, PROMPT))
    attended = torch.ones_like(prompts)
    written = target.model.generate(
        prompts, attention_mask=attended, max_new_tokens=32, do_sample=False, suppress_tokens=[MASK]
    )
    return [Response("made", row, PROMPT, held_out=index < 8) for index, row in enumerate(written)]


@pytest.mark.parametrize("causal", [True, False])
def test_training_lowers_the_loss_and_raises_the_accept_length(target, responses, causal):
    config, settings = (
        tiny_config(causal),
        TrainSettings(minutes=5, steps=120, learning_rate=5e-3, sequences=8, anchors=8),
    )
    held_out = [response for response in responses if response.held_out]

    def measure(tensors):
        head = ReferenceHead(config, tensors)
        torch.manual_seed(1)
        loss = batch_loss(head, target, held_out, settings).item()
        return loss, mean_accept_length(head, target, held_out, (16,))["all"][16]

    loss_before, length_before = measure(initial_tensors(config, target, seed=0))
    tensors, history = train(config, target, responses, settings)
    loss_after, length_after = measure(tensors)
    assert [entry["step"] for entry in history] == [120]
    assert loss_after < 0.6 * loss_before
    assert length_after > length_before + 0.2


def test_a_later_token_leaves_earlier_draft_outputs_bit_equal(target, responses):
    """A block's output may depend on the tokens before its anchor, the anchor and what it reveals, and on nothing
    later."""
    config, changed = tiny_config(True), 20
    head = ReferenceHead(config, initial_tensors(config, target, seed=1))
    tokens, prompt_lengths, lengths = pad(responses[:4], torch.device("cpu"))
    later = tokens.clone()
    later[:, changed] = (later[:, changed] + 1) % MASK
    outputs = []
    for sequence in (tokens, later):
        torch.manual_seed(5)
        blocks = sample_blocks(sequence, prompt_lengths, lengths, config, anchors=16, reveal=0.5)
        outputs.append(block_hidden(head, target, target.states(sequence)[0], blocks))
    same = (outputs[0] == outputs[1]).all(-1)
    revealed = (blocks.tokens != config.mask_token_id).sum(-1, keepdim=True) - 1
    last_seen = torch.minimum(blocks.positions, blocks.positions[..., :1] + revealed)
    assert same[last_seen < changed].all()
    assert not same[last_seen >= changed].any()
    assert 100 < (last_seen < changed).sum() < same.numel() - 50


def test_blocks_hold_the_true_path_then_masks_and_ask_for_the_next_tokens(responses):
    config = tiny_config(True)
    tokens, prompt_lengths, lengths = pad(responses[:8], torch.device("cpu"))
    blocks = sample_blocks(tokens, prompt_lengths, lengths, config, anchors=32, reveal=0.5)
    anchors = blocks.positions[..., 0]
    assert (anchors >= PROMPT).all() and (anchors <= lengths[:, None] - 2).all()
    assert anchors.min() == PROMPT and anchors.max() == lengths.max() - 2
    known = blocks.tokens != config.mask_token_id
    inside = blocks.positions < lengths[:, None, None]
    true = tokens.gather(1, blocks.positions.clamp(max=tokens.shape[1] - 1).flatten(1)).view_as(blocks.positions)
    assert (blocks.tokens == true)[known & inside].all() and known[..., 0].all()
    assert torch.equal(blocks.weights > 0, ~known & inside)
    assert (blocks.teacher_rows == blocks.positions - 1)[blocks.weights > 0].all()
    seen = blocks.context_mask(tokens.shape[1])
    assert torch.equal(seen.sum(-1), anchors.repeat_interleave(config.block_size, dim=1)) and seen[..., 0].all()
    mostly_masks = sample_blocks(tokens, prompt_lengths, lengths, config, anchors=32, reveal=0.0)
    assert (mostly_masks.tokens[..., 1:] == config.mask_token_id).all()


def test_forward_kl_and_its_gradient_equal_autograd():
    torch.manual_seed(0)
    draft = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    teacher, lm_head, weights = (torch.randn(shape, dtype=torch.float64) for shape in ((7, 5), (11, 5), (7,)))
    weights = weights.abs()
    loss, single = forward_kl(draft, teacher, lm_head, weights, chunk=3)
    (gradient,) = torch.autograd.grad(2 * loss, draft)
    p, q = (teacher @ lm_head.T).log_softmax(-1), (draft @ lm_head.T).log_softmax(-1)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    mean = (expected * weights).sum() / weights.sum()
    torch.testing.assert_close(single, expected)
    torch.testing.assert_close(loss, mean)
    torch.testing.assert_close(gradient, torch.autograd.grad(2 * mean, draft)[0])


def test_offline_accept_length_is_the_true_continuation_inside_the_tree(target, responses):
    """A head whose logits are the target's own would accept everything; a budget of 1 accepts the bonus token only."""
    config = tiny_config(True)
    head = ReferenceHead(config, initial_tensors(config, target, seed=0))
    tokens = responses[0].tokens
    lengths = accept_lengths(head, target, tokens, PROMPT, (1, 16, 32))
    assert (lengths[1] == 1).all() and (lengths[32] >= lengths[16]).all()
    remaining = len(tokens) - 1 - torch.arange(PROMPT, len(tokens) - 1)
    assert (lengths[32] - 1 <= remaining).all() and (lengths[32] <= config.block_size).all()


def test_responses_survive_storing(responses, tmp_path):
    save_responses(responses, tmp_path / "responses.npz")
    for stored, given in zip(load_responses(tmp_path / "responses.npz"), responses, strict=True):
        assert torch.equal(stored.tokens, given.tokens)
        assert (stored.source, stored.prompt_length, stored.held_out) == (
            given.source,
            given.prompt_length,
            given.held_out,
        )
