"""`eval quantised_target`: the gaps at a first difference, and whole runs against stand-in servers."""

import json
import threading
from contextlib import contextmanager

import pytest
from sgl_specflow.eval import quantised_target
from sgl_specflow.eval.quantised_target import accept_length, compare, divergence
from test_launch import FakeSGLang, _Handler
from test_near_ties import decoded

PROMPTS = 3
TO, IS = ord("t"), ord("i")


def prefill_with(top):
    """A prefill that gives `top`, and the list of what it is asked."""
    asked = []
    return lambda prefix: asked.append(prefix) or top, asked


def test_a_divergence_has_the_gaps_of_both_servers_and_of_the_prefix_read_as_a_prompt():
    prefill, asked = prefill_with({7: -2.0, 9: -1.5})
    plain = decoded([5, 7, 1], {}, {7: -1.0, 9: -1.25})
    tree = decoded([5, 9, 1], {}, {9: -0.5, 7: -1.5})
    assert divergence(11, plain, tree, prefill) == {
        "prompt": 11, "token": 1, "plain_token": 7, "tree_token": 9,
        "gap_plain": 0.25, "gap_tree": 1.0, "gap_prefill": -0.5,
    }  # fmt: skip
    assert asked == [[3, 4, 5]]
    assert divergence(11, plain, plain, prefill) is None and len(asked) == 1


def test_an_answer_that_merely_ends_has_no_gaps_and_asks_for_none():
    prefill, asked = prefill_with({})
    found = divergence(0, decoded([7]), decoded([7, 9]), prefill)
    assert (found["token"], found["plain_token"], found["tree_token"]) == (1, None, 9) and not asked
    assert [found[name] for name in ("gap_plain", "gap_tree", "gap_prefill")] == [None] * 3


def test_a_row_has_the_mean_disagreements_of_what_has_both_gaps():
    plain = [
        decoded([7, 1], {7: -1.0, 9: -1.5}),
        decoded([7], {7: 0.0, 9: -1.0}),
        decoded([7], {7: 0.0}),
        decoded([7, 2]),
    ]
    tree = [
        decoded([9, 1], {9: -1.0, 7: -1.25}),
        decoded([9], {9: 0.0}),
        decoded([9], {9: 0.0, 7: -9.0}),
        decoded([7, 2]),
    ]
    row = compare(plain, tree, prefill_with({7: -1.0, 9: -1.75})[0])
    assert (row["prompts"], row["identical"], row["tokens_compared"]) == (4, 1, 2)
    assert [item["gap_tree"] for item in row["divergences"]] == [0.25, None, 9.0]
    assert row["mean_disagreement"] == 0.75
    assert row["mean_prefill_disagreement"] == (0.25 + 0.25) / 2


def test_equal_answers_have_no_disagreement():
    row = compare([decoded([7])], [decoded([7])], prefill_with({})[0])
    assert row["identical"] == 1 and row["mean_disagreement"] is None is row["mean_prefill_disagreement"]
    line = quantised_target.summary([row | {"algorithm": "jetflow", "batch": 1, "accept_length": 2.0}])
    assert line.endswith("identical=1 of 1 mean_disagreement=- mean_prefill_disagreement=- accept_length=2.00")


def test_the_accept_length_leaves_prefills_token_out():
    assert accept_length([decoded([1] * 9), decoded([1] * 3)]) == (8 + 2) / 4


class Target(FakeSGLang):
    """Nine tokens an answer, "answer to" or, from a tree server, "answer is"; a plain server says so as well the second
    time that it is asked `question 1`. Log-probabilities by whether it decodes, decodes in a tree or reads a prefix."""

    def __init__(self, verify_steps):
        super().__init__(delay=0.05, verify_steps=verify_steps)
        self.RequestHandlerClass = _FlushHandler
        self.flushed = False
        self.asked, self.prefixes, self.together = [], [], []
        self.lock, self.running = threading.Lock(), 0

    def reply(self, path, body):
        if path != "/generate":
            return super().reply(path, body)
        with self.lock:
            self.running += 1
            self.together.append(self.running)
        status, answer = super().reply(path, body)
        prompt = "".join(map(chr, body["input_ids"]))
        reads = body["sampling_params"]["max_new_tokens"] == 1
        with self.lock:
            self.running -= 1
            again = prompt in self.asked and prompt == "question 1"
            self.asked.append(prompt)
        if reads:
            assert self.flushed, "the prefix is still in the cache"
            self.prefixes.append(prompt)
            self.flushed = False
        other = again or self.verify_steps
        text = "answer is" if other else "answer to"
        tops = {TO: -1.0, IS: -0.875} if reads else {IS: -0.25, TO: -1.25} if other else {TO: -0.5, IS: -0.75}
        count = 1 if reads else len(text)
        answer["output_ids"] = list(text.encode()[:count])
        answer["meta_info"]["output_top_logprobs"] = [[[value, token, None] for token, value in tops.items()]] * count
        return status, answer


class _FlushHandler(_Handler):
    def do_GET(self):
        self.server.flushed = self.path.startswith("/flush_cache")
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command; gives its status, events, servers by name and the file's content."""
    questions = [json.dumps({"question": f"question {i}"}) + "\n" for i in range(PROMPTS + 1)]
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(questions))
    events, servers, out = [], {}, tmp_path / "new" / "out.json"

    def go(*more, verify_steps=4, tree_starts=True):
        @contextmanager
        def start(flags, **_):
            name = "tree" if "--speculative-algorithm" in flags else "plain"
            if name == "tree" and not tree_starts:
                raise RuntimeError("no such head")
            events.append(f"start {name}")
            server = servers[name] = Target(verify_steps if name == "tree" else None)
            server.flags = flags
            yield server
            server.shutdown()
            server.server_close()
            events.append(f"end {name}")

        monkeypatch.setattr(quantised_target, "start", start)
        monkeypatch.setattr(quantised_target, "need_gpu", lambda _: None)
        arguments = ["--model-path", "m", "--data", str(tmp_path), "--out", str(out), "--prompts", str(PROMPTS)]
        return quantised_target.main([*arguments, "--budget", "16", *more])

    return go, events, servers, lambda: json.loads(out.read_text())


def test_a_run_compares_trees_and_another_batch_size_to_plain_decoding(run, capsys):
    go, events, servers, content = run
    assert go("--tokens", "20", "--", "--page-size", "16", "--quantization", "none") == 0
    assert events == ["start tree", "end tree", "start plain", "end plain"]
    for server in servers.values():
        assert server.flags[server.flags.index("--dtype") + 1] == "bfloat16" and "--page-size" in server.flags
        given = [value for flag, value in zip(server.flags, server.flags[1:]) if flag == "--quantization"]
        assert given[-1] == "fp8"
    assert servers["tree"].flags[-1] == "16" and max(servers["tree"].together) == 1
    assert max(servers["plain"].together[:PROMPTS]) == 1 < max(servers["plain"].together[PROMPTS : 2 * PROMPTS])
    assert servers["plain"].prefixes == ["question 1answer ", *[f"question {i}answer " for i in range(PROMPTS)]]

    control, tree = content()["rows"]
    assert content()["meta"]["quantization"] == "fp8"
    assert [(row["algorithm"], row["budget"], row["batch"], row["accept_length"]) for row in (control, tree)] == [
        ("plain", None, 8, None), ("jetflow", 16, 1, 2.0),
    ]  # fmt: skip
    gaps = {"gap_plain": 0.25, "gap_tree": 1.0, "gap_prefill": -0.125}
    found = {"token": len("answer "), "plain_token": TO, "tree_token": IS} | gaps
    assert control["divergences"] == [{"prompt": 1} | found] and control["identical"] == PROMPTS - 1
    assert tree["divergences"] == [{"prompt": i} | found for i in range(PROMPTS)] and tree["identical"] == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "quantised_target: jetflow batch=1 identical=0 of 3 mean_disagreement=1.25 mean_prefill_disagreement=0.38 "
        "accept_length=2.00"
    )


def test_a_tree_server_that_does_not_speculate_ends_the_run_before_plain_decoding(run):
    go, events, *_ = run
    with pytest.raises(RuntimeError, match="did not speculate"):
        go(verify_steps=None)
    assert events == ["start tree", "end tree"]


def test_the_controls_row_stays_when_the_tree_server_does_not_start(run):
    go, events, _, content = run
    with pytest.raises(RuntimeError, match="no such head"):
        go("--parallel", "2", tree_starts=False)
    assert events[0] == "start plain"
    assert [row["algorithm"] for row in content()["rows"]] == ["plain"]
