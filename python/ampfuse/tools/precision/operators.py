"""Examines the values that the operators of a few steps compute."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse._graphs import is_capturing, is_in_backward
from ampfuse._nested import have_own_operators, stored_tensors_in
from ampfuse.tools.diagnosis.phases import BACKWARD, FORWARD
from ampfuse.tools.precision.modules import Modules
from ampfuse.tools.program_lines import current_line

MOST_VALUES = 2**18  # of a tensor, of which exponents are counted
ZERO = -150  # exponents are at least -149, that of the smallest float32


@dataclass
class Operators:
    """The values that the operators of forward and backward have computed."""

    exponents: Counter[int] = field(default_factory=Counter)
    """Numbers of 16-bit values in backward, by their exponent: 1 and 1.5 have 0."""
    nonfinite: list[dict[str, Any]] = field(default_factory=list)
    """The operators that made a NaN or an infinity of finite values, in their order."""
    largest: float = 0.0
    """The largest finite value of an operator that computes in 16 bits, in forward."""
    largest_in: str = ""
    """The module that computed it."""


def is_examined(tensor: Tensor) -> bool:
    """Return True for floating-point tensors, but not for float8, which few operators take."""
    return tensor.is_floating_point() and tensor.itemsize > 1


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
        self._seen: set[tuple[str, str, str]] = set()

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
        is_view = any(result.alias_info is not None for result in operator._schema.returns)
        if (is_view and not operator._schema.is_mutable) or not given or "empty" in name:
            return operator(*args, **kwargs)
        results = operator(*args, **kwargs)
        floats = list(filter(is_examined, stored_tensors_in(results)))
        is_16bit = any(one.dtype in DTYPES_16_BIT for one in given) and name != "_to_copy"
        is_backward = is_in_backward()
        if is_16bit and is_backward:
            for one in floats:
                if one.dtype in DTYPES_16_BIT:
                    self.found.exponents += exponents(one)
        self._look(name, given, floats, is_backward, is_16bit)
        return results

    def _look(
        self,
        name: str,
        given: list[Tensor],
        results: list[Tensor],
        is_backward: bool,
        is_16bit: bool,
    ) -> None:
        """Look for the largest value, and for the operators at which NaN and infinities begin."""
        ends = [end for one in results if one.numel() for end in torch.aminmax(one)]
        if all(math.isfinite(float(end)) for end in ends):
            if is_16bit and not is_backward:
                self._note_largest([end for end in ends if end.dtype in DTYPES_16_BIT])
            return
        if any(is_examined(one) and not bool(one.isfinite().all()) for one in given):
            return
        node = torch._C._current_autograd_node() if is_backward else None
        module = self._modules.behind(node._sequence_nr()) if node else self._modules.running
        phase = BACKWARD if is_backward else FORWARD
        key = (phase, module, name)
        if key in self._seen:
            return
        self._seen.add(key)
        where = None if is_backward else current_line()
        found = {"phase": phase, "module": module, "operator": name}
        self.found.nonfinite.append(found | {"where": where and where.where})

    def _note_largest(self, ends: list[Tensor]) -> None:
        largest = max((abs(float(end)) for end in ends), default=0.0)
        if largest > self.found.largest:
            self.found.largest, self.found.largest_in = largest, self._modules.running


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
    return tree_map(lambda x: x.to(dtype) if is_float(x) else x, results)


def is_float(value: Any) -> bool:
    """Return True for a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def exponents(tensor: Tensor) -> Counter[int]:
    """Count the elements of a 16-bit tensor by their exponents; those that are 0 by `ZERO`."""
    values = tensor.detach().reshape(-1)
    step = -(-values.numel() // MOST_VALUES) if values.numel() else 1
    values = values[::step].float()
    values = values[values.isfinite()]
    found = torch.frexp(values)[1].sub_(1).masked_fill_(values == 0, ZERO)
    counts = torch.bincount(found - ZERO).tolist()
    return Counter({index + ZERO: count * step for index, count in enumerate(counts) if count})
