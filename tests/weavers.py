"""Random Weavers for tests."""

import torch

from sgl_specflow.drafter.weaver import WeaverConfig
from sgl_specflow.drafter.weaver.checkpoint import expected_shapes


def weaver_config(**changes) -> WeaverConfig:
    given = dict(d_model=24, d_embed=20, d_rank=32, num_layers=2, num_heads=4, mlp_dim=40, K=7, candidate_pool_size=12)
    return WeaverConfig.from_dict({**given, **changes})


def random_weaver(config: WeaverConfig, seed: int = 0, strength: float = 1.0, dtype=torch.float64) -> dict:
    """Every tensor random, norms near one; `strength` scales what the adapter adds to the head's scores."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        tensor = torch.randn(shape, generator=draw, dtype=torch.float64)
        if name.endswith("bias"):
            tensor *= 0.3
        elif len(shape) == 1:
            tensor = 1 + 0.3 * tensor
        else:
            tensor /= shape[1] ** 0.5
        tensors[name] = tensor.to(dtype)
    tensors["lm_head_query_in.weight"] *= strength
    return tensors
