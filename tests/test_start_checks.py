"""A start that cannot work is refused before weights load, with an error that names what was given and what to do."""

import json
import subprocess
import sys
import types

import pytest
import torch
from injected import plugin_environment
from served import VOCABULARY, make_small_head, make_small_target, serve, tree_flags
from sgl_specflow.drafter.make import head_config, make_random_head
from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.launch.server import ServerError
from sgl_specflow.runtime import hooks, start_checks
from sgl_specflow.runtime.settings import Options, TreeSettings
from tiny_models import make_tiny_llama


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
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(json.loads(sys.argv[1]))
args.resolve_once()
"""


def resolve(*flags: str, environment: dict | None = None) -> subprocess.CompletedProcess:
    """SGLang's own resolution of command-line flags in a fresh process, without loading a model."""
    import os

    return subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps([str(flag) for flag in flags])],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
    )


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


@pytest.mark.parametrize("text", ["{", "[]", '{"path": true}', '{"path_refresh": 1}'])
def test_unknown_options_are_refused(monkeypatch, text):
    monkeypatch.setenv("SGL_SPECFLOW_OPTIONS", text)
    with pytest.raises(SpecflowConfigError, match="SGL_SPECFLOW_OPTIONS"):
        Options.from_environment()


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field, _fine, _todo", start_checks.CONFLICTS, ids=[row[0] for row in start_checks.CONFLICTS])
def test_conflicting_flags_are_refused_by_name(field, _fine, _todo):
    arguments = types.SimpleNamespace(speculative_algorithm="JETFLOW", **{field: "something else"})
    with pytest.raises(SpecflowConfigError, match="--" + field.replace("_", "-")):
        start_checks.refuse_conflicts(arguments)


def test_every_conflicting_flag_exists_in_sglang():
    from sglang.srt.arg_groups.arg_utils import field_names
    from sglang.srt.server_args import ServerArgs

    known = field_names(ServerArgs)
    assert [row[0] for row in start_checks.CONFLICTS if row[0] not in known] == []


def test_one_log_line_says_what_was_resolved(target, causal):
    done = resolve("--model-path", target, *tree_flags("jetflow", causal, 8))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("sgl_specflow: jetflow, causal head, budget 8 nodes, depth 7, width 16") == 1


# --- heads and targets, through SGLang's own resolution ---------------------------------------------------------------


def broken_head(folder, causal, how):
    import shutil

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


@pytest.mark.parametrize("how", ["missing", "no weights", "cut short", "no config"])
def test_a_missing_or_half_checkpoint_is_refused(folder, target, causal, how):
    path = broken_head(folder, causal, how)
    done = resolve("--model-path", target, *tree_flags("jetflow", path, 8))
    assert done.returncode != 0
    assert "SpecflowConfigError" in done.stderr and str(path) in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"hidden_size": 32}, "hidden_size 32"),
        ({"vocab_size": 32}, "vocab_size 32"),
        ({"num_target_layers": 9, "target_layer_ids": [0, 7]}, "num_target_layers 9"),
        ({"vocab_size": 64, "mask_token_id": 40}, "mask_token_id 40"),
    ],
)
def test_a_head_for_another_target_is_refused(folder, target, changes, named):
    path = other_head(folder / "-".join(changes), **changes)
    done = resolve("--model-path", target, *tree_flags("jetflow", path, 8))
    assert done.returncode != 0 and "SpecflowConfigError" in done.stderr
    assert named in done.stderr, done.stderr[-2000:]


def test_a_start_without_a_head_is_refused(target):
    done = resolve("--model-path", target, "--speculative-algorithm", "jetflow")
    assert done.returncode != 0 and "no --speculative-draft-model-path" in done.stderr


UNSUPPORTED = {
    "MLA": ({"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 9}, "MLA attention"),
    "encoder": ({"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 128}, "an encoder"),
    "mamba layers": ({"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}, "Mamba"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_an_unsupported_target_is_refused(folder, causal, kind):
    more, named = UNSUPPORTED[kind]
    path = folder / kind.replace(" ", "-")
    path.mkdir(exist_ok=True)
    config = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, torch_dtype="float32",
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps({**config, **more}))
    done = resolve("--model-path", path, "--skip-tokenizer-init", *tree_flags("jetflow", causal, 8))
    assert done.returncode != 0 and "SpecflowConfigError" in done.stderr, done.stderr[-3000:]
    assert named in done.stderr and "without --speculative-algorithm" in done.stderr


def test_a_real_server_stops_with_the_message_last(folder, target, bidirectional):
    with pytest.raises(ServerError, match="bidirectional head"):
        serve(target, folder / "refused.log", *tree_flags("jetflow", bidirectional, 8))


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_all_hooks_take_hold(target, causal):
    """In SGLang's own process, after its plugins are loaded."""
    script = "from sglang.srt.plugins import load_plugins; load_plugins(); from sgl_specflow.runtime import hooks; hooks.check_applied(); print(len(hooks.required_hooks()))"
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
    done = resolve("--model-path", target, *tree_flags("jetflow", causal, 8), environment=environment)
    assert done.returncode != 0
    assert "hooks that did not take hold" in done.stderr and "get_alloc_len_per_decode" in done.stderr


def test_a_plain_start_needs_no_head(tmp_path):
    done = resolve("--model-path", make_tiny_llama(tmp_path / "llama"))
    assert done.returncode == 0, done.stderr[-2000:]
