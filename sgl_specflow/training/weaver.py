"""Train a Weaver on a frozen DFlash head and its frozen target.

    python -m sgl_specflow.training.weaver --target smollm2 --head sgl_specflow/drafter/heads/smollm2-135m-dflash \
        --responses OUT/responses.npz --out OUT/smollm2-135m-weaver --minutes 2.5

The responses are the target's own (`training.responses`). OUT receives the adapter in bfloat16 (config.json, safetensors
shards), training.json, the run in numbers with the held-out accept length, and a model card.

What is learned: at random anchors of a response the head drafts its K depths once; each depth's P likeliest tokens are
its pool. The true continuation is the path (teacher forcing), all its nodes in one causal pass. At the node of depth i
the adapter's distribution over pool i + 1 is fitted to the target's there, by forward KL or by cross-entropy.

Where the target's token is outside a pool: it can be neither drafted nor reached. Forward KL counts the target's
probability inside the pool only, sum_c p(c) (log p(c|pool) - log q(c)), so a node weighs what its pool can win;
cross-entropy leaves the node out. In both, nodes below a token outside its pool are left out, since no tree holds them.
"""

import argparse
import datetime
import json
import math
import platform
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from sgl_specflow.drafter.checkpoint import load_tensors
from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.drafter.weaver import FoldedWeaver, ReferenceWeaver, WeaverConfig, load_weaver, save_weaver
from sgl_specflow.drafter.weaver.checkpoint import expected_shapes
from sgl_specflow.training.blocks import Blocks, sample_blocks
from sgl_specflow.training.responses import Response, load_responses
from sgl_specflow.training.target_states import FrozenTarget
from sgl_specflow.training.trainer import block_hidden
from sgl_specflow.tree import build_tree
from sgl_specflow.verify.acceptance import accept

LOSSES = ("forward_kl", "cross_entropy")
CHILDREN = 32  # candidates considered a node, and a depth of the marginal trees, when accept lengths are measured


@dataclass(frozen=True)
class WeaverSettings:
    """Training ends after `minutes` or `steps`, whichever comes first; the learning rate follows that progress."""

    minutes: float
    steps: int = 10**9
    loss: str = "forward_kl"
    learning_rate: float = 1e-3
    warm_up: float = 0.04
    gradient_clip: float = 1.0
    weight_decay: float = 0.01
    sequences: int = 16
    anchors: int = 64
    length_multiple: int = 64
    seed: int = 0

    def __post_init__(self):
        if self.loss not in LOSSES:
            raise ValueError(f"loss is {self.loss!r}; give one of {', '.join(LOSSES)}")


@dataclass
class Drafts:
    """What the frozen head says at M anchors, D depths each, and what came true.

    Attributes:
        committed: [M, H], the target's final-normed hidden state that chose the anchor.
        proposal: [M, D, H], the head's output hidden states of depths 1..D.
        pool_tokens: int64 [M, D, P] and pool_scores float32 [M, D, P], descending logits of the head.
        path: int64 [M, D + 1], the anchor and the true tokens after it.
        inside: bool [M, D], depth i + 1 lies inside the response.
        teacher: [M, D, H], the target's final-normed hidden state that chose the true token of depth i + 1.
    """

    committed: Tensor
    proposal: Tensor
    pool_tokens: Tensor
    pool_scores: Tensor
    path: Tensor
    inside: Tensor
    teacher: Tensor

    @property
    def in_pool(self) -> Tensor:
        """bool [M, D]: the true token of depth i + 1 is in its pool."""
        return (self.pool_tokens == self.path[:, 1:, None]).any(-1)

    @property
    def weights(self) -> Tensor:
        """float32 [M, D] of the loss at the nodes of depths 0..D - 1: exp(-depth / 7), 0 past the end or where the path
        left a pool."""
        reached = torch.nn.functional.pad(self.in_pool, (1, 0), value=True)[:, :-1].to(torch.int8).cumprod(1) > 0
        decay = torch.exp(-torch.arange(self.inside.shape[1], device=self.path.device) / 7.0)
        return torch.where(self.inside & reached, decay, 0.0)


@torch.no_grad()
def draft(head: ReferenceHead, target: FrozenTarget, tokens: Tensor, blocks: Blocks, pool: int) -> Drafts:
    """The head's pools at all anchors of blocks; tokens int64 [N, T], padded on the right."""
    device = tokens.device
    target_hidden, final = target.states(tokens)
    hidden = block_hidden(head, target, target_hidden, blocks).flatten(0, 1)
    positions = blocks.positions.flatten(0, 1)
    sequence = torch.arange(len(tokens), device=device).repeat_interleave(blocks.positions.shape[1])[:, None]
    last = tokens.shape[1] - 1
    proposal = hidden[:, 1:]
    scores, candidates = (proposal.to(target.lm_head.dtype) @ target.lm_head.T).topk(pool, dim=-1)
    return Drafts(
        committed=final[sequence[:, 0], positions[:, 0] - 1],
        proposal=proposal,
        pool_tokens=candidates,
        pool_scores=scores.to(torch.promote_types(scores.dtype, torch.float32)),
        path=tokens[sequence, positions.clamp(max=last)],
        inside=(blocks.weights > 0).flatten(0, 1)[:, 1:],
        teacher=final[sequence, (positions[:, 1:] - 1).clamp(max=last)],
    )


def weaver_loss(weaver: ReferenceWeaver, target: FrozenTarget, drafts: Drafts, loss: str) -> tuple[Tensor, Tensor]:
    """(the adapter's weighted mean loss, a differentiable scalar; the same of the head's marginals alone), in nats.

    Logits are formed over the whole vocabulary and gathered, which is cheaper here than gathering LM-head rows for
    every node of many anchors; serving gathers rows.
    """
    count, depths = drafts.inside.shape
    order = torch.arange(depths, device=drafts.path.device)
    chain = (order[:, None] >= order).expand(count, -1, -1)
    embeddings = torch.nn.functional.embedding(drafts.path[:, :-1], target.embedding)
    dtype = weaver.tensors["token_in.weight"].dtype
    states = weaver.node_states(
        drafts.committed.to(dtype), drafts.proposal.to(dtype), embeddings.to(dtype), order.expand(count, -1), chain
    )
    query = weaver.query(states)
    residual = (query.to(target.lm_head.dtype) @ target.lm_head.T).gather(2, drafts.pool_tokens)
    weights = drafts.weights
    with torch.no_grad():
        teacher = (drafts.teacher @ target.lm_head.T).to(drafts.pool_scores.dtype)
        whole = teacher.logsumexp(-1, keepdim=True)
        teacher = teacher.gather(2, drafts.pool_tokens)
        in_pool = drafts.in_pool
        if loss == "cross_entropy":
            wanted = (drafts.pool_tokens == drafts.path[:, 1:, None]).to(teacher.dtype)
            weights = weights * in_pool
            entropy = 0.0
        else:
            wanted = (teacher - whole).exp()
            entropy = (wanted * teacher.log_softmax(-1)).sum(-1)

    def mean(logits: Tensor) -> Tensor:
        single = entropy - (wanted * logits.log_softmax(-1)).sum(-1)
        return (single * weights).sum() / weights.sum().clamp(min=1e-9)

    return mean(drafts.pool_scores + residual.to(drafts.pool_scores.dtype)), mean(drafts.pool_scores).detach()


def initial_weaver(config: WeaverConfig, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Float32 starting weights: matrices normal (0.02), outputs of blocks smaller, norms one, biases and the final query
    zero, so that training starts from the head's marginals."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("bias") or name == "lm_head_query_in.weight":
            tensor = torch.zeros(shape)
        elif len(shape) == 1:
            tensor = torch.ones(shape)
        else:
            tensor = torch.randn(shape, generator=generator) * 0.02
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor /= math.sqrt(2 * config.num_layers)
        tensors[name] = tensor.to(device)
    return tensors


def train_weaver(
    config: WeaverConfig,
    head: ReferenceHead,
    target: FrozenTarget,
    responses: list[Response],
    settings: WeaverSettings,
    log=lambda entry: None,
) -> tuple[dict[str, Tensor], list[dict]]:
    """Train an adapter from scratch.

    Args:
        responses: those marked `held_out`, or with fewer than two response tokens, are left out.
        log: called with each entry of the history.
    Returns:
        (float32 tensors by name; history, a list of {step, minutes, loss, marginal_loss, outside_pool}: means since the
        last entry, the last one the share of true tokens that their pool lacks).
    Raises:
        ValueError: no response can be trained on.
    """
    torch.manual_seed(settings.seed)
    usable = [r for r in responses if not r.held_out and len(r.tokens) - r.prompt_length >= 2]
    if not usable:
        raise ValueError(
            f"none of {len(responses)} responses can be trained on; give some of two response tokens, not held out"
        )
    device = target.embedding.device
    weights = {n: tensor.requires_grad_() for n, tensor in initial_weaver(config, settings.seed, device).items()}
    weaver = ReferenceWeaver(config, weights)
    matrices = [tensor for tensor in weights.values() if tensor.ndim == 2]
    vectors = [tensor for tensor in weights.values() if tensor.ndim == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    start, history, recent = time.monotonic(), [], []
    for step, batch in enumerate(_batches(usable, settings.sequences)):
        minutes = (time.monotonic() - start) / 60
        progress = max(minutes / settings.minutes, step / settings.steps)
        if step and (progress >= 1 or len(recent) == 100):
            loss, marginal, outside = torch.stack(recent).mean(0).tolist()
            entry = {"step": step, "minutes": round(minutes, 3), "loss": loss}
            history.append(entry | {"marginal_loss": marginal, "outside_pool": outside})
            log(history[-1])
            recent.clear()
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(progress, settings.warm_up)
        tokens, prompt_lengths, lengths = _pad(batch, settings.length_multiple, device)
        blocks = sample_blocks(tokens, prompt_lengths, lengths, head.config, settings.anchors, reveal=0.0)
        drafts = _cut_depth(draft(head, target, tokens, blocks, config.candidate_pool_size), config.depth)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, marginal = weaver_loss(weaver, target, drafts, settings.loss)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), settings.gradient_clip)
        optimizer.step()
        outside = ((~drafts.in_pool) & drafts.inside).sum() / drafts.inside.sum().clamp(min=1)
        recent.append(torch.stack((loss.detach(), marginal, outside.to(loss.dtype))))
    return {name: tensor.detach() for name, tensor in weights.items()}, history


def _cut_depth(drafts: Drafts, depth: int) -> Drafts:
    """The first K depths, where the head has more than the adapter."""
    return Drafts(
        drafts.committed,
        drafts.proposal[:, :depth],
        drafts.pool_tokens[:, :depth],
        drafts.pool_scores[:, :depth],
        drafts.path[:, : depth + 1],
        drafts.inside[:, :depth],
        drafts.teacher[:, :depth],
    )


def _pad(batch: list[Response], multiple: int, device) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [N, T] padded on the right with 0, prompt lengths [N], lengths [N]); T a multiple, so shapes are few."""
    tokens = torch.nn.utils.rnn.pad_sequence([response.tokens for response in batch], batch_first=True)
    tokens = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % multiple))
    prompt_lengths = torch.tensor([response.prompt_length for response in batch])
    lengths = torch.tensor([len(response.tokens) for response in batch])
    return tokens.to(device), prompt_lengths.to(device), lengths.to(device)


def _batches(responses: list[Response], size: int):
    """Endless epochs of whole batches of like length: sorted inside random pools of 32 batches, then shuffled."""
    size = min(size, len(responses))
    while True:
        order = torch.randperm(len(responses)).tolist()
        batches = []
        for first in range(0, len(order), 32 * size):
            near = sorted(order[first : first + 32 * size], key=lambda index: len(responses[index].tokens))
            batches += [near[cut : cut + size] for cut in range(0, len(near) - size + 1, size)]
        for index in torch.randperm(len(batches)).tolist():
            yield [responses[i] for i in batches[index]]


def _schedule(progress: float, warm_up: float) -> float:
    """Linear warm-up from a tenth, then cosine to 0."""
    if progress < warm_up:
        return 0.1 + 0.9 * progress / warm_up
    return 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


# --- accept length without a server ---------------------------------------------------------------------------------


@torch.inference_mode()
def accept_lengths(
    head: ReferenceHead,
    target: FrozenTarget,
    weaver: FoldedWeaver,
    tokens: Tensor,
    prompt_length: int,
    budgets: tuple[int, ...],
    width: int = 8,
    at_once: int = 64,
) -> dict[tuple[str, int], Tensor]:
    """Accept length at every anchor of one greedy response, {(drafter, budget): int64 [anchors]}, the drafters being
    `dflash_tfm`, `ddtree` (the same head's marginals) and `chain` (its likeliest tokens; budget: the anchor and K).

    tokens [T] on the target's device; the anchors are positions prompt_length to T - 2. A pass accepts the longest
    prefix of the true continuation that the tree holds, and one token more. `at_once` anchors are drafted together.
    """
    config = head.config
    anchors = torch.arange(prompt_length, len(tokens) - 1, device=tokens.device)
    parts: dict[tuple[str, int], list[Tensor]] = {}
    for some in anchors.split(at_once):
        positions = (some[:, None] + torch.arange(config.block_size, device=tokens.device))[None]
        block = torch.full_like(positions, config.mask_token_id)
        block[..., 0] = tokens[some]
        blocks = Blocks(block, positions, torch.zeros(positions.shape, device=tokens.device))
        drafts = draft(head, target, tokens[None], blocks, weaver.config.candidate_pool_size)
        drafts = _cut_depth(drafts, weaver.config.depth)
        whole = (drafts.proposal.to(target.lm_head.dtype) @ target.lm_head.T).to(drafts.pool_scores.dtype)
        log_probs = (drafts.pool_scores - whole.logsumexp(-1, keepdim=True)).float()
        # Past the response's end nothing matches: tokens are never -1.
        true = torch.nn.functional.pad(tokens, (0, config.block_size + 1), value=-1)
        depth = weaver.config.depth
        trees = {}
        for budget in budgets:
            trees["dflash_tfm", budget] = weaver.build_tree(
                tokens[some],
                drafts.committed,
                drafts.proposal,
                drafts.pool_tokens,
                drafts.pool_scores,
                budget,
                width,
                CHILDREN,
            )
            trees["ddtree", budget] = build_tree(
                tokens[some],
                log_probs[..., :CHILDREN].contiguous(),
                drafts.pool_tokens[..., :CHILDREN].contiguous(),
                budget,
            )
        trees["chain", depth + 1] = build_tree(
            tokens[some], log_probs[..., :1].contiguous(), drafts.pool_tokens[..., :1].contiguous(), depth + 1
        )
        for key, tree in trees.items():
            parts.setdefault(key, []).append(accept(tree, true[some[:, None] + tree.depth + 1], depth).length)
    return {key: torch.cat(lengths) for key, lengths in parts.items()}


def mean_accept_lengths(
    head: ReferenceHead,
    target: FrozenTarget,
    weaver: FoldedWeaver,
    responses: list[Response],
    budgets: tuple[int, ...],
    width: int = 8,
) -> list[dict]:
    """Tokens a verify pass, walking each greedy response as the server would: rows {source, drafter, budget, width,
    accept_length, responses}, source 'all' last. Responses of fewer than two tokens are left out."""
    passes, committed, counted = Counter(), Counter(), Counter()
    for response in responses:
        length = len(response.tokens) - response.prompt_length
        if length < 2:
            continue
        tokens = response.tokens.to(target.embedding.device)
        lengths = accept_lengths(head, target, weaver, tokens, response.prompt_length, budgets, width)
        for source in (response.source, "all"):
            committed[source] += length - 1
            counted[source] += 1
        for key, row in lengths.items():
            count = _passes(row.tolist())
            for source in (response.source, "all"):
                passes[source, *key] += count
    return [
        {
            "source": source,
            "drafter": drafter,
            "budget": budget,
            "width": width if drafter == "dflash_tfm" else None,
            "accept_length": round(committed[source] / count, 4),
            "responses": counted[source],
        }
        for (source, drafter, budget), count in sorted(passes.items(), key=lambda item: (item[0][0] == "all", item[0]))
    ]


def _passes(lengths: list[int]) -> int:
    """Verify passes from the first anchor to the end of the response."""
    place, count = 0, 0
    while place < len(lengths):
        place += lengths[place]
        count += 1
    return count


# --- command --------------------------------------------------------------------------------------------------------


def model_card(run: dict) -> str:
    """README.md of an adapter: what it is, the data, the run, the held-out accept length, the licences."""
    rows = "\n".join(
        f"| {row['source']} | {row['drafter']} | {row['budget']} | {row['accept_length']:.2f} | {row['responses']} |"
        for row in run["accept_length"]
    )
    first, last, config = run["history"][0], run["history"][-1], run["config"]
    return f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# {run["name"]}: a Weaver adapter for {run["head"]}

{run["parameters"] / 1e6:.1f} million parameters: width {config["d_rank"]}, {config["num_layers"]} layers, pool
{config["candidate_pool_size"]}, depth {config["K"]}. Serve it with `--speculative-algorithm dflash_tfm`, the head
{run["head"]} and `SGL_SPECFLOW_OPTIONS='{{"weaver": "..."}}'`. Made by `python -m sgl_specflow.training.weaver` of
sgl_specflow, {run["date"]}, on {run["device"]}, torch {run["torch"]}.

- **Head**: {run["head"]}, frozen; its hidden states and its pools are what this adapter was trained on.
- **Target and data**: as in the head's card; {run["training_responses"]} responses that the target wrote itself.
- **Training**: {run["settings"]["loss"]} over the pool, {last["step"]} steps in {last["minutes"]:.1f} minutes,
  {run["settings"]["sequences"]} sequences a step with {run["settings"]["anchors"]} anchors each, AdamW
  {run["settings"]["learning_rate"]}; loss {first["loss"]:.3f} (mean of the first {first["step"]} steps) to
  {last["loss"]:.3f} nats, where the head's marginals alone are at {last["marginal_loss"]:.3f}. Outside its pool:
  {100 * last["outside_pool"]:.1f} % of the true tokens.

Held-out prompts of the train splits, greedy, offline (tokens a verify pass, the bonus token included):

| prompts | drafter | budget | accept length | responses |
| --- | --- | --- | --- | --- |
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target, Hugging Face format")
    parser.add_argument("--head", required=True, type=Path, help="folder of a bidirectional DFlash head for it")
    parser.add_argument("--responses", required=True, help="responses.npz of the target's own texts")
    parser.add_argument("--out", required=True, type=Path, help="folder of the adapter")
    parser.add_argument("--minutes", type=float, default=2.5)
    parser.add_argument("--loss", choices=LOSSES, default=WeaverSettings.loss)
    parser.add_argument("--learning-rate", type=float, default=WeaverSettings.learning_rate)
    parser.add_argument("--sequences", type=int, default=WeaverSettings.sequences, help="sequences a step")
    parser.add_argument("--anchors", type=int, default=WeaverSettings.anchors, help="anchors a sequence")
    parser.add_argument("--steps", type=int, default=WeaverSettings.steps, help="end after so many steps")
    parser.add_argument("--rank", type=int, default=512, help="the adapter's width")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--mlp", type=int, default=1408)
    parser.add_argument("--pool", type=int, default=512, help="candidates a depth")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64], help="of the held-out accept length")
    parser.add_argument("--width", type=int, default=8, help="nodes a round when trees are measured")
    parser.add_argument("--held-out", type=int, default=96, help="held-out responses that are measured (0: none)")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).to(device)
    head_config = HeadConfig.load(arguments.head)
    target = FrozenTarget(model, head_config.target_layer_ids)
    head = ReferenceHead(head_config, load_tensors(arguments.head, dtype, device))
    config = WeaverConfig(
        d_model=head_config.hidden_size,
        d_embed=target.embedding.shape[1],
        d_rank=arguments.rank,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        mlp_dim=arguments.mlp,
        depth=head_config.depth,
        candidate_pool_size=arguments.pool,
    )
    config = WeaverConfig.from_dict(config.to_dict(), "the command line")
    config.check_against(head_config, target.embedding.shape[1])
    settings = WeaverSettings(
        minutes=arguments.minutes,
        steps=arguments.steps,
        loss=arguments.loss,
        learning_rate=arguments.learning_rate,
        sequences=arguments.sequences,
        anchors=arguments.anchors,
    )
    responses = load_responses(arguments.responses)
    show = lambda entry: print(json.dumps(entry), flush=True)
    tensors, history = train_weaver(config, head, target, responses, settings, show)
    save_weaver(arguments.out, config, {name: tensor.bfloat16() for name, tensor in tensors.items()})

    _, stored = load_weaver(arguments.out)
    folded = FoldedWeaver(config, stored, target.embedding, target.lm_head, dtype)
    held_out = _spread([response for response in responses if response.held_out], arguments.held_out)
    run = {
        "name": arguments.out.name,
        "head": arguments.head.name,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "config": config.to_dict(),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "settings": vars(settings),
        "training_responses": sum(not response.held_out for response in responses),
        "history": history,
        "accept_length": mean_accept_lengths(head, target, folded, held_out, tuple(arguments.budgets), arguments.width),
    }
    (arguments.out / "training.json").write_text(json.dumps(run, indent=2) + "\n")
    (arguments.out / "README.md").write_text(model_card(run))
    for row in run["accept_length"]:
        print(f"{row['source']:>14} {row['drafter']:>11} budget {row['budget']:>3}: {row['accept_length']:.3f}")


def _spread(responses: list[Response], count: int) -> list[Response]:
    """At most `count` of them, evenly from the whole list."""
    step = max(1, math.ceil(len(responses) / count)) if count else len(responses) + 1
    return responses[::step] if count else []


if __name__ == "__main__":
    main()
