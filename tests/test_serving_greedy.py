"""Greedy decoding through real servers equals plain decoding, token for token, in float32.

The targets have 16 tokens, so that trees branch and paths are accepted with heads of random weights. One plain server a
target gives the answers; each tree server below must give the same ones.
"""

import random
import threading
from functools import cache

import pytest
from served import (
    CONTEXT,
    VOCABULARY,
    accept_length,
    generate,
    get,
    make_small_head,
    make_small_moe_target,
    make_small_target,
    make_small_weaver,
    outcome,
    post,
    serve,
    tree_flags,
    weaver_options,
)
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

# Each entry: algorithm, budget, target, further flags, environment ("weaver": options of a server with a Weaver). Together
# they cover both heads and the Weaver, dense and mixture-of-experts targets, budgets from 2 to 256, page sizes, two
# tensor-parallel ranks, radix cache on and off, chunked prefill, path refresh, and KV memory so short that requests are
# retracted. Entries of one target stand together.
TREE_SERVERS = {
    "jetflow-64": ("jetflow", 64, "llama", [], {}),
    "jetspec-2-no-radix": ("jetspec", 2, "llama", ["--disable-radix-cache", "--speculative-eagle-topk", "3"], {}),
    "ddtree-17-page-16-chunked": (
        "ddtree",
        17,
        "llama",
        ["--page-size", "16", "--chunked-prefill-size", "16"],
        {},
    ),
    "ddtree-5-short-of-memory": ("ddtree", 5, "llama", ["--max-total-tokens", "330"], {}),
    "jetflow-256-page-16-no-radix": ("jetflow", 256, "llama", ["--page-size", "16", "--disable-radix-cache"], {}),
    "jetflow-32-refresh": (
        "jetflow",
        32,
        "llama",
        ["--speculative-num-steps", "5"],
        {"SGL_SPECFLOW_OPTIONS": '{"path_refresh": true, "fp8_draft": true}'},
    ),
    "jetflow-64-two-ranks": ("jetflow", 64, "llama", ["--tp-size", "2"], {}),
    "jetflow-24-page-16-short": ("jetflow", 24, "llama", ["--page-size", "16", "--max-total-tokens", "512"], {}),
    "dflash_tfm-33-page-16-chunked-short": (
        "dflash_tfm",
        33,
        "llama",
        ["--page-size", "16", "--chunked-prefill-size", "16", "--max-total-tokens", "512"],
        {"weaver": {"weaver_width": 4, "weaver_pool": 13, "weaver_temperature": 1.5}},
    ),
    "dflash_tfm-33-two-ranks": ("dflash_tfm", 33, "llama", ["--tp-size", "2"], {"weaver": {"weaver_pool": 13}}),
    "moe-jetflow-64-two-ranks": ("jetflow", 64, "moe", ["--tp-size", "2"], {}),
    "moe-ddtree-17-chunked-short": (
        "ddtree",
        17,
        "moe",
        ["--chunked-prefill-size", "16", "--max-total-tokens", "400"],
        {},
    ),
    "moe-dflash_tfm-33": ("dflash_tfm", 33, "moe", [], {"weaver": {}}),
}


FORBID = DisallowedTokensLogitsProcessor().to_str()


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def greedy(ids: list[int], max_new_tokens: int = 40, **params) -> dict:
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **params},
    }


def scenarios() -> dict[str, list[dict]]:
    """Requests by what they exercise."""
    shared = prompts(1, seed=9, longest=40)[0] * 2
    return {
        "unequal lengths in one batch": [greedy(ids, 8 + 5 * i) for i, ids in enumerate(prompts(12))],
        "shared prefixes": [greedy(shared[: 30 + 3 * i] + [2 + i], 24) for i in range(8)],
        "exactly max_new_tokens": [greedy(ids, n) for n, ids in enumerate(prompts(12, seed=1), start=1)],
        "end of sequence inside a path": [greedy(ids, 60, ignore_eos=False) for ids in prompts(12, seed=2)],
        "stop tokens": [greedy(ids, 60, stop_token_ids=[3 + i % 4]) for i, ids in enumerate(prompts(8, seed=3))],
        "stop strings": [greedy(ids, 60, stop=[f"w{4 + i % 5}"]) for i, ids in enumerate(prompts(8, seed=4))],
        "end of the context window": [
            greedy(ids, CONTEXT - len(ids)) for ids in prompts(3, seed=5, longest=CONTEXT - 30)
        ],
        "logit bias": [greedy(ids, 30, logit_bias={"5": 3.0, "7": -2.0}) for ids in prompts(4, seed=6)],
        "frequency penalty": [greedy(ids, 40, frequency_penalty=0.7) for ids in prompts(6, seed=7)],
        "presence penalty": [greedy(ids, 40, presence_penalty=1.3) for ids in prompts(6, seed=8)],
        "repetition penalty": [greedy(ids, 40, repetition_penalty=1.4) for ids in prompts(6, seed=9)],
        "minimum length": [
            greedy(ids, 60, ignore_eos=False, min_new_tokens=9 + i) for i, ids in enumerate(prompts(8, seed=2))
        ],
        "one penalised request among others": [
            greedy(ids, 30, **({"frequency_penalty": 0.9} if i == 2 else {}))
            for i, ids in enumerate(prompts(6, seed=10))
        ],
        "penalties of long requests, retracted where memory is short": [
            greedy(ids, 90, **params)
            for ids, params in zip(
                prompts(8, seed=13, longest=40),
                2
                * [
                    {"frequency_penalty": 0.8},
                    {"presence_penalty": 1.1},
                    {"repetition_penalty": 1.3},
                    {"min_new_tokens": 50, "ignore_eos": False},
                ],
            )
        ],
        "custom logit processor": [
            greedy(ids, 20, custom_params={"token_ids": [5, 9]}) | {"custom_logit_processor": FORBID}
            if i % 2
            else greedy(ids, 20)
            for i, ids in enumerate(prompts(4, seed=14))
        ],
        "grammar": [greedy(ids, 40, ignore_eos=False, regex="(w2w5|w7w3w4)+w9") for ids in prompts(4, seed=11)],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("small")


@pytest.fixture(scope="module")
def targets(folder):
    return {"llama": make_small_target(folder / "llama"), "moe": make_small_moe_target(folder / "moe")}


@pytest.fixture(scope="module")
def heads(folder):
    return {
        "jetflow": make_small_head(folder / "causal", causal=True),
        "jetspec": make_small_head(folder / "sure", causal=True, confidence=1.0),
        "ddtree": make_small_head(folder / "bidirectional", causal=False),
        "dflash_tfm": make_small_head(folder / "bidirectional", causal=False),
    }


@pytest.fixture(scope="module")
def weaver(folder):
    return make_small_weaver(folder / "weaver")


def plainly(server, name: str) -> list[dict]:
    """Plain decoding's answers to a scenario. Of a grammar, one at a time: for a vocabulary of 16, SGLang's kernel for CUDA
    masks wrong rows of a batch (`_apply_mask` in sgl_specflow/runtime/verifier.py)."""
    return generate(server, scenarios()[name], at_once=1 if name == "grammar" else 8)


@pytest.fixture(scope="module")
def plain_answers(targets, folder):
    """Plain decoding's answers by scenario, of a target by its name; one server a target. Without overlap, under which
    SGLang counts penalties one token late."""

    @cache
    def answers(target: str) -> dict[str, list[dict]]:
        with serve(targets[target], folder / f"plain-{target}.log", "--disable-overlap-schedule") as server:
            return {name: plainly(server, name) for name in scenarios()}

    return answers


@pytest.fixture(scope="module", params=TREE_SERVERS)
def case(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def target(case, targets):
    return targets[TREE_SERVERS[case][2]]


@pytest.fixture(scope="module")
def plain(case, plain_answers):
    return plain_answers(TREE_SERVERS[case][2])


@pytest.fixture(scope="module")
def tree_server(case, target, plain, heads, weaver, folder):
    algorithm, budget, _, flags, environment = TREE_SERVERS[case]
    flags = tree_flags(algorithm, heads[algorithm], budget, *flags)
    if "weaver" in environment:
        environment = weaver_options(weaver, **environment["weaver"])
    with serve(target, folder / f"{case}.log", *flags, environment=environment) as server:
        yield server


@pytest.mark.parametrize("name", scenarios())
def test_greedy_equals_plain_decoding(tree_server, plain, name):
    answers = generate(tree_server, scenarios()[name])
    for i, (expected, answer) in enumerate(zip(plain[name], answers)):
        assert outcome(answer) == outcome(expected), f"request {i} of '{name}'"


def test_trees_are_accepted_and_reported(tree_server, plain):
    """Acceptance is real: several tokens a step with a budget that allows them, and the operator sees it."""
    answers = generate(tree_server, scenarios()["unequal lengths in one batch"])
    budget = int(tree_server.process.args[tree_server.process.args.index("--speculative-num-draft-tokens") + 1])
    assert accept_length(answers) > (1.02 if budget == 2 else 1.1 if budget < 16 else 1.6)
    for answer in answers:
        info = answer["meta_info"]
        histogram = info["spec_correct_drafts_histogram"]
        assert sum(histogram) == info["spec_verify_ct"]
        assert sum(depth * count for depth, count in enumerate(histogram)) == info["spec_num_correct_drafts"]
    metrics = get(tree_server, "/metrics")
    assert "sglang:spec_accept_length" in metrics
    assert "accept len" in tree_server.log.read_text()


def test_one_by_one_equals_at_once(tree_server, plain):
    name = "unequal lengths in one batch"
    answers = generate(tree_server, scenarios()[name][:4], at_once=1)
    assert [outcome(a) for a in answers] == [outcome(a) for a in plain[name][:4]]


def test_log_probabilities_are_those_of_plain_decoding(tree_server, plain, target):
    """Each committed token's log-probability, its top 3 and those of chosen tokens, read at the node that chose it."""
    ask = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [4, 9]}
    answers = generate(tree_server, [greedy(ids, 20) | ask for ids in prompts(4, seed=12)])
    expected = reference_log_probs(target, [(ids, a["output_ids"]) for ids, a in zip(prompts(4, seed=12), answers)])
    for answer, rows in zip(answers, expected):
        info = answer["meta_info"]
        assert len(info["output_token_logprobs"]) == len(answer["output_ids"]) == 20
        for j, row in enumerate(rows):
            value, token = info["output_token_logprobs"][j][:2]
            assert token == answer["output_ids"][j]
            assert value == pytest.approx(row[token].item(), abs=2e-4)
            top = row.topk(3)
            assert [entry[1] for entry in info["output_top_logprobs"][j]] == top.indices.tolist()
            assert {entry[1]: entry[0] for entry in info["output_token_ids_logprobs"][j]} == pytest.approx(
                {4: row[4].item(), 9: row[9].item()}, abs=2e-4
            )


def reference_log_probs(target, pairs):
    import torch
    from transformers import AutoModelForCausalLM

    # The grouped product of experts that transformers prefers takes no float64.
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64, experts_implementation="eager")
    for prompt, output in pairs:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0]
        yield logits[len(prompt) - 1 : -1].log_softmax(-1)


def test_an_abort_in_the_middle_leaves_the_others_alone(tree_server, plain):
    name = "unequal lengths in one batch"
    aborted = {}

    def long_request():
        body = greedy(prompts(1, seed=20)[0][:8], 150) | {"rid": "to-abort"}
        aborted["status"], aborted["answer"] = post(tree_server, "/generate", body)

    thread = threading.Thread(target=long_request)
    thread.start()
    timer = threading.Timer(0.3, lambda: post(tree_server, "/abort_request", {"rid": "to-abort"}))
    timer.start()
    answers = generate(tree_server, scenarios()[name])
    thread.join(60)
    timer.join()
    assert not thread.is_alive()
    assert [outcome(a) for a in answers] == [outcome(a) for a in plain[name]]


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [3, 4], "sampling_params": {"temperature": -1}},
        {"input_ids": [3, 4], "sampling_params": {"top_p": 0}},
        {"input_ids": [3] * (CONTEXT + 5), "sampling_params": {"temperature": 0}},
        {"sampling_params": {"temperature": 0}},
        {"text": "", "sampling_params": {"temperature": 0}},
        {"input_ids": [3, 99999999], "sampling_params": {"temperature": 0}},
        {"input_ids": [3, -5], "sampling_params": {"temperature": 0}},
        {"input_ids": [3, 4], "return_logprob": True, "top_logprobs_num": VOCABULARY + 1},
        {"input_ids": [3, 4], "custom_logit_processor": "garbage", "sampling_params": {"temperature": 0}},
        {"input_ids": [3, 4], "sampling_params": {"temperature": 0, "stop_token_ids": [-1], "min_new_tokens": 5}},
        {"input_ids": [3, 4], "return_sampling_mask": True, "sampling_params": {"temperature": 0, "top_k": 1}},
    ],
)
def test_a_malformed_request_gets_400_and_disturbs_no_other(tree_server, plain, body):
    name = "exactly max_new_tokens"
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(post(tree_server, "/generate", body)[0]))
    thread.start()
    answers = generate(tree_server, scenarios()[name][:4])
    thread.join(60)
    assert statuses == [400]
    assert [outcome(a) for a in answers] == [outcome(a) for a in plain[name][:4]]


def test_memory_really_ran_short(case, tree_server):
    """The servers named so have retracted requests (run last: the scenarios above cause it)."""
    if "short" not in case:
        pytest.skip("this server has memory enough")
    generate(tree_server, scenarios()["penalties of long requests, retracted where memory is short"])
    assert "retract" in tree_server.log.read_text().lower()
