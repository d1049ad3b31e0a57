"""Hooks that only measure: an optimizer may skip steps on the device in spite of them.

Other hooks could notice that a skipped step was called, so for them the host has to decide.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from torch.optim import optimizer as hooks_of_optimizers

Hook = TypeVar("Hook", bound=Callable[..., Any])


def only_measures(hook: Hook) -> Hook:
    """Mark a hook that changes nothing, and that does not care whether a step is skipped."""
    hook.only_measures = True  # type: ignore[attr-defined]
    return hook


def hook_steps(exits: ExitStack, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Call two hooks before and after each step of any optimizer until `exits` closes."""
    for handle in (
        hooks_of_optimizers.register_optimizer_step_pre_hook(before),
        hooks_of_optimizers.register_optimizer_step_post_hook(after),
    ):
        exits.callback(handle.remove)
