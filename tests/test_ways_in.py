"""Every way into SGLang serves trees: `sglang serve`, sglang.Engine, batch jobs; `launch_server` is tested elsewhere."""

import json
import os
import subprocess
import sys
import time
import urllib.request

import pytest
from served import (
    BASE_FLAGS,
    ENVIRONMENT,
    generate,
    make_small_head,
    make_small_target,
    outcome,
    post,
    serve,
    tree_flags,
)
from sgl_specflow.launch.server import Server, free_port
from test_serving_greedy import greedy, prompts

REQUESTS = [greedy(ids, 24) for ids in prompts(4, seed=40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ways")


@pytest.fixture(scope="module")
def target(folder):
    return make_small_target(folder / "target")


@pytest.fixture(scope="module")
def head(folder):
    return make_small_head(folder / "head", causal=True)


@pytest.fixture(scope="module")
def expected(folder, target):
    with serve(target, folder / "plain.log", "--disable-overlap-schedule") as server:
        return [outcome(answer) for answer in generate(server, REQUESTS)]


def test_sglang_serve(folder, target, head, expected):
    port = free_port()
    command = [
        os.path.join(os.path.dirname(sys.executable), "sglang"),
        "serve",
        "--model-path",
        str(target),
        *BASE_FLAGS,
    ]
    command += [*tree_flags("jetflow", head, 16), "--port", str(port)]
    log = folder / "serve.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}, start_new_session=True
        )
    with Server(f"http://127.0.0.1:{port}", process, log) as server:
        deadline = time.monotonic() + 400
        while True:
            assert process.poll() is None and time.monotonic() < deadline, server.log_tail()
            try:
                with urllib.request.urlopen(server.url + "/health", timeout=30):
                    break
            except OSError:
                time.sleep(0.5)
        assert [outcome(answer) for answer in generate(server, REQUESTS)] == expected


ENGINE = """
import json, sys
import sglang

def main():
    given = json.load(sys.stdin)
    engine = sglang.Engine(**given["arguments"])
    answers = [engine.generate(input_ids=r["input_ids"], sampling_params=r["sampling_params"]) for r in given["requests"]]
    engine.shutdown()
    print("ANSWERS " + json.dumps(answers))

if __name__ == "__main__":
    main()
"""


def test_engine(folder, target, head, expected):
    script = folder / "engine.py"
    script.write_text(ENGINE)
    arguments = {
        "model_path": str(target),
        "dtype": "float32",
        "max_running_requests": 8,
        "speculative_algorithm": "jetflow",
        "speculative_draft_model_path": str(head),
        "speculative_num_draft_tokens": 16,
        "log_level": "error",
    }
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps({"arguments": arguments, "requests": REQUESTS}),
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **ENVIRONMENT},
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")), None)
    assert line, done.stderr[-2000:]
    answers = json.loads(line.removeprefix("ANSWERS "))
    assert [outcome(answer) for answer in answers] == expected
    assert all(answer["meta_info"]["spec_verify_ct"] for answer in answers)


def test_openai_endpoints(folder, target, head):
    with serve(target, folder / "openai.log", *tree_flags("jetflow", head, 16)) as server:
        body = {"model": "m", "prompt": "w4 w9 w3", "max_tokens": 12, "temperature": 0, "logprobs": 2}
        status, whole = post(server, "/v1/completions", body)
        assert status == 200 and len(whole["choices"][0]["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]
        request = urllib.request.Request(
            server.url + "/v1/completions",
            json.dumps(body | {"stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        pieces = [json.loads(event)["choices"] for event in events[:-1]]
        assert "".join(choices[0]["text"] for choices in pieces if choices) == whole["choices"][0]["text"]
        status, three = post(server, "/v1/completions", body | {"n": 3, "temperature": 1.0})
        assert status == 200 and len(three["choices"]) == 3


def test_a_weight_update_leaves_the_head_alone(folder, target, head):
    """The update carries the target's own checkpoint: text and accept length stay what they were."""
    with serve(target, folder / "update.log", *tree_flags("jetflow", head, 16)) as server:
        before = generate(server, REQUESTS)
        status, answer = post(server, "/update_weights_from_disk", {"model_path": str(target)})
        assert status == 200 and answer["success"], answer
        after = generate(server, REQUESTS)
    assert [outcome(a) for a in after] == [outcome(a) for a in before]
    steps = [[a["meta_info"]["spec_verify_ct"] for a in answers] for answers in (before, after)]
    assert steps[0] == steps[1]
