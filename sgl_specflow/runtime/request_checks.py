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


HOOKS = [
    ("sglang.srt.speculative.dflash_utils.validate_dflash_request", refuse_request, HookType.AROUND),
]
