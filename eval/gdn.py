"""Time and check the fused Gated Delta Net tree verify against SGLang's recurrent one, on one GPU.

    python -m sgl_specflow.eval gdn --out eval/results/gdn_verify_h200.json

One CUDA graph holds a call for each of several layers' inputs, which together exceed the L2 cache; a figure is the median
replay time over the number of calls. Ours commits a pending path of 8 nodes in each call; the recurrent kernel's commit
is a launch of its own that is not counted. Errors are against float64, on one verify, a random accepted path and its
commit.
"""

import argparse
import functools
import json
import random
from dataclasses import dataclass, replace

import torch
from sgl_specflow.eval.arguments import need_gpu, numbers, pairs, result_file
from sgl_specflow.eval.record import describe
from sgl_specflow.eval.timing import microseconds
from sgl_specflow.kernels.gdn_tree import PendingPaths, TreeStash, gdn_tree_flush, gdn_tree_verify
from sgl_specflow.kernels.gdn_tree.cuda_kernel import KernelShape, shared_limit
from sgl_specflow.kernels.gdn_tree.naive import gates, inverse_norm

from sgl_specflow.tree import ancestor_bits

ROTATED_BYTES = 300e6  # several times the 60 MB of L2
PENDING_NODES = 8
DRIFT_STEPS = 2000
SHAPES = [(requests, nodes) for requests in (1, 4) for nodes in (16, 32, 64, 128, 256)] + [(16, 64), (16, 128)]


@dataclass
class Heads:
    key_heads: int
    value_heads: int
    dim: int


@dataclass
class Layer:
    """Inputs of one verify of one layer."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    state: torch.Tensor
    slots: torch.Tensor
    ancestors: torch.Tensor
    stash: TreeStash
    rows: torch.Tensor
    pending: PendingPaths

    def verify(self, out: torch.Tensor | None = None, **options) -> torch.Tensor:
        return gdn_tree_verify(
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
            stash=self.stash,
            rows=self.rows,
            pending=self.pending,
            out=out,
            **options,
        )

    def in_float64(self) -> "Layer":
        names = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")
        stash = TreeStash(self.stash.u.double(), self.stash.k.double(), self.stash.g.clone())
        pending = PendingPaths(*(x.clone() for x in (self.pending.parity, self.pending.length, self.pending.path)))
        return replace(self, stash=stash, pending=pending, **{name: getattr(self, name).double() for name in names})


def random_parents(requests: int, nodes: int, seed: int) -> list[list[int]]:
    """Mixed trees: each request's parents come from its own number of latest nodes, from bushy to nearly a chain."""
    source = random.Random(seed)
    spans = [source.choice([2, 4, 8, 32, nodes]) for _ in range(requests)]
    return [[-1] + [source.randrange(max(0, i - span), i) for i in range(1, nodes)] for span in spans]


def path_to(parent: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parent[node]
    return path[::-1]


def make_layer(
    heads: Heads, parents: list[list[int]], state_dtype: torch.dtype, seed: int, device: str = "cuda"
) -> Layer:
    generator = torch.Generator(device).manual_seed(seed)
    requests, nodes = len(parents), len(parents[0])
    tokens, keys, values = requests * nodes, heads.key_heads * heads.dim, heads.value_heads * heads.dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32, generator=generator)

    projection, gate = normal(tokens, 2 * keys + values).bfloat16(), normal(tokens, 2 * heads.value_heads).bfloat16()
    views = projection[:, :keys], projection[:, keys : 2 * keys], projection[:, 2 * keys :]
    q, k, v = (x.unflatten(1, (-1, heads.dim)) for x in views)
    return Layer(
        q,
        k,
        v,
        gate[:, heads.value_heads :],
        gate[:, : heads.value_heads],
        A_log=normal(heads.value_heads) * 0.5 - 1.0,
        dt_bias=normal(heads.value_heads).bfloat16(),
        state=(normal(requests + 1, heads.value_heads, heads.dim, heads.dim) * 0.3).to(state_dtype),
        slots=torch.arange(1, requests + 1, device=device, dtype=torch.int32),
        ancestors=ancestor_bits(torch.tensor(parents, device=device)),
        stash=TreeStash.allocate(requests + 1, nodes, heads.key_heads, heads.value_heads, heads.dim, heads.dim, device),
        rows=torch.arange(1, requests + 1, device=device, dtype=torch.int32),
        pending=PendingPaths.allocate(requests + 1, nodes, device),
    )


def accept(layer: Layer, paths: list[list[int]]) -> None:
    longest = max(map(len, paths))
    padded = torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=layer.rows.device)
    layer.pending.record(
        layer.rows.long(), padded, torch.tensor([len(path) for path in paths], device=layer.rows.device)
    )


def flush(layer: Layer) -> None:
    stash = TreeStash(layer.stash.u[None], layer.stash.k[None], layer.stash.g[None])
    gdn_tree_flush(layer.state[None], layer.slots, stash, layer.rows, layer.pending)
    layer.pending.clear(layer.rows.long())


@functools.cache
def snapshot_buffer(requests: int, nodes: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(requests, nodes, heads, dim, dim, device="cuda", dtype=dtype)


def recurrent(layer: Layer, parents: torch.Tensor, snapshots: torch.Tensor) -> torch.Tensor:
    """The call of gdn_triton.py:target_verify (SGLang 0.5.23) with tree links; snapshots receive a state a node."""
    from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
        fused_sigmoid_gating_delta_rule_update,
    )

    requests, nodes = parents.shape
    return fused_sigmoid_gating_delta_rule_update(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=layer.q[None],
        k=layer.k[None],
        v=layer.v[None],
        a=layer.a,
        b=layer.b,
        initial_state_source=layer.state,
        initial_state_indices=layer.slots,
        cu_seqlens=torch.arange(requests + 1, device="cuda", dtype=torch.int32) * nodes,
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        is_kda=False,
        disable_state_update=True,
        intermediate_states_buffer=snapshots,
        intermediate_state_indices=torch.arange(requests, device="cuda", dtype=torch.int32),
        cache_steps=nodes,
        retrieve_parent_token=parents,
    )


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference).norm() / reference.norm()).item()


def errors(heads: Heads, parents: list[list[int]], state_dtype: torch.dtype, with_recurrent: bool, **options) -> dict:
    """One verify, a random accepted path, its commit; against float64 on the same inputs."""
    layer = make_layer(heads, parents, state_dtype, seed=1)
    exact = layer.in_float64()
    source = random.Random(2)
    paths = [path_to(row, source.randrange(len(row) // 2, len(row))) for row in parents]
    out = layer.verify(torch.full_like(layer.v, float("nan"), memory_format=torch.contiguous_format), **options)
    expected = exact.verify(implementation="naive")
    result = {"rel_error_out": relative_error(out, expected)}
    if with_recurrent:
        snapshots = snapshot_buffer(len(parents), len(parents[0]), heads.value_heads, heads.dim, state_dtype)
        theirs = recurrent(layer, torch.tensor(parents, device="cuda").clamp(min=0), snapshots)
        result["recurrent_rel_error_out"] = relative_error(theirs[0], expected)
    for each in (layer, exact):
        accept(each, paths)
    flush(layer)
    stash = TreeStash(exact.stash.u[None], exact.stash.k[None], exact.stash.g[None])
    gdn_tree_flush(exact.state[None], exact.slots, stash, exact.rows, exact.pending, implementation="naive")
    result["rel_error_state"] = relative_error(layer.state[1:], exact.state[1:])
    if with_recurrent:
        committed = torch.stack([snapshots[r, path[-1]] for r, path in enumerate(paths)])
        result["recurrent_rel_error_state"] = relative_error(committed, exact.state[1:])
    return result


def verifies(heads: Heads, parents: list[list[int]], state_dtype: torch.dtype, **options) -> list[functools.partial]:
    """Verifies of several layers, each with a pending path: so many that states come from memory, as in a model. Their one
    argument is the output."""
    calls = []
    for index in range(layers_of(heads, len(parents), state_dtype)):
        layer = make_layer(heads, parents, state_dtype, seed=index)
        layer.verify(**options)
        accept(layer, [list(range(min(PENDING_NODES, len(row)))) for row in parents])
        out = torch.empty_like(layer.v, memory_format=torch.contiguous_format)
        calls.append(functools.partial(layer.verify, out, **options))
    return calls


def state_bytes(heads: Heads, state_dtype: torch.dtype) -> int:
    """Of a layer and request."""
    return heads.value_heads * heads.dim**2 * state_dtype.itemsize


def layers_of(heads: Heads, requests: int, state_dtype: torch.dtype) -> int:
    return max(3, min(48, int(ROTATED_BYTES / (2 * requests * state_bytes(heads, state_dtype)))))


def time_ours(heads: Heads, parents: list[list[int]], state_dtype: torch.dtype, **options) -> float:
    calls = verifies(heads, parents, state_dtype, **options)
    time = microseconds(calls)
    if not all(out.isfinite().all() for call in calls for out in call.args):
        raise RuntimeError("an output is not finite")
    return time


def time_recurrent(heads: Heads, parents: list[list[int]], state_dtype: torch.dtype) -> float:
    snapshots = snapshot_buffer(len(parents), len(parents[0]), heads.value_heads, heads.dim, state_dtype)
    links = torch.tensor(parents, device="cuda").clamp(min=0)
    layers = range(layers_of(heads, len(parents), state_dtype))
    inputs = [make_layer(heads, parents, state_dtype, seed=index) for index in layers]
    return microseconds([functools.partial(recurrent, layer, links, snapshots) for layer in inputs], replays=10)


def measure(heads: Heads, requests: int, nodes: int, state_dtype: torch.dtype, with_recurrent: bool, **options) -> dict:
    parents = random_parents(requests, nodes, seed=requests * 1000 + nodes)
    row = {
        "requests": requests,
        "nodes": nodes,
        "key_heads": heads.key_heads,
        "value_heads": heads.value_heads,
        "state_dtype": str(state_dtype).removeprefix("torch."),
        "recurrent_us": time_recurrent(heads, parents, state_dtype) if with_recurrent else None,
        "fused_us": time_ours(heads, parents, state_dtype, **options),
    }
    row["ratio"] = row["recurrent_us"] / row["fused_us"] if with_recurrent else None
    row |= errors(heads, parents, state_dtype, with_recurrent, **options)
    stash = TreeStash.allocate(1, nodes, heads.key_heads, heads.value_heads, heads.dim, heads.dim, "meta")
    row["extra_mb"] = stash.bytes / 1e6
    row["recurrent_extra_mb"] = nodes * state_bytes(heads, state_dtype) / 1e6
    return row


def drift(heads: Heads, nodes: int, steps: int) -> dict:
    """Steps of verify and commit, each of a random path of at most 16 nodes, against a float64 recurrence over them."""
    parents = random_parents(1, nodes, seed=7)
    paths = [path for node in range(nodes) if len(path := path_to(parents[0], node)) <= 16]
    source, layer = random.Random(3), make_layer(heads, parents, torch.float32, seed=0)
    inputs = [make_layer(heads, parents, torch.float32, seed=100 + index) for index in range(16)]
    exact, group, worst = layer.state[1].double(), heads.value_heads // heads.key_heads, 0.0
    for step in range(steps):
        fresh = inputs[step % len(inputs)]
        layer.q, layer.k, layer.v, layer.a, layer.b = fresh.q, fresh.k, fresh.v, fresh.a, fresh.b
        layer.verify()
        path = source.choice(paths)
        accept(layer, [path])
        k = fresh.k[path].double()
        k = (k * inverse_norm(k)).repeat_interleave(group, dim=1)
        g, beta = gates(fresh.a[path].double(), fresh.b[path].double(), layer.A_log.double(), layer.dt_bias.double())
        for i in range(len(path)):
            exact = g[i].exp()[:, None, None] * exact
            u = beta[i][:, None] * (fresh.v[path[i]].double() - (exact @ k[i][:, :, None])[..., 0])
            exact = exact + u[:, :, None] * k[i][:, None, :]
        if step % 100 == 99:
            flush(layer)
            worst = max(worst, relative_error(layer.state[1], exact))
    return {"steps": steps, "nodes": nodes, "rel_error_state": worst}


COLUMNS = (
    "requests",
    "nodes",
    "state_dtype",
    "recurrent_us",
    "fused_us",
    "ratio",
    "rel_error_out",
    "recurrent_rel_error_out",
    "rel_error_state",
    "recurrent_rel_error_state",
    "extra_mb",
)


def print_row(row: dict) -> None:
    def cell(value) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)

    print(" ".join(f"{cell(row.get(name)):>{len(name)}}" for name in COLUMNS), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval gdn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=result_file, required=True, help="JSON file to write")
    parser.add_argument("--only-ours", action="store_true", help="skip SGLang's kernel (where sglang is missing)")
    parser.add_argument(
        "--heads", type=numbers, default=[16, 48, 128], help="key heads, value heads, dimension (default: Qwen3.6-27B)"
    )
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--shapes", type=pairs, default=SHAPES, help="requests x nodes, such as 1x64,4x128 (default: a grid)"
    )
    parser.add_argument(
        "--slice", type=int, help="value columns of a block: 32, 64 or 128 (default: the library's choice)"
    )
    parser.add_argument("--no-drift", action="store_true", help="skip the 2,000 steps")
    parser.add_argument("--commit", help="recorded in the file; default: git's HEAD")
    arguments = parser.parse_args(arguments)
    if len(arguments.heads) != 3:
        parser.error(f"--heads: {arguments.heads} was given; give key heads, value heads and dimension")
    need_gpu(parser)
    heads = Heads(*arguments.heads)
    state_dtype = getattr(torch, arguments.state_dtype)
    with_recurrent = not arguments.only_ours
    result = {"meta": describe(arguments.commit), "rows": []}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write = lambda: arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(" ".join(COLUMNS))
    for requests, nodes in arguments.shapes:
        options = {}
        if arguments.slice:
            options["shape"] = KernelShape(
                -(-nodes // 16), heads.dim, heads.dim, arguments.slice, state_dtype == torch.bfloat16, shared_limit(0)
            )
            if not options["shape"].fits:
                continue
        result["rows"].append(measure(heads, requests, nodes, state_dtype, with_recurrent, **options))
        print_row(result["rows"][-1])
        write()
    if not arguments.no_drift:
        result["drift"] = drift(heads, 64, DRIFT_STEPS)
        print("drift", result["drift"])
    write()


if __name__ == "__main__":
    main()
