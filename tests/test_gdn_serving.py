"""Trees on a hybrid target (Gated Delta Net and attention layers): token-identical to plain decoding, in float32.

Its layers keep a state that cannot drop a token, so each scenario is a way in which a stale, doubled or foreign state would
show: rows that change owner, finished requests whose state the prefix cache takes over, checkpoints taken while decoding,
retracted requests, prompts in chunks.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from injected import plugin_environment
from served import (
    BASE_FLAGS,
    HYBRIDS,
    accept_length,
    generate,
    make_multimodal_twin,
    make_small_head,
    make_small_hybrid_target,
    make_small_weaver,
    outcome,
    serve,
    tree_flags,
    weaver_options,
)
from test_serving_greedy import greedy, plainly, prompts, reference_log_probs, scenarios

# SGLang keeps conv windows in bfloat16 whatever the model's dtype. Then plain decoding too says something else after a
# retraction or in other chunks, where the same inputs are read from a prompt and not from a window.
EXACT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
# SGLang's prefill kernel for the GPU takes no float32: both servers get the one of the CPU platform there.
FLOAT32_PREFILL = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def register():
    from sgl_specflow.runtime.cpu_gdn_ops import chunk_gated_delta_rule

    target = "sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule"
    HookRegistry.register(target, chunk_gated_delta_rule, HookType.REPLACE)
"""
# Transformers gives Qwen3.5-MoE and multimodal checkpoints a tokenizer of its own, for which SGLang's warm-up is empty.
NO_WARMUP = ["--skip-server-warmup"]
if torch.cuda.is_available():  # else the states' pool takes all memory that is there
    BASE_FLAGS += ["--max-mamba-cache-size", "64"]
EXTRA_BUFFER = ["--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64"]

# Each entry: algorithm, budget, target, further flags. Together they cover both heads and the Weaver, the three classes of
# target, cache strategies, page sizes, chunked prefill, two tensor-parallel ranks, and memory so short that requests are
# retracted. Entries of one target stand together.
TREE_SERVERS = {
    "jetflow-64": (
        "jetflow",
        64,
        "qwen3.5",
        ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"],
    ),
    "ddtree-17-chunked-short-of-memory": (
        "ddtree",
        17,
        "qwen3.5",
        ["--chunked-prefill-size", "16", "--max-total-tokens", "330"],
    ),
    "jetflow-64-two-ranks": ("jetflow", 64, "qwen3.5", ["--tp-size", "2"]),
    "jetflow-24-page-16-extra-buffer": ("jetflow", 24, "qwen3.5", ["--page-size", "16", *EXTRA_BUFFER]),
    "dflash_tfm-33-chunked-short-of-memory": (
        "dflash_tfm",
        33,
        "qwen3.5",
        ["--chunked-prefill-size", "16", "--max-total-tokens", "400"],
    ),
    "moe-jetflow-64-two-ranks": ("jetflow", 64, "qwen3.5-moe", ["--tp-size", "2", *NO_WARMUP]),
    "next-jetflow-24-page-16-extra-buffer": ("jetflow", 24, "qwen3-next", ["--page-size", "16", *EXTRA_BUFFER]),
}
SCENARIOS = (
    "unequal lengths in one batch",
    "shared prefixes",
    "exactly max_new_tokens",
    "end of sequence inside a path",
    "stop strings",
    "end of the context window",
    "penalties of long requests, retracted where memory is short",
    "custom logit processor",
    "grammar",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hybrid")


@pytest.fixture(scope="module")
def environment(folder) -> dict[str, str]:
    return EXACT | (plugin_environment(folder / "plugin", FLOAT32_PREFILL) if torch.cuda.is_available() else {})


@pytest.fixture(scope="module")
def targets(folder) -> dict[str, Path]:
    return {kind: make_small_hybrid_target(folder / kind, kind) for kind in HYBRIDS}


@pytest.fixture(scope="module")
def heads(folder) -> dict[str, Path]:
    shape = dict(num_target_layers=4, target_layer_ids=[0, 2])
    bidirectional = make_small_head(folder / "bidirectional", causal=False, **shape)
    return {
        "jetflow": make_small_head(folder / "causal", causal=True, **shape),
        "ddtree": bidirectional,
        "dflash_tfm": bidirectional,
    }


def turns(answers: list[dict] | None = None) -> list[dict]:
    """Eight conversations: their first turns, or the second ones, which begin with all of the first and its answer."""
    starts = [ids[:30] for ids in prompts(8, seed=21, longest=80)]
    if answers is None:
        return [greedy(ids, 90 + i) for i, ids in enumerate(starts)]
    return [greedy(ids + answer["output_ids"] + [2 + i], 40) for i, (ids, answer) in enumerate(zip(starts, answers))]


@pytest.fixture(scope="module")
def plain_answers(targets, folder, environment):
    """Plain decoding's answers by scenario, of a target by its name; one server a target. No prefix cache: each prompt is
    computed from its first token."""

    @cache
    def answers(target: str) -> dict[str, list[dict]]:
        flags, log = [*NO_WARMUP, "--disable-overlap-schedule", "--disable-radix-cache"], folder / f"plain-{target}.log"
        with serve(targets[target], log, *flags, environment=environment) as server:
            answers = {name: plainly(server, name) for name in SCENARIOS}
            answers["first turns"] = generate(server, turns())
            answers["second turns"] = generate(server, turns(answers["first turns"]))
            return answers

    return answers


@pytest.fixture(scope="module", params=TREE_SERVERS)
def case(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain(case, plain_answers):
    return plain_answers(TREE_SERVERS[case][2])


@pytest.fixture(scope="module")
def tree_server(case, targets, plain, heads, folder, environment):
    algorithm, budget, target, flags = TREE_SERVERS[case]
    flags = tree_flags(algorithm, heads[algorithm], budget, *flags)
    if algorithm == "dflash_tfm":
        environment = environment | weaver_options(make_small_weaver(folder / "weaver"))
    with serve(targets[target], folder / f"{case}.log", *flags, environment=environment) as server:
        yield server


@pytest.mark.parametrize("name", SCENARIOS)
def test_greedy_equals_plain_decoding(tree_server, plain, name):
    answers = generate(tree_server, scenarios()[name])
    assert [outcome(a) for a in answers] == [outcome(a) for a in plain[name]]
    if name == "unequal lengths in one batch":
        assert accept_length(answers) > 1.3


def test_a_second_turn_starts_from_the_state_of_the_first(case, tree_server, plain):
    """The states that the first turn left in the prefix cache, of decoded tokens too, are those of its tokens."""
    for _ in range(2):  # again, with every slot and row used before
        first = generate(tree_server, turns())
        assert [outcome(a) for a in first] == [outcome(a) for a in plain["first turns"]]
        second = generate(tree_server, turns(first))
        assert [outcome(a) for a in second] == [outcome(a) for a in plain["second turns"]]
    cached = [answer["meta_info"]["cached_tokens"] for answer in second]
    if "short" not in case:
        assert max(cached) > 30, f"no state of a decoded token came from the cache: {cached}"


def test_memory_really_ran_short(case, tree_server):
    if "short" not in case:
        pytest.skip("this server has memory enough")
    generate(tree_server, scenarios()["penalties of long requests, retracted where memory is short"])
    assert "retract" in tree_server.log.read_text().lower()


def test_no_state_a_node_is_allocated(tree_server):
    log = tree_server.log.read_text()
    assert "GiB come back" in log
    assert "intermediate_ssm_state_cache" not in log


def test_long_answers_of_many_requests(folder, environment):
    """Issue 5's proof: 64 prompts of 256 tokens each (on a CPU 12 of 96), where prompts share beginnings, requests finish
    and join all the time, and memory is too short for eight at once."""
    (count, length), context = ((64, 256) if torch.cuda.is_available() else (12, 96)), 448
    target = make_small_hybrid_target(folder / "long-target", context=context)
    head = make_small_head(
        folder / "long-head", True, num_target_layers=4, target_layer_ids=[0, 2], max_position_embeddings=context
    )
    first = [greedy(ids, 8) for ids in prompts(8, seed=31, longest=100)]

    def answers(server):
        """Eight short ones, then those that go on from their ends, where the prefix cache keeps a state."""
        begun = [body["input_ids"] + a["output_ids"] for body, a in zip(first, generate(server, first))]
        ends = prompts(count, seed=32, longest=60)
        return generate(server, [greedy(begun[i % 8] + ids, length) for i, ids in enumerate(ends)])

    plain_flags, short_of_memory = (
        ["--disable-overlap-schedule", "--disable-radix-cache"],
        ["--max-total-tokens", "1500"],
    )
    with serve(target, folder / "long-plain.log", *NO_WARMUP, *plain_flags, environment=environment) as server:
        plain = answers(server)
    flags = tree_flags("jetflow", head, 64, *short_of_memory)
    with serve(target, folder / "long-tree.log", *flags, environment=environment) as server:
        tree = answers(server)
        log = server.log.read_text()
    assert [outcome(a) for a in tree] == [outcome(a) for a in plain]
    assert all(len(a["output_ids"]) == length for a in tree) and accept_length(tree) > 1.3
    assert "retract" in log.lower()
    assert max(a["meta_info"]["cached_tokens"] for a in tree) > 30


@pytest.mark.parametrize("kind", HYBRIDS)
def test_plain_decoding_is_the_model_that_the_checkpoint_holds(kind, targets, plain_answers):
    """Every expert and every decay was loaded: transformers chooses the same tokens from the same files."""
    name, count = "unequal lengths in one batch", 4
    pairs = [(ids, a["output_ids"]) for ids, a in zip(prompts(12)[:count], plain_answers(kind)[name])]
    expected = [rows.argmax(-1).tolist() for rows in reference_log_probs(targets[kind], pairs)]
    assert [output for _, output in pairs] == expected


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-moe"])
def test_the_language_model_of_a_multimodal_checkpoint(kind, targets, heads, folder, plain_answers, environment):
    twin, name = make_multimodal_twin(targets[kind], folder / f"{kind}-twin"), "unequal lengths in one batch"
    flags = ["--json-model-override-args", '{"language_model_only": true}', *NO_WARMUP]
    flags += tree_flags("jetflow", heads["jetflow"], 32)
    with serve(twin, folder / f"{kind}-twin.log", *flags, environment=environment) as server:
        answers = generate(server, scenarios()[name])
    assert [outcome(a) for a in answers] == [outcome(a) for a in plain_answers(kind)[name]]
