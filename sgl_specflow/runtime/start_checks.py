"""What a start with a tree algorithm must satisfy, checked before any weight is loaded.

Called while SGLang resolves its arguments. Each refusal names what was given, what is allowed and what to do.
"""

import logging
from pathlib import Path

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils.common import get_device_memory_capacity

from sgl_specflow.drafter.checkpoint import check_checkpoint
from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.runtime.names import is_tree_algorithm
from sgl_specflow.runtime.settings import OPTIONS_VARIABLE, Options, TreeSettings
from sgl_specflow.runtime.tree_memory import check_pool, default_requests

logger = logging.getLogger(__name__)

# Flags that a tree worker does not serve: (field of ServerArgs, values that are fine, why or what to do instead).
CONFLICTS = [
    ("pp_size", (1,), "pipeline parallelism is not supported; use one GPU a server, and --dp-size for more"),
    ("enable_dp_attention", (False, None), "data-parallel attention is not supported; use --dp-size alone"),
    ("ep_size", (1, None), "expert parallelism is not tested with trees; use --tp-size alone"),
    ("attn_cp_size", (1, None), "context parallelism is not supported"),
    ("dcp_size", (1, None), "decode context parallelism is not supported"),
    ("disaggregation_mode", ("null", None), "serve prefill and decode from one server"),
    ("enable_two_batch_overlap", (False, None), "leave it out"),
    ("enable_pdmux", (False, None), "leave it out"),
    ("enable_unified_memory", (False, None), "leave it out"),
    ("enable_hierarchical_cache", (False, None), "leave it out"),
    ("enable_lora", (False, None), "the head is trained for the bare target; merge the adapter into it"),
    ("lora_paths", (None, []), "the head is trained for the bare target; merge the adapter into it"),
    ("enable_multi_layer_eagle", (False, None), "leave it out"),
    ("enable_watermark", (False, None), "leave it out"),
    ("enable_mixed_chunk", (False, None), "leave it out"),
    (
        "kv_cache_dtype",
        ("auto", "bf16", "bfloat16", "fp8_e4m3"),
        "tree attention reads keys and values in the model's dtype or fp8_e4m3; use one of them",
    ),
    (
        "speculative_draft_kv_cache_dtype",
        (None, "auto", "bf16", "bfloat16", "fp8_e4m3"),
        "tree attention reads keys and values in the model's dtype or fp8_e4m3; use one of them",
    ),
    ("enable_return_hidden_states", (False, None), "leave it out"),
    ("speculative_adaptive", (False, None), "the budget is fixed at start; leave it out"),
    ("speculative_use_rejection_sampling", (False, None), "acceptance is exact already; leave it out"),
    ("speculative_use_block_verification", (False, None), "acceptance is exact already; leave it out"),
    (
        "speculative_accept_threshold_single",
        (1.0, None),
        "a threshold below 1 changes the output's distribution; leave it out",
    ),
    (
        "speculative_accept_threshold_acc",
        (1.0, None),
        "a threshold below 1 changes the output's distribution; leave it out",
    ),
    ("speculative_token_map", (None,), "the head uses the target's whole vocabulary; leave it out"),
    (
        "speculative_dflash_block_size",
        (None,),
        "the block is the head's; use --speculative-num-draft-tokens for the budget",
    ),
    ("speculative_draft_window_size", (None,), "the window is the head's; leave it out"),
]

# The same for targets with Gated Delta Net layers.
HYBRID_CONFLICTS = [
    (
        "mamba_radix_cache_strategy",
        ("auto", "no_buffer", "extra_buffer"),
        "use --mamba-radix-cache-strategy extra_buffer or no_buffer, or leave it out",
    ),
    ("enable_linear_replayssm", (False, None), "a tree verify keeps no state a node already; leave it out"),
    ("enable_linear_replayssm_spec", (False, None), "a tree verify keeps no state a node already; leave it out"),
    ("enable_int8_mamba_checkpoint", (False, None), "leave it out"),
    ("enable_page_major_kv_layout", (False, None), "leave it out"),
    ("enable_streaming_session", (False, None), "leave it out"),
    ("mamba_ssm_dtype", (None, "float32", "bfloat16"), "use --mamba-ssm-dtype float32 or bfloat16, or leave it out"),
]

# Architectures whose linear layers are Gated Delta Net as SGLang's GDN backend runs them.
HYBRID_ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
TEXT_ONLY = """--json-model-override-args '{"language_model_only": true}'"""


def resolve_server_args(algorithm: str, server_args) -> None:
    """Check everything and write budget, depth, width and request limit into server_args (SGLang's stand-in)."""
    from sgl_specflow.runtime import hooks

    hooks.check_applied()
    refuse_conflicts(server_args)
    check_positive(server_args)
    check_memory_saver(server_args)
    keep_head_as_stored(server_args)
    head = load_head_config(server_args)
    settings = TreeSettings.resolve(
        algorithm,
        head,
        server_args.speculative_num_draft_tokens,
        server_args.speculative_num_steps,
        server_args.speculative_eagle_topk,
        Options.from_environment(),
    )
    check_target(head, server_args)
    check_tensor_parallel(head, server_args.tp_size or 1)
    if server_args.max_total_tokens is not None:
        check_pool(server_args.max_total_tokens, settings.budget, server_args.page_size or 1)
    server_args.speculative_num_draft_tokens = settings.budget
    server_args.speculative_num_steps = settings.depth
    server_args.speculative_eagle_topk = settings.width
    if server_args.max_running_requests is None:
        server_args.max_running_requests = default_requests(
            get_device_memory_capacity(server_args.device), settings.budget, head.vocab_size
        )
    logger.info(settings.describe())


def keep_head_as_stored(server_args) -> None:
    """SGLang quantises a draft model as --quantization says for the target; a tree's head is served as its folder has it."""
    asked = server_args.speculative_draft_model_quantization
    if asked is not None and server_args._speculative_draft_quantization_explicitly_set:
        raise SpecflowConfigError(
            given=f"--speculative-draft-model-quantization {asked}",
            allowed="a head as its folder has it, or FP8 copies of its large matrices",
            todo=f"""leave the flag out; for FP8 set {OPTIONS_VARIABLE}='{{"fp8_draft": true}}'""",
        )
    server_args.speculative_draft_model_quantization = None


def check_head_first(server_args) -> None:
    """Before handle_speculative_decoding, which reads the head's config and fails in other words than ours."""
    arguments = resolving_view(server_args)
    if is_tree_algorithm(arguments.speculative_algorithm):
        load_head_config(arguments)


def refuse_conflicts(server_args, conflicts=CONFLICTS) -> None:
    """Raise for the first flag that a tree worker does not serve."""
    for field, fine, todo in conflicts:
        value = getattr(server_args, field, fine[0])
        if value not in fine:
            flag = "--" + field.replace("_", "-")
            raise SpecflowConfigError(
                given=f"{flag} {value} with --speculative-algorithm {server_args.speculative_algorithm.lower()}",
                allowed=f"{flag} {fine[0]}" if fine[0] not in (None, False) else f"no {flag}",
                todo=todo,
            )


def check_positive(server_args) -> None:
    """Numbers that SGLang takes unseen and fails on later, in other words."""
    for field in ("tp_size", "page_size", "max_running_requests"):
        value = getattr(server_args, field)
        if value is not None and value < 1:
            flag = "--" + field.replace("_", "-")
            raise SpecflowConfigError(
                given=f"{flag} {value}", allowed="1 or more", todo=f"leave {flag} out, or mend it"
            )


def check_memory_saver(server_args) -> None:
    """A server that sleeps loses the head's weights unless they are kept on the host: no weight update brings them back."""
    kept = server_args.enable_weights_cpu_backup or server_args.enable_draft_weights_cpu_backup
    if server_args.enable_memory_saver and not kept:
        raise SpecflowConfigError(
            given="--enable-memory-saver without a backup of the head's weights",
            allowed="--enable-memory-saver with --enable-draft-weights-cpu-backup or --enable-weights-cpu-backup",
            todo="add --enable-draft-weights-cpu-backup",
        )


def draft_folder(server_args) -> Path:
    """The head's folder; a hub id is fetched first."""
    given = server_args.speculative_draft_model_path
    if not given:
        raise SpecflowConfigError(
            given="no --speculative-draft-model-path",
            allowed="the folder or hub id of a draft head that was trained for this target",
            todo="add --speculative-draft-model-path; a head for SmolLM2-135M-Instruct comes with sgl_specflow",
        )
    folder = Path(given).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or given.startswith(".") or given.count("/") != 1:
        raise SpecflowConfigError(
            given=f"--speculative-draft-model-path {given}, which is no folder",
            allowed="a folder with config.json and safetensors files, or a hub id of the form owner/name",
            todo="mend the path",
        )
    return _fetch(given, server_args.speculative_draft_model_revision)


def _fetch(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub raises a dozen kinds; each means the same to the user
        raise SpecflowConfigError(
            given=f"--speculative-draft-model-path {hub_id}, which could not be fetched ({error})",
            allowed="a folder, or a hub id that this machine reaches",
            todo="check the name and the network, unset HF_HUB_OFFLINE, or download the head and give its folder",
        ) from error


def load_head_config(server_args) -> HeadConfig:
    """The head's config; its tensors are checked too unless they are to be made up (--load-format dummy)."""
    folder = draft_folder(server_args)
    load_format = getattr(server_args, "speculative_draft_load_format", None) or server_args.load_format
    return HeadConfig.load(folder) if str(load_format).endswith("dummy") else check_checkpoint(folder)


def check_target(head: HeadConfig, server_args) -> None:
    """Raise unless the target is one that a tree worker serves and the head was made for."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    # SGLang hands plugins a stand-in that records writes; its view of the arguments is what model_config_of takes.
    model = model_config_of(server_args._cfg)
    name = server_args.model_path
    if not model.is_generation or model.is_encoder_decoder:
        _refuse_target(name, "an encoder or embedding model", "a decoder that generates text")
    if model.attention_arch != AttentionArch.MHA:
        _refuse_target(name, f"{model.attention_arch.name} attention", "multi-head or grouped-query attention")
    if mambaish_config(model) is not None:
        _check_hybrid(model, server_args)
    if model.is_hybrid_swa:
        _refuse_target(name, "a split cache for sliding-window layers", "one cache for all layers")
    if model.is_multimodal:
        raise SpecflowConfigError(
            given=f"the target {name} with image or audio inputs",
            allowed="text",
            todo=f"serve its language model alone with {TEXT_ONLY}, where SGLang's class can (the Qwen3.5 and Qwen3.6 "
            "ones do), or serve it without --speculative-algorithm",
        )
    _check_hidden_capture(model, name)
    text = model.hf_text_config
    if model.context_len > head.max_position_embeddings:
        raise SpecflowConfigError(
            given=f"a context length of {model.context_len} with a head for {head.max_position_embeddings} positions",
            allowed=f"--context-length up to {head.max_position_embeddings}",
            todo="lower --context-length, or raise max_position_embeddings in the head's config.json if it was trained so",
        )
    head.check_against_target(text.hidden_size, model.vocab_size, text.num_hidden_layers, name)


def check_tensor_parallel(head: HeadConfig, ranks: int) -> None:
    """Raise unless `ranks` can share the head as SGLang's models/dflash.py cuts it."""
    if ranks == 1:
        return
    queries, keys = head.num_attention_heads, head.num_key_value_heads
    if queries % ranks or (keys % ranks and ranks % keys) or head.intermediate_size % ranks:
        raise SpecflowConfigError(
            given=f"--tp-size {ranks} with a head of {queries} query heads, {keys} key heads and intermediate size "
            f"{head.intermediate_size}",
            allowed="a size that divides query heads and intermediate size, and divides the key heads or is divided by them",
            todo="choose another --tp-size",
        )


def _check_hybrid(model, server_args) -> None:
    """Of the targets with layers that keep a state, those with Gated Delta Net layers are served."""
    architecture = model.hf_config.architectures[0]
    if architecture not in HYBRID_ARCHITECTURES:
        _refuse_target(
            server_args.model_path,
            f"linear-attention or Mamba layers of {architecture}",
            f"attention in every layer, or Gated Delta Net layers of {', '.join(HYBRID_ARCHITECTURES)}",
        )
    refuse_conflicts(server_args, HYBRID_CONFLICTS)


def _check_hidden_capture(model, name: str) -> None:
    from sglang.srt.models.registry import ModelRegistry

    target_class, _ = ModelRegistry.resolve_model_cls(model.hf_config.architectures)
    if not hasattr(target_class, "set_dflash_layers_to_capture"):
        _refuse_target(
            name,
            f"class {target_class.__name__}, which hands out no hidden states",
            "a class of SGLang with set_dflash_layers_to_capture",
        )


def _refuse_target(name: str, given: str, allowed: str) -> None:
    raise SpecflowConfigError(
        given=f"the target {name} with {given}", allowed=allowed, todo="serve it without --speculative-algorithm"
    )


HOOKS = [
    ("sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding", check_head_first, HookType.BEFORE),
]
