"""Trees and layer inputs shared by the GDN tests: the same grid for the references, the tiles and the kernel."""

import random
from dataclasses import dataclass

import torch
from sgl_specflow.kernels.gdn_tree import PendingPaths, TreeStash

from sgl_specflow.tree import ancestor_bits

TREE_SHAPES = ("chain", "star", "comb", "recent", "wide")


def parents(shape: str, nodes: int, seed: int = 0) -> list[int]:
    """comb: a chain with a tooth at each link. recent: a parent among the last 8. wide: any parent. roots: none."""
    source = random.Random(f"{shape} {nodes} {seed}")
    choose = {
        "chain": lambda i: i - 1,
        "star": lambda i: 0,
        "comb": lambda i: i - 1 if i % 2 else i - 2,
        "recent": lambda i: source.randrange(max(0, i - 8), i),
        "wide": lambda i: source.randrange(i),
        "roots": lambda i: -1,
    }[shape]
    return [-1] + [choose(i) for i in range(1, nodes)]


def path_to(parent: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parent[node]
    return path[::-1]


@dataclass
class Layer:
    """Inputs of one layer's verify for R requests. q, k, v are views of one projection, a and b of another."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    state: torch.Tensor
    slots: torch.Tensor
    parent: list[list[int]]
    ancestors: torch.Tensor
    node_count: torch.Tensor
    stash: TreeStash
    rows: torch.Tensor
    pending: PendingPaths

    def arguments(self) -> tuple:
        return (
            self.q,
            self.k,
            self.v,
            self.a,
            self.b,
            self.A_log,
            self.dt_bias,
            self.state,
            self.slots,
            self.ancestors,
            self.node_count,
            self.stash,
            self.rows,
            self.pending,
        )

    def new_nodes(self, seed: int) -> None:
        """Other q, k, v, a, b and trees for the next step; states, stash and pending paths stay."""
        other = make_layer(
            seed,
            self.parent,
            self.k.shape[1],
            self.v.shape[1],
            self.k.shape[2],
            self.v.shape[2],
            dtype=self.q.dtype,
            state_dtype=self.state.dtype,
            device=self.q.device,
            nodes=self.ancestors.shape[1],
        )
        self.q, self.k, self.v, self.a, self.b = other.q, other.k, other.v, other.a, other.b


def make_layer(
    seed: int,
    parent: list[list[int]],
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int | None = None,
    *,
    dtype=torch.bfloat16,
    state_dtype=torch.float32,
    device="cpu",
    decay: str = "mixed",
    beta: str = "mixed",
    repeated_keys: bool = False,
    nodes: int | None = None,
) -> Layer:
    """decay: mixed, one (g near 0), zero (g near -20); beta: mixed, one, zero. Rows are in reverse order of requests."""
    value_dim = value_dim or key_dim
    requests, counts = len(parent), [len(row) for row in parent]
    nodes = nodes or max(counts)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens, keys, values = requests * nodes, key_heads * key_dim, value_heads * value_dim
    projection = normal(tokens, 2 * keys + values + 24)
    if repeated_keys:
        projection[:, keys : 2 * keys] = projection[:1, keys : 2 * keys]
    gates = normal(tokens, 2 * value_heads)
    gates[:, :value_heads] += {"mixed": 0.0, "one": 30.0, "zero": -30.0}[beta]
    gates[:, value_heads:] += {"mixed": 0.0, "one": -12.0, "zero": 20.0}[decay]
    projection, gates = projection.to(device, dtype), gates.to(device, dtype)
    exact = torch.promote_types(dtype, torch.float32)
    padded = torch.tensor([row + [-1] * (nodes - len(row)) for row in parent])
    state = normal(requests + 2, value_heads, value_dim, key_dim) * 0.3
    return Layer(
        q=projection[:, :keys].view(tokens, key_heads, key_dim),
        k=projection[:, keys : 2 * keys].view(tokens, key_heads, key_dim),
        v=projection[:, 2 * keys : 2 * keys + values].view(tokens, value_heads, value_dim),
        a=gates[:, value_heads:],
        b=gates[:, :value_heads],
        A_log=(normal(value_heads) * 0.5 - 1.0).to(device, exact),
        dt_bias=normal(value_heads).to(device, dtype),
        state=state.to(device, state_dtype),
        slots=torch.randperm(requests + 1, generator=generator)[:requests].to(device, torch.int32) + 1,
        parent=parent,
        ancestors=ancestor_bits(padded).to(device),
        node_count=torch.tensor(counts, dtype=torch.int32, device=device),
        stash=TreeStash.allocate(requests + 1, nodes, key_heads, value_heads, key_dim, value_dim, device, dtype),
        rows=torch.arange(requests, 0, -1, dtype=torch.int32, device=device),
        pending=PendingPaths.allocate(requests + 1, nodes, device),
    )


def accept(layer: Layer, paths: list[list[int]]) -> None:
    """Records each request's accepted path."""
    longest = max(map(len, paths))
    device = layer.rows.device
    layer.pending.record(
        layer.rows.long(),
        torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=device),
        torch.tensor([len(path) for path in paths], device=device),
    )


def accept_leaf(layer: Layer, seed: int) -> list[list[int]]:
    """Records a random accepted path for each request; returns the paths."""
    source = random.Random(seed)
    paths = [path_to(row, source.randrange(len(row))) for row in layer.parent]
    accept(layer, paths)
    return paths


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm()).item()
