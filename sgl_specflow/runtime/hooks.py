"""The functions of SGLang 0.5.23 that the plugin wraps, in one list, and the check that each wrap took hold.

SGLang's `HookRegistry` logs a hook that fails to apply and starts all the same; a tree worker without its hooks
is silently wrong (a verify graph without the tree's mask, a request row too short for the tree). So the check
runs where a start can still be stopped: when the arguments are resolved and when a worker is created.
"""

import pkgutil
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sgl_specflow.errors import SpecflowConfigError


class Hook(NamedTuple):
    """One wrap: the dotted path of SGLang's function, our function, and how it wraps."""

    target: str
    function: Callable[..., Any]
    type: HookType


def required_hooks() -> list[Hook]:
    """Every hook of this process: the tree's own, and the CPU platform's where that is the platform."""
    from sglang.srt.platforms import current_platform

    from sgl_specflow.runtime import (
        cpu_gdn_ops,
        cpu_ops,
        cpu_platform,
        gdn_backend,
        gdn_state,
        penalties,
        request_checks,
        start_checks,
        tree_backend,
        tree_input,
        tree_memory,
    )

    hooks = [
        *start_checks.HOOKS,
        *tree_memory.HOOKS,
        *tree_input.HOOKS,
        *tree_backend.HOOKS,
        *gdn_state.HOOKS,
        *gdn_backend.HOOKS,
        *penalties.HOOKS,
        *request_checks.HOOKS,
    ]
    if isinstance(current_platform, cpu_platform.CpuReferencePlatform):
        hooks += [*cpu_ops.HOOKS, *cpu_gdn_ops.HOOKS]
    return [Hook(*hook) for hook in hooks]


def install() -> None:
    """Hand every required hook to SGLang's registry, which applies them once all plugins are loaded."""
    for target, function, hook_type in required_hooks():
        HookRegistry.register(target, function, hook_type)


def check_applied(hooks: Iterable[Hook] | None = None) -> None:
    """Raise SpecflowConfigError, naming each target, unless every required hook wraps its target."""
    hooks = required_hooks() if hooks is None else hooks
    missing = [hook.target for hook in hooks if not _wraps(_resolve(hook.target), hook.function)]
    if missing:
        raise SpecflowConfigError(
            given=f"hooks that did not take hold: {', '.join(missing)}",
            allowed="every hook of sgl_specflow in place, since a tree worker is silently wrong without them",
            todo="look above in the log for 'Failed to apply hooks'; install sglang==0.5.23; if SGLANG_PLUGINS is set, "
            "add sgl_specflow to it; remove other plugins that replace these functions",
        )


def _resolve(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None


def _wraps(function: Any, hook: Callable[..., Any]) -> bool:
    """Whether hook is in function's chain of wrappers (HookRegistry sets __wrapped__ and keeps the hook in a closure)."""
    while function is not None:
        if function is hook or any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
