"""How much KV memory a tree step may take, told to SGLang's scheduler.

Three readings of `srt/mem_cache/allocation_sizing.py` do not fit a tree that is drafted in one pass:

- a decode step is taken to need `num_steps * eagle_topk` slots. Our tree needs its budget and no more, whatever its
  depth and width; and the scheduler's estimate must equal what the draft input reserves (2 * budget).
- a request's row holds `context_len + 4 + budget` slots at page size 1, while a step reserves up to 2 * budget past
  the committed length: near the end of the context window the reservation ran into the next request's row.
- a request may be as long as the KV pool, which leaves nothing for the reservation.

And one of `srt/mem_cache/kv_cache_configurator.py`: a verify pass scores `budget` rows a request over the whole vocabulary,
which SGLang's reserve for activations does not know. It is taken off what the KV pool is made of.
"""

import logging

from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_exec, get_schedule, get_spec

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.runtime.names import is_tree_algorithm

logger = logging.getLogger(__name__)

LEAST_REQUEST = 16  # tokens
LEAST_DEFAULT_REQUESTS, MOST_DEFAULT_REQUESTS = 4, 48
STEP_SHARE = 0.06  # of a device's memory, for the logits of all nodes that the default number of requests verifies
GIB = 2**30


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


def default_requests(memory_mib: float | None, budget: int, vocabulary: int) -> int:
    """Requests at once where the user names no number: as many as verify in 6 % of the device's memory, 4 to 48."""
    if memory_mib is None:
        return MOST_DEFAULT_REQUESTS
    fit = int(STEP_SHARE * memory_mib * 2**20 / step_bytes(1, budget, vocabulary, 0, 0, []))
    return max(LEAST_DEFAULT_REQUESTS, min(MOST_DEFAULT_REQUESTS, fit))


def step_bytes(requests: int, budget: int, vocabulary: int, hidden: int, hidden_bytes: int, captured: list[int]) -> int:
    """GPU memory that verifying takes beside weights and KV.

    Args:
        requests: the most that run at once. vocabulary: of the target. hidden: numbers of the captured layers a token, of
            hidden_bytes each. captured: batch sizes of the target's CUDA graphs.

    The float32 logits of all nodes, kept for the graphs, and three times as much for a sampled batch (its log-probabilities
    need a copy, SGLang's softmax and filters make further ones); the hidden states that each captured graph
    keeps, and our copy.
    """
    rows = requests * budget
    return 4 * rows * vocabulary * 4 + (sum(captured) + requests) * budget * hidden * hidden_bytes


def reserve_step_memory(original, configurator, pre_model_load_memory) -> int:
    """Around KVCacheConfigurator._profile_available_bytes: bytes for the KV pool, what a step takes left out."""
    available = original(configurator, pre_model_load_memory)
    spec = get_spec()
    if (
        not is_tree_algorithm(spec.speculative_algorithm)
        or configurator.is_draft_worker
        or not str(configurator.device).startswith("cuda")
    ):
        return available
    from sgl_specflow.drafter.config import HeadConfig
    from sgl_specflow.runtime.start_checks import draft_folder

    model, budget = configurator.model_config, int(spec.speculative_num_draft_tokens)
    requests = int(get_schedule().max_running_requests)
    sizes = get_exec().graph.cuda_graph_config.decode.bs or []
    captured = [size for size in sizes if size <= requests]
    head = HeadConfig.load(draft_folder(spec))
    taken = step_bytes(requests, budget, model.vocab_size, head.context_size, model.dtype.itemsize, captured)
    logger.info(
        "sgl_specflow: %.2f GiB for verifying %d requests of %d nodes, %.2f GiB for the KV cache",
        taken / GIB,
        requests,
        budget,
        (available - taken) / GIB,
    )
    if taken >= available:
        raise SpecflowConfigError(
            given=f"{available / GIB:.2f} GiB beside the weights, with {requests} requests of {budget} nodes, whose "
            f"verification takes {taken / GIB:.2f} GiB",
            allowed="room for both verification and a KV cache",
            todo="lower --max-running-requests or --speculative-num-draft-tokens, or raise --mem-fraction-static",
        )
    return available - taken


HOOKS = [
    (
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        reserve_step_memory,
        HookType.AROUND,
    ),
    ("sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info", request_limits, HookType.AFTER),
    ("sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode", alloc_len_per_decode, HookType.AROUND),
    ("sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len", extra_context_len, HookType.AROUND),
]
