"""Entry point of the group `sglang.srt.plugins`: SGLang calls `register` in every one of its processes.

SGLang logs what a plugin raises and carries on. So nothing here may half succeed: an algorithm is registered
last, when all hooks are registered, and `hooks.check_applied` stops a start whose hooks did not take hold.
"""


def register() -> None:
    """Register the hooks and the algorithms `jetflow` (alias `jetspec`) and `ddtree` with SGLang."""
    from sgl_specflow.runtime import algorithm, hooks

    hooks.install()
    algorithm.register()
