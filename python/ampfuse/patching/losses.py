"""Replaces `torch.nn.functional.cross_entropy`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional
from torch.overrides import has_torch_function_variadic
from torch.utils._device import DeviceContext

from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse._graphs import traced_as
from ampfuse.gradients.devices import is_served
from ampfuse.losses.options import REDUCTIONS
from ampfuse.patching._usage import Usage

USAGE = Usage("cross_entropy")

NAME = "torch.nn.functional.cross_entropy"
# The types of plain tensors; the last two occur while a program is traced.
PLAIN = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
DTYPES = (*DTYPES_16_BIT, torch.float32, torch.float64)

original = functional.cross_entropy


def replacement(is_on: Callable[[], bool]) -> Any:
    """Return the replacement of `torch.nn.functional.cross_entropy`."""

    @functools.wraps(original)
    def cross_entropy(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        as_passed: dict[str, Any] = {
            "weight": weight,
            "size_average": size_average,
            "ignore_index": ignore_index,
            "reduce": reduce,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
        }
        if not is_on():
            return original(input, target, **as_passed)
        reason, refusal = _why_not(input, target, **as_passed), ""
        if reason is None:
            try:
                return _ours(input, target, weight, ignore_index, reduction, label_smoothing)
            except (TypeError, ValueError, IndexError) as error:
                refusal = str(error)
                reason = refusal.splitlines()[0]
        try:
            loss = original(input, target, **as_passed)  # raises torch's error, or accepts this
        except Exception as error:
            if refusal and hasattr(error, "add_note"):  # of Python 3.11, printed after the error
                error.add_note(f"ampfuse: {refusal}")
            raise
        USAGE.count_fallback(NAME, reason)
        return loss

    # TorchScript compiles the function that this attribute returns: torch's.
    cross_entropy.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]
    return cross_entropy


def _ours(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    loss: Tensor = torch.ops.ampfuse.cross_entropy.as_torch(
        input, target, weight, REDUCTIONS[reduction], ignore_index, label_smoothing
    )
    USAGE.count_use(input)
    return loss.to(_dtype_of_loss(input, target, weight))


def _dtype_of_loss(input: Tensor, target: Tensor, weight: Tensor | None) -> torch.dtype:
    """Return torch's dtype: log-probabilities are multiplied by probabilities and their weights."""
    factors = [target, weight] if target.is_floating_point() else []
    dtypes = {tensor.dtype for tensor in (input, *factors) if tensor is not None}
    if torch.is_autocast_enabled(input.device.type):
        dtypes = {torch.float32 if dtype in DTYPES_16_BIT else dtype for dtype in dtypes}
    return functools.reduce(torch.promote_types, dtypes)


def _has_only_default_devices() -> bool:
    """Return True if all function modes are default devices, which only affect tensor creation."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return bool(modes) and all(isinstance(mode, DeviceContext) for mode in modes)


@traced_as(lambda: False)
def _is_in_make_fx() -> bool:
    """Return True if a program uses make_fx itself; torch.compile uses it internally."""
    return get_proxy_mode() is not None and TracingContext.try_get() is None


def _why_not(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    size_average: bool | None,
    reduce: bool | None,
    reduction: str,
    **_: Any,
) -> str | None:
    if has_torch_function_variadic(input, target) and not _has_only_default_devices():
        return "a torch function mode or a tensor subclass"
    for tensor in (input, target, weight):
        if tensor is not None and type(tensor) not in PLAIN:
            return f"a tensor of type {type(tensor).__name__}"
    if not is_served(input.device):
        return f"logits on {input.device.type}"
    if input.dtype not in DTYPES or input.layout != torch.strided:
        return f"logits of {input.dtype}, {input.layout}"
    if target.requires_grad:
        return "targets that require grad"
    if size_average is not None or reduce is not None or reduction not in REDUCTIONS:
        return "size_average or reduce, or an unknown reduction"
    if forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
        return "forward mode, or torch.func"
    if (
        torch._C._get_tracing_state() is not None
        or torch.compiler.is_exporting()
        or _is_in_make_fx()
    ):
        return "a graph that may run without ampfuse"
    return None
