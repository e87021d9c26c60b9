"""A start that cannot work is refused before weights load, with an error that names what was given and what to do."""

import json
import os
import shutil
import subprocess
import sys
import types

import pytest
import torch
from injected import plugin_environment
from served import (
    VOCABULARY,
    make_multimodal_twin,
    make_small_head,
    make_small_hybrid_target,
    make_small_target,
    make_small_weaver,
    serve,
    tree_flags,
    weaver_options,
)
from sgl_specflow.launch.server import ServerError

from sgl_specflow.drafter.make import head_config, make_random_head
from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.runtime import hooks, start_checks
from sgl_specflow.runtime.settings import AdapterSettings, Options, TreeSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checks")


@pytest.fixture(scope="module")
def target(folder):
    return make_small_target(folder / "target")


@pytest.fixture(scope="module")
def causal(folder):
    return make_small_head(folder / "causal", causal=True)


@pytest.fixture(scope="module")
def bidirectional(folder):
    return make_small_head(folder / "bidirectional", causal=False)


RESOLVE = """
import json, logging, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args

lines = []

class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

for name, flags in json.loads(sys.argv[1]).items():
    lines.clear()
    logging.getLogger("sgl_specflow").handlers = [Keep()]
    logging.getLogger("sgl_specflow").setLevel(logging.INFO)
    error = None
    try:
        prepare_server_args(flags).resolve_once()
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    print("RESULT " + json.dumps([name, error, lines]))
"""


def resolve_all(cases: dict[str, list], environment: dict | None = None) -> dict[str, tuple[str | None, list[str]]]:
    """SGLang's own resolution of each case's command-line flags, in one fresh process and without loading a model:
    (error or None, lines that sgl_specflow logged) by case."""
    cases = {name: [str(flag) for flag in flags] for name, flags in cases.items()}
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
    )
    rows = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(rows) == len(cases), done.stderr[-3000:]
    return {name: (error, lines) for name, error, lines in rows}


# --- settings: ranges ------------------------------------------------------------------------------------------------


def settings_for(head_folder, algorithm="JETFLOW", budget=None, depth=None, width=None, **options):
    from sgl_specflow.drafter.config import HeadConfig

    return TreeSettings.resolve(algorithm, HeadConfig.load(head_folder), budget, depth, width, Options(**options))


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"budget": 1}, "--speculative-num-draft-tokens 1"),
        ({"budget": 257}, "--speculative-num-draft-tokens 257"),
        ({"depth": 0}, "--speculative-num-steps 0"),
        ({"depth": 8}, "--speculative-num-steps 8"),
        ({"width": 0}, "--speculative-eagle-topk 0"),
        ({"width": VOCABULARY + 1}, f"--speculative-eagle-topk {VOCABULARY + 1}"),
        ({"algorithm": "DDTREE"}, "ddtree with a causal head"),
        ({"budget": 3, "path_refresh": True}, "path_refresh with a budget of 3"),
    ],
)
def test_values_out_of_range_are_refused_by_name(causal, arguments, named):
    with pytest.raises(SpecflowConfigError, match=named) as error:
        settings_for(causal, **arguments)
    assert "Allowed:" in str(error.value) and "To do:" in str(error.value)


def test_a_bidirectional_head_is_refused_by_jetflow(bidirectional):
    with pytest.raises(SpecflowConfigError, match="bidirectional head"):
        settings_for(bidirectional)
    with pytest.raises(SpecflowConfigError, match="path_refresh"):
        settings_for(bidirectional, algorithm="DDTREE", path_refresh=True)


def test_defaults_come_from_the_head(causal, bidirectional):
    assert settings_for(causal) == TreeSettings("JETFLOW", 64, 7, 16, 8, True, VOCABULARY - 1, False)
    assert settings_for(bidirectional, algorithm="DDTREE", budget=5).block == 5
    assert settings_for(causal, budget=4).depth == 3
    assert settings_for(causal, depth=2).block == 3


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"path": true}',
        '{"fp8_draft": "yes"}',
        '{"path_refresh": 1}',
        '{"weaver": 3}',
        '{"weaver": ""}',
        '{"weaver_width": true}',
        '{"weaver_rounds": 2.5}',
        '{"weaver_pool": 1.5}',
        '{"weaver_temperature": "hot"}',
        '{"weaver_pool": ' + "1" * 5000 + "}",
    ],
)
def test_unknown_options_are_refused(monkeypatch, text):
    monkeypatch.setenv("SGL_SPECFLOW_OPTIONS", text)
    with pytest.raises(SpecflowConfigError, match="SGL_SPECFLOW_OPTIONS"):
        Options.from_environment()


# --- the Weaver ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weaver(folder):
    return make_small_weaver(folder / "weaver")


def test_a_weavers_defaults_come_from_its_checkpoint(bidirectional, weaver):
    settings = settings_for(bidirectional, "DFLASH_TFM", weaver=str(weaver))
    assert (settings.depth, settings.block) == (7, 8)
    assert settings.adapter == AdapterSettings(weaver, 32, 2, VOCABULARY, 1.0, 7)
    given = dict(weaver=str(weaver), weaver_width=1, weaver_rounds=3, weaver_pool=3, weaver_temperature=2)
    narrow = settings_for(bidirectional, "DFLASH_TFM", 5, **given)
    assert narrow.adapter == AdapterSettings(weaver, 1, 3, 3, 2.0, 4) and narrow.depth == 4


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"weaver": None}, "without a Weaver"),
        ({"weaver": "/nowhere/weaver.pt"}, "/nowhere/weaver.pt"),
        ({"weaver_width": 0}, "weaver_width 0"),
        ({"weaver_width": 65}, "weaver_width 65"),
        ({"weaver_rounds": 0}, "weaver_rounds 0"),
        ({"weaver_rounds": 64}, "weaver_rounds 64"),
        ({"weaver_pool": 0}, "weaver_pool 0"),
        ({"weaver_pool": VOCABULARY + 1}, f"weaver_pool {VOCABULARY + 1}"),
        ({"weaver_temperature": 0}, "weaver_temperature 0"),
        ({"weaver_temperature": float("nan")}, "weaver_temperature nan"),
        ({"depth": 8}, "--speculative-num-steps 8"),
        ({"path_refresh": True}, "path_refresh with a bidirectional head"),
    ],
)
def test_weaver_options_out_of_range_are_refused_by_name(bidirectional, weaver, arguments, named):
    with pytest.raises(SpecflowConfigError, match=named) as error:
        settings_for(bidirectional, "DFLASH_TFM", **{"weaver": str(weaver), **arguments})
    assert "Allowed:" in str(error.value) and "To do:" in str(error.value)


@pytest.mark.parametrize(
    "option",
    [{"weaver": "x"}, {"weaver_width": 8}, {"weaver_rounds": 2}, {"weaver_pool": 4}, {"weaver_temperature": 1.0}],
)
def test_weaver_options_with_another_algorithm_are_refused(causal, bidirectional, option):
    for head, algorithm in ((causal, "JETFLOW"), (bidirectional, "DDTREE")):
        with pytest.raises(SpecflowConfigError, match=f"{next(iter(option))} with --speculative-algorithm"):
            settings_for(head, algorithm, **option)


def test_a_weaver_of_another_head_or_kind_is_refused(causal, bidirectional, weaver, folder):
    with pytest.raises(SpecflowConfigError, match="dflash_tfm with a causal head"):
        settings_for(causal, "DFLASH_TFM", weaver=str(weaver))
    for changes, named in (
        ({"d_model": 32}, "d_model 32"),
        ({"d_embed": 32}, "d_embed 32"),
        ({"K": 8}, "K 8, the head predicts 7"),
        ({"candidate_pool_size": 99}, "candidate_pool_size 99"),
    ):
        other = make_small_weaver(folder / f"weaver-{next(iter(changes))}", **changes)
        with pytest.raises(SpecflowConfigError, match=named):
            settings_for(bidirectional, "DFLASH_TFM", weaver=str(other))


def test_weights_that_want_more_than_tensors_are_refused(bidirectional, folder):
    class Code:
        def __reduce__(self):
            return os.system, ("true",)

    torch.save({"config": Code(), "state_dict": {}}, folder / "code.pt")
    with pytest.raises(SpecflowConfigError, match="wants code run"):
        settings_for(bidirectional, "DFLASH_TFM", weaver=str(folder / "code.pt"))


def test_a_start_with_a_weaver_says_what_was_resolved(target, bidirectional, weaver):
    flags = {"x": ["--model-path", target, *tree_flags("dflash_tfm", bidirectional, 8)]}
    error, lines = resolve_all(flags, weaver_options(weaver, weaver_width=4, weaver_rounds=2))["x"]
    assert error is None and len(lines) == 1
    assert "dflash_tfm, bidirectional head, budget 8 nodes, depth 7" in lines[0]
    assert f"Weaver {weaver}: 2 rounds of 4 nodes, pool 16, temperature 1" in lines[0]


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field, _fine, _todo", start_checks.CONFLICTS, ids=[row[0] for row in start_checks.CONFLICTS])
def test_conflicting_flags_are_refused_by_name(field, _fine, _todo):
    arguments = types.SimpleNamespace(speculative_algorithm="JETFLOW", **{field: "something else"})
    with pytest.raises(SpecflowConfigError, match="--" + field.replace("_", "-")):
        start_checks.refuse_conflicts(arguments)


@pytest.mark.parametrize("field, value, allowed", [
    ("lora_paths", ["a"], "no --lora-paths"), ("enable_lora", True, "no --enable-lora"), ("pp_size", 2, "--pp-size 1"),
])  # fmt: skip
def test_what_a_refusal_allows_can_be_typed(field, value, allowed):
    arguments = types.SimpleNamespace(speculative_algorithm="JETFLOW", **{field: value})
    with pytest.raises(SpecflowConfigError) as refused:
        start_checks.refuse_conflicts(arguments)
    assert refused.value.allowed == allowed


@pytest.mark.parametrize("ranks, named", [(3, "4 query heads"), (16, "--tp-size 16")])
def test_a_head_that_the_ranks_cannot_share_is_refused(ranks, named):
    head = types.SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)
    with pytest.raises(SpecflowConfigError, match=named):
        start_checks.check_tensor_parallel(head, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_head_that_the_ranks_can_share(ranks):
    head = types.SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)
    start_checks.check_tensor_parallel(head, ranks)


@pytest.mark.parametrize(
    "field, _fine, _todo", start_checks.HYBRID_CONFLICTS, ids=[row[0] for row in start_checks.HYBRID_CONFLICTS]
)
def test_conflicting_flags_of_hybrid_targets_are_refused_by_name(field, _fine, _todo):
    arguments = types.SimpleNamespace(speculative_algorithm="JETFLOW", **{field: "something else"})
    with pytest.raises(SpecflowConfigError, match="--" + field.replace("_", "-")):
        start_checks.refuse_conflicts(arguments, start_checks.HYBRID_CONFLICTS)


@pytest.mark.parametrize("field", ["tp_size", "page_size", "max_running_requests"])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_below_one_are_refused_by_name(field, value):
    arguments = types.SimpleNamespace(tp_size=1, page_size=None, max_running_requests=None)
    start_checks.check_positive(arguments)
    setattr(arguments, field, value)
    with pytest.raises(SpecflowConfigError, match=f"--{field.replace('_', '-')} {value}"):
        start_checks.check_positive(arguments)


@pytest.mark.parametrize(
    "saver, target_kept, head_kept, fine",
    [(True, False, False, False), (True, True, False, True), (True, False, True, True), (False, False, False, True)],
)
def test_a_server_that_sleeps_keeps_the_head(saver, target_kept, head_kept, fine):
    arguments = types.SimpleNamespace(
        enable_memory_saver=saver, enable_weights_cpu_backup=target_kept, enable_draft_weights_cpu_backup=head_kept
    )
    if fine:
        start_checks.check_memory_saver(arguments)
    else:
        with pytest.raises(SpecflowConfigError, match="--enable-draft-weights-cpu-backup"):
            start_checks.check_memory_saver(arguments)


def test_every_conflicting_flag_exists_in_sglang():
    from sglang.srt.arg_groups.arg_utils import field_names
    from sglang.srt.server_args import ServerArgs

    known = field_names(ServerArgs)
    conflicts = [*start_checks.CONFLICTS, *start_checks.HYBRID_CONFLICTS]
    assert [row[0] for row in conflicts if row[0] not in known] == []


@pytest.mark.parametrize("asked, explicit", [("fp8", False), (None, False), (None, True)])
def test_the_head_does_not_take_the_targets_quantization(asked, explicit):
    arguments = types.SimpleNamespace(
        speculative_draft_model_quantization=asked, _speculative_draft_quantization_explicitly_set=explicit
    )
    start_checks.keep_head_as_stored(arguments)
    assert arguments.speculative_draft_model_quantization is None


# --- heads and targets, through SGLang's own resolution ---------------------------------------------------------------


def broken_head(folder, causal, how):
    if how == "missing":
        return folder / "nothing-here"
    copy = folder / how.replace(" ", "-")
    shutil.copytree(causal, copy, dirs_exist_ok=True)
    if how == "no weights":
        for file in copy.glob("*.safetensors"):
            file.unlink()
    elif how == "cut short":
        file = next(copy.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:200])
    elif how == "no config":
        (copy / "config.json").unlink()
    return copy


def other_head(folder, **changes):
    config = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCABULARY, num_target_layers=3, target_layer_ids=[0, 1], mask_token_id=3,
        causal_head=True, block_size=8,
    )  # fmt: skip
    make_random_head(head_config(**{**config, **changes}), folder, dtype=torch.float32)
    return folder


def config_only(folder, **fields):
    """A target of which only config.json exists."""
    folder.mkdir(exist_ok=True)
    config = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, torch_dtype="float32",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def edited_head(folder, causal, **fields):
    """A copy of the head whose config.json says something else; fields of dflash_config with two underscores."""
    shutil.copytree(causal, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        place, name = (config["dflash_config"], name.removeprefix("dflash__")) if "__" in name else (config, name)
        place[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


BROKEN = ["missing", "no weights", "cut short", "no config"]
EDITED = {
    "target_layer_ids [1, 0]": {"dflash__target_layer_ids": [1, 0]},
    "target_layer_ids [1, 1]": {"dflash__target_layer_ids": [1, 1]},
    "cannot be read (TypeError": {"dflash__target_layer_ids": 1},
    "causal_head 'false'": {"dflash__causal_head": "false"},
    "cannot be read (AttributeError": {"dflash_config": "x"},
    "with a head for 64 positions": {"max_position_embeddings": 64},
}
FLAGS = {
    "--speculative-draft-model-quantization fp8": ["--speculative-draft-model-quantization", "fp8"],
    "--lora-paths": ["--lora-paths", "a=/x"],
    "KV pool of 30 tokens": ["--max-total-tokens", "30"],
}
OTHER_HEADS = {
    "hidden_size 32": {"hidden_size": 32},
    "vocab_size 32": {"vocab_size": 32},
    "num_target_layers 9": {"num_target_layers": 9, "target_layer_ids": [0, 7]},
    "mask_token_id 40": {"vocab_size": 64, "mask_token_id": 40},
}
MLA = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
UNSUPPORTED = {
    "MLA attention": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "n_routed_experts": 4,
        **MLA,
    },
    "an encoder": {"architectures": ["BertModel"], "model_type": "bert"},
    "Mamba": {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"},
}


@pytest.fixture(scope="module")
def resolved(folder, target, causal, bidirectional):
    """Every case at once: importing SGLang takes far longer than resolving."""
    model = ["--model-path", target]
    cases = {
        "fine": [*model, *tree_flags("jetflow", causal, 8)],
        "upper case": [*model, *tree_flags("JetSpec", causal, 8)],
        "plain": model,
        "no head": [*model, "--speculative-algorithm", "jetflow"],
        "pipeline": [*model, *tree_flags("jetflow", causal, 8), "--pp-size", "2"],
        "no weaver": [*model, *tree_flags("dflash_tfm", bidirectional, 8)],
    }
    for how in BROKEN:
        cases[how] = [*model, *tree_flags("jetflow", broken_head(folder, causal, how), 8)]
    for number, (named, changes) in enumerate(OTHER_HEADS.items()):
        cases[named] = [*model, *tree_flags("jetflow", other_head(folder / f"other-{number}", **changes), 8)]
    for number, (named, fields) in enumerate(EDITED.items()):
        cases[named] = [*model, *tree_flags("jetflow", edited_head(folder / f"edited-{number}", causal, **fields), 8)]
    for named, flags in FLAGS.items():
        cases[named] = [*model, *tree_flags("jetflow", causal, 8), *flags]
    not_an_object = edited_head(folder / "not-an-object", causal)
    (not_an_object / "config.json").write_text("[]")
    cases["not an object"] = [*model, *tree_flags("jetflow", not_an_object, 8)]
    broken_index = edited_head(folder / "broken-index", causal)
    (broken_index / "model.safetensors.index.json").write_text("{")
    cases["broken index"] = [*model, *tree_flags("jetflow", broken_index, 8)]
    hybrid = make_small_hybrid_target(folder / "hybrid")
    head = make_small_head(folder / "hybrid-head", causal=True, num_target_layers=4, target_layer_ids=[0, 2])
    cases["hybrid"] = ["--model-path", hybrid, *tree_flags("jetflow", head, 8)]
    twin = make_multimodal_twin(hybrid, folder / "twin")
    cases["multimodal"] = ["--model-path", twin, *tree_flags("jetflow", head, 8)]
    text_only = ["--json-model-override-args", '{"language_model_only": true}']
    cases["multimodal, text only"] = [*cases["multimodal"], *text_only]
    cases["hybrid, lazy"] = [*cases["hybrid"], "--mamba-radix-cache-strategy", "extra_buffer_lazy"]
    for number, (named, fields) in enumerate(UNSUPPORTED.items()):
        path = config_only(folder / f"target-{number}", **fields)
        cases[named] = ["--model-path", path, "--skip-tokenizer-init", *tree_flags("jetflow", causal, 8)]
    return resolve_all(cases)


def test_one_log_line_says_what_was_resolved(resolved):
    for name, algorithm in (("fine", "jetflow"), ("upper case", "jetspec")):
        error, lines = resolved[name]
        assert error is None
        assert [
            line for line in lines if "causal head, budget 8 nodes, depth 7, width 16" in line and algorithm in line
        ]
        assert len(lines) == 1


def test_a_hybrid_target_starts_with_the_cache_strategies_that_are_served(resolved):
    assert resolved["hybrid"][0] is None
    error, _ = resolved["hybrid, lazy"]
    assert error.startswith("SpecflowConfigError") and "--mamba-radix-cache-strategy extra_buffer_lazy" in error


def test_a_multimodal_target_starts_as_a_language_model(resolved):
    assert resolved["multimodal, text only"][0] is None
    error, _ = resolved["multimodal"]
    assert error.startswith("SpecflowConfigError") and "language_model_only" in error


def test_a_plain_start_needs_no_head(resolved):
    assert resolved["plain"] == (None, [])


@pytest.mark.parametrize("how", BROKEN)
def test_a_missing_or_half_checkpoint_is_refused(resolved, folder, how):
    error, _ = resolved[how]
    assert error.startswith("SpecflowConfigError")
    assert ("nothing-here" if how == "missing" else str(folder / how.replace(" ", "-"))) in error


@pytest.mark.parametrize("named", OTHER_HEADS)
def test_a_head_for_another_target_is_refused(resolved, named):
    error, _ = resolved[named]
    assert error.startswith("SpecflowConfigError") and named in error


@pytest.mark.parametrize("named", [*EDITED, *FLAGS])
def test_what_would_fail_later_is_refused_first(resolved, named):
    error, _ = resolved[named]
    assert error and error.startswith("SpecflowConfigError") and named in error


@pytest.mark.parametrize("name", ["not an object", "broken index"])
def test_files_that_do_not_parse_are_named(resolved, folder, name):
    error, _ = resolved[name]
    assert error.startswith("SpecflowConfigError") and str(folder / name.replace(" ", "-")) in error


@pytest.mark.parametrize("named", UNSUPPORTED)
def test_an_unsupported_target_is_refused(resolved, named):
    error, _ = resolved[named]
    assert error.startswith("SpecflowConfigError")
    assert named in error and "without --speculative-algorithm" in error


def test_a_start_without_a_head_is_refused(resolved):
    assert "no --speculative-draft-model-path" in resolved["no head"][0]


def test_a_start_without_a_weaver_is_refused(resolved):
    assert "without a Weaver" in resolved["no weaver"][0] and "SGL_SPECFLOW_OPTIONS" in resolved["no weaver"][0]


def test_pipeline_parallelism_is_refused(resolved):
    assert "--pp-size" in resolved["pipeline"][0] or "pp-size" in resolved["pipeline"][0]


def test_a_real_server_stops_with_the_message_last(folder, target, bidirectional):
    with pytest.raises(ServerError, match="bidirectional head"):
        serve(target, folder / "refused.log", *tree_flags("jetflow", bidirectional, 8))


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_all_hooks_take_hold(target, causal):
    """In SGLang's own process, after its plugins are loaded."""
    script = (
        "from sglang.srt.plugins import load_plugins; load_plugins(); from sgl_specflow.runtime import hooks; "
        "hooks.check_applied(); print(len(hooks.required_hooks()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= 5


def test_a_hook_whose_target_is_gone_is_named():
    gone = hooks.Hook("sglang.srt.no_such_module.function", print, hooks.HookType.AROUND)
    unwrapped = hooks.Hook("sglang.srt.mem_cache.allocation_sizing.get_alloc_page_size", print, hooks.HookType.AROUND)
    with pytest.raises(SpecflowConfigError, match="no_such_module.function, sglang.srt.mem_cache"):
        hooks.check_applied([gone, unwrapped])


SABOTEUR = """
    def register():
        from sglang.srt.plugins.hook_registry import HookRegistry
        apply = HookRegistry._apply_target.__func__

        def fail_for_ours(cls, target, hooks):
            if target.endswith("get_alloc_len_per_decode"):
                raise RuntimeError("sabotaged")
            return apply(cls, target, hooks)

        HookRegistry._apply_target = classmethod(fail_for_ours)
"""


def test_a_start_with_a_hook_that_failed_to_apply_is_stopped(tmp_path, target, causal):
    environment = plugin_environment(tmp_path / "plugin", SABOTEUR)
    error, _ = resolve_all({"x": ["--model-path", target, *tree_flags("jetflow", causal, 8)]}, environment)["x"]
    assert "hooks that did not take hold" in error and "get_alloc_len_per_decode" in error
