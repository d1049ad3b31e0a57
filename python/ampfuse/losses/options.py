"""Metrics and options that both losses have, and the call of their operators."""

import re
from collections.abc import Callable
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from ampfuse._arguments import explain, refuse_unknown
from ampfuse._graphs import bind_operator, eager_only, traced_as

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # missing in some builds of torch

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
DEFAULTS = {
    "ignore_index": -100,
    "reduction": "mean",
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "softcap": None,
    "chunk_rows": None,
    "chunk_classes": None,
    "logits_dtype": None,
}

# Hints for keyword arguments that the losses' functions do not have.
REMEDIES = {
    "scaler": "pass grad_scale=scaler.scale_tensor(), or use the module, which takes scaler=",
    "size_average": "use reduction=",
    "reduce": "use reduction=",
}

_OPS = torch.ops.ampfuse
# By the name of a loss's function, and whether it returns metrics.
OPERATORS = {
    ("cross_entropy", False): bind_operator(_OPS.cross_entropy.default),
    ("cross_entropy", True): bind_operator(_OPS.cross_entropy.metrics),
    ("cross_entropy_", False): bind_operator(_OPS.cross_entropy_.default),
    ("linear_cross_entropy", False): bind_operator(_OPS.linear_cross_entropy.default),
    ("linear_cross_entropy", True): bind_operator(_OPS.linear_cross_entropy.metrics),
}

# Torch's messages: for C++ autograd functions under torch.func, for operators in forward mode, and
# for C++ autograd functions in forward mode.
_REFUSALS = re.compile(r"with functorch transforms|forward AD|jvp is not implemented")


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


class CrossEntropyMetrics(NamedTuple):
    """Metrics of each row from the same pass, in the shape of class targets.

    They have no gradient.
    """

    lse: Tensor
    """Log-sum-exp of the logits after softcap, in the loss's dtype."""
    entropy: Tensor
    """Entropy of the predicted distribution in nats, in the loss's dtype."""
    argmax: Tensor
    """The class of the largest logit, int64."""
    correct: Tensor
    """True if that is the target (for probabilities, the most probable class).

    It is False for ignored rows.
    """


class SeenLoss(NamedTuple):
    """A loss that was computed, and the options that matter when losses are added up."""

    node: Any
    """The loss's `grad_fn`."""
    reduction: str
    """"none", "sum", "mean" of its own rows, or "divided" by a denominator."""
    is_weighted: bool
    ignore_index: int


# While `accumulate` looks at a step, a list of the losses that the step computes.
SEEN_LOSSES: ContextVar[list[SeenLoss] | None] = ContextVar("SEEN_LOSSES", default=None)


@eager_only
def _note_loss(loss: Tensor, reduction: str, denominator: Any, options: dict[str, Any]) -> None:
    seen = SEEN_LOSSES.get()
    if seen is not None:
        kind = "divided" if reduction == "mean" and denominator is not None else reduction
        weight = options.get("weight", options.get("class_weight"))
        seen.append(SeenLoss(loss.grad_fn, kind, weight is not None, options["ignore_index"]))


def check_call(function: Any, unknown: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Raise for unknown arguments, and for None in place of a tensor that is required."""
    refuse_unknown(function, unknown, REMEDIES)
    for argument, tensor in tensors.items():
        if tensor is None:  # which operators take for an empty tensor
            raise TypeError(f"{function.__name__}: {argument}: expected a Tensor, got None")


def compute_loss(
    function: Callable[..., Any],
    unknown: dict[str, Any],
    tensors: dict[str, Tensor],
    return_metrics: bool = False,
    *,
    reduction: str,
    grad_scale: Tensor | float | None,
    denominator: Tensor | float | None,
    **options: Any,
) -> Any:
    """Call the operator with a function's name, and return a pair if metrics are requested.

    `unknown` are arguments that the function does not have, and `tensors` those that it requires,
    in their order.
    """
    name = function.__name__
    check_call(function, unknown, tensors)
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f'reduction: expected "none", "mean" or "sum", got {reduction!r}')
    for constant in ("z_loss", "softcap"):
        if isinstance(options[constant], Tensor):  # the host would wait, and it has no gradient
            raise TypeError(f"{constant}: expected a number, got a tensor")
    input, *_ = tensors.values()
    options |= {
        "reduction": REDUCTIONS[reduction],
        "grad_scale": _number("grad_scale", grad_scale, torch.float32, input),
        "denominator": _number("denominator", denominator, torch.float64, input),
    }
    try:
        results = OPERATORS[name, bool(return_metrics)](*tensors.values(), **options)
    except RuntimeError as error:
        # Active transforms are not checked beforehand: torch refuses only what is differentiated (a
        # metric of detached logits works inside `torch.func.grad`), and the check would cost time
        # in each call and break the graph of `torch.compile` under vmap.
        if _REFUSALS.search(str(error)):
            raise refusal(name) from error
        explain(name, error)
    loss = results if isinstance(results, Tensor) else results[0]
    _note_loss(loss, reduction, denominator, options)
    return (results[0], CrossEntropyMetrics(*results[1:])) if return_metrics else results


def refusal(function: str) -> NotImplementedError:
    """Return the error under torch.func and in forward mode."""
    return NotImplementedError(
        f"{function}: torch.func transforms (grad, vjp, jvp, jacrev, hessian) and forward-mode AD "
        "are not supported; use torch.nn.functional.cross_entropy of the logits under them"
    )


def _number(
    name: str, value: Tensor | float | None, dtype: torch.dtype, input: Tensor
) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    _check_number(name, value)
    # torch.compile would recompile for each value of a constant, but not of a factor. Tensors
    # cannot be multiplied by a Fraction or a Decimal.
    factor = float(value) if isinstance(value, Fraction | Decimal) else value
    device = getattr(input, "device", None)  # types without a device are refused later
    return torch.ones((), dtype=dtype, device=device) * factor


@eager_only
def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, Number):
        hint = "; pass scaler.scale_tensor()" if hasattr(value, "get_scale") else ""
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}{hint}")
    if name == "denominator" and not value:
        raise ValueError("denominator: expected a number other than 0")


# --- modules ------------------------------------------------------------------------------------


def checked_scaler(scaler: Any) -> Any:
    """Return the scaler; raise if it is something else."""
    if isinstance(scaler, type):
        name = scaler.__name__
        raise TypeError(f"scaler: expected a GradScaler, got the class {name}; write {name}()")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise TypeError(f"scaler: expected a GradScaler or None, got {type(scaler).__name__}")
    return scaler


def changed_options(self: Any) -> str:
    """Return the options that differ from the defaults."""
    given = {name: getattr(self, name, default) for name, default in DEFAULTS.items()}
    if self.scaler is not None:
        given["scaler"] = type(self.scaler).__name__
    return ", ".join(f"{name}={v}" for name, v in given.items() if v != DEFAULTS.get(name))


def options_of(module: Any, input: Tensor, denominator: Tensor | float | None) -> LossOptions:
    """Return the options that both losses have, as arguments of a loss's function."""
    return {
        "ignore_index": module.ignore_index,
        "reduction": module.reduction,
        "label_smoothing": module.label_smoothing,
        "grad_scale": grad_scale_of(module.scaler, input),
        "denominator": denominator,
        "z_loss": module.z_loss,
        "softcap": module.softcap,
    }


def _traced_grad_scale_of(scaler: Any, input: Tensor) -> Tensor | None:
    return None  # compiled losses compute their gradients in backward, where the scale is known


@traced_as(_traced_grad_scale_of)
def grad_scale_of(scaler: Any, input: Tensor) -> Tensor | None:
    """Return the gradient that `scaler.scale(loss).backward()` will pass to the loss's backward."""
    if scaler is None or not scaler.is_enabled():
        return None
    if hasattr(scaler, "_announce_scale"):
        return scaler._announce_scale()  # type: ignore[no-any-return]
    device = getattr(input, "device", None)
    one = torch.ones((), dtype=torch.float32, device=device)
    if getattr(scaler, "_scale", one) is None:  # torch's step raises until a loss was scaled
        return one * scaler._init_scale  # type: ignore[no-any-return]
    return scaler.scale(one)  # type: ignore[no-any-return]
