"""What a request may ask of a tree server: refused with SGLang's 400 before it is queued, so that no other suffers."""

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_exec, get_spec

from sgl_specflow.runtime.names import is_tree_algorithm


def refuse_request(original, req, enable_overlap: bool) -> str | None:
    """Around validate_dflash_request: the message of a refusal, or None."""
    if not is_tree_algorithm(get_spec().speculative_algorithm):
        return original(req, enable_overlap)
    if req.return_hidden_states:
        return "return_hidden_states is not supported with tree speculative decoding; leave it out."
    if req.return_sampling_mask:
        return "return_sampling_mask is not supported with tree speculative decoding; leave it out."
    deterministic = get_exec().deterministic.enable_deterministic_inference
    if deterministic and req.sampling_params.min_p > 0 and req.sampling_params.top_k != 1:
        # SGLang's seeded sampler asserts that there is none, which would end the scheduler.
        return "min_p is not supported with --enable-deterministic-inference; give min_p 0."
    return None


def refuse_tokens(_original, manager, obj, input_ids) -> None:
    """Around TokenizerManager._validate_one_request: what would end the server is a ValueError, hence a 400."""
    if input_ids is not None and len(input_ids) == 0 and getattr(obj, "input_embeds", None) is None:
        raise ValueError("The prompt has no tokens. Give at least one.")
    if is_tree_algorithm(get_spec().speculative_algorithm):
        _check_vocabulary(obj, input_ids, manager.model_config.vocab_size)
    _original(manager, obj, input_ids)
    # Last: to load a processor is to run the sender's code, so SGLang must have found that this server allows it.
    processor = getattr(obj, "custom_logit_processor", None)
    if processor is not None and get_exec().features.enable_custom_logit_processor:
        _check_processor(processor)


def _check_vocabulary(obj, input_ids, vocab_size: int) -> None:
    if input_ids and not 0 <= min(input_ids) <= max(input_ids) < vocab_size:
        outside = min(input_ids) if min(input_ids) < 0 else max(input_ids)
        raise ValueError(f"input_ids holds {outside}, outside the vocabulary of {vocab_size} tokens.")
    most = getattr(obj, "top_logprobs_num", None)
    if isinstance(most, int) and most > vocab_size:
        raise ValueError(f"top_logprobs_num {most} is more than the vocabulary of {vocab_size} tokens.")


def _check_processor(text) -> None:
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    for one in text if isinstance(text, list) else [text]:
        if one is None:
            continue
        try:
            CustomLogitProcessor.from_str(one)
        except Exception as error:  # it holds pickled code: anything may go wrong
            raise ValueError(f"custom_logit_processor cannot be loaded ({type(error).__name__}: {error}).") from error


def refuse_sampling(_result, params, vocab_size: int) -> None:
    """After SamplingParams.verify: SGLang's minimum-length penaliser indexes logits with the stop tokens."""
    outside = [token for token in params.stop_token_ids or () if not 0 <= token < vocab_size]
    if outside and params.min_new_tokens > 0:
        raise ValueError(f"stop_token_ids {outside} lie outside the vocabulary of {vocab_size} tokens.")


HOOKS = [
    ("sglang.srt.speculative.dflash_utils.validate_dflash_request", refuse_request, HookType.AROUND),
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        refuse_tokens,
        HookType.AROUND,
    ),
    ("sglang.srt.sampling.sampling_params.SamplingParams.verify", refuse_sampling, HookType.AFTER),
]
