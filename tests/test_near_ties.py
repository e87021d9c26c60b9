"""`eval near_ties`: which differences it finds, by what gaps it judges them, and when it fails."""

import json
from contextlib import contextmanager

import pytest
import torch
from sgl_specflow.eval import near_ties
from sgl_specflow.eval.backends import Decoded, TopTokenBackend
from sgl_specflow.eval.near_ties import BFLOAT16_ROUNDING, LARGEST_UNITS, compare, divergence, first_difference
from sgl_specflow.launch.generation import Job, RequestFailed, answer_all
from test_launch import FakeSGLang

UNIT = 16 * BFLOAT16_ROUNDING  # one rounding of a top logit of 16


def decoded(tokens, *tops, prompt=(3, 4)):
    """An answer; `tops` are the log-probabilities at its positions, from the first."""
    return Decoded(list(prompt), list(tokens), [*tops, *[{}] * (len(tokens) - len(tops))], 2)


def logits_with(gap):
    """A float32 model that puts 7 at 16 and 9 below it by `gap`, and notes what it is asked."""
    asked = []

    def exact(tokens):
        asked.append(tokens)
        return torch.zeros(12).index_fill_(0, torch.tensor([7]), 16.0).index_fill_(0, torch.tensor([9]), 16.0 - gap)

    return exact, asked


@pytest.mark.parametrize(
    "a, b, at",
    [([], [], None), ([5, 6], [5, 6], None), ([5, 6], [5, 7], 1), ([5], [6], 0), ([5, 6], [5], 1), ([5], [5, 6], 1)],
)
def test_the_first_difference_is_found(a, b, at):
    assert first_difference(a, b) == at


def test_a_divergence_is_judged_over_the_common_prefix_and_by_both_servers():
    exact, asked = logits_with(gap=0.5)
    plain = decoded([5, 7, 1], {}, {7: -1.0, 9: -1.25, 2: -3.0})
    tree = decoded([5, 9, 1], {}, {9: -0.5, 7: -1.5, 2: -3.0})
    assert divergence(11, plain, tree, exact) == {
        "prompt": 11, "token": 1, "plain_token": 7, "tree_token": 9, "gap_float32": 0.5, "gap_bf16": 0.25,
        "gap_bf16_tree": 1.0, "top_logit": 16.0, "units": 1.25 / UNIT, "error_bf16": 0.25, "error_bf16_tree": 1.5,
    }  # fmt: skip
    assert asked == [[3, 4, 5]]


def test_a_token_outside_the_likeliest_has_no_bfloat16_gap():
    exact, _ = logits_with(gap=0.5)
    found = divergence(0, decoded([7], {7: -1.0, 2: -3.0}), decoded([9], {9: -0.5, 2: -3.0}), exact)
    assert found["gap_bf16"] is None and found["gap_bf16_tree"] is None and found["units"] is None
    assert found["gap_float32"] == 0.5


def test_a_row_counts_what_was_compared_and_keeps_the_largest_gap():
    def exact(tokens):
        return logits_with(gap=0.25 if tokens == [3, 4, 1] else 0.125)[0](tokens)

    sure = {7: -1.0, 9: -1.5}, {9: -1.0, 7: -1.25}
    plain = [decoded([7, 1], sure[0]), decoded([1, 7, 1]), decoded([1, 2, 3])]
    tree = [decoded([9, 1], sure[1]), decoded([1, 9, 1]), decoded([1, 2, 3])]
    row = compare(plain, tree, exact)
    assert (row["prompts"], row["identical"], row["tokens_compared"]) == (3, 1, 0 + 1 + 3)
    assert [item["prompt"] for item in row["divergences"]] == [0, 1]
    assert row["largest_gap"] == 0.25 and row["largest_units"] == 0.75 / UNIT


def test_answers_of_other_prompts_are_not_compared():
    with pytest.raises(ValueError):
        compare([decoded([7])], [], logits_with(gap=0.0)[0])


def rows_with(gap, algorithm="jetflow", tree=(9,), gap_float32=0.0, trees_share=0.75):
    """A divergence about which the servers disagree by `gap`, `trees_share` of it the tree's."""
    name = {"algorithm": algorithm, "budget": 16, "batch": 8, "plain_batch": 8}
    plain = decoded([7], {7: 0.0, 9: (trees_share - 1) * gap})
    answer = decoded(tree, {9: 0.0, 7: -trees_share * gap})
    return [name | compare([plain], [answer], logits_with(gap_float32)[0])]


@pytest.mark.parametrize(
    "rows, unexplained",
    [
        (rows_with(LARGEST_UNITS * UNIT), 0),
        (rows_with((LARGEST_UNITS + 0.1) * UNIT), 1),
        (rows_with(6 * UNIT, trees_share=0.25), 0),  # plain decoding is the one that is off
        (rows_with(6 * UNIT, trees_share=0.5), 1),  # both are
        (rows_with(6 * UNIT, trees_share=0.25, gap_float32=4.5 * UNIT), 1),  # float32 is on plain decoding's side
        (rows_with(6 * UNIT, trees_share=0.75, gap_float32=-4.5 * UNIT), 0),
        (rows_with((LARGEST_UNITS + 0.1) * UNIT, algorithm="plain"), 0),  # the control judges the threshold, not us
        (rows_with(0.0, tree=(7, 1)), 1),  # an answer that merely goes on is no near tie
        (rows_with(0.0, tree=(7,)), 0),
        (rows_with(0.0, gap_float32=9 * UNIT), 0),  # plain decoding itself is that far from float32
        (rows_with(0.0, tree=(5,)), 1),  # likely for neither server
    ],
)
def test_only_a_trees_gap_beyond_the_threshold_is_unexplained(rows, unexplained):
    assert len(near_ties.unexplained(rows)) == unexplained


def test_the_summary_states_the_bound():
    rows = [*rows_with(8 * UNIT, algorithm="plain"), *rows_with(2 * UNIT, gap_float32=0.125)]
    last = near_ties.summary(rows).splitlines()[-1]
    assert last == (
        "near_ties: divergences=1 largest_gap=0.1250 largest_units=2.00 allowed_units=4.0 unexplained=0"
    )  # fmt: skip


@pytest.fixture
def server():
    server = FakeSGLang(verify_steps=4)
    yield server
    server.shutdown()
    server.server_close()


def ask(server, backend_class):
    backend = backend_class(server.url)

    async def collect():
        return [outcome async for _, outcome in answer_all(backend, [Job(0, 0, None, [{"content": "ab"}], {})], 1)]

    return backend.run(collect())[0]


class WithTopTokens(FakeSGLang):
    """Nine tokens an answer, with the likeliest of each position, `gap` between the two that differ."""

    gap = 0.0

    def reply(self, path, body):
        status, answer = super().reply(path, body)
        if path == "/generate":
            tops = [[-0.5, ord("t"), None], [-0.5 - self.gap, ord("i"), None]]
            answer["meta_info"]["output_top_logprobs"] = [tops] * 9
        return status, answer


@pytest.mark.parametrize(
    "tree_text, verify_steps, units, status",
    [("answer to", 4, 9.0, 0), ("answer is", 4, 2.0, 0), ("answer is", 4, 9.0, 1), ("answer to", None, 2.0, None)],
    ids=["equal", "near tie", "no near tie", "no speculation"],
)
def test_a_run_fails_for_a_gap_or_a_server_that_does_not_speculate(
    tmp_path, monkeypatch, tree_text, verify_steps, units, status
):
    @contextmanager
    def start(flags, **_):
        assert flags[flags.index("--dtype") + 1] == "bfloat16"
        is_tree = "--speculative-algorithm" in flags
        server = WithTopTokens(0.0, verify_steps if is_tree else None, lambda _: tree_text if is_tree else "answer to")
        server.gap = units * UNIT * (0 if is_tree else 1)
        yield server
        server.shutdown()
        server.server_close()

    logits = torch.zeros(256)
    logits[ord("t")], logits[ord("i")] = 16.0, 16.0 - 0.9 * units * UNIT  # plain decoding is right
    monkeypatch.setattr(near_ties, "start", start)
    monkeypatch.setattr(near_ties, "mixed", lambda _, count: [[{"content": "question"}]] * count)
    monkeypatch.setattr(near_ties, "ExactLogits", lambda _: lambda tokens: logits)
    out = tmp_path / "out.json"
    arguments = ["--model-path", "m", "--data", "d", "--out", str(out), "--prompts", "3", "--budgets", "16"]
    if status is None:
        with pytest.raises(RuntimeError, match="did not speculate"):
            near_ties.main(arguments)
        return
    assert near_ties.main(arguments) == status
    rows = json.loads(out.read_text())["rows"]
    assert [(row["algorithm"], row["batch"], row["plain_batch"]) for row in rows] == [
        ("plain", 8, 1), ("jetflow", 1, 1), ("jetflow", 8, 8),
    ]  # fmt: skip
    assert [row["identical"] for row in rows] == [3, *[3 if tree_text == "answer to" else 0] * 2]
    assert all(item["token"] == len("answer ") for row in rows for item in row["divergences"])


@pytest.mark.parametrize("entries, whole", [(9, True), (8, False)])
def test_answers_carry_the_likeliest_tokens_of_every_position(server, monkeypatch, entries, whole):
    asked, reply = [], server.reply

    def with_top_tokens(path, body):
        status, answer = reply(path, body)
        if path == "/generate":
            asked.append(body)
            answer["meta_info"]["output_top_logprobs"] = [[[-0.5, 7, None], [-1.5, 9, None]]] * entries
        return status, answer

    monkeypatch.setattr(server, "reply", with_top_tokens)
    outcome = ask(server, TopTokenBackend)
    assert asked[0]["input_ids"] == [97, 98] and asked[0]["return_logprob"] and asked[0]["top_logprobs_num"] == 5
    if whole:
        assert outcome == Decoded([97, 98], list(b"answer to"), [{7: -0.5, 9: -1.5}] * 9, 4)
    else:
        assert isinstance(outcome, RequestFailed) and "9 tokens came with" in str(outcome)
