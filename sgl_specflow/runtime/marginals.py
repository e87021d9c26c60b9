"""From the head's hidden states to the best tokens of each row, through the target's LM head."""

from dataclasses import dataclass

import torch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
from sglang.srt.runtime_context import get_parallel

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.kernels.fp8_linear import fp8_linear, quantise_rows
from sgl_specflow.kernels.tree_step import best_tokens

MOST_FP8_ROWS = 128  # more are read in several passes, which the LM head as it is needs no more bytes for


@dataclass
class TargetVocabulary:
    """The target's embedding and LM head as a draft head borrows them.

    Attributes:
        embedding: module, int64 [...] -> [..., H].
        weight: [this rank's vocabulary rows, H].
        first_token: id of the first row.
        size: of the whole vocabulary. rows_a_rank: what each rank's rows are padded to, in the target's own cut.
        logit_cap: soft cap that the target puts on its logits (0: none).
        logit_scale: factor on the target's logits.
        fp8: weight in FP8 and its scales, as `fp8_linear` takes them, for logits that need not be exact; None: without.
    """

    embedding: torch.nn.Module
    weight: torch.Tensor
    first_token: int
    logit_cap: float
    logit_scale: float
    size: int
    rows_a_rank: int
    fp8: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, target_model: torch.nn.Module) -> "TargetVocabulary":
        """From a loaded SGLang model; SpecflowConfigError if its LM head is quantised or not to be found."""
        head = getattr(target_model, "lm_head", None)
        weight = getattr(head, "weight", None)
        if weight is None or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise SpecflowConfigError(
                given=f"a target whose LM head is {type(head).__name__} of {getattr(weight, 'dtype', None)}",
                allowed="a dense LM head in float32, bfloat16 or float16",
                todo="serve a checkpoint whose LM head is not quantised",
            )
        shard = getattr(head, "shard_indices", None)
        rows = int(shard.num_org_elements) if shard is not None else weight.shape[0]
        processor = getattr(target_model, "logits_processor", None)
        return cls(
            embedding=target_model.get_input_embeddings(),
            weight=weight[:rows],
            first_token=int(shard.org_vocab_start_index) if shard is not None else 0,
            logit_cap=float(getattr(processor, "final_logit_softcapping", None) or 0.0),
            logit_scale=float(getattr(processor, "logit_scale", None) or 1.0),
            size=int(head.org_vocab_size) if shard is not None else rows,
            rows_a_rank=int(shard.num_org_elements_padded) if shard is not None else rows,
        )

    def embedding_rows(self) -> torch.Tensor:
        """The embedding's [this rank's vocabulary rows, H], of the same tokens as `weight`'s; SpecflowConfigError if the
        target cuts the two differently."""
        rows, shard = self.weight.shape[0], getattr(self.embedding, "shard_indices", None)
        if shard is None:
            alike, has = get_parallel().tp_size == 1, "an embedding that is not cut"
        else:
            first, count = int(shard.org_vocab_start_index), int(shard.num_org_elements)
            alike, has = (first, count) == (self.first_token, rows), f"the embedding of {count} tokens from {first} on"
        if not alike:
            raise SpecflowConfigError(
                given=f"a target whose rank has {has}, and the LM head of {rows} from {self.first_token} on",
                allowed="an embedding and an LM head that SGLang cuts alike",
                todo="serve it on one GPU, or without a Weaver (ddtree)",
            )
        return self.embedding.weight[:rows]

    def of_all_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """From [this rank's vocabulary rows, ...] to [vocabulary, ...], on every rank. A collective: all ranks call it."""
        if get_parallel().tp_size == 1:
            return rows
        padded = rows.new_zeros(self.rows_a_rank, *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        return tensor_model_parallel_all_gather(padded, dim=0)[: self.size]

    def quantise(self) -> None:
        """Draft with an FP8 copy of the LM head from now on; the target keeps its own."""
        self.fp8 = quantise_rows(self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> [N, this rank's vocabulary rows] in the LM head's dtype, neither scaled nor capped."""
        if self.fp8 is not None and hidden.shape[0] <= MOST_FP8_ROWS:
            return fp8_linear(hidden.to(self.weight.dtype), *self.fp8)
        return torch.matmul(hidden.to(self.weight.dtype), self.weight.T)

    def best(self, hidden: torch.Tensor, width: int, asked: tuple[torch.Tensor, torch.Tensor] | None = None):
        """The `width` likeliest tokens of each row, by full-vocabulary log-probability.

        Args:
            hidden: [N, H], the head's output. asked: rows and tokens, both int64 [M], of further pairs to score, or None.

        Returns:
            log_probs float32 [N, width] (descending), tokens int64 [N, width], and the asked pairs' log_probs [M].
        """
        logits = self.logits(hidden)
        values, tokens, total = self._best_here(logits, width)
        picked = None if asked is None else self._pick(logits, *asked)
        if get_parallel().tp_size > 1:
            total = tensor_model_parallel_all_gather(total[:, None], dim=1).logsumexp(1)
            values = tensor_model_parallel_all_gather(values, dim=1)
            tokens = tensor_model_parallel_all_gather(tokens, dim=1)
            # Stable: ranks hold ascending parts of the vocabulary, so ties go to the smaller token, as on one rank.
            values, order = values.sort(dim=1, descending=True, stable=True)
            values, tokens = values[:, :width], tokens.gather(1, order[:, :width])
            if picked is not None:
                picked = tensor_model_parallel_all_gather(picked[:, None], dim=1).amax(1)
        return values - total[:, None], tokens, None if picked is None else picked - total[asked[0]]

    def _best_here(self, logits: torch.Tensor, width: int):
        """`best_tokens` of this rank's part of the vocabulary; where it has fewer than `width` tokens, or none (SGLang pads
        a small vocabulary before it cuts it), the rest is -inf."""
        rows, here = logits.shape
        if here >= width:
            values, tokens, total = best_tokens(logits, width, scale=self.logit_scale, cap=self.logit_cap)
            return values, tokens + self.first_token, total
        values = torch.full((rows, width), -torch.inf, device=logits.device)
        tokens = torch.zeros(rows, width, dtype=torch.int64, device=logits.device)
        total = torch.full((rows,), -torch.inf, device=logits.device)
        if here:
            values[:, :here], tokens[:, :here], total = self._best_here(logits, here)
        return values, tokens, total

    def _pick(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of single tokens, float32 [M]; -inf where they lie on another rank."""
        if not logits.shape[1]:
            return torch.full(tokens.shape, -torch.inf, device=logits.device)
        local = tokens - self.first_token
        here = (local >= 0) & (local < logits.shape[1])
        picked = logits[rows, local.clamp(0, logits.shape[1] - 1)].float() * self.logit_scale
        if self.logit_cap:
            picked = self.logit_cap * torch.tanh(picked / self.logit_cap)
        return picked.masked_fill(~here, -torch.inf)
