"""The batched token tree of one verify pass, and its ancestor bit masks."""

import math
from dataclasses import dataclass

import torch

WORD_BITS = 32


@dataclass
class TokenTree:
    """R token trees of B nodes each.

    Nodes are ordered by depth, and inside a depth by the order in which the builder selected them, so a parent comes
    before its children. Node 0 is the anchor. Siblings carry distinct tokens: acceptance relies on it. Nodes from
    `node_count[r]` on are padding: the root's token, parent -1, depth 0, only their own bit. No other node attends to
    a padding node and none is ever accepted; each attends to itself, so that no attention row is empty.

    Attributes:
        token: int64 [R, B].
        parent: int64 [R, B], -1 for the root and for padding.
        depth: int64 [R, B], 0 for the root and for padding.
        ancestors: int32 [R, B, ceil(B / 32)]. Bit j % 32 of word j // 32 is set when node j is an ancestor of the node
            or the node itself. Bit 31 makes a word negative, as intended.
        node_count: int64 [R], real nodes, the root included.
    """

    token: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    ancestors: torch.Tensor
    node_count: torch.Tensor

    @property
    def budget(self) -> int:
        return self.token.shape[1]

    def ancestor_mask(self) -> torch.Tensor:
        """bool [R, B, B]: entry [r, i, j] is true when node j is an ancestor of node i or node i itself."""
        return unpack_bits(self.ancestors, self.budget)

    def positions(self, committed_length: torch.Tensor) -> torch.Tensor:
        """RoPE positions, int64 [R, B]: committed length (int64 [R], the anchor's position) plus depth."""
        return committed_length[:, None] + self.depth

    def first(self, requests: int) -> "TokenTree":
        """The first `requests` trees, as views."""
        return TokenTree(**{name: value[:requests] for name, value in vars(self).items()})

    def clone(self) -> "TokenTree":
        """The same trees in tensors of their own."""
        return TokenTree(**{name: value.clone() for name, value in vars(self).items()})

    def copy_(self, other: "TokenTree") -> "TokenTree":
        """Overwrite these tensors with the trees of `other`, of the same shape; returns self."""
        for name, value in vars(other).items():
            getattr(self, name).copy_(value)
        return self

    def check(self) -> None:
        """Raise ValueError naming the first violated invariant. It reads values: for tests and debugging only."""
        _check_layout(self)
        node = torch.arange(self.budget, device=self.token.device)
        real = node < self.node_count[:, None]
        child = real & (node > 0)
        above = self.parent.clamp(0, self.budget - 1)
        same_parent = self.parent[:, :, None] == self.parent[:, None, :]
        same_token = self.token[:, :, None] == self.token[:, None, :]
        later = node[:, None] > node
        # Order matters: each test may assume the ones before it.
        invariants = {
            "node_count lies in 1..B": ((self.node_count >= 1) & (self.node_count <= self.budget))[:, None],
            "the root has parent -1": (node > 0) | (self.parent == -1),
            "the root has depth 0": (node > 0) | (self.depth == 0),
            "padding has parent -1": real | (self.parent == -1),
            "padding has depth 0": real | (self.depth == 0),
            "padding has the root's token": real | (self.token == self.token[:, :1]),
            "a parent comes before its child": ~child | ((self.parent >= 0) & (self.parent < node)),
            "a child is one deeper than its parent": ~child | (self.depth == self.depth.gather(1, above) + 1),
            "nodes are ordered by depth": ~child | (self.depth >= self.depth.roll(1, dims=1)),
            "siblings carry distinct tokens": ~(child[:, :, None] & later & same_parent & same_token).any(2),
            "ancestors agree with parents": (self.ancestors == ancestor_bits(self.parent)).all(2),
        }
        for name, holds in invariants.items():
            if not bool(holds.all()):
                request, at = (~holds).nonzero()[0].tolist()
                raise ValueError(f"TokenTree invariant broken: {name} (request {request}, node {at})")


def pack_bits(flags: torch.Tensor) -> torch.Tensor:
    """Pack bool [..., B] into int32 [..., ceil(B / 32)]: flag j becomes bit j % 32 of word j // 32."""
    words = math.ceil(flags.shape[-1] / WORD_BITS)
    padded = torch.nn.functional.pad(flags, (0, words * WORD_BITS - flags.shape[-1]))
    bit = torch.arange(WORD_BITS, dtype=torch.int32, device=flags.device)
    value = torch.ones_like(bit) << bit
    # Distinct powers of two, one of them -2^31: the sum is the bitwise or and stays inside int32.
    return (padded.unflatten(-1, (words, WORD_BITS)) * value).sum(-1, dtype=torch.int32)


def unpack_bits(bits: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of `pack_bits`: int32 [..., W] to bool [..., count], with count <= 32 W."""
    bit = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    return ((bits[..., None] >> bit) & 1).bool().flatten(-2)[..., :count]


def ancestor_bits(parent: torch.Tensor, max_depth: int | None = None) -> torch.Tensor:
    """The `ancestors` field of a TokenTree from its parents, without host synchronisation.

    Pointer doubling: after t rounds a node holds the bits of the nearest 2^t nodes of its path.

    Args:
        parent: int64 [R, B]; a negative entry has no parent.
        max_depth: greatest depth in any of the trees; B - 1 when not given. Smaller saves rounds.

    Returns:
        int32 [R, B, ceil(B / 32)].
    """
    budget = parent.shape[1]
    node = torch.arange(budget, device=parent.device)
    jump = torch.where(parent < 0, node, parent)
    bits = pack_bits(node[:, None] == node).expand(parent.shape[0], -1, -1)
    path_length = budget if max_depth is None else min(max_depth + 1, budget)
    for _ in range((path_length - 1).bit_length()):
        bits = bits | bits.gather(1, jump[:, :, None].expand_as(bits))
        jump = jump.gather(1, jump)
    return bits.contiguous()


def chain(tokens: torch.Tensor) -> TokenTree:
    """A path as a tree: tokens int64 [R, N], the anchor first, gives trees of N real nodes without branches."""
    requests, length = tokens.shape
    depth = torch.arange(length, device=tokens.device).repeat(requests, 1)
    return TokenTree(
        token=tokens.clone(),
        parent=depth - 1,
        depth=depth,
        ancestors=ancestor_bits(depth - 1),
        node_count=torch.full((requests,), length, device=tokens.device),
    )


def _check_layout(tree: TokenTree) -> None:
    requests, budget = tree.token.shape
    expected = {
        "token": (torch.int64, (requests, budget)),
        "parent": (torch.int64, (requests, budget)),
        "depth": (torch.int64, (requests, budget)),
        "ancestors": (torch.int32, (requests, budget, math.ceil(budget / WORD_BITS))),
        "node_count": (torch.int64, (requests,)),
    }
    for name, (dtype, shape) in expected.items():
        field = getattr(tree, name)
        if field.dtype != dtype or tuple(field.shape) != shape:
            raise ValueError(
                f"TokenTree invariant broken: {name} is {field.dtype} {tuple(field.shape)}, must be {dtype} {shape}"
            )
