"""Replaces `torch.optim.Adam`, `AdamW` and `SGD`, except for options that ours do not support."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from ampfuse import _C, optim
from ampfuse._graphs import eager_only, traced_as
from ampfuse.gradients.devices import is_served
from ampfuse.gradients.signals import Signals
from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.options import check_initial
from ampfuse.optim.sgd import SGD_RULE
from ampfuse.patching._usage import Usage

USAGE = Usage("optimizers")


class PatchedOptimizer(FusedOptimizer):
    """Our optimizer with torch's options, for an optimizer that torch's constructor has made.

    Only with `fused=True` does the step unscale gradients, in place. Otherwise scalers unscale them
    before, and a step that is skipped calls no hooks.
    """

    _has_own_options = False
    _has_stepped = False

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

        If torch skips its first step, it creates no state, and schedulers warn of it. SGD without
        momentum never has state.
        """
        has_stepped = self._has_stepped or bool(self.state)
        return has_stepped or "found_inf" in vars(self)  # set by GraphedStep

    def _step(self) -> None:
        super()._step()
        self._note_patched_step()

    @eager_only
    def _note_patched_step(self) -> None:
        self._has_stepped = True
        USAGE.count_use()
        self._count_avoided_wait()

    def _count_avoided_wait(self) -> None:
        """Count a step that a flag on a GPU may skip, and for which torch's host would have waited.

        Without `fused=True` torch's scaler passes no flag, but reads it, once on each device.
        """
        signals = self._slot.signals or Signals().add_attributes(self)
        found_inf = signals.found_inf
        if self._unscale == "before" and found_inf is not None and found_inf.is_cuda:
            USAGE.waits_avoided += 1


class Adam(PatchedOptimizer, optim.Adam):
    """The replacement of `torch.optim.Adam`."""


class AdamW(PatchedOptimizer, optim.AdamW):
    """The replacement of `torch.optim.AdamW`."""


class SGD(PatchedOptimizer, optim.SGD):
    """The replacement of `torch.optim.SGD`, which leaves sparse gradients to torch."""

    _rule = replace(
        SGD_RULE,
        sparse_error=(
            "SGD with fused=True, with weight decay or in torch.compile does not support sparse "
            "gradients. The parameter has shape"
        ),
    )
    _own_options = SGD_RULE.ours

    def _step(self) -> None:
        sparse = {} if self.defaults["fused"] else _sparse_grads(self)
        if not sparse:
            super()._step()
            return
        USAGE.count_fallback("a parameter's step in torch.optim.SGD", "its gradient is sparse")
        found_inf = (self._slot.signals or Signals().add_attributes(self)).found_inf
        if found_inf is None or not found_inf.item():
            self._step_sparse(sparse)
        try:
            for param in sparse:
                param.grad = None
            super()._step()
        finally:
            for param, grad in sparse.items():
                param.grad = grad

    def _step_sparse(self, sparse: dict[Tensor, Tensor]) -> None:
        """Step the parameters that have sparse gradients, by torch's function."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param in sparse]
            buffers = [self.state.get(one, {}).get("momentum_buffer") for one in params]
            names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach")
            sgd(
                params,
                [sparse[param] for param in params],
                buffers,
                has_sparse_grad=True,
                lr=group["lr"],
                fused=False,
                **{name: group[name] for name in names},
            )
            if group["momentum"] != 0:
                for param, buffer in zip(params, buffers, strict=True):
                    self.state[param]["momentum_buffer"] = buffer


def _no_grads(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    return {}  # traced code refuses a sparse gradient where it reads the gradients


@traced_as(_no_grads)
def _sparse_grads(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the sparse gradients by their parameters."""
    sparse = {}
    for group in optimizer.param_groups:
        params = group["params"]
        _, others = _C.ordinary_grads(params, True)
        for param in map(params.__getitem__, others):
            if param.grad.is_sparse:
                sparse[param] = param.grad
    return sparse


CLASSES: dict[Any, type[PatchedOptimizer]] = {
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.SGD: SGD,
}


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
        ours = CLASSES[torchs]
        reason = _why_not(self, ours) if cls is torchs else "it derives from torch's class"
        if reason is None:
            self.__class__ = ours
            self.take_over()
        else:
            module = "torch.optim" if cls is torchs else cls.__module__
            USAGE.count_fallback(f"{module}.{cls.__name__}", reason)

    return init


def _why_not(optimizer: Optimizer, ours: type[PatchedOptimizer]) -> str | None:
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
            check_initial(ours._rule, group)
        except (TypeError, ValueError) as error:
            return str(error)
    return None
