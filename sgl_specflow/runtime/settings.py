"""The resolved settings of a tree algorithm: from SGLang's flags and the head's config to one dataclass.

SGLang's flags carry everything but what `SGL_SPECFLOW_OPTIONS` holds, a JSON object in the environment, which is the
one place for options that SGLang has no flag for:

    SGL_SPECFLOW_OPTIONS='{"path_refresh": true}'

- `path_refresh` (bool, default false; causal heads only): a second pass of the head over the first tree's better half
  re-scores children on their own branch (DESIGN.md section 3, JetFlow's tree-causal drafting).
"""

import json
import os
from dataclasses import dataclass, fields

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.runtime.names import DDTREE, JETFLOW, JETSPEC

OPTIONS_VARIABLE = "SGL_SPECFLOW_OPTIONS"
MIN_BUDGET, MAX_BUDGET = 2, 256
DEFAULT_BUDGET = 64
DEFAULT_WIDTH = 16


@dataclass(frozen=True)
class Options:
    """What SGL_SPECFLOW_OPTIONS holds."""

    path_refresh: bool = False

    @classmethod
    def from_environment(cls) -> "Options":
        """Parse the variable; SpecflowConfigError names an unknown key or a wrong value."""
        text = os.environ.get(OPTIONS_VARIABLE, "").strip() or "{}"
        known = {field.name: field.type for field in fields(cls)}
        allowed = f"a JSON object with the keys {', '.join(known)} (true or false)"
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise _refusal(f"{OPTIONS_VARIABLE}={text!r}, which is no JSON ({error})", allowed) from error
        if (
            not isinstance(given, dict)
            or not set(given) <= set(known)
            or not all(type(v) is bool for v in given.values())
        ):
            raise _refusal(f"{OPTIONS_VARIABLE}={text!r}", allowed)
        return cls(**given)


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
    """

    algorithm: str
    budget: int
    depth: int
    width: int
    block: int
    causal: bool
    mask_token: int
    path_refresh: bool

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
        greatest = head.block_size - 1
        depth = greatest if depth is None else depth
        _in_range("--speculative-num-steps", depth, 1, greatest, "depths that this head predicts in one pass")
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
        return cls(algorithm, budget, depth, width, block, head.causal_head, head.mask_token_id, options.path_refresh)

    def describe(self) -> str:
        """One log line."""
        head = "causal" if self.causal else "bidirectional"
        refresh = "on" if self.path_refresh else "off"
        return (
            f"sgl_specflow: {self.algorithm.lower()}, {head} head, budget {self.budget} nodes, depth {self.depth}, "
            f"width {self.width} children a depth, block {self.block}, path refresh {refresh}"
        )


def _in_range(flag: str, value: int, least: int, most: int, meaning: str) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise _refusal(f"{flag} {value}", f"{least} to {most}: {meaning}", f"give {flag} a value in that range")


def _refusal(given: str, allowed: str, todo: str = "mend or unset it") -> SpecflowConfigError:
    return SpecflowConfigError(given=given, allowed=allowed, todo=todo)
