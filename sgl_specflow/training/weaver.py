"""Train a Weaver on a frozen DFlash head and its frozen target.

    python -m sgl_specflow.training.weaver --target smollm2 --head sgl_specflow/drafter/heads/smollm2-135m-dflash \
        --responses responses --out OUT/smollm2-135m-weaver --minutes 2.5

The responses are the target's own, a file or folder that `regenerate` wrote. OUT receives the adapter in bfloat16
(config.json, safetensors shards), training.json, the run in numbers with the held-out accept length, and a model card.

What is learned: at random anchors of a response the head drafts its K depths once; each depth's P likeliest tokens are
its pool. The true continuation is the path (teacher forcing), all its nodes in one causal pass. At the node of depth i
the adapter's distribution over pool i + 1 is fitted to the target's there, by forward KL or by cross-entropy.

Where the target's token is outside a pool: it can be neither drafted nor reached. Forward KL counts the target's
probability inside the pool only, sum_c p(c) (log p(c|pool) - log q(c)), so a node weighs what its pool can win;
cross-entropy leaves the node out. In both, nodes below a token outside its pool are left out, since no tree holds them.
"""

import argparse
import dataclasses
import datetime
import itertools
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
from sgl_specflow.training.attention import TILE
from sgl_specflow.training.blocks import Blocks, sample_blocks
from sgl_specflow.training.head import TrainingHead
from sgl_specflow.training.losses import teacher_log_probs
from sgl_specflow.training.offline_accept import Answers, OfflineDrafter, measurable, walk
from sgl_specflow.training.optimizer import schedule
from sgl_specflow.training.responses import Response, load_responses
from sgl_specflow.training.rows import Batch, Rows
from sgl_specflow.training.target_states import FrozenTarget, load_model
from sgl_specflow.training.trainer import block_hidden
from sgl_specflow.tree import TokenTree, expansion_rounds, expansion_width

LOSSES = ("forward_kl", "cross_entropy")
REPORT_STEPS = 100


@dataclass(frozen=True)
class WeaverSettings:
    """Training ends after `minutes` or `steps`, whichever comes first; the learning rate follows that progress.

    A step is one packed row. sequences: responses that it holds, on average: its tokens are fixed. anchors: of a
    response, on average. decay: of the loss's weight with depth, exp(-depth / decay).
    """

    minutes: float
    steps: int = 10**9
    loss: str = "forward_kl"
    learning_rate: float = 1e-3
    warm_up: float = 0.04
    gradient_clip: float = 1.0
    weight_decay: float = 0.01
    decay: float = 7.0
    sequences: int = 16
    anchors: int = 64
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
        depth_weights: float32 [M, D], exp(-i / decay) where depth i + 1 lies inside the response, else 0.
        teacher: [M, D, P], the target's log-probabilities (over the vocabulary) of the pool, after the true path.
    """

    committed: Tensor
    proposal: Tensor
    pool_tokens: Tensor
    pool_scores: Tensor
    path: Tensor
    depth_weights: Tensor
    teacher: Tensor

    @property
    def inside(self) -> Tensor:
        """bool [M, D]: depth i + 1 lies inside the response."""
        return self.depth_weights > 0

    @property
    def in_pool(self) -> Tensor:
        """bool [M, D]: the true token of depth i + 1 is in its pool."""
        return (self.pool_tokens == self.path[:, 1:, None]).any(-1)

    @property
    def weights(self) -> Tensor:
        """float32 [M, D] of the loss at the nodes of depths 0..D - 1: `depth_weights`, 0 where the path left a pool."""
        reached = torch.nn.functional.pad(self.in_pool, (1, 0), value=True)[:, :-1].to(torch.int8).cumprod(1) > 0
        return torch.where(reached, self.depth_weights, 0.0)


@torch.no_grad()
def draft(
    head: TrainingHead, target: FrozenTarget, batch: Batch, blocks: Blocks, pool: int, depth: int | None = None
) -> Drafts:
    """The head's pools of `pool` tokens at all anchors of blocks, which reveal nothing.

    depth: K, where the head has more depths than the adapter; None: the head's.
    """
    depth = depth or head.config.depth
    hidden, final = block_hidden(head, target, batch, blocks)
    proposal, targets = hidden[:, 1 : depth + 1], blocks.targets[:, : depth + 1]
    scores, candidates = (proposal.to(target.lm_head.dtype) @ target.lm_head.T).topk(pool, dim=-1)
    table, chosen_by = teacher_log_probs(final, target.lm_head), (targets[:, 1:, None] - 1).clamp(min=0)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return Drafts(
        committed=final[(blocks.anchors - 1).clamp(min=0)],
        proposal=proposal,
        pool_tokens=candidates,
        pool_scores=scores.to(wide),
        path=batch.row.tokens[targets],
        # No state chose a document's first token.
        depth_weights=blocks.weights[:, 1 : depth + 1].masked_fill(blocks.positions[:, :1] == 0, 0.0),
        teacher=table[chosen_by, candidates].to(wide),
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
        in_pool = drafts.in_pool
        if loss == "cross_entropy":
            wanted = (drafts.pool_tokens == drafts.path[:, 1:, None]).to(drafts.teacher.dtype)
            weights = weights * in_pool
            entropy = 0.0
        else:
            wanted = drafts.teacher.exp()
            entropy = (wanted * drafts.teacher.log_softmax(-1)).sum(-1)

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
    """Train an adapter from scratch. What a step trains on depends on (seed, step) alone.

    Args:
        responses: greedy and sampled; those marked `held_out`, or of fewer than two response tokens, are left out.
        log: called with each entry of the history.
    Returns:
        (float32 tensors by name; history, a list of {step, minutes, loss, marginal_loss, outside_pool}: means since the
        last entry, the last one the share of true tokens that their pool lacks).
    Raises:
        ValueError: no response can be trained on.
    """
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
    rows, count = _rows(usable, settings), _block_count(head.config, settings)
    cuda = device.type == "cuda"
    packed = TrainingHead(head.config, head.tensors, head.tensors["fc.weight"].dtype, fast=cuda)

    def drafts_of(step: int) -> Drafts:
        batch = rows[step].to(device)
        generator = torch.Generator(device).manual_seed(settings.seed * 1_000_003 + step)
        blocks = sample_blocks(batch.row, head.config, count, 0.0, settings.decay, generator)
        return draft(packed, target, batch, blocks, config.candidate_pool_size, config.depth)

    if cuda:
        drafts_of(0)  # compiles, before the clock starts
        torch.cuda.synchronize(device)
    start, history, recent = time.monotonic(), [], []
    for step in itertools.count():
        minutes = (time.monotonic() - start) / 60
        progress = max(minutes / settings.minutes, step / settings.steps)
        if step and (progress >= 1 or len(recent) == REPORT_STEPS):
            loss, marginal, outside = torch.stack(recent).mean(0).tolist()
            entry = {"step": step, "minutes": round(minutes, 3), "loss": loss}
            history.append(entry | {"marginal_loss": marginal, "outside_pool": outside})
            log(history[-1])
            recent.clear()
        if step and progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * schedule(progress, settings.warm_up)
        drafts = drafts_of(step)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss, marginal = weaver_loss(weaver, target, drafts, settings.loss)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), settings.gradient_clip)
        optimizer.step()
        outside = ((~drafts.in_pool) & drafts.inside).sum() / drafts.inside.sum().clamp(min=1)
        recent.append(torch.stack((loss.detach(), marginal, outside.to(loss.dtype))))
    return {name: tensor.detach() for name, tensor in weights.items()}, history


def _rows(responses: list[Response], settings: WeaverSettings) -> Rows:
    """Rows of `sequences` mean lengths, and of the longest response at least; whole tiles, which the fast head needs."""
    lengths = [len(response.tokens) for response in responses]
    wanted = max(max(lengths), min(settings.sequences, len(lengths)) * sum(lengths) / len(lengths))
    return Rows(responses, math.ceil(wanted / TILE) * TILE, settings.seed)


def _block_count(head: HeadConfig, settings: WeaverSettings) -> int:
    """Blocks a row, so many more than asked for that their positions fill whole tiles."""
    whole = TILE // math.gcd(TILE, head.block_size)
    return math.ceil(settings.sequences * settings.anchors / whole) * whole


# --- accept length without a server ---------------------------------------------------------------------------------


@dataclass
class WeaverAnswers(Answers):
    """`Answers` with what a Weaver reads beside them; final: [R, T, H], the target's final-normed hidden states."""

    final: Tensor

    def select(self, rows: Tensor) -> "WeaverAnswers":
        fewer = super().select(rows)
        return WeaverAnswers(**vars(fewer), final=self.final[rows, : fewer.tokens.shape[1]])


class WeaverDrafter(OfflineDrafter):
    """An `OfflineDrafter` that also grows a Weaver's trees, `nodes` nodes a round, in `rounds`; None: the default."""

    def __init__(
        self,
        head: ReferenceHead,
        target: FrozenTarget,
        weaver: FoldedWeaver,
        nodes: int | None = None,
        rounds: int | None = None,
    ):
        super().__init__(head, target)
        self.weaver, self.nodes, self.rounds = weaver, nodes, rounds

    @torch.inference_mode()
    def read(self, responses: list[Response], at_once: int = 64) -> WeaverAnswers:
        answers = super().read(responses, at_once)
        final = torch.cat([self.target.states(some.clamp(min=0))[1] for some in answers.tokens.split(at_once)])
        return WeaverAnswers(**vars(answers), final=final)

    def conditional_tree(self, answers: WeaverAnswers, anchor: Tensor, budget: int) -> TokenTree:
        """One pass of the head, then the tree that the Weaver grows from its pools."""
        depth = min(self.weaver.config.depth, budget - 1)
        size = min(self.head.config.block_size, budget)
        block = torch.full((len(anchor), size), self.head.config.mask_token_id, device=anchor.device)
        block[:, 0] = answers.tokens.gather(1, anchor[:, None])[:, 0]
        positions = anchor[:, None] + torch.arange(size, device=anchor.device)
        proposal = self._run(answers, anchor, block, positions, None)[:, 1 : depth + 1]
        logits = proposal.to(self.target.lm_head.dtype) @ self.target.lm_head.T
        scores, candidates = logits.topk(self.weaver.config.candidate_pool_size, dim=-1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        rows = torch.arange(len(anchor), device=anchor.device)
        committed = answers.final[rows, anchor - 1]
        nodes = self.nodes or expansion_width(budget)
        rounds = self.rounds or expansion_rounds(budget, nodes)
        root, children = block[:, 0], self.width
        return self.weaver.build_tree(root, committed, proposal, candidates, scores, budget, nodes, rounds, children)


def mean_accept_lengths(drafter: WeaverDrafter, responses: list[Response], budgets: tuple[int, ...]) -> list[dict]:
    """Tokens a verify pass, walking all greedy answers as the server would: rows {source, drafter, budget, width,
    accept_length, responses}, source `all` last.

    The drafters are `dflash_tfm`, `ddtree` (the same head's marginals) and `chain` (its likeliest tokens; budget: the
    anchor and one of each depth). Answers of fewer than two tokens are left out.
    """
    responses = measurable(responses)
    if not responses:
        return []
    depth = drafter.head.config.depth
    methods = {("chain", depth + 1): (drafter.chain, depth + 1)}
    methods |= {("ddtree", budget): (drafter.tree, budget) for budget in budgets}
    methods |= {("dflash_tfm", budget): (drafter.conditional_tree, budget) for budget in budgets}
    lengths = walk(drafter.read(responses), responses, methods, depth)
    counts = Counter(response.source for response in responses) | {"all": len(responses)}
    return [
        {
            "source": source,
            "drafter": name,
            "budget": budget,
            "width": drafter.nodes or expansion_width(budget) if name == "dflash_tfm" else None,
            "accept_length": round(of_source[source], 4),
            "responses": counts[source],
        }
        for source in [*sorted(set(counts) - {"all"}), "all"]
        for (name, budget), of_source in lengths.items()
    ]


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
  on average {run["settings"]["sequences"]} sequences a step with {run["settings"]["anchors"]} anchors each, AdamW
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
    parser.add_argument("--responses", required=True, help="what `regenerate` wrote: a shard, or their folder")
    parser.add_argument("--out", required=True, type=Path, help="folder of the adapter")
    parser.add_argument("--minutes", type=float, default=2.5)
    parser.add_argument("--loss", choices=LOSSES, default=WeaverSettings.loss)
    parser.add_argument("--learning-rate", type=float, default=WeaverSettings.learning_rate)
    parser.add_argument("--sequences", type=int, default=WeaverSettings.sequences, help="sequences a step, on average")
    parser.add_argument("--anchors", type=int, default=WeaverSettings.anchors, help="anchors a sequence, on average")
    parser.add_argument("--steps", type=int, default=WeaverSettings.steps, help="end after so many steps")
    parser.add_argument("--rank", type=int, default=512, help="the adapter's width")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--mlp", type=int, default=1408)
    parser.add_argument("--pool", type=int, default=512, help="candidates a depth")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64], help="of the held-out accept length")
    parser.add_argument("--width", type=int, help="nodes a round when trees are measured; default: the server's")
    parser.add_argument("--rounds", type=int, help="how many rounds then; default: the server's")
    parser.add_argument("--held-out", type=int, default=96, help="held-out responses that are measured (0: none)")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    head_config = HeadConfig.load(arguments.head)
    target = FrozenTarget(load_model(arguments.target, device), head_config.target_layer_ids)
    dtype = target.embedding.dtype
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
    drafter = WeaverDrafter(head, target, folded, arguments.width, arguments.rounds)
    # Offline accept length is that of greedy decoding: only greedy answers tell it.
    held_out = [response for response in responses if response.held_out and response.greedy]
    run = {
        "name": arguments.out.name,
        "head": arguments.head.name,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "config": config.to_dict(),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "settings": dataclasses.asdict(settings),
        "training_responses": sum(not response.held_out for response in responses),
        "history": history,
        "accept_length": mean_accept_lengths(drafter, _spread(held_out, arguments.held_out), tuple(arguments.budgets)),
    }
    (arguments.out / "training.json").write_text(json.dumps(run, indent=2) + "\n")
    (arguments.out / "README.md").write_text(model_card(run))
    for row in run["accept_length"]:
        print(f"{row['source']:>14} {row['drafter']:>11} budget {row['budget']:>3}: {row['accept_length']:.3f}")


def _spread(responses: list[Response], count: int) -> list[Response]:
    """At most `count` of them, evenly from the whole list."""
    count = min(count, len(responses))
    return [responses[place * len(responses) // count] for place in range(count)]


if __name__ == "__main__":
    main()
