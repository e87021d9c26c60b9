"""Inputs of tree_attention for tests: random trees over pools whose unnamed slots hold NaN."""

import math
import random
from dataclasses import dataclass, field

import torch
from sgl_specflow.kernels.tree_attention import TreeAttentionConfig

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    name: str
    prefix: tuple[int, ...] = (37, 5)
    nodes: int = 7
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None
    shape: str = "tree"
    padding: int = 0
    strided: bool = False
    index_dtype: torch.dtype = torch.int64
    sinks: bool = False
    options: dict = field(default_factory=dict)
    config: TreeAttentionConfig | None = None


def make_inputs(case: Case, device: str, seed: int = 0) -> dict:
    """Arguments of tree_attention. Pool slots that no list names hold NaN, as does everything that is written."""
    generator = torch.Generator().manual_seed(seed)
    source = random.Random(seed)
    requests, nodes = len(case.prefix), case.nodes
    (num_heads, num_kv_heads), pool_dtype = case.heads, case.pool_dtype or case.dtype
    parents = [_parents(case, source) for _ in range(requests)]
    depth = torch.tensor([[_depth(parent, j) for j in range(nodes)] for parent in parents])
    ancestors = torch.stack([_pack(_visible(case, parent)) for parent in parents])

    used = sum(case.prefix) + requests * nodes
    slots = torch.randperm(2 * used + 3, generator=generator)[:used]

    def pool(dim: int) -> torch.Tensor:
        values = torch.full((2 * used + 3, num_kv_heads, dim), NAN, dtype=torch.float32)
        values[slots] = torch.randn(used, num_kv_heads, dim, generator=generator)
        values = values.to(pool_dtype).to(device)
        if not case.strided:
            return values
        # A layer's half of a pool that interleaves layers, slots and heads apart by more than a row.
        wide = torch.full((2 * used + 3, 2, num_kv_heads + 1, 2 * dim), NAN, device=device).to(pool_dtype)
        view = wide[:, 1, :num_kv_heads, dim:]
        view.copy_(values)
        return view

    bounds = torch.tensor([0, *case.prefix]).cumsum(0)
    num_rows = requests * nodes
    return dict(
        q=torch.randn(num_rows, num_heads, case.head_dim, generator=generator).to(case.dtype).to(device),
        k_pool=pool(case.head_dim),
        v_pool=pool(case.value_dim),
        prefix_indptr=bounds.to(torch.int32).to(device),
        prefix_slots=slots[: sum(case.prefix)].to(case.index_dtype).to(device),
        node_slots=slots[sum(case.prefix) :].to(device),
        ancestors=ancestors.to(device),
        depth=depth.to(case.index_dtype).to(device),
        scale=case.head_dim**-0.5,
        sinks=torch.randn(num_heads, generator=generator).to(device) if case.sinks else None,
        out=torch.full((num_rows, num_heads, case.value_dim), NAN, dtype=case.dtype, device=device),
        **case.options,
    )


def _parents(case: Case, source: random.Random) -> list[int]:
    real = case.nodes - case.padding
    if case.shape == "tree":
        return [-1] + [source.randrange(max(0, j - 6), j) for j in range(1, real)] + [-1] * case.padding
    return [j - 1 for j in range(real)] + [-1] * case.padding


def _depth(parent: list[int], node: int) -> int:
    return 0 if parent[node] < 0 else 1 + _depth(parent, parent[node])


def _visible(case: Case, parent: list[int]) -> list[set[int]]:
    if case.shape == "bidirectional":
        return [set(range(case.nodes))] * case.nodes
    paths = []
    for node, above in enumerate(parent):
        paths.append({node} | (paths[above] if above >= 0 else set()))
    return paths


def _pack(visible: list[set[int]]) -> torch.Tensor:
    words = math.ceil(len(visible) / 32)
    packed = torch.zeros(len(visible), words, dtype=torch.int64)
    for node, seen in enumerate(visible):
        for j in seen:
            packed[node, j // 32] |= 1 << (j % 32)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
