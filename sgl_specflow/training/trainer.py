"""The training loop of a draft head: frozen target, forward KL, one wall-clock or step budget."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_specflow.drafter.checkpoint import expected_shapes
from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.training.blocks import Blocks, sample_blocks
from sgl_specflow.training.losses import forward_kl
from sgl_specflow.training.responses import Response
from sgl_specflow.training.target_states import FrozenTarget


@dataclass(frozen=True)
class TrainSettings:
    """Training ends after `minutes` or `steps`, whichever comes first; the learning rate follows that progress."""

    minutes: float
    steps: int = 10**9
    learning_rate: float = 1.5e-3
    warm_up: float = 0.04
    gradient_clip: float = 1.0
    weight_decay: float = 0.01
    sequences: int = 16
    anchors: int = 48
    reveal: float = 0.3
    seed: int = 0


def initial_tensors(config: HeadConfig, target: FrozenTarget, seed: int) -> dict[str, Tensor]:
    """Float32 starting weights on the target's device: matrices normal (0.02), outputs of layers smaller, norms one.

    The final norm starts as the target's, whose scale the LM head expects.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        tensor = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor /= math.sqrt(2 * config.num_hidden_layers)
        tensors[name] = tensor.to(target.embedding.device)
    tensors["norm.weight"] = target.model.model.norm.weight.detach().float().clone()
    return tensors


def block_hidden(head: ReferenceHead, target: FrozenTarget, target_hidden: Tensor, blocks: Blocks) -> Tensor:
    """The head's final-normed hidden states [N, A, S, H] at all blocks, from target hidden states [N, T, L * H]."""
    count, length = target_hidden.shape[:2]
    where = torch.arange(length, device=target_hidden.device).expand(count, -1)
    dtype = head.tensors["fc.weight"].dtype
    context = head.context_kv(head.project_context(target_hidden.to(dtype)), where)
    embeddings = torch.nn.functional.embedding(blocks.tokens.flatten(1), target.embedding).to(dtype)
    hidden = head.forward(
        embeddings,
        blocks.positions.flatten(1),
        context,
        blocks.block_mask(head.config.causal_head),
        blocks.context_mask(length),
    )
    return hidden.unflatten(1, blocks.tokens.shape[1:])


def batch_loss(head: ReferenceHead, target: FrozenTarget, batch: list[Response], settings: TrainSettings) -> Tensor:
    """The loss of one batch of responses with fresh random blocks."""
    device = target.embedding.device
    tokens, prompt_lengths, lengths = pad(batch, device)
    reveal = settings.reveal if head.config.causal_head else 0.0
    blocks = sample_blocks(tokens, prompt_lengths, lengths, head.config, settings.anchors, reveal)
    target_hidden, final = target.states(tokens)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = block_hidden(head, target, target_hidden, blocks)
    counted = blocks.weights > 0
    sequence = torch.arange(len(tokens), device=device)[:, None, None].expand_as(counted)
    teacher = final[sequence[counted], blocks.teacher_rows[counted]]
    return forward_kl(hidden[counted], teacher, target.lm_head, blocks.weights[counted])[0]


def train(config: HeadConfig, target: FrozenTarget, responses: list[Response], settings: TrainSettings):
    """Train a head from scratch.

    Args:
        responses: those marked `held_out`, or with fewer than two response tokens, are left out.
    Returns:
        (float32 tensors by name; history, a list of {step, minutes, loss}, the loss averaged since the last entry).
    Raises:
        ValueError: no response can be trained on.
    """
    torch.manual_seed(settings.seed)
    usable = [r for r in responses if not r.held_out and len(r.tokens) - r.prompt_length >= 2]
    if not usable:
        raise ValueError(
            f"none of {len(responses)} responses can be trained on; give some of two response tokens, not held out"
        )
    weights = {name: tensor.requires_grad_() for name, tensor in initial_tensors(config, target, settings.seed).items()}
    head = ReferenceHead(config, weights)
    matrices = [tensor for tensor in weights.values() if tensor.ndim == 2]
    vectors = [tensor for tensor in weights.values() if tensor.ndim == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=matrices[0].is_cuda)
    start, history, losses = time.monotonic(), [], []
    for step, batch in enumerate(_batches(usable, settings)):
        minutes = (time.monotonic() - start) / 60
        progress = max(minutes / settings.minutes, step / settings.steps)
        if step and (progress >= 1 or len(losses) == 200):
            history.append({"step": step, "minutes": round(minutes, 3), "loss": torch.stack(losses).mean().item()})
            losses.clear()
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(progress, settings.warm_up)
        loss = batch_loss(head, target, batch, settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), settings.gradient_clip)
        optimizer.step()
        losses.append(loss.detach())
    return {name: tensor.detach() for name, tensor in weights.items()}, history


def pad(batch: list[Response], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [N, T] padded on the right with 0, prompt lengths [N], lengths [N]), int64 on `device`."""
    tokens = torch.nn.utils.rnn.pad_sequence([response.tokens for response in batch], batch_first=True)
    prompt_lengths = torch.tensor([response.prompt_length for response in batch])
    lengths = torch.tensor([len(response.tokens) for response in batch])
    return tokens.to(device), prompt_lengths.to(device), lengths.to(device)


def _schedule(progress: float, warm_up: float) -> float:
    """Linear warm-up from a tenth, then cosine to 0."""
    if progress < warm_up:
        return 0.1 + 0.9 * progress / warm_up
    return 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def _batches(responses: list[Response], settings: TrainSettings) -> Iterator[list[Response]]:
    """Endless epochs of batches of like length (sorted inside random pools of 32 batches, then shuffled)."""
    pool = 32 * settings.sequences
    while True:
        order = torch.randperm(len(responses)).tolist()
        batches = []
        for first in range(0, len(order), pool):
            near = sorted(order[first : first + pool], key=lambda index: len(responses[index].tokens))
            batches += [near[cut : cut + settings.sequences] for cut in range(0, len(near), settings.sequences)]
        for index in torch.randperm(len(batches)).tolist():
            yield [responses[i] for i in batches[index]]
