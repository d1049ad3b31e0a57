"""Options that both losses have: their types, and their conversion to operator arguments."""

from decimal import Decimal
from fractions import Fraction
from numbers import Number
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from ampfuse._graphs import eager_only, traced_as

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # missing in some builds of torch

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
DEFAULTS = {
    "ignore_index": -100,
    "reduction": "mean",
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "softcap": None,
}


# Hints for keyword arguments that the losses' functions do not have.
REMEDIES = {
    "scaler": "pass grad_scale=scaler.scale_tensor(), or use the module, which takes scaler=",
    "size_average": "use reduction=",
    "reduce": "use reduction=",
}


class LossOptions(TypedDict, total=False):
    """Options of both losses."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    grad_scale: Tensor | float | None
    denominator: Tensor | float | None
    z_loss: float
    softcap: float | None


class LinearLossOptions(LossOptions, total=False):
    """Options of `linear_cross_entropy`."""

    class_weight: Tensor | None
    chunk_rows: int | None
    chunk_classes: int | None
    logits_dtype: torch.dtype | None
    accumulate_into: Tensor | None
    process_group: "ProcessGroup | None"
    first_class: int | None
    num_classes: int | None


def changed_options(module: Any, defaults: dict[str, Any]) -> str:
    """Return the options of a loss that differ from the defaults, as text."""
    given = {name: getattr(module, name) for name in defaults}
    if module.scaler is not None:
        given["scaler"] = type(module.scaler).__name__
    return ", ".join(f"{name}={v}" for name, v in given.items() if v != defaults.get(name))


def checked_scaler(scaler: Any) -> Any:
    """Return the scaler; raise if it is something else."""
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise TypeError(f"scaler: expected a GradScaler or None, got {type(scaler).__name__}")
    return scaler


def _traced_grad_scale_of(scaler: Any, input: Tensor) -> Tensor | None:
    return None  # compiled losses compute their gradients in backward, where the scale is known


@traced_as(_traced_grad_scale_of)
def grad_scale_of(scaler: Any, input: Tensor) -> Tensor | None:
    """Return the gradient that `scaler.scale(loss).backward()` will pass to the loss's backward."""
    if scaler is None or not scaler.is_enabled():
        return None
    if hasattr(scaler, "_live_scale"):
        return scaler._live_scale()  # type: ignore[no-any-return]
    one = torch.ones((), dtype=torch.float32, device=device_of(input))
    return scaler.scale(one)  # type: ignore[no-any-return]


def device_of(input: Tensor) -> torch.device | None:
    """Return the tensor's device, or None for types that are refused later."""
    return getattr(input, "device", None)


def op_options(
    input: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    grad_scale: Tensor | float | None,
    denominator: Tensor | float | None,
    z_loss: float,
    softcap: float | None,
) -> dict[str, Any]:
    """Return the options as arguments of the operators."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f'reduction: expected "none", "mean" or "sum", got {reduction!r}')
    for name, constant in (("z_loss", z_loss), ("softcap", softcap)):
        if isinstance(constant, Tensor):  # the host would wait for it, and it would get no gradient
            raise TypeError(f"{name}: expected a number, got a tensor")
    return {
        "reduction": REDUCTIONS[reduction],
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "grad_scale": _number("grad_scale", grad_scale, torch.float32, input),
        "denominator": _number("denominator", denominator, torch.float64, input),
        "z_loss": z_loss,
        "softcap": softcap,
    }


def _number(
    name: str, value: Tensor | float | None, dtype: torch.dtype, input: Tensor
) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    _check_number(name, value)
    # torch.compile would recompile for each value of a constant, but not of a factor.
    return torch.ones((), dtype=dtype, device=device_of(input)) * as_plain(value)


def as_plain(value: float) -> float:
    """Return a Fraction or a Decimal as a float: tensors cannot be multiplied by these."""
    return float(value) if isinstance(value, Fraction | Decimal) else value


def refuse_none(op: str, **tensors: Tensor) -> None:
    """Raise for an argument that is None in place of a tensor, which operators take for empty."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise TypeError(f"{op}: {name}: expected a Tensor, got None")


@eager_only
def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, Number):
        hint = "; pass scaler.scale_tensor()" if hasattr(value, "get_scale") else ""
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}{hint}")
    if name == "denominator" and not value:
        raise ValueError("denominator: expected a number other than 0")
