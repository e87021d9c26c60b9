"""What a forward pass over tree nodes carries: SGLang's `SpecInput` for our verify and draft passes.

It is a `DFlashVerifyInput`, so that SGLang's branches on DFLASH route it, with the tree instead of a mask: ancestor
bits and depths are all that the tree attention needs. Both of SGLang's makers of dummy inputs for CUDA-graph capture
give a chain without a mask for DFLASH-like algorithms, which captures causal attention; ours are wrapped to give
trees of the right width.
"""

from dataclasses import dataclass

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


@dataclass
class TreeInput(DFlashVerifyInput):
    """One pass over R * N nodes, N = draft_token_num, in node order.

    Attributes beyond the parent's: `ancestors` int32 [R, N, ceil(N / 32)], the nodes each node attends to (any bit
    pattern: a tree, a causal block, a bidirectional block); `depth` int64 [R, N], so that a node's position is the
    committed length plus its depth. Both are None in the dummies of warm-up and graph capture, where every node sees
    itself only, at depth 0.
    """

    ancestors: torch.Tensor | None = None
    depth: torch.Tensor | None = None


def dummy_tree_input(nodes: int, is_draft_worker: bool) -> TreeInput:
    """The input of a warm-up or a graph capture, for any number of requests."""
    return TreeInput(
        draft_token=None,
        positions=None,
        draft_token_num=nodes,
        capture_hidden_mode=CaptureHiddenMode.NULL if is_draft_worker else CaptureHiddenMode.FULL,
    )


def capture_input(original, runner, num_tokens: int):
    """Around DecodeCudaGraphRunner.get_spec_info: the input a graph is captured with."""
    if not _is_tree(runner.model_runner.spec_algorithm):
        return original(runner, num_tokens)
    return dummy_tree_input(runner.captured_req_width, runner.model_runner.is_draft_worker)


def warm_up_input(original, spec_algorithm, custom_mask, num_tokens_per_req: int, is_draft_worker: bool):
    """Around create_dummy_verify_input: the input of a warm-up pass."""
    if not _is_tree(spec_algorithm):
        return original(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)
    return dummy_tree_input(num_tokens_per_req, is_draft_worker)


def _is_tree(spec_algorithm) -> bool:
    from sgl_specflow.runtime.algorithm import TreeAlgorithm

    return isinstance(spec_algorithm, TreeAlgorithm)


HOOKS = [
    (
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        capture_input,
        HookType.AROUND,
    ),
    ("sglang.srt.speculative.spec_info.create_dummy_verify_input", warm_up_input, HookType.AROUND),
]
