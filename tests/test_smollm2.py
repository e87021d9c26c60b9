"""The shipped heads on the real SmolLM2-135M-Instruct, greedy, float32: identical to plain decoding, and they help.

The whole proof (64 prompts, 96 tokens, more budgets, page sizes and batch sizes) is `python -m sgl_specflow.eval
lossless`; its result is eval/results/lossless_smollm2_h200.json.
"""

import json
import os
from pathlib import Path

import pytest
from served import accept_length, generate, outcome, post, serve, tree_flags
from sgl_specflow.launch.batch import read_jobs
from sgl_specflow.launch.get_smollm2 import fetch

ROOT = Path(__file__).resolve().parents[1]
HEADS = ROOT / "sgl_specflow" / "drafter" / "heads"
TOKENS = 48
# algorithm, budget, page size, and the least accept length that the shipped head must reach on the shipped prompts
SERVERS = {
    "jetflow-16": ("jetflow", HEADS / "smollm2-135m-jetflow", 16, 1, 2.0),
    "ddtree-64-page-16": ("ddtree", HEADS / "smollm2-135m-dflash", 64, 16, 2.5),
    "dflash_tfm-32": ("dflash_tfm", HEADS / "smollm2-135m-dflash", 32, 1, 2.5),
}
WEAVER = {"SGL_SPECFLOW_OPTIONS": json.dumps({"weaver": str(HEADS / "smollm2-135m-weaver")})}

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def model():
    return fetch(Path(os.environ.get("SPECFLOW_SMOLLM2", ROOT / ".cache" / "models" / "smollm2-135m-instruct")))


def run_server(model, log, *flags, environment=()):
    memory, threads = ["--max-total-tokens", "16384"], {"OMP_NUM_THREADS": "2"}
    # Both threads are there before SGLang starts its processes, which can then not be forked.
    return serve(model, log, *memory, *flags, environment={**threads, **dict(environment)}, timeout=600, fork=False)


def requests(server):
    """The shipped prompts through the model's chat template."""
    jobs, bad = read_jobs(ROOT / "launch" / "prompts.jsonl", {})
    assert not bad and len(jobs) == 8
    for job in jobs:
        status, answer = post(server, "/tokenize", {"messages": job.messages})
        assert status == 200, answer
        yield {"input_ids": answer["tokens"], "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS}}


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    with run_server(model, tmp_path_factory.mktemp("plain") / "log") as server:
        return generate(server, list(requests(server)))


@pytest.mark.parametrize("name", SERVERS)
def test_shipped_head_is_lossless_and_helps(name, model, plain, tmp_path):
    algorithm, head, budget, page, least = SERVERS[name]
    flags = tree_flags(algorithm, head, budget, "--page-size", str(page))
    environment = WEAVER if algorithm == "dflash_tfm" else {}
    with run_server(model, tmp_path / "log", *flags, environment=environment) as server:
        asked = list(requests(server))
        answers = generate(server, asked)
        alone = generate(server, asked[:2], at_once=1)
    assert [outcome(a) for a in answers] == [outcome(a) for a in plain]
    assert [outcome(a) for a in alone] == [outcome(a) for a in plain[:2]]
    assert accept_length(answers) >= least
