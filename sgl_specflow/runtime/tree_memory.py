"""How much KV memory a tree step may take, told to SGLang's scheduler.

Two readings of `srt/mem_cache/allocation_sizing.py` do not fit a tree that is drafted in one pass:

- a decode step is taken to need `num_steps * eagle_topk` slots. Our tree needs its budget and no more, whatever its
  depth and width; and the scheduler's estimate must equal what the draft input reserves (2 * budget).
- a request's row holds `context_len + 4 + budget` slots at page size 1, while a step reserves up to 2 * budget past
  the committed length: near the end of the context window the reservation ran into the next request's row.
"""

from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_spec

from sgl_specflow.runtime.names import is_tree_algorithm


def alloc_len_per_decode(original) -> int:
    """KV slots that one request may take in one step: the budget."""
    spec = get_spec()
    if is_tree_algorithm(spec.speculative_algorithm):
        return int(spec.speculative_num_draft_tokens)
    return original()


def extra_context_len(original) -> int:
    """Slots of a request's row beyond the context length: all that a step may reserve, in whole pages."""
    extra = original()
    if is_tree_algorithm(get_spec().speculative_algorithm):
        reserve = allocation_sizing.get_alloc_reserve_per_decode()
        extra = max(extra, reserve + allocation_sizing.get_alloc_page_size() - 1)
    return extra


HOOKS = [
    ("sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode", alloc_len_per_decode, HookType.AROUND),
    ("sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len", extra_context_len, HookType.AROUND),
]
