"""Replaces `torch.optim.Adam` and `AdamW`, except for options that ours do not support."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer

from ampfuse import optim
from ampfuse._graphs import eager_only
from ampfuse.gradients.devices import is_served
from ampfuse.gradients.signals import Signals
from ampfuse.optim.adam import ADAM
from ampfuse.optim.options import check_initial
from ampfuse.patching._usage import Usage

USAGE = Usage("optimizers")


class PatchedAdam(optim.Adam):
    """Our Adam with torch's options, for an optimizer that torch's constructor has made.

    Only with `fused=True` does the step unscale gradients, in place. Otherwise scalers unscale them
    before, and a step that is skipped calls no hooks.
    """

    _has_own_options = False

    def take_over(self) -> None:
        """Create the attributes that torch's constructor has not made."""
        self._note_zero()
        self.__setstate__({})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does."""
        if isinstance(param_group, dict) and param_group.get("differentiable"):
            raise ValueError("differentiable=True: only allowed in the constructor")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state for pickle, deepcopy and load_state_dict."""
        super().__setstate__(state)
        is_fused = bool(self.defaults["fused"])
        self._unscale = "in_step" if is_fused else "before"
        self._unscales_in_place = is_fused

    def _may_skip_itself(self) -> bool:
        """Return False before the first step.

        If torch skips its first step, it creates no state, and schedulers warn of it.
        """
        return bool(self.state) or "found_inf" in vars(self)  # set by GraphedStep

    def _step(self) -> None:
        super()._step()
        USAGE.count_use()
        self._count_avoided_wait()

    @eager_only
    def _count_avoided_wait(self) -> None:
        """Count a step that a flag on a GPU may skip, and for which torch's host would have waited.

        Without `fused=True` torch's scaler passes no flag, but reads it, once on each device.
        """
        signals = self._slot.signals or Signals().add_attributes(self)
        found_inf = signals.found_inf
        if self._unscale == "before" and found_inf is not None and found_inf.is_cuda:
            USAGE.waits_avoided += 1


class Adam(PatchedAdam):
    """The replacement of `torch.optim.Adam`."""


class AdamW(PatchedAdam, optim.AdamW):
    """The replacement of `torch.optim.AdamW`."""


CLASSES: dict[Any, type[PatchedAdam]] = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW}


def constructor(torchs: Any, is_on: Callable[[], bool]) -> Any:
    """Return the replacement of `__init__` of one of torch's classes.

    torch's constructor checks the arguments and makes the groups. Then the optimizer becomes ours,
    unless it is of a derived class, which may use torch's internals.
    """
    original = torchs.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        cls = type(self)
        # AdamW's constructor calls Adam's.
        if not is_on() or next(base for base in cls.__mro__ if base in CLASSES) is not torchs:
            return
        reason = _why_not(self) if cls is torchs else "it derives from torch's class"
        if reason is None:
            self.__class__ = CLASSES[torchs]
            self.take_over()
        else:
            module = "torch.optim" if cls is torchs else cls.__module__
            USAGE.count_fallback(f"{module}.{cls.__name__}", reason)

    return init


def _why_not(optimizer: Optimizer) -> str | None:
    for group in optimizer.param_groups:
        params = group["params"]
        if group["differentiable"]:
            return "differentiable=True"
        if len(set(params)) < len(params):
            return "a parameter that is in a group twice"
        for param in params:
            if not is_served(param.device):
                return f"parameters on {param.device.type}"
        try:
            check_initial(ADAM, group)
        except (TypeError, ValueError) as error:
            return str(error)
    return None
