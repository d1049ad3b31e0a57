"""Examines the values that the operators of a few steps compute."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse._graphs import is_capturing, is_in_backward
from ampfuse._nested import have_own_operators, stored_tensors_in
from ampfuse.tools.precision.modules import Modules
from ampfuse.tools.precision.outcome import Outcome, Overflow, is_finite
from ampfuse.tools.program_lines import current_line


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at each operator in a block of code.

    Dropout draws the same numbers for all precisions here, so that their steps can be compared.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: Modules, outcome: Outcome) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_paused = True
        """True outside of forward and backward, whose operators are not examined."""
        self._modules = modules
        self.outcome = outcome

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and look at its results."""
        kwargs = kwargs or {}
        given = list(stored_tensors_in((args, kwargs)))
        if have_own_operators(given):
            return NotImplemented
        if self.is_paused or is_capturing():
            return operator(*args, **kwargs)
        name = operator.name().partition("::")[2].partition(".")[0]
        is_random = torch.Tag.nondeterministic_seeded in operator.tags
        if is_random and len(given) == 1 and given[0].dtype in DTYPES_16_BIT:
            return drawn_alike(operator, given[0], args, kwargs)
        results = operator(*args, **kwargs)
        is_view = any(result.alias_info is not None for result in operator._schema.returns)
        if given and not (is_view and not operator._schema.is_mutable) and "empty" not in name:
            self._look(name, given, list(filter(is_examined, stored_tensors_in(results))))
        return results

    def _look(self, name: str, given: list[Tensor], results: list[Tensor]) -> None:
        """Look for the largest gradient, and for operators at which NaN and infinities begin."""
        ends = [end for one in results if one.numel() for end in torch.aminmax(one)]
        if all(math.isfinite(float(end)) for end in ends):
            is_16_bit = any(one.dtype in DTYPES_16_BIT for one in given)
            if is_in_backward() and is_16_bit and name != "_to_copy":
                sizes = [abs(float(end)) for end in ends if end.dtype in DTYPES_16_BIT]
                self.outcome.largest_in_backward = max([self.outcome.largest_in_backward, *sizes])
            return
        if is_in_backward() or not all(map(is_finite, filter(is_examined, given))):
            return
        key = self._modules.running, name
        if all(key != (one.module, one.operator) for one in self.outcome.overflows):
            line = current_line()
            self.outcome.overflows.append(Overflow(*key, line.where if line else ""))


def is_examined(tensor: Tensor) -> bool:
    """Return True for floating-point tensors, but not for float8, which few operators take."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def drawn_alike(
    operator: Any, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operator on a tensor of 16 bits with the random numbers that float32 would get."""
    wide = tensor.float()
    args = tuple(wide if one is tensor else one for one in args)
    results = operator(*args, **kwargs)
    if results is wide:
        return tensor.copy_(wide)
    dtype = kwargs.get("dtype") or tensor.dtype

    def narrow(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tree_map(narrow, results)
