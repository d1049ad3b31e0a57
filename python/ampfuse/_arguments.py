"""Checks of arguments, whose errors name the argument at fault and the remedy."""

import inspect
import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from torch import Tensor

_MISMATCH = re.compile(
    r"ampfuse::(\w+)\(\) Expected a value of type '([^']+)' for argument '(\w+)' but instead found "
    r"type '(\w+)'"
)

# The expected value of an argument, by its name or else by its type in the schema.
_EXPECTED = {
    "dtype": "a torch.dtype",
    "logits_dtype": "a torch.dtype",
    "ord": "1, 2 or inf",
    "List[Tensor]": "a list of tensors",
    "Tensor": "a Tensor",
    "float": "a number",
    "int": "an int",
    "bool": "a bool",
    "str": "a str",
}


def suggestion(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return `; did you mean ...?`, or nothing if no known name is as like this one."""
    similar = get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def refuse_unknown(
    function: Callable[..., Any], names: Iterable[str], remedies: Mapping[str, str]
) -> None:
    """Raise for the first of these names, since the function has no such keyword arguments."""
    for name in names:
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
        hint = f"; {remedies[name]}" if name in remedies else suggestion(name, known)
        called = function.__qualname__.removesuffix(".__init__")
        raise TypeError(f"{called}: unexpected keyword argument {name!r}{hint}")


def explain(op: str, error: RuntimeError, **lists: Sequence[Tensor]) -> NoReturn:
    """Raise a TypeError that names the argument of a wrong type; raise other errors unchanged.

    torch's own message prints the values of all tensors, and does not name the item of a list.
    """
    mismatch = _MISMATCH.search(str(error))
    if mismatch is None or mismatch[1] != op:  # perhaps of an operator that a subclass calls
        raise error
    _, kind, name, found = mismatch.groups()
    if kind.startswith("Optional["):
        kind = kind.removeprefix("Optional[").removesuffix("]")
    expected = _EXPECTED.get(name) or _EXPECTED.get(kind, kind)
    if found in ("list", "tuple"):
        for index, item in enumerate(lists.get(name, ())):
            if not isinstance(item, Tensor):
                name, expected, found = f"{name}[{index}]", "a Tensor", type(item).__name__
                break
    found = "a Tensor" if found == "Tensor" else found
    raise TypeError(f"{op}: {name}: expected {expected}, got {found}") from None


def is_flag(value: Any) -> bool:
    """Return True if the value is a bool (numpy's included) or the integer 0 or 1."""
    has_flag_type = type(value).__name__ in ("bool", "bool_", "int")  # without importing numpy
    return has_flag_type and value in (0, 1)


def described(value: Any) -> str:
    """Return type and value for messages: `str '1e-3'`."""
    return f"{type(value).__name__} {value!r}"


def type_name(value: Any) -> str:
    """Return the name of a value's class with its module, since classes may share a name."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def checked_number(name: str, value: Any) -> float:
    """Convert a number, or a tensor with one element, which some programs save."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    return float(value)


def checked_known(name: str, value: Any) -> float:
    """Convert a number; raise if it is NaN."""
    number = checked_number(name, value)
    if math.isnan(number):
        raise ValueError(f"{name}: expected a number, got {value}")
    return number


def checked_count(name: str, value: Any, least: int, most: int = 2**62) -> int:
    """Convert an integer between `least` and `most`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    if number > most:
        raise ValueError(f"{name}: expected at most {most}, got {number}")
    return number
