"""The CUDA kernel's algorithm in PyTorch, tile by tile and in its order, so that the CPU can hold it to naive.py.

It differs from naive.py in what the kernel differs in: raw Gram matrices with the norms as factors, diagonal tiles
inverted by substitution, each tile of U taken out of all later rows at once, tiles without an ancestor bit skipped, the
output accumulated over tiles of columns, the accepted path added 16 nodes at a time. With `split` it also rounds operands
as the kernel does.

Shapes of one request as in naive.py, but q and k raw: [N, H, d_k], value heads expanded.
"""

from dataclasses import dataclass

import torch
from sgl_specflow.kernels.gdn_tree.naive import inverse_norm

TILE = 16
TILE_SCALE = 4096.0  # of X, Y and the inverses in float16


def bf16_terms(x: torch.Tensor, terms: int) -> torch.Tensor:
    """x rounded to the sum of `terms` bfloat16 values."""
    total, rest = torch.zeros_like(x), x
    for _ in range(terms):
        term = rest.to(torch.bfloat16).to(x.dtype)
        total, rest = total + term, rest - term
    return total


def f16_terms(x: torch.Tensor, terms: int, scale: float | torch.Tensor) -> torch.Tensor:
    """x rounded to the sum of `terms` float16 values, scaled by a power of two meanwhile."""
    total, rest = torch.zeros_like(x), x * scale
    for _ in range(terms):
        term = rest.to(torch.float16).to(x.dtype)
        total, rest = total + term, rest - term
    return total / scale


@dataclass
class TiledVerify:
    """out [N, H, d_v], and the stash: u / |k| [N, H, d_v] and G [N, H]."""

    out: torch.Tensor
    u: torch.Tensor
    G: torch.Tensor


def verify_tiled(q, k, v, g, beta, state, visible, scale: float, split: bool = False) -> TiledVerify:
    """One request's verify. visible [N, N] bool, itself included; split: round operands to the kernel's terms."""

    def terms(x: torch.Tensor, count: int) -> torch.Tensor:
        return bf16_terms(x, count) if split else x

    def half_terms(x: torch.Tensor, count: int, scale: float | torch.Tensor = TILE_SCALE) -> torch.Tensor:
        return f16_terms(x, count, scale) if split else x

    count, heads = g.shape
    tiles = -(-count // TILE)
    pad = tiles * TILE - count
    q, k, v, g, beta = (torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, pad)) for x in (q, k, v, g, beta))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [H, N, d]
    visible = torch.nn.functional.pad(visible, (0, pad, 0, pad)).tril()
    occupied = visible.view(tiles, TILE, tiles, TILE).any(3).any(1)
    G = visible.to(g.dtype) @ g
    into, norm, q_norm = G.exp().T[..., None], inverse_norm(k), inverse_norm(q)
    # U's scale, of a whole head here: |u| is at most the sum of |v| + |S k| over its path.
    greatest = torch.maximum(v.abs().amax(), 12 * state.abs().amax()).clamp(min=1e-30)
    u_scale = torch.exp2(4 - greatest.log2().floor())

    def rows(i: int) -> slice:
        return slice(i * TILE, (i + 1) * TILE)

    def decayed_product(left: torch.Tensor, i: int, j: int) -> torch.Tensor:
        gap = (G[rows(i), None] - G[None, rows(j)]).permute(2, 0, 1)
        norms = norm[:, rows(j)].mT
        return torch.where(visible[rows(i), rows(j)], left[:, rows(i)] @ k[:, rows(j)].mT * norms * gap.exp(), 0.0)

    x = {
        (i, j): (beta.T[:, rows(i), None] * norm[:, rows(i)] * decayed_product(k, i, j)).tril(-1 if i == j else TILE)
        for i in range(tiles)
        for j in range(i + 1)
        if occupied[i, j]
    }
    right = beta.T[..., None] * (v - norm * into * (k @ terms(state, 3).mT))
    u = torch.zeros_like(right)
    for j in range(tiles):
        inverse = invert_unit_lower(x[j, j])
        inverse = half_terms(inverse - torch.eye(TILE, dtype=inverse.dtype, device=inverse.device), 2)
        u[:, rows(j)] = right[:, rows(j)] + inverse @ half_terms(right[:, rows(j)], 2, u_scale)
        for i in range(j + 1, tiles):
            if occupied[i, j]:
                right[:, rows(i)] -= half_terms(x[i, j], 2) @ half_terms(u[:, rows(j)], 2, u_scale)

    out = q_norm * into * (q @ terms(state, 2).mT)
    for i in range(tiles):
        for j in range(i + 1):
            if occupied[i, j]:
                y = half_terms(q_norm[:, rows(i)] * decayed_product(q, i, j), 1)
                out[:, rows(i)] += y @ half_terms(u[:, rows(j)], 1, u_scale)
    out, u = scale * out, norm * u
    return TiledVerify(out[:, :count].transpose(0, 1), u[:, :count].transpose(0, 1), G[:count])


def invert_unit_lower(x: torch.Tensor) -> torch.Tensor:
    """(I + x)^-1 for strictly lower triangular x [H, 16, 16], by forward substitution over rows."""
    inverse = torch.eye(TILE, dtype=x.dtype, device=x.device).repeat(x.shape[0], 1, 1)
    for row in range(1, TILE):
        inverse[:, row] -= (x[:, row, None, :row] @ inverse[:, :row])[:, 0]
    return inverse


def commit_tiled(state, k, u, G, path, split: bool = False) -> torch.Tensor:
    """The state [H, d_v, d_k] after path [m]; k raw and u / |k| as the stash holds them, [N, H, d]."""
    last = G[path[-1]]
    state = last.exp()[:, None, None] * state
    for chunk in path.split(TILE):
        weighted = ((last - G[chunk]).exp()[..., None] * u[chunk]).permute(1, 2, 0)
        state = state + (bf16_terms(weighted, 3) if split else weighted) @ k[chunk].transpose(0, 1)
    return state
