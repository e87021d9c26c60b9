"""The functions of `steps` with five launches a layer: four products of `row_linear`, each with its norm, bias, gate or
residual, and attention by Triton, as all else.

States are x alone: what reads it divides by its root mean square, in float32. Nothing is rounded between a product and its
ends, so results are nearer to exact ones than the other implementations', and differ from theirs by roundings.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_specflow.drafter.weaver import triton_steps
from sgl_specflow.drafter.weaver.config import WeaverConfig
from sgl_specflow.drafter.weaver.triton_steps import attend, tree_builder, unset_places
from sgl_specflow.kernels.row_linear import DTYPES, row_linear
from sgl_specflow.tree import Expansion

__all__ = [
    "after_attention",
    "attend",
    "before_attention",
    "enter",
    "mlp",
    "pool_logits",
    "refusals",
    "states_of",
    "tree_builder",
    "unset_places",
]

pool_logits = functools.partial(triton_steps.pool_logits, normed=False)


def refusals(config: WeaverConfig, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Why `row_linear` cannot multiply; empty where it can."""
    wrong = []
    if device.type != "cuda":
        wrong.append(f"tensors are on {device}")
    if dtype not in DTYPES:
        wrong.append(f"dtype is {dtype}, which must be bfloat16 or float16")
    wrong += [
        f"{name} is {size}, which must be a multiple of 8"
        for name, size in (("d_rank", config.d_rank), ("mlp_dim", config.mlp_dim))
        if size % 8
    ]
    return wrong


def states_of(x: Tensor) -> tuple[Tensor]:
    """`steps.states_of`."""
    return (x,)


def enter(nodes: Expansion, table: Tensor, turn: Tensor, visible: Tensor, prefix: int) -> tuple[Tensor, Tensor, Tensor]:
    """`steps.enter`."""
    x, _, own_turn, rows = triton_steps.enter(nodes, table, turn, visible, prefix)
    return x, own_turn, rows


def before_attention(states: Sequence[Tensor], block: dict) -> Tensor:
    """`steps.before_attention`."""
    return row_linear(states[0], *block["qkv"], norm=True)


def after_attention(states: Sequence[Tensor], mixed: Tensor, block: dict) -> tuple[Tensor]:
    """`steps.after_attention`."""
    return (row_linear(mixed, block["o"], residual=states[0]),)


def mlp(states: Sequence[Tensor], block: dict) -> tuple[Tensor]:
    """`steps.mlp`."""
    inner = row_linear(states[0], *block["gate_up"], norm=True, gated=True)
    return (row_linear(inner, *block["down"], residual=states[0]),)
