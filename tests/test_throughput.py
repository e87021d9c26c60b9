"""`eval throughput`: what is timed and counted, and a whole run against stand-in servers."""

import json
import re
import time

import pytest
from sgl_specflow.eval import throughput
from sgl_specflow.eval.acceptance import server_settings
from sgl_specflow.eval.backends import Streamed, StreamingBackend
from sgl_specflow.eval.throughput import Tally, row
from sgl_specflow.launch.generation import Job, RequestFailed, answer_all
from test_launch import FakeSGLang, _Handler

STEP_SECONDS = 0.02


def test_a_single_requests_prefill_is_not_timed():
    tally = Tally()
    tally.add_round([[Streamed(sent=1.0, arrivals=[3.0, 3.5, 4.0], counts=[1, 4, 6], verify_steps=2)]])
    assert (tally.prompts, tally.tokens, tally.timed_tokens, tally.decode_seconds) == (1, 6, 5, 1.0)
    assert (tally.request_seconds, tally.decoded_tokens, tally.steps, tally.step_ms) == (3.0, 5, 2, 500.0)
    assert tally.tokens_per_second == 5.0 and tally.rounds == [5.0]


def test_a_group_is_timed_from_where_all_of_it_decodes():
    first = Streamed(sent=0.0, arrivals=[1.0, 2.0, 3.0, 4.0], counts=[1, 2, 3, 4], verify_steps=None)
    late = Streamed(sent=0.5, arrivals=[2.5, 3.5, 4.5], counts=[1, 3, 4], verify_steps=None)
    tally = Tally()
    tally.add_group([first, late])
    # From 2.5 to 4.5: two tokens of the first, three of the late one.
    assert (tally.timed_tokens, tally.decode_seconds, tally.request_seconds) == (5, 2.0, 4.5)
    assert (tally.steps, tally.step_seconds) == (6, 5.0)


def test_rounds_are_summed_and_kept_apart():
    tally = Tally()
    for end in (3.0, 5.0):
        tally.add_round([[Streamed(0.0, [1.0, end], [1, 9], 4)], [Streamed(0.0, [1.0, end], [1, 9], 4)]])
    assert tally.prompts == 2 and tally.tokens == 36
    assert tally.rounds == [4.0, 2.0] and tally.tokens_per_second == pytest.approx(32 / 12)


def test_at_batch_one_the_speed_up_is_accept_length_over_inflation():
    plain, tree = Tally(), Tally()
    plain.add_round([[Streamed(0.0, [1.0, 3.0], [1, 9], None)]])
    tree.add_round([[Streamed(0.0, [1.0, 2.0], [1, 9], 2)]])
    line = row("jetflow", 16, 1, "gsm8k", tree, plain)
    assert (line["step_ms"], line["plain_step_ms"], line["inflation"]) == (500.0, 250.0, 2.0)
    assert line["accept_length"] == 4.0 and line["speed_up"] == 2.0 == line["accept_length"] / line["inflation"]
    assert line["request_tokens_per_second"] == 4.5 and line["tokens_per_second"] == 8.0
    assert row("plain", None, 1, "gsm8k", plain, plain)["speed_up"] == 1.0


def test_each_drafter_gets_a_server_a_budget_and_the_weaver_its_option():
    settings = server_settings(["--base"], ["a=jetflow:/heads/one", "b=dflash_tfm:/heads/two:/weaver"], [4, 8])
    assert list(settings) == [("plain", None), ("a", 4), ("a", 8), ("b", 4), ("b", 8)]
    assert settings["plain", None][0] == ["--base"]
    flags, environment, head = settings["b", 8]
    assert flags[:3] == ["--base", "--speculative-algorithm", "dflash_tfm"] and flags[-1] == "8"
    assert json.loads(environment["SGL_SPECFLOW_OPTIONS"]) == {"weaver": "/weaver"} and head.name == "two"
    assert settings["a", 4][1] == {}


class StreamingSGLang(FakeSGLang):
    """Answers nine tokens in chunks: prefill's one, then `accept` a step."""

    def __init__(self, accept=1, whole=True):
        super().__init__(verify_steps=8 // accept if accept > 1 else None)
        self.accept, self.whole, self.flushed, self.stopped = accept, whole, 0, False
        self.RequestHandlerClass = _StreamHandler

    def stop(self):
        self.stopped = True
        self.shutdown()
        self.server_close()


class _StreamHandler(_Handler):
    def do_GET(self):
        self.server.flushed += self.path.startswith("/flush_cache")
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        if self.path != "/generate":
            return super().do_POST()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, reply = self.server.reply(self.path, body)
        self.send_response(status)
        self.end_headers()
        for count in range(1, 10, self.server.accept) if status == 200 and body["stream"] else ():
            chunk = reply | {"meta_info": reply["meta_info"] | {"completion_tokens": count}}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            time.sleep(STEP_SECONDS)
        end = b"data: [DONE]\n\n" if self.server.whole else b'data: {"error": {"message": "aborted"}}\n\n'
        self.wfile.write(end)


def stream(server, content):
    backend = StreamingBackend(server.url)

    async def collect():
        jobs = [Job(0, 0, None, [{"content": content}], {})]
        return [outcome async for _, outcome in answer_all(backend, jobs, 1)]

    return backend.run(collect())[0]


def test_chunks_are_counted_and_timed_as_they_arrive():
    server = StreamingSGLang(accept=4)
    answer = stream(server, "ab")
    server.stop()
    assert server.prompts == ["ab"]
    assert (answer.counts, answer.verify_steps, answer.steps, answer.decoded_tokens) == ([1, 5, 9], 2, 2, 8)
    assert answer.sent < answer.arrivals[0] and len(answer.arrivals) == 3
    assert answer.arrivals[-1] - answer.arrivals[0] >= STEP_SECONDS  # two steps, less what the first chunk lay waiting


@pytest.mark.parametrize(
    "content, whole, message", [("fail", True, "answered 400"), ("ab", False, "broke off: .*aborted")]
)
def test_a_request_that_is_refused_or_broken_off_is_a_failure(content, whole, message):
    server = StreamingSGLang(whole=whole)
    outcome = stream(server, content)
    server.stop()
    assert isinstance(outcome, RequestFailed) and re.search(message, str(outcome))


def run(tmp_path, monkeypatch, start):
    rows = [{"question": f"question {i}"} for i in range(3)]
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    monkeypatch.setattr(throughput, "start", start)
    arguments = ["--model-path", "m", "--data", str(tmp_path), "--out", str(tmp_path / "out.json"), "--rounds", "2"]
    return throughput.main([*arguments, "--budgets", "16", "--drafters", "jetflow=jetflow:/head", "--batches", "1,2"])


def test_a_run_takes_turns_and_writes_a_row_a_server(tmp_path, monkeypatch):
    asked, started = [], []

    def start(flags, **_):
        assert flags[flags.index("--max-running-requests") + 1] == "2"
        accept = 4 if "--speculative-algorithm" in flags else 1
        server = StreamingSGLang(accept)
        reply = server.reply
        server.reply = lambda path, body: asked.append(accept) or reply(path, body)
        started.append(server)
        return server

    assert run(tmp_path, monkeypatch, start) == 0
    assert all(server.stopped and server.flushed == 2 * (1 + 2) for server in started) and len(started) == 2
    generated = asked[12:]  # after warming: a prompt and two prompts a server, each tokenised and generated
    assert generated == ([1] * 6 + [4] * 6) * 2 * 2
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(line["drafter"], line["budget"], line["batch"]) for line in rows] == [
        ("plain", None, 1), ("jetflow", 16, 1), ("plain", None, 2), ("jetflow", 16, 2),
    ]  # fmt: skip
    assert [line["accept_length"] for line in rows] == [1.0, 4.0, 1.0, 4.0]
    assert all(line["prompts"] == 3 and line["tokens"] == 54 and len(line["rounds"]) == 2 for line in rows)
    assert rows[2]["plain_step_ms"] == rows[2]["step_ms"] == rows[3]["plain_step_ms"] != rows[1]["plain_step_ms"]
    assert rows[2]["tokens_per_second"] > 1.2 * rows[0]["tokens_per_second"]  # 1.5: groups of two and one, not of one
    tree = rows[1]
    assert tree["speed_up"] > 1.5  # 4, but for the noise of a busy machine


def test_when_a_server_does_not_start_the_others_are_stopped(tmp_path, monkeypatch):
    started = []

    def start(flags, **_):
        if "--speculative-algorithm" in flags:
            raise RuntimeError("no such head")
        started.append(StreamingSGLang())
        return started[-1]

    with pytest.raises(RuntimeError, match="no such head"):
        run(tmp_path, monkeypatch, start)
    assert started[0].stopped
