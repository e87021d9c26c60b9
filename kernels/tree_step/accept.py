"""Acceptance and the plan of its commit in one launch: `verify.accept` and `commit.plan_commit`."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from sgl_specflow.kernels.placement import runs_triton

from sgl_specflow.commit import CommitPlan, plan_commit
from sgl_specflow.tree import TokenTree
from sgl_specflow.verify import Accepted, accept


@dataclass
class Commit:
    """What one pass commits (`accepted`), where it goes (`plan`), and the lengths after it, int64 [R]."""

    accepted: Accepted
    plan: CommitPlan
    new_length: torch.Tensor

    @classmethod
    def empty(cls, requests: int, entries: int, device: torch.device) -> "Commit":
        """Fields of a commit's shapes, unset. entries: the greatest depth + 1."""
        wide = lambda: torch.empty(requests, entries, dtype=torch.int64, device=device)  # noqa: E731
        flat = lambda: torch.empty(requests, dtype=torch.int64, device=device)  # noqa: E731
        return cls(Accepted(wide(), flat(), wide(), flat(), flat()), CommitPlan(wide(), wide(), wide(), wide()), flat())


def accept_and_plan(
    tree: TokenTree,
    next_token: torch.Tensor,
    max_depth: int,
    window: torch.Tensor,
    committed: torch.Tensor,
    out: Commit | None = None,
) -> Commit:
    """Walk the trees and plan the commit.

    Args:
        tree, next_token, max_depth: as `accept` has them, contiguous; at most 256 nodes on CUDA.
        window: int64 [R, B], the nodes' cache slots; committed: int64 [R], the lengths before the pass.
        out: what to write, for CUDA graphs; a fresh one if None.

    On CUDA one launch, elsewhere in torch; no host synchronisation. Raises ValueError as `accept` does.
    """
    requests, budget = tree.token.shape
    if not runs_triton(tree.token):
        accepted = accept(tree, next_token, max_depth)
        commit = Commit(accepted, plan_commit(window, accepted, committed), committed + accepted.length)
        return commit if out is None else _copy(commit, out)
    wide = (requests, budget)
    for name, tensor, shape in (
        ("next_token", next_token, wide),
        ("window", window, wide),
        ("committed", committed, wide[:1]),
    ):
        if tensor.dtype != torch.int64 or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; give contiguous int64 {shape}")
    if max_depth < 0:
        raise ValueError(f"max_depth is {max_depth}; give 0 (commit the bonus token only) or more")
    entries = max_depth + 1
    commit = Commit.empty(requests, entries, tree.token.device) if out is None else out
    accepted, plan = commit.accepted, commit.plan
    _accept[(requests,)](
        tree.token,
        tree.parent,
        tree.depth,
        tree.ancestors,
        next_token,
        window,
        committed,
        accepted.path,
        accepted.length,
        accepted.tokens,
        accepted.bonus,
        accepted.last_node,
        plan.node,
        plan.source,
        plan.destination,
        plan.position,
        commit.new_length,
        budget,
        entries,
        tree.ancestors.shape[2],
        triton.next_power_of_2(budget),
        triton.next_power_of_2(entries),
        num_warps=4,
    )
    return commit


def _copy(commit: Commit, out: Commit) -> Commit:
    for part, target in ((commit.accepted, out.accepted), (commit.plan, out.plan)):
        for name, value in vars(part).items():
            getattr(target, name).copy_(value)
    out.new_length.copy_(commit.new_length)
    return out


@triton.jit
def _accept(
    token,
    parent,
    depth,
    ancestors,
    choice,
    window,
    committed,
    path,
    length,
    tokens,
    bonus,
    last_node,
    node,
    source,
    destination,
    position,
    new_length,
    budget,
    entries,
    WORDS: tl.constexpr,
    NODES: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first = request * budget
    index = tl.arange(0, NODES)
    real = index < budget
    above = tl.load(parent + first + index, mask=real, other=-1)
    own = tl.load(token + first + index, mask=real, other=-1)
    wanted = tl.load(choice + first + tl.maximum(above, 0), mask=real, other=-2)
    level = tl.load(depth + first + index, mask=real, other=0)
    matches = ((above >= 0) & (own == wanted)) | (index == 0)
    on_path = real & (level < entries)
    for word in tl.static_range(WORDS):
        here = matches & (index // 32 == word)
        bits = tl.sum(tl.where(here, 1 << (index % 32).to(tl.int64), 0), 0).to(tl.int32)
        needed = tl.load(ancestors + (first + index) * WORDS + word, mask=real, other=0)
        on_path = on_path & ((needed & ~bits) == 0)
    accepted = tl.sum(on_path.to(tl.int64), 0)
    entry = tl.arange(0, ENTRIES)
    stored = entry < entries
    at_depth = on_path[None, :] & (level[None, :] == entry[:, None])
    walked = tl.sum(tl.where(at_depth, index[None, :] + 1, 0), 1) - 1
    inside = entry < accepted
    row = request * entries + entry
    tl.store(path + row, walked.to(tl.int64), mask=stored)
    at = tl.where(inside, walked, 0)
    committed_token = tl.load(choice + first + at, mask=inside & stored, other=0)
    tl.store(tokens + row, committed_token, mask=stored)
    last = tl.sum(tl.where(entry == accepted - 1, walked, 0), 0)
    tl.store(last_node + request, last.to(tl.int64))
    tl.store(bonus + request, tl.load(choice + first + last))
    tl.store(length + request, accepted)
    before = tl.load(committed + request)
    tl.store(new_length + request, before + accepted)
    to = tl.where(inside, entry, 0)
    tl.store(node + row, at.to(tl.int64), mask=stored)
    tl.store(source + row, tl.load(window + first + at, mask=stored, other=0), mask=stored)
    tl.store(destination + row, tl.load(window + first + to, mask=stored, other=0), mask=stored)
    tl.store(position + row, before + to, mask=stored)
