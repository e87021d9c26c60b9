"""What a verify step leaves for the next one: instead of a state a node, the numbers that make any path's state."""

from dataclasses import dataclass

import torch


@dataclass
class PendingPaths:
    """Each request row's accepted path that its states do not hold yet. One for all layers of a model.

    A verify reads k and G of buffer `parity[row]` and writes the other, since the blocks of a launch share them. So
    between two verifies of a row stands exactly one `record` or `clear`.

    Attributes:
        parity: int32 [rows], 0 or 1.
        length: int32 [rows], nodes of the path; 0 for nothing pending.
        path: int32 [rows, longest path], node indices of the row's last verify, the root first.
    """

    parity: torch.Tensor
    length: torch.Tensor
    path: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, longest_path: int, device: torch.device | str) -> "PendingPaths":
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        return cls(zeros(rows), zeros(rows), zeros(rows, longest_path))

    def record(self, rows: torch.Tensor, path: torch.Tensor, length: torch.Tensor) -> None:
        """After a verify of `rows` [R] (int64): the path [R, <= longest path] that it accepted, `length` [R] long."""
        self.parity[rows] = 1 - self.parity[rows]
        self.path[rows, : path.shape[1]] = path.to(torch.int32)
        self.length[rows] = length.to(torch.int32)

    def clear(self, rows: torch.Tensor) -> None:
        """Forget what is pending: after a flush, or when the row or its state slot gets a new owner."""
        self.length[rows] = 0


@dataclass
class TreeStash:
    """The last verify's nodes of every request row, in one layer or, with a leading dimension, in several.

    Attributes:
        u: float32 [rows, value heads, nodes, d_v]: u_i / |k_i|.
        k: [2, rows, key heads, nodes, d_k] in the model's dtype: keys as the projection gave them, by parity.
        g: float64 [2, rows, value heads, nodes]: G_i, by parity. A long path's sum loses float32's digits in differences.
    """

    u: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor

    @classmethod
    def allocate(
        cls,
        rows: int,
        nodes: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        layers: int | None = None,
    ) -> "TreeStash":
        lead = () if layers is None else (layers,)
        exact = torch.promote_types(dtype, torch.float32)
        return cls(
            torch.zeros(*lead, rows, value_heads, nodes, value_dim, dtype=exact, device=device),
            torch.zeros(*lead, 2, rows, key_heads, nodes, key_dim, dtype=dtype, device=device),
            torch.zeros(*lead, 2, rows, value_heads, nodes, dtype=torch.float64, device=device),
        )

    def layer(self, index: int) -> "TreeStash":
        return TreeStash(self.u[index], self.k[index], self.g[index])

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.u, self.k, self.g))
