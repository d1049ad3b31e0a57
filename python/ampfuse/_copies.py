"""Copies of objects that belong to a process group."""

import copy
from typing import Any, TypeVar

T = TypeVar("T")


def copied_with_group(original: T, memo: dict[int, Any]) -> T:
    """Copy an object by its pickled state, for `__deepcopy__`. The copy has the same group."""
    group = original.process_group  # type: ignore[attr-defined]
    memo[id(group)] = group
    copied = memo[id(original)] = type(original).__new__(type(original))
    state = copy.deepcopy(original.__getstate__(), memo)
    copied.__setstate__(state)  # type: ignore[attr-defined]
    return copied
