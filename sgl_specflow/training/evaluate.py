"""`evaluate`: offline accept lengths of heads on test prompts, into the rows of eval/results/acceptance_*.json."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from sgl_specflow.drafter.checkpoint import load_tensors
from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.drafter.weaver import FoldedWeaver, load_weaver
from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.eval.prompts import rows as test_rows
from sgl_specflow.eval.record import describe
from sgl_specflow.kernels.fp8_linear import dequantise_rows, quantise_rows
from sgl_specflow.training.config import AblateConfig, EvaluateConfig
from sgl_specflow.training.offline_accept import OfflineDrafter, accept_lengths, measurable, walk
from sgl_specflow.training.prompts import chat_tokens
from sgl_specflow.training.responses import Response, load_responses, save_responses
from sgl_specflow.training.target_states import FrozenTarget
from sgl_specflow.training.weaver import WeaverDrafter
from sgl_specflow.tree import expansion_rounds, expansion_width

TRAINING = "training.json"
METHODS = {"tree": "one_pass", "conditional": "one_pass", "refresh": "path_refresh", "chain": "chain"}
# What `runtime.fp8_draft` quantises, by the names of a checkpoint.
FP8_MATRICES = ("o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")


def continuations(config: EvaluateConfig | AblateConfig, tokenizer, generate: Callable) -> list[Response]:
    """The target's greedy answers to the first `rows` prompts of each data set; kept in `config.continuations`.

    Raises SpecflowConfigError where the kept ones are of other data sets, or of more or fewer prompts.

    generate: (prompts, max_new_tokens) -> continuations.
    """
    kept = Path(config.continuations) if config.continuations else None
    if kept and kept.exists():
        answers = load_responses(kept)
        if missing := sorted(set(config.datasets) - {answer.source for answer in answers}):
            raise SpecflowConfigError(
                given=f"continuations {kept}, which hold no answer to {', '.join(missing)}",
                allowed="a file that a run over these data sets kept",
                todo="give another file, or delete it",
            )
        counts = {dataset: len(test_rows(Path(config.data), dataset)[: config.rows]) for dataset in config.datasets}
        kept_counts = Counter(answer.source for answer in answers)
        if other := [name for name, count in counts.items() if kept_counts[name] != count]:
            raise SpecflowConfigError(
                given=f"continuations {kept} with {', '.join(f'{kept_counts[name]} answers of {name}' for name in other)}",
                allowed=f"{', '.join(f'{counts[name]} of {name}' for name in other)}, as rows {config.rows} asks",
                todo="give another file, or delete it",
            )
        return answers
    texts = [
        (dataset, chat[0]["content"])
        for dataset in config.datasets
        for chat in test_rows(Path(config.data), dataset)[: config.rows]
    ]
    tokens = chat_tokens(tokenizer, [text for _, text in texts])
    prompts = [(dataset, tokens[index]) for index, (dataset, _) in enumerate(texts)]
    answers = generate([tokens for _, tokens in prompts], config.max_new_tokens)
    responses = [
        Response(dataset, torch.tensor(tokens + answer), len(tokens), held_out=True)
        for (dataset, tokens), answer in zip(prompts, answers, strict=True)
    ]
    if kept:
        save_responses(responses, kept)
    return responses


def evaluate(config: EvaluateConfig, target: FrozenTarget, answers: list[Response]) -> dict:
    """Measure every head: {"meta", "rows"}, a row a method, data set and budget.

    `config.out` is written after each head's own trees, and after each width and budget of its Weaver.
    """
    result = {"meta": describe(config.commit or None) | {"config": asdict(config)}, "rows": []}
    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    counts = {dataset: sum(answer.source == dataset for answer in answers) for dataset in config.datasets}
    for folder in config.heads:
        head_config = HeadConfig.load(folder)
        dtype, device = target.embedding.dtype, target.embedding.device
        target.capture(head_config.target_layer_ids)
        tensors, lm_head = load_tensors(folder, dtype, str(device)), target.lm_head
        if config.fp8_draft:
            tensors = {name: _rounded(t) if name.endswith(FP8_MATRICES) else t for name, t in tensors.items()}
            lm_head = _rounded(lm_head)
        head = ReferenceHead(head_config, tensors)
        refreshed = config.path_refresh if head_config.causal_head else []
        drafter = OfflineDrafter(head, target, config.width, lm_head)
        lengths = accept_lengths(drafter, answers, config.budgets, refreshed, chains=[head_config.block_size])
        result["rows"] += [
            row | {"fp8_draft": config.fp8_draft} for row in _rows(Path(folder), head_config, lengths, counts)
        ]
        out.write_text(json.dumps(result, indent=1) + "\n")
        if folder in config.weavers:
            for line in _weaver_rows(config, folder, head, target, answers, counts):
                result["rows"].append(line)
                out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _weaver_rows(config: EvaluateConfig, folder: str, head: ReferenceHead, target: FrozenTarget, answers, counts):
    """Rows of the trees that the head's Weaver grows, a width, budget and data set each, as they are measured."""
    adapter, tensors = load_weaver(config.weavers[folder])
    adapter.check_against(head.config, target.embedding.shape[1])
    weaver = FoldedWeaver(adapter, tensors, target.embedding, target.lm_head, target.embedding.dtype)
    answers = measurable(answers)
    read = WeaverDrafter(head, target, weaver).read(answers)
    name = Path(config.weavers[folder]).name
    settings = dict.fromkeys(
        (budget, width or expansion_width(budget)) for width in config.weaver_widths for budget in config.budgets
    )
    for budget, width in settings:
        rounds = expansion_rounds(budget, width)
        drafter = WeaverDrafter(head, target, weaver, width, rounds)
        methods = {f"conditional-{budget}": (drafter.conditional_tree, budget)}
        lengths = walk(read, answers, methods, head.config.depth)
        for row in _rows(Path(folder), head.config, lengths, counts):
            yield row | {"weaver": name, "weaver_width": width, "weaver_rounds": rounds}


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """A matrix as FP8 holds it, in its own dtype."""
    return dequantise_rows(*quantise_rows(weight), weight.dtype)


def _rows(folder: Path, head: HeadConfig, lengths: dict, counts: dict[str, int]) -> list[dict]:
    facts = json.loads((folder / TRAINING).read_text()) if (folder / TRAINING).exists() else {}
    rows = []
    for method, of_source in lengths.items():
        kind, _, budget = method.partition("-")
        drafter = (
            "jetflow" if head.causal_head else {"tree": "ddtree", "chain": "dflash", "conditional": "dflash_tfm"}[kind]
        )
        for dataset, count in counts.items():
            rows.append(
                {
                    "drafter": drafter,
                    "method": METHODS[kind],
                    "causal": head.causal_head,
                    "head": folder.name,
                    "loss": facts.get("loss", "unknown"),
                    "data": facts.get("data", "unknown"),
                    "steps": facts.get("steps"),
                    "dataset": dataset,
                    "budget": int(budget),
                    "accept_length": round(of_source[dataset], 4),
                    "prompts": count,
                    "engine": "offline",
                }
            )
    return rows


def table(result: dict) -> str:
    """The rows as text, a line a head, method and data set; of a Weaver's trees one a width, w4 for 4."""
    cells: dict[tuple, dict[tuple, float]] = {}
    for row in result["rows"]:
        method = f"{row['method']} w{row['weaver_width']}" if "weaver_width" in row else row["method"]
        line = cells.setdefault((row["head"], method), {})
        line[row["dataset"], row["budget"]] = row["accept_length"]
    lines = []
    for (head, method), line in cells.items():
        for dataset in sorted({dataset for dataset, _ in line}):
            values = "  ".join(f"{budget}: {value:.2f}" for (name, budget), value in line.items() if name == dataset)
            lines.append(f"{head:28} {method:13} {dataset:9} {values}")
    return "\n".join(lines)
