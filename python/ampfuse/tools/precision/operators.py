"""Examines the values that the operators of a few steps compute."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse._graphs import is_capturing, is_in_backward
from ampfuse._nested import have_own_operators, stored_tensors_in
from ampfuse.tools.precision.modules import Modules
from ampfuse.tools.program_lines import current_line


class Overflow(NamedTuple):
    """An operator that made a NaN or an infinity of finite values in forward."""

    module: str
    operator: str
    where: str
    """File and line, as in `"train.py:12"`."""


@dataclass
class Operators:
    """The values that operators have computed."""

    overflows: list[Overflow] = field(default_factory=list)
    """Each operator of a module once, in their order."""
    largest: float = 0.0
    """The largest finite value of an operator that computes in 16 bits, in forward."""
    largest_in: str = ""
    """The module that computed it."""
    largest_in_backward: float = 0.0
    """The same in backward, where activations have gradients, too."""


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at each operator in a block of code.

    Dropout draws the same numbers for all precisions here, so that their steps can be compared.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: Modules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Operators()
        self.is_paused = True
        """True outside of forward and backward, whose operators are not examined."""
        self._modules = modules

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
        """Look for the largest value, and for the operators at which NaN and infinities begin."""
        ends = [end for one in results if one.numel() for end in torch.aminmax(one)]
        if all(math.isfinite(float(end)) for end in ends):
            if name != "_to_copy" and any(one.dtype in DTYPES_16_BIT for one in given):
                self._note_largest([end for end in ends if end.dtype in DTYPES_16_BIT])
            return
        if is_in_backward() or any(not is_finite(one) for one in filter(is_examined, given)):
            return
        key = self._modules.running, name
        if all(key != (one.module, one.operator) for one in self.found.overflows):
            line = current_line()
            self.found.overflows.append(Overflow(*key, line.where if line else ""))

    def _note_largest(self, ends: list[Tensor]) -> None:
        found = self.found
        largest = max((abs(float(end)) for end in ends), default=0.0)
        if is_in_backward():
            found.largest_in_backward = max(found.largest_in_backward, largest)
        elif largest > found.largest:
            found.largest, found.largest_in = largest, self._modules.running


def is_examined(tensor: Tensor) -> bool:
    """Return True for floating-point tensors, but not for float8, which few operators take."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def is_finite(tensor: Tensor) -> bool:
    """Return True if no element is NaN or infinite."""
    return bool(tensor.isfinite().all())


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
