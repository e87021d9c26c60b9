"""Packed rows, blocks and their attention: equal to one document at a time, and blind to the future and to others."""

import pytest
import torch
from training_cases import MASK, PROMPT, tiny_head, tiny_target

from sgl_specflow.drafter.make import random_tensors
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.training.attention import TILE, attend, dense_pattern, sparse_pattern
from sgl_specflow.training.blocks import make_blocks, sample_blocks
from sgl_specflow.training.head import TrainingHead
from sgl_specflow.training.responses import Response
from sgl_specflow.training.rows import Rows, pack
from sgl_specflow.training.trainer import block_hidden

HEADS = {
    "causal": tiny_head(True),
    "bidirectional": tiny_head(False),
    "sliding": tiny_head(False, layer_types=["sliding_attention", "full_attention"], sliding_window=7),
    "causal sliding": tiny_head(True, layer_types=["sliding_attention", "full_attention"], sliding_window=7),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def responses(lengths=(20, 35, 12, 29), seed=0) -> list[Response]:
    generator = torch.Generator().manual_seed(seed)
    return [Response("x", torch.randint(0, MASK, (n,), generator=generator), PROMPT, False) for n in lengths]


def blocks_of(batch, config, count=48, reveal=0.4, seed=0):
    return sample_blocks(batch.row, config, count, reveal, 5.0, torch.Generator().manual_seed(seed))


def test_a_row_holds_whole_documents_and_says_where_blocks_may_stand():
    documents = responses()
    batch = pack(documents, 128)
    row, end = batch.row, 0
    for document in documents:
        start, end = end, end + len(document.tokens)
        inside = slice(start, end)
        assert torch.equal(row.tokens[inside], document.tokens)
        assert torch.equal(batch.tokens.flatten()[batch.source[inside]], document.tokens)
        assert torch.equal(row.positions[inside], torch.arange(end - start))
        assert (row.first[inside] == start).all() and (row.last[inside] == end - 1).all()
        assert row.response[inside].nonzero()[:, 0].tolist() == list(range(PROMPT - 1, end - start - 1))
    assert not row.response[end:].any()
    with pytest.raises(ValueError, match="96 tokens for a row of 64"):
        pack(documents, 64)


def test_rows_are_a_function_of_seed_and_number_and_hold_everything_once_an_epoch():
    documents = responses([*range(8, 40)])
    one, other = Rows(documents, 128, seed=3), Rows(documents, 128, seed=3)
    assert torch.equal(other[7].tokens, one[7].tokens)
    rows = one._rows(0)
    assert sorted(index for row in rows for index in row) == list(range(32))
    assert one._rows(1) != rows and one.epoch_of(len(rows)) == 1.0


def test_blocks_hold_the_true_path_then_masks_and_ask_for_the_next_tokens():
    documents = responses([40] * 5)
    batch = pack(documents, 256)
    blocks = blocks_of(batch, HEADS["causal"], count=340)
    row, offset = batch.row, torch.arange(6)
    assert row.response[blocks.anchors].all() and (blocks.anchors[1:] >= blocks.anchors[:-1]).all()
    assert set(blocks.anchors.tolist()) == set(row.response.nonzero()[:, 0].tolist())
    inside = blocks.anchors[:, None] + offset <= row.last[blocks.anchors][:, None]
    known = blocks.tokens != MASK
    assert known[:, 0].all() and known[:, 1].any() and not known[:, -1][inside[:, -1]].any()
    assert (blocks.tokens == row.tokens[blocks.targets])[known & inside].all()
    assert torch.equal(blocks.weights > 0, ~known & inside)
    assert torch.equal(blocks.positions, row.positions[blocks.anchors][:, None] + offset)
    revealed = known.sum(1, keepdim=True) - 1
    expected = torch.exp(-(offset - revealed - 1) / 5.0)
    torch.testing.assert_close(blocks.weights[blocks.weights > 0], expected[blocks.weights > 0])
    assert (blocks_of(batch, HEADS["causal"], reveal=0.0).tokens[:, 1:] == MASK).all()


@pytest.mark.parametrize("name", HEADS)
def test_packed_equals_the_reference_head_on_each_document_alone(target, name):
    config, documents = HEADS[name], responses()
    tensors = {key: tensor.double() for key, tensor in random_tensors(config, 1).items()}
    batch = pack(documents, 128)
    blocks = blocks_of(batch, config)
    packed, _ = block_hidden(TrainingHead(config, tensors, torch.float64, fast=False), target, batch, blocks)
    reference, hidden = ReferenceHead(config, tensors), target.states(batch.tokens)[0].double()
    for index in range(len(blocks.anchors)):
        document = next(d for d in range(4) if blocks.anchors[index] < sum(len(r.tokens) for r in documents[: d + 1]))
        place = int(blocks.positions[index, 0])
        where = torch.arange(place)
        context = reference.context_kv(reference.project_context(hidden[document, :place]), where)
        embeddings = target.embedding[blocks.tokens[index]].double()
        alone = reference.forward(embeddings, blocks.positions[index], context)
        torch.testing.assert_close(packed[index], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["causal", "bidirectional"])
def test_a_later_token_leaves_earlier_outputs_bit_equal_and_another_document_this_one(target, name):
    """A block's output may depend on its document's tokens before the anchor, the anchor and what it reveals (all that
    stands before the output, in a causal head), and on nothing else."""
    config, documents, changed = HEADS[name], responses([40, 40, 40]), 22
    head = TrainingHead(config, random_tensors(config, 2), torch.float32, fast=False)
    outputs = []
    for altered in (False, True):
        tokens = [r.tokens.clone() for r in documents]
        if altered:
            tokens[1][changed] = (tokens[1][changed] + 1) % MASK
        batch = pack([Response("x", t, PROMPT, False) for t in tokens], 128)
        blocks = blocks_of(batch, config, count=120, reveal=0.5 if config.causal_head else 0.0)
        outputs.append(block_hidden(head, target, batch, blocks)[0].detach())
    same = (outputs[0] == outputs[1]).all(-1)
    document = blocks.anchors // 40
    assert same[document != 1].all()
    revealed = (blocks.tokens != MASK).sum(-1, keepdim=True) - 1
    last_seen = torch.minimum(blocks.positions, blocks.positions[:, :1] + revealed)
    within = (document == 1)[:, None].expand_as(same)
    assert same[within & (last_seen < changed)].all()
    assert not same[within & (last_seen >= changed)].any()
    assert (within & (last_seen < changed)).sum() > 50 and (within & (last_seen >= changed)).sum() > 20


@pytest.mark.parametrize("name", HEADS)
def test_the_sparse_attention_equals_the_dense_one(name):
    """FlexAttention, unfused on the CPU; its tiles hold every visible pair, and few others."""
    config = tiny_head(HEADS[name].causal_head, 16)
    batch = pack(responses([40, 90, 70, 33, 120]), 384)
    blocks = blocks_of(batch, config, count=32)
    window = 7 if "sliding" in name else None
    visible = blocks.visibility(config.causal_head, window)
    sparse, dense = sparse_pattern(visible, 384), dense_pattern(visible, 384)
    tiles = sparse.to_dense()[0, 0].bool().repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    assert (tiles | ~dense.mask).all() and tiles.float().mean() < 0.6
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 16, generator=generator) for n, h in ((512, 4), (896, 2), (896, 2)))
    torch.testing.assert_close(attend(q, k, v, sparse), attend(q, k, v, dense), rtol=1e-5, atol=1e-5)


def test_a_row_that_flex_attention_cannot_tile_is_refused():
    batch = pack(responses(), 128)
    with pytest.raises(ValueError, match="multiples of 128"):
        sparse_pattern(blocks_of(batch, HEADS["causal"]).visibility(True), 128)


def test_make_blocks_gives_filler_blocks_no_weight():
    batch = pack(responses(), 128)
    blocks = make_blocks(
        batch.row, HEADS["causal"], torch.tensor([0, 127, 10]), torch.zeros(3, 1, dtype=torch.long), 5.0
    )
    assert (blocks.weights.sum(1) > 0).tolist() == [False, False, True]
