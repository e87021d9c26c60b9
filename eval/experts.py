"""Distinct experts that a pass of a mixture-of-experts target touches, and the floor of step inflation that they imply.

    python -m sgl_specflow.eval experts --model qwen3-30b-a3b --budgets 16,64,256 --out eval/results/experts_h200.json

SGLang's own recorder counts the tokens that each expert of each layer gets in a pass; the servers are those of `eval
inflation`, but not timed, since recording costs time. A pass reads every weight that is no expert's once, and every expert
that a token of it goes to once: `target_gb`. A tree step reads its draft head besides, the LM head a second time, and the
prefix's keys and values of the head's layers: `draft_gb`. The floor is a tree step's bytes over a plain step's, both with
the target's keys and values; it is the inflation of a step that does nothing but read.

The weights are made up, so is the routing: `distinct_uniform` is what independent, uniform routing would touch.
"""

import argparse
import asyncio
import json
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from sgl_specflow.eval.arguments import need_gpu, pairs
from sgl_specflow.eval.inflation import (
    add_server_arguments,
    groups,
    prompts_of,
    running,
    servers_of,
    stream_requests,
)
from sgl_specflow.eval.record import describe
from sgl_specflow.eval.shapes import MODELS
from sgl_specflow.launch.server import Server

from sgl_specflow.drafter.checkpoint import expected_shapes
from sgl_specflow.drafter.config import HeadConfig

RECORDER_FLAGS = ["--expert-distribution-recorder-mode", "stat", "--expert-distribution-recorder-buffer-size", "-1"]
FOLDER_VARIABLE = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
STEPS = 40  # of a request
BF16 = 2  # bytes


def recorded_passes(url: str, folder: Path, run: Callable[[], object]) -> torch.Tensor:
    """Tokens that went to each expert, [passes, layers, experts], in all passes of a server during `run`.

    folder: the server's FOLDER_VARIABLE. Raises RuntimeError where the server writes no record.
    """
    before = set(folder.glob("*.pt"))
    _post(url + "/start_expert_distribution_record")
    run()
    _post(url + "/stop_expert_distribution_record")
    _post(url + "/dump_expert_distribution_record")
    written = set(folder.glob("*.pt")) - before
    if len(written) != 1:
        raise RuntimeError(f"{len(written)} records in {folder}, expected one")
    return torch.load(written.pop(), map_location="cpu", weights_only=True)["logical_count"]


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=120) as answer:
        answer.read()


def distinct_experts(passes: torch.Tensor, tokens: int, experts_a_token: int) -> list[float]:
    """By layer, the mean number of experts that passes of `tokens` tokens touch; other passes (prefills, drafts) are left
    out. Raises RuntimeError where there is none."""
    of_steps = passes[(passes.sum(-1) == tokens * experts_a_token).all(-1)]
    if not len(of_steps):
        raise RuntimeError(f"no pass of {tokens} tokens among {len(passes)}")
    return (of_steps > 0).sum(-1).double().mean(0).tolist()


def uniform_experts(experts: int, experts_a_token: int, tokens: int) -> float:
    """Experts that `tokens` tokens touch on average if each goes to any `experts_a_token` of `experts`, independently."""
    return experts * (1 - (1 - experts_a_token / experts) ** tokens)


def bytes_read(target: dict, distinct: list[float], batch: int, context: int) -> float:
    """Bytes that one pass of a bfloat16 Qwen3-MoE target reads; `target` is its `config.json`."""
    hidden, layers, dim = target["hidden_size"], target["num_hidden_layers"], target["head_dim"]
    heads, kv_heads = target["num_attention_heads"], target["num_key_value_heads"]
    attention = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden
    dense = layers * (attention + hidden * target["num_experts"]) + target["vocab_size"] * hidden
    experts = sum(distinct) * 3 * hidden * target["moe_intermediate_size"]
    return BF16 * (dense + experts + layers * batch * context * 2 * kv_heads * dim)


def draft_bytes(target: dict, head: HeadConfig, batch: int, context: int, fp8: bool = False) -> float:
    """Bytes that one draft reads: head and LM head in bfloat16 or FP8, the head's keys and values in bfloat16."""
    weights = sum(torch.Size(shape).numel() for shape in expected_shapes(head).values())
    weights += target["vocab_size"] * target["hidden_size"]
    kept = head.num_hidden_layers * batch * context * 2 * head.num_key_value_heads * head.head_dim
    return weights * (1 if fp8 else BF16) + kept * BF16


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sgl_specflow.eval experts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_arguments(parser)
    parser.add_argument("--points", type=pairs, default="1x4096", help="batch x context, by commas")
    options = parser.parse_args(arguments)
    target = MODELS[options.model].target
    if "num_experts" not in target:
        with_experts = [name for name in MODELS if "num_experts" in MODELS[name].target]
        parser.error(f"{options.model} has no experts; give {', '.join(with_experts)}")
    need_gpu(parser)

    points = options.points
    folder = Path(tempfile.mkdtemp(prefix="experts_"))
    servers = {
        key: ([*flags, *RECORDER_FLAGS], environment | {FOLDER_VARIABLE: str(folder / f"record{number}")})
        for number, (key, (flags, environment)) in enumerate(servers_of(options, ["triton"], points, folder).items())
    }
    result = {"meta": describe(options.commit), "rows": [], "failures": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for group in groups(servers, options.at_once):
        with running(group, options) as opened:
            for key, server in opened.items():
                for point in points:
                    try:
                        result["rows"].append(
                            measure(key, server, Path(servers[key][1][FOLDER_VARIABLE]), point, options)
                        )
                    except Exception as error:
                        result["failures"].append({"server": list(key), "point": point, "error": str(error)[-2000:]})
        add_floor(result["rows"])
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        floor = f"floor {row['floor_inflation']:.3f}" if "floor_inflation" in row else ""
        print(
            f"{row['algorithm']:10} B={row['budget']} batch {row['batch']} context {row['context']}: "
            f"{row['distinct']:.1f} experts a layer ({row['distinct_uniform']:.1f} if uniform) {floor}"
        )
    return 1 if result["failures"] else 0


def measure(key: tuple, server: Server | Exception, folder: Path, point: tuple[int, int], options) -> dict:
    """One server's row at (batch, context)."""
    if isinstance(server, Exception):
        raise server
    (algorithm, variant, fp8), (batch, context) = key, point
    shapes, target = MODELS[options.model], MODELS[options.model].target
    is_plain = algorithm == "plain"
    tokens = batch * (1 if is_plain else variant)
    new_tokens = int(STEPS * (1.0 if is_plain else options.simulated_accept))
    run = lambda: asyncio.run(stream_requests(server.url, prompts_of(batch, context), new_tokens))
    layers = distinct_experts(recorded_passes(server.url, folder, run), tokens, target["num_experts_per_tok"])
    row = {
        "model": options.model,
        "algorithm": algorithm,
        "budget": None if is_plain else variant,
        "batch": batch,
        "context": context,
        "tokens_a_pass": tokens,
        "distinct": sum(layers) / len(layers),
        "distinct_of_layers": layers,
        "distinct_uniform": uniform_experts(target["num_experts"], target["num_experts_per_tok"], tokens),
        "target_gb": bytes_read(target, layers, batch, context) / 1e9,
    }
    if not is_plain:
        head = HeadConfig.from_dict(shapes.head_config(context, causal=algorithm == "jetflow"))
        row |= {"fp8_draft": fp8, "draft_gb": draft_bytes(target, head, batch, context, fp8) / 1e9}
    return row


def add_floor(rows: list[dict]) -> None:
    """Give each tree row `floor_inflation`, its bytes over those of the plain row at its point."""
    plain = {(row["batch"], row["context"]): row["target_gb"] for row in rows if row["algorithm"] == "plain"}
    for row in rows:
        if row["algorithm"] != "plain" and (row["batch"], row["context"]) in plain:
            total = row["target_gb"] + row["draft_gb"]
            row["floor_inflation"] = total / plain[row["batch"], row["context"]]
