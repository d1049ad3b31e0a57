"""`torch.optim.Adam` and `AdamW`: ours, where they compute what torch's would."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse import optim
from ampfuse.optim._loading import TORCHS_OWN
from ampfuse.patching._stand_in import StandIn
from ampfuse.patching._usage import Usage

USAGE = Usage("optimizers")

# Which of torch's implementations: ours has one, which runs in a graph, too.
IMPLEMENTATIONS = dict.fromkeys(TORCHS_OWN) | {"capturable": False, "differentiable": False}

# Options that groups and `defaults` have besides torch's, from which programs may make another one.
OURS_ALONE = ("master_weights", "state_dtype", "max_grad_norm", "write_back_grads")


class _InPlaceOfTorchs(optim.Adam):
    """With torch's arguments and the contract that a program knows of torch's class.

    Only with `fused=True` do steps take gradients that are scaled, and leave them unscaled. Else
    scalers unscale them first, and call no hooks of a step that is skipped.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._implementations = {
            name: options.pop(name, default) for name, default in IMPLEMENTATIONS.items()
        }
        own = {name: option for name, option in options.items() if name not in OURS_ALONE}
        super().__init__(*args, **own, master_weights=False)
        self.defaults.update(self._implementations)
        self._take_contract()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; with moments as wide as torch's, where one dtype will do for a group."""
        if isinstance(param_group, dict):
            if param_group.get("differentiable"):
                raise ValueError("differentiable=True: only where an optimizer is made with it")
            _listed([param_group])
            params = _tensors(param_group.get("params"))
            dtypes = {param.dtype for param in params if isinstance(param, Tensor)}
            narrow = dtypes == {torch.bfloat16}
            param_group.setdefault("state_dtype", torch.bfloat16 if narrow else torch.float32)
            for name, value in self._implementations.items():
                param_group.setdefault(name, value)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For pickle, deepcopy and load_state_dict."""
        super().__setstate__(state)
        self._implementations = {name: self.defaults[name] for name in IMPLEMENTATIONS}
        self._take_contract()

    def _take_contract(self) -> None:
        is_fused = bool(self._implementations["fused"])
        self._step_supports_amp_scaling = self._leaves_unscaled = is_fused

    def _step(self) -> None:
        super()._step()
        USAGE.serve()


class Adam(_InPlaceOfTorchs):
    """`ampfuse.Adam` there."""


class AdamW(_InPlaceOfTorchs, optim.AdamW):
    """`ampfuse.AdamW` there."""


OURS: tuple[type[_InPlaceOfTorchs], ...] = (Adam, AdamW)


def stand_in(ours: type[_InPlaceOfTorchs], is_on: Callable[[], bool]) -> Any:
    """For torch's class of that name."""
    original: type[Optimizer] = getattr(torch.optim, ours.__name__)
    return StandIn.of(original, is_on, partial(_make, original, ours), USAGE, OURS_ALONE)


def _make(original: Any, ours: type[_InPlaceOfTorchs], given: dict[str, Any]) -> Optimizer:
    given["params"] = _listed(given.get("params"))
    reason = _why_not(given)
    if reason is None:
        # Options are torch's to refuse.
        original(**_torchs(given) | {"params": [torch.zeros(0, device="cpu")]})
        before = [(group, dict(group)) for group in _groups(given["params"])]
        try:
            return ours(**given)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error)
        for group, entries in before:  # the program's own, to which ours were added
            group.clear()
            group.update(entries)
    made = original(**_torchs(given))
    USAGE.leave_to_torch(f"torch.optim.{original.__name__}", reason)
    return made  # type: ignore[no-any-return]


def _torchs(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in OURS_ALONE}


def _listed(params: Any) -> Any:
    """What can be gone through twice, where it could be once. Groups stay the program's own."""
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
    """Of parameters, named parameters, or groups of them."""
    if isinstance(params, Tensor):
        yield params
        return
    for entry in params if isinstance(params, Iterable) else ():
        if isinstance(entry, dict):
            yield from _tensors(entry.get("params", ()))
        else:
            yield entry[1] if isinstance(entry, tuple) else entry


def _why_not(given: dict[str, Any]) -> str | None:
    params = given["params"]
    groups = _groups(params)
    if any(options.get("differentiable") for options in (given, *groups)):
        return "differentiable=True"
    betas = [options["betas"] for options in (given, *groups) if "betas" in options]
    if any(isinstance(beta, Tensor) for pair in betas for beta in pair):
        return "betas in tensors"
    for tensor in _tensors(params):
        if isinstance(tensor, Tensor) and tensor.device.type not in ("cpu", "cuda"):
            return f"parameters on {tensor.device.type}"
    return None
