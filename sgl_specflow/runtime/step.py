"""What one decode step works on, shared by drafting, verifying and committing."""

from dataclasses import dataclass

import torch

from sgl_specflow.kernels.tree_step import window_slots


@dataclass
class StepWindow:
    """The KV slots that one step may write, R requests of B nodes.

    Attributes:
        slots: int64 [R, B], node order; slot i of request r holds position committed_length[r] + i after the commit.
        committed_length: int64 [R], the anchor's position.
        anchor: int64 [R], the last committed token, whose KV is not in the cache yet.
        plan: SGLang's plan of the window's slot ids.
    """

    slots: torch.Tensor
    committed_length: torch.Tensor
    anchor: torch.Tensor
    plan: object

    @classmethod
    def of(cls, batch, model_runner, budget: int) -> "StepWindow":
        """Read the window from SGLang's request table, before the pass that the scheduler runs beside."""
        committed = batch.seq_lens
        if committed.is_cuda:
            # Under overlap it may come from another stream.
            committed.record_stream(torch.cuda.current_stream())
        table = model_runner.req_to_token_pool.req_to_token
        slots = window_slots(table, batch.req_pool_indices, committed, budget)
        host_lengths = batch.seq_lens_cpu
        plan = model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=committed,
            seq_lens_cpu=host_lengths if host_lengths is not None else batch.spec_info.nxt_kv_lens_cpu,
            write_virtual=slots.flatten(),
            read_extent=budget,
        )
        return cls(slots=slots, committed_length=committed, anchor=batch.spec_info.bonus_tokens, plan=plan)
