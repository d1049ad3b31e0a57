"""`torch.optim.Adam` and `AdamW`: ours, where they compute what torch's would."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse.optim import Adam, AdamW
from ampfuse.patching._stand_in import StandIn
from ampfuse.patching._usage import Usage

USAGE = Usage("optimizers")

# How torch computes it. Ours has one way, which runs in a graph, too.
IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")


def stand_in(ours: type[Adam], is_on: Callable[[], bool]) -> Any:
    """For torch's class of that name."""
    original: type[Optimizer] = getattr(torch.optim, ours.__name__)
    return StandIn.of(original, is_on, partial(_make, original, ours))


def _make(original: Any, ours: type[Adam], given: dict[str, Any]) -> Optimizer:
    given["params"] = _listed(given.get("params"))
    reason = _why_not(given)
    if reason is None:
        options = {name: value for name, value in given.items() if name not in IMPLEMENTATIONS}
        try:
            optimizer = ours(
                **options, master_weights=False, state_dtype=_state_dtype(given["params"])
            )
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error)
        else:
            optimizer.register_step_post_hook(_count)
            return optimizer
    made = original(**given)
    USAGE.leave_to_torch(f"torch.optim.{original.__name__}", reason)
    return made  # type: ignore[no-any-return]


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    USAGE.serve()


def _listed(params: Any) -> Any:
    """What can be gone through twice, where it could be once."""
    if not isinstance(params, Iterator | list | tuple):
        return params
    return [
        {**entry, "params": _listed(entry.get("params"))} if isinstance(entry, dict) else entry
        for entry in params
    ]


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
    groups = [entry for entry in params if isinstance(entry, dict)] if type(params) is list else []
    if any(options.get("differentiable") for options in (given, *groups)):
        return "differentiable=True"
    betas = [options["betas"] for options in (given, *groups) if "betas" in options]
    if any(isinstance(beta, Tensor) for pair in betas for beta in pair):
        return "betas in tensors"
    for tensor in _tensors(params):
        if isinstance(tensor, Tensor) and tensor.device.type not in ("cpu", "cuda"):
            return f"parameters on {tensor.device.type}"
    return None


def _state_dtype(params: Any) -> torch.dtype:
    """As wide as torch's, where one will do."""
    dtypes = {tensor.dtype for tensor in _tensors(params)}
    return torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32


OURS = (Adam, AdamW)
