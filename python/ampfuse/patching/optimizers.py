"""Replaces `torch.optim.Adam` and `AdamW`, except for arguments that ours do not support."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse import optim
from ampfuse._graphs import eager_only
from ampfuse.gradients.devices import is_served
from ampfuse.gradients.signals import Signals
from ampfuse.optim.options import OURS, TORCHS_OWN
from ampfuse.patching._class_swap import ClassSwap
from ampfuse.patching._usage import Usage

USAGE = Usage("optimizers")

ADAMS_OWN = {*OURS, "process_group", "unscale"}


class _InPlaceOfTorchs(optim.Adam):
    """Our Adam with the arguments, options and behaviour of torch's class.

    Only with `fused=True` does the step unscale gradients, in place. Otherwise scalers unscale them
    before, and a step that is skipped calls no hooks.
    """

    _has_own_options = False

    def __init__(self, *args: Any, **options: Any) -> None:
        self._implementations = {
            name: options.pop(name, default) for name, default in TORCHS_OWN.items()
        }
        for name in ADAMS_OWN & options.keys():
            raise TypeError(f"{type(self).__name__}: unexpected keyword argument {name!r}")
        super().__init__(*args, **options)
        self.defaults.update(self._implementations)
        self._set_amp_scaling()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does."""
        if isinstance(param_group, dict):
            if param_group.get("differentiable"):
                raise ValueError("differentiable=True: only allowed in the constructor")
            _listed([param_group])
            for name, value in self._implementations.items():
                param_group.setdefault(name, value)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state for pickle, deepcopy and load_state_dict."""
        super().__setstate__(state)
        self._implementations = {name: self.defaults[name] for name in TORCHS_OWN}
        self._set_amp_scaling()

    def _set_amp_scaling(self) -> None:
        is_fused = bool(self._implementations["fused"])
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
        signals = self._slot.signals or Signals().with_attributes(self)
        found_inf = signals.found_inf
        if self._unscale == "before" and found_inf is not None and found_inf.is_cuda:
            USAGE.waits_avoided += 1


class Adam(_InPlaceOfTorchs):
    """The replacement of `torch.optim.Adam`."""


class AdamW(_InPlaceOfTorchs, optim.AdamW):
    """The replacement of `torch.optim.AdamW`."""


CLASSES: tuple[type[_InPlaceOfTorchs], ...] = (Adam, AdamW)


def replacement(ours: type[_InPlaceOfTorchs], is_on: Callable[[], bool]) -> Any:
    """Return the replacement of torch's class with the same name."""
    original: type[Optimizer] = getattr(torch.optim, ours.__name__)
    return ClassSwap.of(original, ours, is_on, partial(_make, original, ours), USAGE)


def _make(original: Any, ours: type[_InPlaceOfTorchs], given: dict[str, Any]) -> Optimizer:
    given["params"] = _listed(given.get("params"))
    reason = _why_not(given)
    if reason is None:
        before = [(group, dict(group)) for group in _groups(given["params"])]
        try:
            return ours(**given)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error)
        for group, entries in before:  # `ours` has added options to the program's own dicts
            group.clear()
            group.update(entries)
    made = original(**given)
    USAGE.count_fallback(f"torch.optim.{original.__name__}", reason)
    return made  # type: ignore[no-any-return]


def _listed(params: Any) -> Any:
    """Replace iterators by lists, which can be read twice. Groups stay the program's own dicts."""
    if not isinstance(params, Iterator | list | tuple):
        return params
    params = list(params) if isinstance(params, Iterator) else params
    for group in _groups(params):
        if isinstance(group.get("params"), Iterator):
            group["params"] = list(group["params"])
    return params


def _groups(params: Any) -> list[dict[str, Any]]:
    is_list = isinstance(params, list | tuple)
    return [entry for entry in params if isinstance(entry, dict)] if is_list else []


def _tensors(params: Any) -> Iterator[Any]:
    """Yield the tensors of parameters, of named parameters, or of a group of either."""
    if isinstance(params, Tensor):
        yield params
        return
    if isinstance(params, dict):
        params = params.get("params", ())
    for entry in params if isinstance(params, Iterable) else ():
        yield entry[1] if isinstance(entry, tuple) else entry


def _why_not(given: dict[str, Any]) -> str | None:
    params = given["params"]
    groups = _groups(params)
    if any(options.get("differentiable") for options in (given, *groups)):
        return "differentiable=True"
    betas = [options["betas"] for options in (given, *groups) if "betas" in options]
    if not all(isinstance(beta, float) for pair in betas for beta in pair):
        return "betas that are not floats"
    is_foreach = bool(given.get("foreach"))
    has_rate_for_graphs = isinstance(given.get("lr"), Tensor) and not given.get("capturable")
    if is_foreach and (given.get("fused") or has_rate_for_graphs):
        return "options that torch refuses"
    for of_group in groups or [params]:
        tensors = [tensor for tensor in _tensors(of_group) if isinstance(tensor, Tensor)]
        if len({id(tensor) for tensor in tensors}) < len(tensors):
            return "a parameter that is in a group twice"
        for tensor in tensors:
            if not is_served(tensor.device):
                return f"parameters on {tensor.device.type}"
    return None
