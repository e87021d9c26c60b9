"""The likeliest tokens of the target's vocabulary: on one rank and cut over several, ties and padding ranks included."""

import threading
import types

import pytest
import torch

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.runtime import marginals
from sgl_specflow.runtime.marginals import TargetVocabulary

HIDDEN, WIDTH = 8, 6


class Ranks:
    """Several ranks as threads; their all-gathers meet at a barrier."""

    def __init__(self, count: int):
        self.count, self.barrier, self.rank = count, threading.Barrier(count, timeout=20), threading.local()
        self.parts = [None] * count
        self.tp_size = count

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        self.parts[self.rank.index] = tensor
        self.barrier.wait()
        whole = torch.cat(self.parts, dim=dim)
        self.barrier.wait()
        return whole

    def run(self, work):
        results = [None] * self.count

        def one(index):
            self.rank.index = index
            try:
                results[index] = work(index)
            except BaseException:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=one, args=(index,)) for index in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def vocabulary(weight: torch.Tensor, first: int, cap: float = 0.0) -> TargetVocabulary:
    return TargetVocabulary(torch.nn.Identity(), weight, first, cap, 0.7, 40, 16)


def inputs(tied: bool):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(40, HIDDEN, generator=generator)
    if tied:
        weight = weight[torch.arange(40) % 7]
    hidden = torch.randn(5, HIDDEN, generator=generator)
    asked = torch.tensor([0, 1, 2, 4, 4, 4]), torch.tensor([0, 39, 19, 20, 21, 5])
    return weight, hidden, asked


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(marginals, "get_parallel", lambda: types.SimpleNamespace(tp_size=1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_one_rank_against_float64(tied, cap):
    weight, hidden, (rows, tokens) = inputs(tied)
    log_probs, best, own = vocabulary(weight, 0, cap).best(hidden, WIDTH, (rows, tokens))
    exact = 0.7 * hidden.double() @ weight.double().T
    exact = (cap * torch.tanh(exact / cap) if cap else exact).log_softmax(1)
    torch.testing.assert_close(log_probs.double(), exact.gather(1, best), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        log_probs.double(), exact.sort(1, descending=True).values[:, :WIDTH], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(own.double(), exact[rows, tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", [(20, 20), (40, 0), (37, 3), (10, 10, 10, 10)], ids=str)
def test_ranks_agree_with_one(monkeypatch, cuts, tied):
    weight, hidden, asked = inputs(tied)
    expected = vocabulary(weight, 0).best(hidden, WIDTH, asked)
    ranks = Ranks(len(cuts))
    monkeypatch.setattr(marginals, "get_parallel", lambda: ranks)
    monkeypatch.setattr(marginals, "tensor_model_parallel_all_gather", ranks.all_gather)
    ends = torch.tensor(cuts).cumsum(0).tolist()

    def one(index):
        first = ends[index] - cuts[index]
        return vocabulary(weight[first : ends[index]], first).best(hidden, WIDTH, asked)

    results = ranks.run(one)
    for log_probs, tokens, own in results:
        assert torch.equal(tokens, expected[1])
        torch.testing.assert_close(log_probs, expected[0])
        torch.testing.assert_close(own, expected[2])
        # The same on all ranks to the last bit: their trees must be.
        assert torch.equal(log_probs, results[0][0]) and torch.equal(own, results[0][2])


def test_every_rank_gets_the_rows_of_all(monkeypatch):
    """In the order of tokens; the last rank's part is padded, as SGLang pads it."""
    table, ranks = torch.randn(40, 3), Ranks(3)
    monkeypatch.setattr(marginals, "get_parallel", lambda: ranks)
    monkeypatch.setattr(marginals, "tensor_model_parallel_all_gather", ranks.all_gather)

    def one(index):
        own = table[16 * index : 16 * (index + 1)]
        return vocabulary(own, 16 * index).of_all_ranks(own)

    assert all(torch.equal(rows, table) for rows in ranks.run(one))


def test_an_embedding_that_is_cut_otherwise_is_refused(monkeypatch):
    def target(rows, first=None):
        embedding = torch.nn.Embedding(rows, HIDDEN)
        if first is not None:
            embedding.shard_indices = types.SimpleNamespace(org_vocab_start_index=first, num_org_elements=rows - 1)
        return TargetVocabulary(embedding, torch.randn(15, HIDDEN), 16, 0.0, 1.0, 40, 16)

    monkeypatch.setattr(marginals, "get_parallel", lambda: types.SimpleNamespace(tp_size=2))
    assert target(16, 16).embedding_rows().shape == (15, HIDDEN)
    for rows, first in ((16, 0), (41, 16)):
        with pytest.raises(SpecflowConfigError, match=f"embedding of {rows - 1} tokens from {first} on"):
            target(rows, first).embedding_rows()
    with pytest.raises(SpecflowConfigError, match="an embedding that is not cut"):
        target(40).embedding_rows()
    monkeypatch.setattr(marginals, "get_parallel", lambda: types.SimpleNamespace(tp_size=1))
    assert target(40).embedding_rows().shape == (15, HIDDEN)


def test_an_fp8_copy_of_the_lm_head_scores_nearly_the_same():
    weight, hidden, _ = inputs(tied=False)
    kept = weight.clone()
    rounded = vocabulary(weight, 0)
    rounded.quantise()
    exact = (0.7 * hidden @ weight.T).log_softmax(1)
    log_probs, tokens, _ = rounded.best(hidden, WIDTH)
    assert torch.equal(weight, kept)
    difference = (log_probs - exact.gather(1, tokens)).abs()
    assert 0 < difference.max() < 0.2
    assert (exact.gather(1, tokens) > exact.sort(1, descending=True).values[:, WIDTH - 1 : WIDTH] - 0.2).all()
