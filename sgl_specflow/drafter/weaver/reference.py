"""The Weaver in plain PyTorch: slow, readable, any float dtype. The fast construction is held to it; training
differentiates through it.

Sources: the module names and shapes of the public checkpoint (trymirai/weaver). A pre-norm transformer of width
`d_rank`; norms are x / sqrt(mean(x^2) + 1e-6) * weight + bias in float32 at least; q, k and v are the thirds of
`qkv_proj`, heads inside each third; RoPE is of the neox kind (first half of a head against the second); scores are
scaled by head_dim^-1/2.

Who sees whom, with K + 1 prefix entries at RoPE positions 0..K and a node of depth d at position d + 1:

    prefix entry i   prefix entries 0..i
    node             the whole prefix, its ancestors, itself
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_specflow.drafter.weaver.config import WeaverConfig

EPS = 1e-6


def norm_with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-6) * weight + bias over the last dimension, in float32 at least, in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (F.rms_norm(wide, wide.shape[-1:], eps=EPS) * weight + bias).to(x.dtype)


def rotary_table(config: WeaverConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [..., head_dim / 2], of integer positions [...]."""
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=dtype) / config.head_dim
    angles = positions.to(dtype)[..., None] * config.rope_base**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., head_dim] turned by cos and sin [..., head_dim / 2], in their dtype; the result has x's."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class ReferenceWeaver:
    """The adapter's forward over a dictionary of tensors (`checkpoint.load_weaver`).

    All tensors share one dtype and device, and so do the inputs. R is a batch of requests.
    """

    def __init__(self, config: WeaverConfig, tensors: dict[str, Tensor]):
        self.config, self.tensors = config, tensors

    def node_states(
        self,
        committed_hidden: Tensor,
        proposal_hidden: Tensor,
        node_embeddings: Tensor,
        node_depth: Tensor,
        node_mask: Tensor,
    ) -> Tensor:
        """The adapter's states of N nodes [R, N, d_rank], before `out_norm`.

        Args:
            committed_hidden: [R, d_model], the target's final-normed hidden state of the last committed token (the one
                that chose the anchor).
            proposal_hidden: [R, k, d_model], the head's output hidden states of depths 1..k, k <= K.
            node_embeddings: [R, N, d_embed], the target's embedding of the nodes' tokens.
            node_depth: int64 [R, N], 0 for the anchor.
            node_mask: bool [R, N, N], node i attends to node j: ancestors and itself.
        """
        config = self.config
        prefix = torch.cat((committed_hidden[:, None], proposal_hidden), dim=1)
        prefix = self._linear(self._norm(prefix, "output_norm"), "proposal_in")
        nodes = self._linear(self._norm(node_embeddings, "embed_norm"), "token_in")
        x = torch.cat((prefix, nodes), dim=1)

        requests, length = prefix.shape[:2]
        order = torch.arange(length, device=x.device)
        positions = torch.cat((order.expand(requests, -1), node_depth + 1), dim=1)
        count = nodes.shape[1]
        mask = torch.zeros(requests, length + count, length + count, dtype=torch.bool, device=x.device)
        mask[:, :length, :length] = order[:, None] >= order
        mask[:, length:, :length] = True
        mask[:, length:, length:] = node_mask
        cos, sin = rotary_table(config, positions, torch.promote_types(x.dtype, torch.float32))
        for layer in range(config.num_layers):
            x = x + self._attention(f"blocks.{layer}", x, cos[:, None], sin[:, None], mask[:, None])
            x = x + self._mlp(f"blocks.{layer}", x)
        return x[:, length:]

    def pool_logits(self, states: Tensor, pool_scores: Tensor, pool_rows: Tensor) -> Tensor:
        """Logits over each node's pool [R, N, P]: the head's score plus query times LM-head row.

        Args:
            states: [R, N, d_rank] from `node_states`.
            pool_scores: [R, N, P], the head's scores (logits, or log-probabilities: a constant a node drops out in the
                softmax) of the P candidates one deeper than the node.
            pool_rows: [R, N, P, d_model], the LM head's rows of those candidates.
        """
        return pool_scores + (pool_rows @ self.query(states)[..., None])[..., 0]

    def query(self, states: Tensor) -> Tensor:
        """What a state asks of the LM head's rows: [..., d_rank] -> [..., d_model]."""
        return self._linear(self._norm(states, "out_norm"), "lm_head_query_in")

    def _attention(self, block: str, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        qkv = self._linear(self._norm(x, f"{block}.norm_attn"), f"{block}.qkv_proj")
        q, k, v = qkv.unflatten(-1, (3, self.config.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=mask)
        return self._linear(mixed.transpose(1, 2).flatten(2), f"{block}.o_proj")

    def _mlp(self, block: str, x: Tensor) -> Tensor:
        gate, up = self._linear(self._norm(x, f"{block}.norm_mlp"), f"{block}.gate_up_proj").chunk(2, dim=-1)
        return self._linear(F.silu(gate) * up, f"{block}.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return norm_with_bias(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])
