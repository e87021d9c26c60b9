"""Optimisers of a head: Muon for its matrices and AdamW for its vectors, or AdamW for all; schedule and average."""

import math

import torch
from torch import Tensor

from sgl_specflow.training.config import TrainConfig


class HeadOptimizer:
    """One or two torch optimisers over named float32 tensors.

    Muon (torch.optim.Muon) orthogonalises each matrix's momentum; its rate is scaled so that an update has AdamW's
    typical size (`match_rms_adamw`), so one number serves both.
    """

    def __init__(self, weights: dict[str, Tensor], config: TrainConfig):
        matrices = [tensor for tensor in weights.values() if tensor.ndim == 2]
        vectors = [tensor for tensor in weights.values() if tensor.ndim == 1]
        fused = matrices[0].is_cuda
        adamw = {"betas": (0.9, 0.95), "fused": fused}
        vector_group = {"params": vectors, "weight_decay": 0.0, "lr": config.vector_learning_rate}
        if config.optimizer == "muon":
            muon = torch.optim.Muon(
                matrices,
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            )
            self.optimizers = [muon, torch.optim.AdamW([vector_group], **adamw)]
        else:
            matrix_group = {"params": matrices, "weight_decay": config.weight_decay, "lr": config.learning_rate}
            self.optimizers = [torch.optim.AdamW([matrix_group, vector_group], **adamw)]
        self.peaks = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, rate: float) -> None:
        """One update at `rate` times the peak learning rates, which clears the gradients."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, self.peaks, strict=True):
            group["lr"] = peak * rate
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def state_dict(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def schedule(progress: float, warm_up: float) -> float:
    """Part of the peak rate: linear warm-up from a tenth, then cosine to 0. progress: 0 to 1 of the run."""
    if progress < warm_up:
        return 0.1 + 0.9 * progress / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1 - warm_up))))
