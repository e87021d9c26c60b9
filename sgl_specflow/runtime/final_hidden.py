"""The target's final-normed hidden state of each request's last committed token, kept from step to step.

SGLang's logits processor hands out the final-normed states of all rows (`last_hidden_states`) beside the captured
layers when its `keep_last_hidden_states` is set, through graph replays too (`srt/layers/logits_processor.py`,
`runner/decode_cuda_graph_runner.py`, 0.5.23). They are kept by row of SGLang's request table, written when a prefill or
a step ends and read when the next step drafts, all on the stream that runs the batches:

- a request that joins, leaves or changes its place in the batch keeps its row;
- each chunk of a prefill writes, the last one stays; a retracted request is prefilled again and writes again;
- a row that changes hands is written by the new request's prefill, which is launched after every step that still
  holds the finished one, before anyone reads it.
"""

import torch

from sgl_specflow.errors import SpecflowConfigError


def keep_final_hidden(target_model: torch.nn.Module) -> None:
    """Make the target hand out its final-normed states. Before its graphs are captured; SpecflowConfigError if it has
    no logits processor that can."""
    processor = getattr(target_model, "logits_processor", None)
    if not hasattr(processor, "keep_last_hidden_states"):
        raise SpecflowConfigError(
            given=f"a target of class {type(target_model).__name__}, whose final hidden states cannot be read",
            allowed="a class of SGLang with a LogitsProcessor at .logits_processor",
            todo="serve it with --speculative-algorithm ddtree",
        )
    processor.keep_last_hidden_states = True


class FinalHidden:
    """A row of H numbers for each row of SGLang's request table."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device | str):
        self.table = torch.zeros(rows, width, dtype=dtype, device=device)

    def write(self, rows: torch.Tensor, hidden: torch.Tensor) -> None:
        """rows int64 [R] of the request table, hidden [R, H]."""
        self.table[rows] = hidden.to(self.table.dtype)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, H]."""
        return self.table[rows]
