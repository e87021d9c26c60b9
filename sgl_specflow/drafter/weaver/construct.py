"""The Weaver made ready for serving, and the construction of a tree with it as one function of tensors.

What does not depend on the step is computed once: norms' scales and biases go into the linear maps behind them, and
both ends become tables over the vocabulary, `token_in(embed_norm(embedding))` and `lm_head · lm_head_query_in ·
out_norm`. A node then costs one row of the first table, the blocks, and P rows of the second: d_rank numbers a
candidate instead of d_model, and never a projection to the whole vocabulary.

Each node's keys and values are written once, behind the prefix's, at its slot (its place in the order of expansion);
who its ancestors are is a row of flags gathered from an earlier ancestor's, and those of its own round beside them. No
host synchronisation and shapes that depend on budget, width, rounds and batch only: a CUDA graph can hold the whole
construction.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_specflow.drafter.weaver import steps
from sgl_specflow.drafter.weaver.config import WeaverConfig
from sgl_specflow.drafter.weaver.reference import EPS, norm_with_bias, rotary_table
from sgl_specflow.kernels.row_linear import MOST_ROWS
from sgl_specflow.tree import Expansion, TokenTree, build_conditional_tree

TABLE_ROWS = 16384  # vocabulary rows that are projected at once when the tables are made


class FoldedWeaver:
    """A Weaver over one target's embedding and LM head.

    Args:
        config, tensors: from `checkpoint.load_weaver`, tensors in float32 or wider, on any device.
        embedding: [V, d_embed], the target's. lm_head: [V, d_model], the target's. With of_all_ranks both are of a part of
            the vocabulary, the same.
        dtype: of the tables, the maps and the arithmetic between them; norms, rotation and scores are in float32 at least.
        implementation: of the pieces of a round, "torch", "triton" or "cuda" (a layer in five launches, in bfloat16 or
            float16); None: on CUDA tensors "cuda" where it serves the Weaver and a round's rows are as few as its
            products are made for, else Triton.
        of_all_ranks: from rows [part of V, n] of a table to [V, n]; None where this process has all.
    """

    def __init__(
        self,
        config: WeaverConfig,
        tensors: dict[str, Tensor],
        embedding: Tensor,
        lm_head: Tensor,
        dtype: torch.dtype,
        implementation: str | None = None,
        of_all_ranks: Callable[[Tensor], Tensor] | None = None,
    ):
        self.config = config
        device = embedding.device
        self.steps, self.few_row_steps = _steps(implementation, config, dtype, device)
        wide = torch.promote_types(dtype, torch.float32)
        tensors = {name: tensor.to(device, wide) for name, tensor in tensors.items()}
        self.wide = wide
        self.dtype = dtype
        self.proposal = _after_norm(tensors, "output_norm", "proposal_in", dtype)
        self.blocks = [
            {
                "qkv": _after_norm(tensors, f"blocks.{i}.norm_attn", f"blocks.{i}.qkv_proj", dtype),
                "o": tensors[f"blocks.{i}.o_proj.weight"].to(dtype),
                "gate_up": _after_norm(tensors, f"blocks.{i}.norm_mlp", f"blocks.{i}.gate_up_proj", dtype),
                "down": tuple(tensors[f"blocks.{i}.down_proj.{part}"].to(dtype) for part in ("weight", "bias")),
            }
            for i in range(config.num_layers)
        ]
        whole = of_all_ranks or (lambda rows: rows)
        self.token_table = whole(torch.cat([self._token_rows(part, tensors) for part in embedding.split(TABLE_ROWS)]))
        rows, biases = zip(*(self._query_rows(part, tensors) for part in lm_head.split(TABLE_ROWS)))
        self.query_table, self.query_bias = whole(torch.cat(rows)), whole(torch.cat(biases)[:, None])[:, 0].contiguous()
        cos, sin = rotary_table(config, torch.arange(config.depth + 2, device=device), wide)
        # Of a position: what a head is multiplied with, and what its swapped halves are.
        self.turn = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)

    def _token_rows(self, embedding: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        x = norm_with_bias(embedding.to(self.wide), tensors["embed_norm.weight"], tensors["embed_norm.bias"])
        return F.linear(x, tensors["token_in.weight"], tensors["token_in.bias"]).to(self.dtype)

    def _query_rows(self, lm_head: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        rows = lm_head.to(self.wide) @ tensors["lm_head_query_in.weight"]
        return (rows * tensors["out_norm.weight"]).to(self.dtype), rows @ tensors["out_norm.bias"]

    @torch.inference_mode()
    def build_tree(
        self,
        anchor: Tensor,
        committed_hidden: Tensor,
        proposal_hidden: Tensor,
        pool_tokens: Tensor,
        pool_scores: Tensor,
        budget: int,
        width: int,
        rounds: int,
        children: int,
        temperature: float = 1.0,
        max_depth: Tensor | None = None,
    ) -> TokenTree:
        """The tree of at most `budget` nodes, by `rounds` expansions of `width` nodes each.

        A path u_1..u_n scores sum_i log q(u_i | x, h, u_1..u_{i-1}), where q(. | .) is the softmax over the P candidates
        of depth i alone of (head's score + adapter's residual) / temperature. It is a distribution over the pool, not
        over the vocabulary: what the target may say outside the pool has probability 0, so scores of different depths
        are each relative to what their pool can say. Acceptance does not depend on them. What a round guesses comes from
        the softmax over the head's scores alone, at the same temperature.

        Args:
            anchor: int64 [R].
            committed_hidden: [R, d_model], the target's final-normed hidden state that chose the anchor.
            proposal_hidden: [R, k, d_model], the head's output hidden states of depths 1..k, k <= K.
            pool_tokens: int64 [R, D, P], distinct inside a depth, D <= K.
            pool_scores: float32 [R, D, P], the head's logits or log-probabilities of them.
            budget, width, rounds, children, max_depth: as in `build_conditional_tree`.
        """
        steps = self.steps_for(anchor.shape[0] * max(width, proposal_hidden.shape[1] + 1))
        state = _Construction(
            self,
            steps,
            anchor,
            committed_hidden,
            proposal_hidden,
            pool_tokens,
            pool_scores,
            width * rounds,
            temperature,
        )
        marginals = (pool_scores if temperature == 1 else pool_scores / temperature).log_softmax(-1).float()
        return build_conditional_tree(
            anchor,
            pool_tokens,
            marginals,
            state.log_probs,
            budget,
            width,
            rounds,
            children,
            max_depth,
            steps.tree_builder,
        )

    def steps_for(self, rows: int):
        """The module whose functions run products of so many rows."""
        return self.few_row_steps if rows <= MOST_ROWS else self.steps


class _Construction:
    """What the adapter remembers while one batch of trees grows.

    Places 0.. of the key and value buffers are the prefix's, then the nodes' by slot. Attention runs over a whole
    number of eights of them, which its kernels want of a mask; what is not written yet is zero and masked.
    """

    def __init__(
        self,
        weaver: FoldedWeaver,
        steps,
        anchor,
        committed_hidden,
        proposal_hidden,
        pool_tokens,
        pool_scores,
        slots,
        temperature,
    ):
        config, device = weaver.config, anchor.device
        self.weaver, self.steps, self.temperature = weaver, steps, temperature
        self.pool_tokens, self.pool_scores = pool_tokens.contiguous(), pool_scores.contiguous()
        requests, self.prefix = anchor.shape[0], proposal_hidden.shape[1] + 1
        places = _whole_eights(self.prefix + slots)
        shape = (config.num_layers, requests, config.num_heads, places, config.head_dim)
        self.keys, self.values = steps.unset_places((2, *shape), weaver.dtype, device)
        # Row s: the places that the node in slot s attends to.
        self.visible = torch.empty(requests, slots, places, dtype=torch.bool, device=device)
        self._run_prefix(committed_hidden, proposal_hidden)

    def _run_prefix(self, committed_hidden, proposal_hidden) -> None:
        weaver = self.weaver
        hidden = torch.cat((committed_hidden[:, None].to(weaver.dtype), proposal_hidden.to(weaver.dtype)), dim=1)
        x = F.linear(_normed(hidden), *weaver.proposal)
        self._run(self.steps.states_of(x), weaver.turn[None, : self.prefix], 0, visible=None)

    def log_probs(self, nodes: Expansion) -> Tensor:
        """[R, n, P] for `build_conditional_tree`."""
        weaver = self.weaver
        *states, turn, visible = self.steps.enter(nodes, weaver.token_table, weaver.turn, self.visible, self.prefix)
        *_, query = self._run(states, turn, self.prefix + nodes.first_slot, visible)
        logits = self.steps.pool_logits(
            query, nodes.depth, self.pool_tokens, self.pool_scores, weaver.query_table, weaver.query_bias
        )
        return (logits if self.temperature == 1 else logits / self.temperature).log_softmax(-1)

    def _run(
        self, states: Sequence[Tensor], turn: Tensor, first: int, visible: Tensor | None
    ) -> Sequence[Tensor] | None:
        """The states behind all blocks; keys and values are kept at places from first on.

        visible: None for the prefix, of which keys and values are all that is wanted.
        """
        steps, heads = self.steps, self.weaver.config.num_heads
        for layer, block in enumerate(self.weaver.blocks):
            qkv = steps.before_attention(states, block).unflatten(-1, (3, heads, -1))
            mixed = steps.attend(qkv, turn, self.keys[layer], self.values[layer], first, visible)
            if visible is None and layer == len(self.weaver.blocks) - 1:
                return None
            states = steps.mlp(steps.after_attention(states, mixed, block), block)
        return states


def _whole_eights(count: int) -> int:
    return -(-count // 8) * 8


def _steps(implementation: str | None, config: WeaverConfig, dtype: torch.dtype, device: torch.device) -> tuple:
    """The modules for many rows and for few ones."""
    if implementation not in (None, "torch", "triton", "cuda"):
        raise ValueError(f"implementation is {implementation!r}; give 'torch', 'triton', 'cuda' or None")
    if implementation == "torch" or (implementation is None and device.type != "cuda"):
        return steps, steps
    from sgl_specflow.drafter.weaver import cuda_steps, triton_steps

    refused = cuda_steps.refusals(config, dtype, device)
    if implementation == "cuda" and refused:
        raise ValueError(f"implementation 'cuda' does not serve this Weaver ({'; '.join(refused)}); give None")
    many = cuda_steps if implementation == "cuda" else triton_steps
    few = triton_steps if implementation == "triton" or refused else cuda_steps
    return many, few


def _normed(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps), computed in float32 at least; scale and bias are folded into what follows."""
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


def _after_norm(tensors: dict[str, Tensor], norm: str, linear: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(weight, bias) of the linear map behind a norm, with the norm's scale and bias in them."""
    weight = tensors[f"{linear}.weight"]
    bias = weight @ tensors[f"{norm}.bias"]
    if f"{linear}.bias" in tensors:
        bias = bias + tensors[f"{linear}.bias"]
    return (weight * tensors[f"{norm}.weight"]).to(dtype), bias.to(dtype)
