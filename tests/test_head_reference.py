"""The reference head against a second, loop-by-loop derivation in float64, and the masks that drafting relies on."""

import math

import pytest
import torch

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.make import head_config, random_tensors
from sgl_specflow.drafter.reference import ReferenceHead

CONTEXT = 7


def make(causal: bool, layer_types=None, sliding_window=None, seed: int = 0) -> ReferenceHead:
    raw = head_config(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=50,
        num_target_layers=6,
        target_layer_ids=[1, 3, 4],
        mask_token_id=49,
        causal_head=causal,
        block_size=6,
        layer_types=layer_types,
        sliding_window=sliding_window,
    )
    config = HeadConfig.from_dict(raw)
    tensors = random_tensors(config, seed, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:  # norms of one would hide a norm that is left out
            tensors[name] = 0.5 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    return ReferenceHead(config, tensors)


def inputs(head: ReferenceHead, seed: int = 1, batch: tuple[int, ...] = ()):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(CONTEXT, head.config.context_size), draw(head.config.block_size, head.config.hidden_size)


def run(head: ReferenceHead, target_hidden, embeddings, positions=None, **masks):
    committed = target_hidden.shape[-2]
    where = torch.arange(committed).expand(*target_hidden.shape[:-1])
    if positions is None:
        positions = (committed + torch.arange(embeddings.shape[-2])).expand(*embeddings.shape[:-1])
    context = head.context_kv(head.project_context(target_hidden), where)
    return head.forward(embeddings, positions, context, **masks)


def by_loops(head: ReferenceHead, target_hidden, embeddings):
    """The same forward a token, a head and a key at a time, with RoPE as complex rotation."""
    config, weights = head.config, head.tensors

    def norm(vector, name):
        return vector / math.sqrt(float(vector.square().mean()) + config.rms_norm_eps) * weights[f"{name}.weight"]

    def turn(vector, position):
        half = config.head_dim // 2
        pairs = torch.complex(vector[:half], vector[half:])
        angle = torch.tensor(
            [position * config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)], dtype=torch.float64
        )
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((pairs.real, pairs.imag))

    def heads(vector, name, layer, position=None):
        parts = (weights[f"layers.{layer}.self_attn.{name}_proj.weight"] @ vector).split(config.head_dim)
        return (
            [turn(norm(part, f"layers.{layer}.self_attn.{name}_norm"), position) for part in parts]
            if position is not None
            else parts
        )

    committed = len(target_hidden)
    context = [norm(weights["fc.weight"] @ row, "hidden_norm") for row in target_hidden]
    states = list(embeddings)
    for layer in range(config.num_hidden_layers):
        normed = [norm(state, f"layers.{layer}.input_layernorm") for state in states]
        everything = context + normed
        keys = [heads(vector, "k", layer, position) for position, vector in enumerate(everything)]
        values = [heads(vector, "v", layer) for vector in everything]
        after = []
        for index, state in enumerate(states):
            here, mixed = committed + index, []
            for number, query in enumerate(heads(normed[index], "q", layer, here)):
                kv = number // (config.num_attention_heads // config.num_key_value_heads)
                window = config.layer_window(layer) or 10**9
                seen = [
                    there
                    for there in range(len(everything))
                    if (there <= here or not config.layer_is_causal(layer)) and here - there < window
                ]
                scores = torch.stack([query @ keys[there][kv] for there in seen]) / math.sqrt(config.head_dim)
                mixed.append(sum(p * values[there][kv] for p, there in zip(scores.softmax(0), seen)))
            state = state + weights[f"layers.{layer}.self_attn.o_proj.weight"] @ torch.cat(mixed)
            x = norm(state, f"layers.{layer}.post_attention_layernorm")
            gate, up, down = (weights[f"layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            pre = gate @ x
            after.append(state + down @ (pre * torch.sigmoid(pre) * (up @ x)))
        states = after
    return torch.stack([norm(state, "norm") for state in states])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sliding", [None, 4])
def test_reference_equals_the_loop_derivation_in_float64(causal, sliding):
    head = make(causal, ["sliding_attention", "full_attention"] if sliding else None, sliding)
    target_hidden, embeddings = inputs(head)
    torch.testing.assert_close(
        run(head, target_hidden, embeddings), by_loops(head, target_hidden, embeddings), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("causal", [True, False])
def test_a_later_block_position_reaches_earlier_outputs_only_in_a_bidirectional_head(causal):
    head = make(causal)
    target_hidden, embeddings = inputs(head)
    before = run(head, target_hidden, embeddings)
    embeddings[4] += 1.0
    after = run(head, target_hidden, embeddings)
    assert torch.equal(before[:4], after[:4]) == causal
    assert not torch.equal(before[4:], after[4:])


def test_sliding_layers_of_a_bidirectional_head_are_causal_unless_the_checkpoint_says_otherwise():
    types = ["sliding_attention", "full_attention"]
    head = make(False, types, 4)
    assert [head.config.layer_is_causal(layer) for layer in range(2)] == [True, False]
    stated = HeadConfig.from_dict(head.config.raw | {"is_causal": False})
    assert [stated.layer_is_causal(layer) for layer in range(2)] == [False, False]


def test_a_tree_node_sees_its_own_branch_as_a_chain_does():
    """Two branches below the anchor, each with a mask: each equals its own causal block with revealed tokens."""
    head = make(True)
    target_hidden, embeddings = inputs(head)
    anchor, left, left_mask, right, right_mask = embeddings[:5]
    nodes = torch.stack((anchor, left, right, left_mask, right_mask))
    parents, depths = [-1, 0, 0, 1, 2], [0, 1, 1, 2, 2]
    mask = torch.eye(5, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    tree = run(head, target_hidden, nodes, CONTEXT + torch.tensor(depths), block_mask=mask)
    for path in ([0, 1, 3], [0, 2, 4]):
        torch.testing.assert_close(tree[path], run(head, target_hidden, nodes[path]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_a_batch_equals_its_blocks_one_by_one(causal):
    head = make(causal)
    target_hidden, embeddings = inputs(head, batch=(3,))
    together = run(head, target_hidden, embeddings)
    for index in range(3):
        torch.testing.assert_close(
            together[index], run(head, target_hidden[index], embeddings[index]), rtol=1e-12, atol=1e-12
        )


def test_context_mask_equals_a_shorter_context():
    head = make(True)
    target_hidden, embeddings = inputs(head)
    positions = 4 + torch.arange(len(embeddings))
    mask = torch.arange(CONTEXT).expand(len(embeddings), -1) < 4
    masked = run(head, target_hidden, embeddings, positions, context_mask=mask)
    torch.testing.assert_close(masked, run(head, target_hidden[:4], embeddings), rtol=1e-12, atol=1e-12)


def test_partial_rotary_leaves_the_remaining_dimensions_alone():
    raw = make(True).config.raw | {"partial_rotary_factor": 0.5}
    config = HeadConfig.from_dict(raw)
    from sgl_specflow.drafter.reference import rope

    x = torch.randn(3, 2, 8, dtype=torch.float64)
    turned = rope(x, torch.tensor([0, 1, 5]), config)
    assert torch.equal(turned[..., 4:], x[..., 4:]) and torch.equal(turned[0], x[0])
    assert not torch.allclose(turned[1:, :, :4], x[1:, :, :4])
