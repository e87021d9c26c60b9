"""The resolved settings of a tree algorithm: from SGLang's flags and the head's config to one dataclass.

SGLang's flags carry everything but what `SGL_SPECFLOW_OPTIONS` holds, a JSON object in the environment, which is the
one place for options that SGLang has no flag for:

    SGL_SPECFLOW_OPTIONS='{"path_refresh": true}'

- `path_refresh` (bool, default false; causal heads only): a second pass of the head over the first tree's better half
  re-scores children on their own branch (JetFlow's tree-causal drafting).
- `fp8_draft` (bool, default false): drafting reads FP8 copies of the head's large matrices and of the LM head. It changes
  which tokens are proposed, never what is accepted.
- `weaver` (text; dflash_tfm only, which needs it): the Weaver adapter: a torch file, a folder or a hub id.
- `weaver_width` (integer, default: half of the budget, 32 at most): nodes that the adapter expands at once. 1 is strict
  best-first search, which takes budget - 1 rounds.
- `weaver_rounds` (integer, default: ceil((budget - 1) / weaver_width)): how often it does so.
- `weaver_pool` (integer, default: what the adapter was trained with): tokens of a depth that compete.
- `weaver_temperature` (number, default 1.0): divides the adapter's logits; above 1 trees grow wider.
"""

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.weaver import WeaverConfig, find_weaver, load_weaver_config
from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.runtime.names import DDTREE, DFLASH_TFM, JETFLOW, JETSPEC
from sgl_specflow.tree import expansion_rounds, expansion_width

OPTIONS_VARIABLE = "SGL_SPECFLOW_OPTIONS"
MIN_BUDGET, MAX_BUDGET = 2, 256
DEFAULT_BUDGET = 64
DEFAULT_WIDTH = 16
MAX_WEAVER_WIDTH = 64


@dataclass(frozen=True)
class Options:
    """What SGL_SPECFLOW_OPTIONS holds; None: not given."""

    path_refresh: bool = False
    fp8_draft: bool = False
    weaver: str | None = None
    weaver_width: int | None = None
    weaver_rounds: int | None = None
    weaver_pool: int | None = None
    weaver_temperature: float | None = None

    @classmethod
    def from_environment(cls) -> "Options":
        """Parse the variable; SpecflowConfigError names an unknown key or a wrong value."""
        text = os.environ.get(OPTIONS_VARIABLE, "").strip() or "{}"
        allowed = "a JSON object with the keys " + ", ".join(
            f"{key} ({kind})" for key, (kind, _) in OPTION_KINDS.items()
        )
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:  # a ValueError of its own for an integer of thousands of digits
            raise _refusal(f"{OPTIONS_VARIABLE}={text[:200]!r}, which is no JSON ({error})", allowed) from error
        if not isinstance(given, dict):
            raise _refusal(f"{OPTIONS_VARIABLE}={text!r}", allowed)
        for key, value in given.items():
            if key not in OPTION_KINDS or not OPTION_KINDS[key][1](value):
                raise _refusal(f"{OPTIONS_VARIABLE} with {key!r}: {json.dumps(value)}", allowed)
        return cls(**given)

    def refuse_weaver_options(self, algorithm: str) -> None:
        """Raise for an option of the Weaver beside an algorithm without one."""
        for option in fields(self):
            if option.name.startswith("weaver") and getattr(self, option.name) is not None:
                raise _refusal(
                    f"{option.name} with --speculative-algorithm {algorithm.lower()}",
                    "options of the Weaver with --speculative-algorithm dflash_tfm only",
                    f"leave {option.name} out of {OPTIONS_VARIABLE}, or give --speculative-algorithm dflash_tfm",
                )


# What each option must be, for the error and for the check.
OPTION_KINDS = {
    "path_refresh": ("true or false", lambda value: type(value) is bool),
    "fp8_draft": ("true or false", lambda value: type(value) is bool),
    "weaver": ("a path or hub id", lambda value: isinstance(value, str) and bool(value.strip())),
    "weaver_width": ("an integer", lambda value: type(value) is int),
    "weaver_rounds": ("an integer", lambda value: type(value) is int),
    "weaver_pool": ("an integer", lambda value: type(value) is int),
    "weaver_temperature": ("a number", lambda value: type(value) in (int, float)),
}


@dataclass(frozen=True)
class AdapterSettings:
    """How the Weaver grows a tree.

    Attributes:
        path: its torch file or folder.
        width: nodes expanded at once (w). rounds: how often.
        pool: tokens of a depth that compete (P).
        temperature: divides its logits.
        prefix: depths of the head whose hidden states it reads.
    """

    path: Path
    width: int
    rounds: int
    pool: int
    temperature: float
    prefix: int

    @classmethod
    def resolve(cls, path: Path, weaver: WeaverConfig, head: HeadConfig, budget: int, block: int, options: Options):
        """From the options; SpecflowConfigError names the one that is out of range."""
        width = expansion_width(budget) if options.weaver_width is None else options.weaver_width
        _in_range("weaver_width", width, 1, MAX_WEAVER_WIDTH, "nodes that the Weaver expands at once")
        rounds = expansion_rounds(budget, width) if options.weaver_rounds is None else options.weaver_rounds
        _in_range("weaver_rounds", rounds, 1, budget - 1, "how often the Weaver expands nodes, below the budget")
        pool = weaver.candidate_pool_size if options.weaver_pool is None else options.weaver_pool
        _in_range("weaver_pool", pool, 1, head.vocab_size, "tokens of a depth that compete")
        temperature = 1.0 if options.weaver_temperature is None else options.weaver_temperature
        if not 0.01 <= temperature <= 100:
            raise _refusal(f"weaver_temperature {temperature}", "0.01 to 100", "give a value in that range")
        return cls(path, width, rounds, pool, float(temperature), min(weaver.depth, block - 1))


@dataclass(frozen=True)
class TreeSettings:
    """How one step drafts and verifies.

    Attributes:
        budget: nodes a verify pass scores, root included (B).
        depth: greatest depth of a tree (D), at most the head's and at most B - 1.
        width: children considered a depth (K).
        block: queries of the head's pass, the anchor included.
        causal: whether the head's block is causal (JetFlow) or bidirectional (DFlash).
        mask_token: the token that fills the block.
        path_refresh: whether a second pass re-scores the tree on its own branches.
        adapter: the Weaver's settings (dflash_tfm), or None.
        fp8_draft: whether drafting reads FP8 weights.
    """

    algorithm: str
    budget: int
    depth: int
    width: int
    block: int
    causal: bool
    mask_token: int
    path_refresh: bool
    adapter: AdapterSettings | None = None
    fp8_draft: bool = False

    @classmethod
    def resolve(
        cls,
        algorithm: str,
        head: HeadConfig,
        budget: int | None,
        depth: int | None,
        width: int | None,
        options: Options,
    ) -> "TreeSettings":
        """From --speculative-num-draft-tokens, --speculative-num-steps and --speculative-eagle-topk (None: default)."""
        budget = DEFAULT_BUDGET if budget is None else budget
        _in_range(
            "--speculative-num-draft-tokens", budget, MIN_BUDGET, MAX_BUDGET, "the tree's budget, its root included"
        )
        greatest, weaver = head.depth, None
        if algorithm == DFLASH_TFM:
            path, weaver = _load_weaver(head, options)
            greatest = weaver.depth
        else:
            options.refuse_weaver_options(algorithm)
        depth = greatest if depth is None else depth
        whose = "this Weaver reads (its K)" if weaver else "this head predicts in one pass"
        _in_range("--speculative-num-steps", depth, 1, greatest, f"depths that {whose}")
        width = min(DEFAULT_WIDTH, head.vocab_size) if width is None else width
        _in_range("--speculative-eagle-topk", width, 1, min(256, head.vocab_size), "children considered a depth")
        if algorithm in (JETFLOW, JETSPEC) and not head.causal_head:
            raise _refusal(
                f"--speculative-algorithm {algorithm.lower()} with a bidirectional head",
                "a causal head (dflash_config.causal_head true in its config.json)",
                "give a JetFlow head, or --speculative-algorithm ddtree for this one",
            )
        if algorithm == DDTREE and head.causal_head:
            raise _refusal(
                "--speculative-algorithm ddtree with a causal head",
                "a bidirectional DFlash head",
                "give a DFlash head, or --speculative-algorithm jetflow for this one",
            )
        if options.path_refresh and not head.causal_head:
            raise _refusal("path_refresh with a bidirectional head", "a causal head", "leave path_refresh out")
        if options.path_refresh and budget < 4:
            raise _refusal(f"path_refresh with a budget of {budget}", "a budget of at least 4", "raise the budget")
        depth = min(depth, budget - 1)
        # A causal head's marginals do not see past their depth; a bidirectional one was trained on whole blocks.
        block = depth + 1 if head.causal_head else min(head.block_size, budget)
        adapter = AdapterSettings.resolve(path, weaver, head, budget, block, options) if weaver else None
        return cls(
            algorithm=algorithm,
            budget=budget,
            depth=depth,
            width=width,
            block=block,
            causal=head.causal_head,
            mask_token=head.mask_token_id,
            path_refresh=options.path_refresh,
            adapter=adapter,
            fp8_draft=options.fp8_draft,
        )

    def describe(self) -> str:
        """One log line."""
        head = "causal" if self.causal else "bidirectional"
        more = f"path refresh {'on' if self.path_refresh else 'off'}"
        if self.adapter:
            more = (
                f"Weaver {self.adapter.path}: {self.adapter.rounds} rounds of {self.adapter.width} nodes, pool "
                f"{self.adapter.pool}, temperature {self.adapter.temperature:g}"
            )
        if self.fp8_draft:
            more += ", FP8 draft weights"
        return (
            f"sgl_specflow: {self.algorithm.lower()}, {head} head, budget {self.budget} nodes, depth {self.depth}, "
            f"width {self.width} children a depth, block {self.block}, {more}"
        )


def _load_weaver(head: HeadConfig, options: Options) -> tuple[Path, WeaverConfig]:
    if options.weaver is None:
        raise _refusal(
            "--speculative-algorithm dflash_tfm without a Weaver",
            "the Weaver adapter that was trained on this head: a torch file, a folder or a hub id",
            f'set {OPTIONS_VARIABLE}=\'{{"weaver": "PATH"}}\', or give --speculative-algorithm ddtree to go without',
        )
    if head.causal_head:
        raise _refusal(
            "--speculative-algorithm dflash_tfm with a causal head",
            "a bidirectional DFlash head",
            "give the DFlash head that the Weaver was trained on",
        )
    path = find_weaver(options.weaver)
    weaver = load_weaver_config(path)
    # The target's embedding is as wide as its hidden states in every target that is served; the worker looks again.
    weaver.check_against(head, head.hidden_size, f"the Weaver {path}")
    return path, weaver


def _in_range(flag: str, value: int, least: int, most: int, meaning: str) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise _refusal(f"{flag} {value}", f"{least} to {most}: {meaning}", f"give {flag} a value in that range")


def _refusal(given: str, allowed: str, todo: str = "mend or unset it") -> SpecflowConfigError:
    return SpecflowConfigError(given=given, allowed=allowed, todo=todo)
