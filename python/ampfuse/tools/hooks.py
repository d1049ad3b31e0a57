"""The hooks by which tools follow a program: steps, modules, backward, scalers, loaders, saves.

All of them end when an ExitStack closes. Hooks of optimizers only measure: an optimizer may skip
steps on the device in spite of them. Other hooks could notice that, so the host decides for them.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as hooks_of_modules
from torch.optim import Optimizer
from torch.optim import optimizer as hooks_of_optimizers
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

import ampfuse
from ampfuse import checkpoint
from ampfuse.amp import GradScaler

Hook = TypeVar("Hook", bound=Callable[..., Any])

# The functions that `hook_functions` can replace.
FUNCTIONS: dict[str, list[tuple[Any, str]]] = {
    "backward": [(torch.autograd, "backward")],  # all backward passes come to it
    "scale": [(GradScaler, name) for name in ("unscale_", "step", "update", "clip_grad_norm_")],
    "make_scaler": [(GradScaler, "__init__")],
    "make_loader": [(DataLoader, "__init__")],
    "iterate": [(DataLoader, "__iter__")],
    "next_batch": [(_BaseDataLoaderIter, "__next__")],
    "fetch": [(_MapDatasetFetcher, "fetch"), (_IterableDatasetFetcher, "fetch")],
    "accumulate": [(ampfuse, "accumulate")],
    "save": [(torch, "save")],
    "load": [(torch, "load"), *((checkpoint, name) for name in ("load", "latest", "verify"))],
    "save_checkpoint": [(checkpoint, "save")],
}


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


def hook_modules(exits: ExitStack, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Call two hooks before and after each call of any module, also if the call fails."""
    for handle in (
        hooks_of_modules.register_module_forward_pre_hook(before),
        hooks_of_modules.register_module_forward_hook(after, always_call=True),
    ):
        exits.callback(handle.remove)


class FirstOptimizer:
    """The optimizer whose steps are those of the program, or the next one when it is gone."""

    def __init__(self) -> None:
        self._reference: weakref.ref[Optimizer] | None = None

    def matches(self, optimizer: Optimizer) -> bool:
        """Return True if this optimizer is the first one."""
        if self._reference is None or self._reference() is None:
            self._reference = weakref.ref(optimizer)
        return self._reference() is optimizer


def hook_functions(exits: ExitStack, **arounds: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace functions of FUNCTIONS by what these calls make of them, until `exits` closes."""
    for kind, around in arounds.items():
        for owner, name in FUNCTIONS[kind]:
            replace(exits, owner, name, around(getattr(owner, name)))


def replace(exits: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute, and put it back when `exits` closes.

    What somebody else has put in its place meanwhile stays, and may still call `value`.
    """
    original = getattr(owner, name)

    def put_back() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, original)

    setattr(owner, name, value)
    exits.callback(put_back)
