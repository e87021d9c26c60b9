"""A target's choice made up so that a path of a wanted length is accepted: for step times without weights."""

import torch
import triton
import triton.language as tl
from sgl_specflow.kernels.placement import runs_triton

from sgl_specflow.tree import TokenTree

_CHUNK = 16  # tokens that are looked for among the nodes at a time


def force_path(tree: TokenTree, length: int) -> torch.Tensor:
    """A choice int64 [R, B] under which each tree's deepest path is accepted down to `length` tokens, the bonus token
    included, and nothing below: the nodes above choose their child on it, all others a token that no node carries.

    One launch on CUDA, elsewhere torch; no host synchronisation.
    """
    if not runs_triton(tree.token):
        return _force_torch(tree, length)
    requests, budget = tree.token.shape
    choice = torch.empty_like(tree.token)
    _force[(requests,)](
        tree.token,
        tree.parent,
        tree.depth,
        tree.ancestors,
        length,
        choice,
        budget,
        tree.ancestors.shape[2],
        max(_CHUNK, triton.next_power_of_2(budget + 1)),
        _CHUNK,
        num_warps=4,
    )
    return choice


def _force_torch(tree: TokenTree, length: int) -> torch.Tensor:
    deepest = tree.depth.argmax(1)
    on_path = tree.ancestor_mask().gather(1, deepest[:, None, None].expand(-1, 1, tree.budget))[:, 0]
    on_path = on_path & (tree.depth < length) & (tree.parent >= 0)
    # -1 is no token: it matches no child. The bonus token must be one, so the last path node keeps a token of no child.
    chosen = torch.full_like(tree.token, -1)
    parent = torch.where(on_path, tree.parent, tree.budget)
    chosen = torch.nn.functional.pad(chosen, (0, 1)).scatter(1, parent, tree.token)[:, : tree.budget]
    return torch.where(chosen < 0, _token_of_no_child(tree), chosen)


def _token_of_no_child(tree: TokenTree) -> torch.Tensor:
    """int64 [R, 1], a token that no node of the tree carries: the smallest missing one of 0..B."""
    requests = tree.token.shape[0]
    present = torch.zeros(requests, tree.budget + 2, dtype=torch.bool, device=tree.token.device)
    present.scatter_(1, tree.token.clamp(max=tree.budget + 1), True)
    return (~present[:, : tree.budget + 1]).to(torch.int8).argmax(1, keepdim=True)


@triton.jit(do_not_specialize=["length"])
def _force(
    token,
    parent,
    depth,
    ancestors,
    length,
    choice,
    budget,
    WORDS: tl.constexpr,
    NODES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first = request * budget
    node = tl.arange(0, NODES)
    real = node < budget
    own = tl.load(token + first + node, mask=real, other=-1)
    above = tl.load(parent + first + node, mask=real, other=-1)
    level = tl.load(depth + first + node, mask=real, other=-1)
    deepest = tl.argmax(level, 0)
    word = tl.load(ancestors + (first + deepest) * WORDS + node // 32, mask=real, other=0)
    on_path = real & (((word >> (node % 32)) & 1) != 0) & (level < length) & (above >= 0)
    absent = tl.full([], NODES, tl.int32)
    for start in range(0, NODES, CHUNK):
        candidate = start + tl.arange(0, CHUNK)
        missing = tl.max((own[None, :] == candidate[:, None]).to(tl.int32), 1) == 0
        absent = tl.minimum(absent, tl.min(tl.where(missing, candidate, NODES), 0))
    tl.store(choice + first + node, absent.to(tl.int64), mask=real)
    tl.debug_barrier()
    # Nodes of one path have parents of their own.
    tl.store(choice + first + above, own, mask=on_path)
