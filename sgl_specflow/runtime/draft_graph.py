"""From the head's hidden states to a tree inside the head's own CUDA graph: LM head, likeliest tokens, tree building.

SGLang's graph runner calls what `capture_tail_hooks` holds at the end of each captured pass. So a replay of the head's
graph ends with the tree in buffers of fixed address, and drafting is one launch from the host.
"""

import torch

from sgl_specflow.kernels.tree_step import empty_tree
from sgl_specflow.tree import TokenTree


class DraftTail:
    """The tail of one drafter's graphs, and the trees of the last replay.

    Args:
        grow: function of (anchors int64 [R], hidden [R, block, H], rows [R] of the request table, limits int64 [R], out
            TokenTree) that fills `out`.
        requests: the greatest batch that is captured.
        budget: nodes of a tree. block: queries of the head's pass a request. depth: the greatest depth.
    """

    def __init__(self, grow, requests: int, budget: int, block: int, depth: int, device: torch.device):
        self._grow, self._block, self._depth = grow, block, depth
        self._trees = empty_tree(requests, budget, device)
        self._limits = torch.full((requests,), depth, dtype=torch.int64, device=device)
        self._limited = False

    def __call__(self, _runner, output, forward_batch, num_tokens: int) -> None:
        """SGLang's capture hook."""
        requests = num_tokens // self._block
        hidden = output.hidden_states.view(requests, self._block, -1)
        anchors = forward_batch.input_ids.view(requests, self._block)[:, 0].contiguous()
        rows = forward_batch.req_pool_indices
        self._grow(anchors, hidden, rows, self._limits[:requests], self.trees(requests))

    def set_limits(self, limits: torch.Tensor | None) -> None:
        """Before a replay: limits int64 [R] on single requests' depth, or None. A batch that no graph holds changes
        nothing."""
        if limits is not None and limits.numel() > self._limits.numel():
            return
        if limits is not None:
            self._limits[: limits.numel()].copy_(limits)
        elif self._limited:
            self._limits.fill_(self._depth)
        self._limited = limits is not None

    def trees(self, requests: int) -> TokenTree:
        """The first `requests` trees, in the buffers that the next replay overwrites."""
        return self._trees.first(requests)
