"""How much KV memory a tree step may take, told to SGLang's scheduler.

Three readings of `srt/mem_cache/allocation_sizing.py` do not fit a tree that is drafted in one pass:

- a decode step is taken to need `num_steps * eagle_topk` slots. Our tree needs its budget and no more, whatever its
  depth and width; and the scheduler's estimate must equal what the draft input reserves (2 * budget).
- a request's row holds `context_len + 4 + budget` slots at page size 1, while a step reserves up to 2 * budget past
  the committed length: near the end of the context window the reservation ran into the next request's row.
- a request may be as long as the KV pool, which leaves nothing for the reservation.
"""

from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_spec

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.runtime.names import is_tree_algorithm

LEAST_REQUEST = 16  # tokens


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


def request_limits(info: tuple, worker) -> tuple:
    """After TpModelWorker.get_worker_info: the longest request leaves room in the KV pool for its own reservation.

    Otherwise a request that is as long as the pool is admitted and dies half way, with nothing left to retract.
    """
    if not is_tree_algorithm(get_spec().speculative_algorithm) or worker.is_draft_worker:
        return info
    pool, longest, longest_input = info[0], info[4], info[5]
    room = pool - allocation_sizing.get_alloc_reserve_per_decode() - allocation_sizing.get_alloc_page_size()
    check_pool(pool, allocation_sizing.get_alloc_len_per_decode(), allocation_sizing.get_alloc_page_size())
    cut = max(0, longest - room)
    return (*info[:4], longest - cut, longest_input - cut, *info[6:])


def check_pool(pool: int, budget: int, page_size: int) -> None:
    """Raise SpecflowConfigError unless a request of some length fits beside what one step reserves."""
    least = 2 * budget + page_size + LEAST_REQUEST
    if pool < least:
        raise SpecflowConfigError(
            given=f"a KV pool of {pool} tokens with a budget of {budget}",
            allowed=f"at least {least} tokens, since a request reserves twice the budget beyond its length",
            todo="raise --max-total-tokens or --mem-fraction-static, or lower --speculative-num-draft-tokens",
        )


HOOKS = [
    ("sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info", request_limits, HookType.AFTER),
    ("sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode", alloc_len_per_decode, HookType.AROUND),
    ("sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len", extra_context_len, HookType.AROUND),
]
