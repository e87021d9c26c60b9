"""Batch jobs, the quickstart's comparison, the server handle and the environment script, against fakes."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from sgl_specflow.launch import quickstart
from sgl_specflow.launch.__main__ import main
from sgl_specflow.launch.generation import Answer, Job
from sgl_specflow.launch.server import ServerError, start

ROOT = Path(__file__).resolve().parent.parent


class FakeSGLang(ThreadingHTTPServer):
    """/generate and /tokenize with the reply layout of SGLang 0.5.23. A prompt that holds "fail" is refused."""

    daemon_threads = True

    def __init__(self, delay=0.0, verify_steps=None, text=lambda prompt: f"answer to {prompt}"):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.delay, self.verify_steps, self.text = delay, verify_steps, text
        self.prompts = []
        self.refused = "fail"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def log_tail(self):
        return ""

    def reply(self, path, body):
        if path == "/tokenize":
            return 200, {"tokens": [ord(letter) for letter in body["messages"][-1]["content"]]}
        prompt = body.get("text") or "".join(map(chr, body["input_ids"]))
        time.sleep(self.delay)
        self.prompts.append(prompt)
        if self.refused and self.refused in prompt:
            return 400, {"error": {"message": "refused"}}
        meta = {"prompt_tokens": 3, "completion_tokens": 9, "finish_reason": {"type": "length"}}
        if self.verify_steps:
            meta["spec_verify_ct"] = self.verify_steps
        text = self.text(prompt)
        return 200, {"text": text, "output_ids": list(text.encode()[:9]), "meta_info": meta}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, reply = self.server.reply(self.path, body)
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def fake():
    server = FakeSGLang()
    yield server
    server.shutdown()
    server.server_close()


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch_arguments(prompts, out, url, *more):
    return ["batch", str(prompts), "--out", str(out), "--url", url, *more]


# ---- batch


def test_batch_answers_every_row_with_its_id_and_figures(tmp_path, fake):
    fake.verify_steps = 4
    rows = [
        {"prompt": "one"},
        {"id": {"any": 1}, "messages": [{"role": "user", "content": "two"}], "sampling_params": {"max_new_tokens": 5}},
    ]
    out = tmp_path / "answers.jsonl"
    assert main(batch_arguments(write_rows(tmp_path / "p.jsonl", rows), out, fake.url)) == 0
    answers = sorted(read_rows(out), key=lambda row: row["index"])
    assert [(row["id"], row["text"]) for row in answers] == [(0, "answer to one"), ({"any": 1}, "answer to two")]
    assert answers[0]["meta"] == {
        "finish_reason": "length", "prompt_tokens": 3, "tokens": 9, "steps": 4, "accept_length": 2.0,
    }  # fmt: skip
    assert not out.with_name("answers.jsonl.errors").exists()


def test_batch_killed_in_the_middle_goes_on_without_losing_or_repeating_a_row(tmp_path, fake):
    fake.delay = 0.05
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": f"row {index}"} for index in range(60)])
    out = tmp_path / "answers.jsonl"
    arguments = batch_arguments(prompts, out, fake.url, "--concurrency", "4")
    child = subprocess.Popen(
        [sys.executable, "-m", "sgl_specflow.launch", *arguments], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (not out.exists() or out.read_bytes().count(b"\n") < 10):
        time.sleep(0.01)
    child.kill()
    child.wait(timeout=10)
    before = read_rows(out)
    assert 10 <= len(before) < 60

    other = FakeSGLang()  # The first one may still work on requests of the killed run.
    assert main(batch_arguments(prompts, out, other.url)) == 0
    other.shutdown()
    other.server_close()
    after = read_rows(out)
    assert after[: len(before)] == before
    assert sorted(row["index"] for row in after) == list(range(60))
    assert sorted(other.prompts) == sorted(f"row {row['index']}" for row in after[len(before) :])


def test_batch_asks_again_for_the_row_of_a_torn_last_line(tmp_path, fake):
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}])
    out = tmp_path / "answers.jsonl"
    arguments = batch_arguments(prompts, out, fake.url)
    assert main(arguments) == 0
    out.write_bytes(out.read_bytes()[:-20])
    fake.prompts.clear()
    assert main(arguments) == 0
    assert len(fake.prompts) == 1
    assert sorted(row["index"] for row in read_rows(out)) == [0, 1, 2]


@pytest.mark.parametrize("change", ["prompt", "sampling", "foreign"])
def test_batch_refuses_an_output_made_from_something_else(tmp_path, fake, capsys, change):
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    out = tmp_path / "answers.jsonl"
    assert main(batch_arguments(prompts, out, fake.url)) == 0
    more = []
    if change == "prompt":
        write_rows(prompts, [{"prompt": "one"}, {"prompt": "another"}])
    elif change == "sampling":
        more = ["--max-new-tokens", "7"]
    else:
        out.write_text('{"some": "file"}\n')
    content = out.read_bytes()
    fake.prompts.clear()
    assert main(batch_arguments(prompts, out, fake.url, *more)) == 2
    assert f"{out}:" in capsys.readouterr().err
    assert out.read_bytes() == content and not fake.prompts


def test_batch_names_bad_rows_before_it_asks_anything(tmp_path, fake, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "good"}\nnot json\n\n{"text": "neither"}\n{"prompt": "a", "messages": []}\n[1]\n')
    out = tmp_path / "answers.jsonl"
    assert main(batch_arguments(prompts, out, fake.url)) == 2
    error = capsys.readouterr().err
    assert all(f"{prompts}:{line}: " in error for line in (2, 4, 5, 6)) and f"{prompts}:3:" not in error
    assert not out.exists() and not fake.prompts

    assert main(batch_arguments(prompts, out, fake.url, "--skip-bad")) == 0
    assert f"{prompts}:4: " in capsys.readouterr().err
    assert [row["index"] for row in read_rows(out)] == [0]


def test_batch_refuses_rows_that_share_an_id(tmp_path, fake, capsys):
    rows = [{"id": 1, "prompt": "a"}, {"prompt": "b"}, {"id": "1", "prompt": "c"}, {"id": "1", "prompt": "d"}]
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    assert main(batch_arguments(prompts, tmp_path / "answers.jsonl", fake.url)) == 2
    error = capsys.readouterr().err
    assert f'{prompts}:2: "id" 1 is that of line 1' in error and f"{prompts}:4: \"id\" '1' is that of line 3" in error
    assert f"{prompts}:3:" not in error and not fake.prompts


def test_batch_lists_failed_rows_and_retries_them(tmp_path, fake):
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "one"}, {"id": "b", "prompt": "fail here"}])
    out, errors = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.errors"
    assert main(batch_arguments(prompts, out, fake.url)) == 1
    assert [row["index"] for row in read_rows(out)] == [0]
    (failed,) = read_rows(errors)
    assert failed["id"] == "b" and "refused" in failed["error"]

    fake.refused = None
    fake.prompts.clear()
    assert main(batch_arguments(prompts, out, fake.url)) == 0
    assert fake.prompts == ["fail here"] and not errors.exists()
    assert [row["index"] for row in read_rows(out)] == [0, 1]


def test_batch_leaves_with_130_on_ctrl_c_and_says_how_to_go_on(tmp_path, fake):
    fake.delay = 0.1
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": f"row {index}"} for index in range(200)])
    out = tmp_path / "answers.jsonl"
    command = [sys.executable, "-m", "sgl_specflow.launch", *batch_arguments(prompts, out, fake.url)]
    child = subprocess.Popen(
        [*command, "--concurrency", "2"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (not out.exists() or not out.stat().st_size):
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    error = child.communicate(timeout=20)[1]
    assert child.returncode == 130
    assert "run the same command again" in error and "Traceback" not in error
    assert all(row["text"] for row in read_rows(out))


def test_batch_stops_when_the_server_is_gone(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setattr("sgl_specflow.launch.generation._CONNECTION_RETRY_SECONDS", (0.01,))
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": f"row {index}"} for index in range(5)])
    assert main(batch_arguments(prompts, tmp_path / "answers.jsonl", "http://127.0.0.1:9")) == 1
    gc.collect()
    assert "does not answer" in capsys.readouterr().err and not caplog.text
    assert not (tmp_path / "answers.jsonl").exists(), "a run that never began"
    (tmp_path / "answers.jsonl").touch()
    assert main(batch_arguments(prompts, tmp_path / "answers.jsonl", "http://127.0.0.1:9")) == 1
    assert (tmp_path / "answers.jsonl").exists(), "a file that was there before"


@pytest.mark.parametrize("wrong", [["--concurrency", "0"], ["--concurrency", "-3"], ["--max-new-tokens", "0"]])
def test_batch_refuses_numbers_under_one(tmp_path, fake, capsys, wrong):
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "one"}])
    with pytest.raises(SystemExit) as stopped:
        main(batch_arguments(prompts, tmp_path / "a.jsonl", fake.url, *wrong))
    assert stopped.value.code == 2 and "give 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "http://", "http://[::1", "http://a:99999", "ftp://a:1"])
def test_batch_refuses_what_is_no_address(tmp_path, capsys, url):
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "one"}])
    with pytest.raises(SystemExit):
        main(batch_arguments(prompts, tmp_path / "a.jsonl", url))
    assert "http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "-1", "inf"])
def test_batch_refuses_what_is_no_temperature(tmp_path, fake, capsys, value):
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "one"}])
    with pytest.raises(SystemExit):
        main([*batch_arguments(prompts, tmp_path / "a.jsonl", fake.url), "--temperature", value])
    assert "give a number from 0 on" in capsys.readouterr().err and not (tmp_path / "a.jsonl").exists()


def test_a_reply_that_is_not_sglangs_fails_its_row_only(tmp_path, fake, monkeypatch):
    answer = fake.reply
    monkeypatch.setattr(
        fake, "reply", lambda path, body: (200, ["odd"]) if body.get("text") == "two" else answer(path, body)
    )
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}])
    out = tmp_path / "answers.jsonl"
    assert main(batch_arguments(prompts, out, fake.url)) == 1
    assert sorted(row["index"] for row in read_rows(out)) == [0, 2]
    assert "is this SGLang" in Path(f"{out}.errors").read_text()


def test_an_id_that_is_no_unicode_is_kept(tmp_path, fake):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "\\ud800", "prompt": "one"}\n')
    out = tmp_path / "answers.jsonl"
    assert main(batch_arguments(prompts, out, fake.url)) == 0
    assert read_rows(out)[0]["id"] == "\ud800"


def test_flags_for_an_engine_are_refused_with_a_url(tmp_path, fake, capsys):
    with pytest.raises(SystemExit):
        main([*batch_arguments(tmp_path / "p.jsonl", tmp_path / "a.jsonl", fake.url), "--", "--dtype", "float32"])
    assert "flags after --" in capsys.readouterr().err


# ---- quickstart


def answer(text, verify_steps=None, tokens=9):
    return Answer(text, list(range(tokens)), 3, "length", verify_steps)


def test_the_summary_counts_steps_after_the_first_token():
    job = Job(0, "a", "question", None, {})
    comparisons = quickstart.compare([job, job], [answer("x"), answer("y")], [answer("x", 2), answer("z", 4)])
    assert [comparison.identical for comparison in comparisons] == [True, False]
    expected = "quickstart: prompts=2 identical=1 accept_length=2.67 plain_steps=16 tree_steps=6"
    assert quickstart.summary(comparisons) == expected


def test_equal_texts_of_other_tokens_are_not_identical():
    plain, tree = answer("x"), Answer("x", [7] * 9, 3, "length", 2)
    assert not quickstart.Comparison(Job(0, "a", "question", None, {}), plain, tree).identical


def test_a_tree_server_that_does_not_speculate_is_an_error():
    with pytest.raises(quickstart.QuickstartError, match="did not speculate"):
        quickstart.compare([Job(0, "a", "question", None, {})], [answer("x")], [answer("x")])


def test_texts_stand_side_by_side_within_the_width():
    job = Job(0, "a", None, [{"role": "user", "content": "question " * 30}], {})
    text = "word " * 60 + "\n\n\tindented"
    shown = quickstart.render(quickstart.Comparison(job, answer(text), answer(text, 4)), 80)
    assert max(map(len, shown.splitlines())) <= 80
    rows = [line.split(" │ ") for line in shown.splitlines() if " │ " in line]
    assert [right for _, right in rows[:3]] == ["jetflow", "4 verify steps", "accept length 2.00"]
    assert [left.rstrip() for left, _ in rows[:2]] == ["plain", "8 decode steps"]
    assert len(rows) > 8 and all(left.rstrip() == right for left, right in rows[3:])


@pytest.mark.parametrize("same", [True, False])
def test_the_quickstart_ends_with_its_one_line_and_status(tmp_path, monkeypatch, capsys, same):
    started = []

    @contextmanager
    def fake_start(flags, **_):
        started.append(flags)
        speculative = "--speculative-algorithm" in flags
        differ = speculative and not same
        server = FakeSGLang(
            verify_steps=2 if speculative else None, text=lambda prompt: ("other " if differ else "") + prompt
        )
        yield server
        server.shutdown()
        server.server_close()

    monkeypatch.setattr(quickstart, "start", fake_start)
    (tmp_path / "config.json").write_text("{}")
    arguments = ["quickstart", "--model-path", "model", "--head", str(tmp_path), "--logs", str(tmp_path)]
    assert main(arguments) == (0 if same else 1)
    last = capsys.readouterr().out.splitlines()[-1]
    identical = 8 if same else 0
    assert last == f"quickstart: prompts=8 identical={identical} accept_length=4.00 plain_steps=64 tree_steps=16"
    assert len(started) == 2 and all("float32" in flags for flags in started)


# ---- server


def processes_with(marker):
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and marker in " ".join(process.info["cmdline"] or []):
            found.append(process.info["pid"])
    return found


def wait_until(condition, seconds=15):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.1)
    return condition()


@pytest.fixture
def stand_in(tmp_path):
    """PYTHONPATH of a stand-in for sglang.launch_server: answers /health, has a child, ignores SIGTERM if told to."""
    package = tmp_path / "stand_in" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        "import http.server, os, signal, subprocess, sys\n"
        "if '--stubborn' in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', *sys.argv])\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        "http.server.HTTPServer(('127.0.0.1', port), Handler).serve_forever()\n"
    )
    return {"PYTHONPATH": str(package.parent)}


@pytest.mark.parametrize("flags", [[], ["--stubborn"]], ids=["", "stubborn"])
def test_a_stopped_server_leaves_none_of_its_processes(tmp_path, stand_in, monkeypatch, flags):
    monkeypatch.setattr("sgl_specflow.launch.server._GRACE_SECONDS", 1.0)
    marker = str(tmp_path / "marker")
    with start([marker, *flags], log=tmp_path / "log", environment=stand_in, timeout=20) as server:
        with urllib.request.urlopen(server.url + "/health", timeout=5) as reply:
            assert reply.status == 200
        assert len(processes_with(marker)) == 2
    assert not processes_with(marker)
    server.stop()


def test_a_server_ends_with_a_killed_parent(tmp_path, stand_in):
    marker = str(tmp_path / "marker")
    program = (
        "import sys, time; from sgl_specflow.launch.server import start\n"
        f"start([sys.argv[1]], log={str(tmp_path / 'log')!r}, environment={stand_in!r}, timeout=20)\n"
        "print('up', flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, marker], stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"up\n"
    leader = [pid for pid in processes_with("sglang.launch_server") if pid in processes_with(marker)]
    parent.kill()
    parent.communicate(timeout=10)
    try:
        assert leader and wait_until(lambda: not set(leader) & set(processes_with(marker)))
    finally:
        for pid in processes_with(marker):  # The stand-in's child does not watch its parent; SGLang's processes do.
            os.kill(pid, signal.SIGKILL)


def test_sigterm_ends_servers_that_are_still_starting(tmp_path, stand_in):
    """The launcher's children too, which nobody else would end."""
    launcher, marker = Path(stand_in["PYTHONPATH"]) / "sglang" / "launch_server.py", str(tmp_path / "marker")
    launcher.write_text(launcher.read_text().replace("class Handler", "import time; time.sleep(60)\nclass Handler"))
    program = (
        "import sys; from sgl_specflow.launch.server import end_servers_on_sigterm, start\n"
        "end_servers_on_sigterm(); print('up', flush=True)\n"
        f"start([sys.argv[1], '--stubborn'], log={str(tmp_path / 'log')!r}, environment={stand_in!r}, timeout=50)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, marker], stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"up\n" and wait_until(lambda: len(processes_with(marker)) == 3)
    parent.terminate()
    assert parent.wait(timeout=10) == 128 + signal.SIGTERM
    parent.stdout.close()
    assert wait_until(lambda: not processes_with(marker), seconds=5)


def test_a_server_that_does_not_answer_in_time_is_stopped(tmp_path):
    marker = str(tmp_path / "marker")
    with pytest.raises(ServerError, match="did not answer within 1 s"):
        start(["--model-path", marker], log=tmp_path / "log", timeout=1)
    assert not processes_with(marker)


def test_a_server_with_bad_flags_fails_with_the_end_of_its_log(tmp_path):
    marker = str(tmp_path / "marker")
    with pytest.raises(ServerError, match="(?s)ended with status 2.*no-such-flag"):
        start(["--model-path", marker, "--no-such-flag"], log=tmp_path / "log", timeout=120)
    assert not processes_with(marker)


@pytest.mark.parametrize("message, taken, starts", [("EADDRINUSE", 2, 3), ("EADDRINUSE", 9, 3), ("no memory", 9, 1)])
def test_a_server_whose_port_was_taken_is_started_again(tmp_path, stand_in, message, taken, starts):
    """The first `taken` of them end with the message; `starts` there are."""
    launcher, count = Path(stand_in["PYTHONPATH"]) / "sglang" / "launch_server.py", tmp_path / "starts"
    launcher.write_text(
        f"with open({str(count)!r}, 'a+') as file: file.write('x'); file.seek(0); begun = len(file.read())\n"
        f"if begun <= {taken}: raise SystemExit('[Errno 98] {message}: cannot listen')\n" + launcher.read_text()
    )
    if starts > taken:
        start([], log=tmp_path / "log", environment=stand_in, timeout=20).stop()
    else:
        with pytest.raises(ServerError, match=message):
            start([], log=tmp_path / "log", environment=stand_in, timeout=20)
    assert count.read_text() == starts * "x"


# ---- environment.sh


@pytest.fixture
def checkout(tmp_path):
    """A checkout of the shell part alone, and a stand-in interpreter that notes its pip calls."""
    launch = tmp_path / "checkout" / "launch"
    launch.mkdir(parents=True)
    (launch / "environment.sh").write_bytes((ROOT / "launch" / "environment.sh").read_bytes())
    (launch.parent / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    interpreter = tmp_path / "venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(
        "#!/bin/sh\n"
        f'case "$*" in "-m pip"*) echo "$*" >>{tmp_path}/pip-calls; echo building; exit $(cat {tmp_path}/status);; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    interpreter.chmod(0o755)
    (tmp_path / "status").write_text("0")
    return launch.parent


def make_environment(checkout, extra="quickstart"):
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source launch/environment.sh; make_environment {extra}; echo $python"],
        cwd=checkout,
        env={**os.environ, "SPECFLOW_VENV": str(checkout.parent / "venv")},
        capture_output=True,
        text=True,
        timeout=30,
    )


def pip_calls(checkout):
    calls = checkout.parent / "pip-calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_the_environment_is_installed_once(checkout):
    for _ in range(2):
        assert make_environment(checkout, "test").stdout.strip() == str(checkout.parent / "venv/bin/python")
    assert pip_calls(checkout) == 1
    make_environment(checkout)  # The test extra serves the quickstart too.
    assert pip_calls(checkout) == 1
    with (checkout / "pyproject.toml").open("a") as stream:
        stream.write("\n# changed\n")
    make_environment(checkout, "test")
    assert pip_calls(checkout) == 2


def test_a_failed_installation_shows_its_log_and_is_tried_again(checkout):
    (checkout.parent / "status").write_text("3")
    result = make_environment(checkout)
    assert result.returncode == 1
    assert "pip install failed (status 3)" in result.stderr and "| building" in result.stderr
    (checkout.parent / "status").write_text("0")
    assert make_environment(checkout).returncode == 0 and pip_calls(checkout) == 2
