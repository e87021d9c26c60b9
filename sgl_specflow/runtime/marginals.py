"""From the head's hidden states to the best tokens of each row, through the target's LM head."""

from dataclasses import dataclass

import torch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
from sglang.srt.runtime_context import get_parallel

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.kernels.tree_step import best_tokens


@dataclass
class TargetVocabulary:
    """The target's embedding and LM head as a draft head borrows them.

    Attributes:
        embedding: module, int64 [...] -> [..., H].
        weight: [this rank's vocabulary rows, H].
        first_token: id of the first row.
        logit_cap: soft cap that the target puts on its logits (0: none).
        logit_scale: factor on the target's logits.
    """

    embedding: torch.nn.Module
    weight: torch.Tensor
    first_token: int
    logit_cap: float
    logit_scale: float

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
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> [N, this rank's vocabulary rows] in the LM head's dtype, neither scaled nor capped."""
        return torch.matmul(hidden.to(self.weight.dtype), self.weight.T)

    def best(self, hidden: torch.Tensor, width: int, asked: tuple[torch.Tensor, torch.Tensor] | None = None):
        """The `width` likeliest tokens of each row, by full-vocabulary log-probability.

        Args:
            hidden: [N, H], the head's output. asked: rows and tokens, both int64 [M], of further pairs to score, or None.

        Returns:
            log_probs float32 [N, width] (descending), tokens int64 [N, width], and the asked pairs' log_probs [M].
        """
        logits = self.logits(hidden)
        values, tokens, total = best_tokens(
            logits, min(width, logits.shape[1]), scale=self.logit_scale, cap=self.logit_cap
        )
        if self.first_token:
            tokens += self.first_token
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

    def _pick(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of single tokens, float32 [M]; -inf where they lie on another rank."""
        local = tokens - self.first_token
        here = (local >= 0) & (local < logits.shape[1])
        picked = logits[rows, local.clamp(0, logits.shape[1] - 1)].float() * self.logit_scale
        if self.logit_cap:
            picked = self.logit_cap * torch.tanh(picked / self.logit_cap)
        return picked.masked_fill(~here, -torch.inf)
