"""Responses cut into packed rows: which documents a step trains on, in an order that a seed and a step number fix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.training.blocks import PackedRow
from sgl_specflow.training.responses import Response


@dataclass
class Batch:
    """Documents of one row, as the target reads them (padded) and as the head reads them (packed).

    Attributes:
        tokens: [D, L] int64, right-padded with 0.
        source: [T] int64, where the row's token stands in `tokens.flatten()`; 0 where no document is.
        row: of T tokens.
    """

    tokens: Tensor
    source: Tensor
    row: PackedRow

    def to(self, device) -> "Batch":
        if torch.device(device).type == "cuda":
            pinned = Batch(self.tokens.pin_memory(), self.source.pin_memory(), self.row.pin())
            return Batch(
                pinned.tokens.to(device, non_blocking=True),
                pinned.source.to(device, non_blocking=True),
                pinned.row.to(device),
            )
        return Batch(self.tokens.to(device), self.source.to(device), self.row.to(device))


def pack(responses: list[Response], row_tokens: int) -> Batch:
    """One row of whole documents. Raises ValueError where they do not fit.

    A block may be anchored at the prompt's last token and at every response token but the last: after prefill the
    first anchor is the first response token, and the prompt's last token is as good a lesson.
    """
    lengths = [len(response.tokens) for response in responses]
    used = sum(lengths)
    if used > row_tokens:
        raise ValueError(f"documents of {used} tokens for a row of {row_tokens}")
    tokens = torch.nn.utils.rnn.pad_sequence([response.tokens for response in responses], batch_first=True)
    width = tokens.shape[1]
    length = torch.tensor(lengths)
    document = torch.repeat_interleave(torch.arange(len(responses)), length)
    start = (length.cumsum(0) - length)[document]
    place = torch.arange(used) - start
    prompt = torch.tensor([response.prompt_length for response in responses])[document]
    last = start + length[document] - 1
    rest = row_tokens - used

    def filled(values: Tensor, fill: int = 0) -> Tensor:
        return torch.nn.functional.pad(values, (0, rest), value=fill)

    source = document * width + place
    empty = torch.arange(used, row_tokens)
    row = PackedRow(
        tokens=filled(tokens.flatten()[source]),
        positions=filled(place),
        first=torch.cat((start, empty)),
        last=torch.cat((last, empty)),
        response=filled((place >= prompt - 1) & (place < length[document] - 1)),
    )
    return Batch(tokens, filled(source), row)


class Rows:
    """Endless epochs of rows: row n is the same whenever and wherever it is asked for.

    Documents of like length share a row, so that the target's padded batch wastes little: sorted inside random pools,
    cut into rows, the rows shuffled.
    """

    def __init__(self, responses: list[Response], row_tokens: int, seed: int):
        self.responses, self.row_tokens, self.seed = responses, row_tokens, seed
        self._epochs: dict[int, list[list[int]]] = {}
        longest = max(len(response.tokens) for response in responses)
        if longest > row_tokens:
            raise SpecflowConfigError(
                given=f"row_tokens {row_tokens}",
                allowed=f"the longest response's {longest} tokens or more",
                todo="give row_tokens of at least that",
            )

    def __getitem__(self, number: int) -> Batch:
        epoch = 0
        while number >= len(rows := self._rows(epoch)):
            number -= len(rows)
            epoch += 1
        return pack([self.responses[index] for index in rows[number]], self.row_tokens)

    def epoch_of(self, number: int) -> float:
        """How often the data has been seen after `number` rows."""
        epoch = 0
        while number >= len(rows := self._rows(epoch)):
            number -= len(rows)
            epoch += 1
        return epoch + number / len(rows)

    def _rows(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.responses), generator=generator).tolist()
            mean = sum(len(response.tokens) for response in self.responses) / len(order)
            pool = max(1, int(16 * self.row_tokens / mean))
            rows = []
            for first in range(0, len(order), pool):
                near = sorted(order[first : first + pool], key=lambda index: len(self.responses[index].tokens))
                rows += self._cut(near)
            shuffled = torch.randperm(len(rows), generator=generator).tolist()
            self._epochs[epoch] = [rows[index] for index in shuffled]
        return self._epochs[epoch]

    def _cut(self, indices: list[int]) -> list[list[int]]:
        rows, used = [[]], 0
        for index in indices:
            length = len(self.responses[index].tokens)
            if used + length > self.row_tokens:
                rows.append([])
                used = 0
            rows[-1].append(index)
            used += length
        return rows
