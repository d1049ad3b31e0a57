"""Who refers to something of torch's by a name of its own, and can be made to mean another thing.

`import torch; torch.optim.AdamW` asks torch each time. `from torch.optim import AdamW` has asked
already, and so has whoever keeps it in a class or in a table of optimizers.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple


class Reference(NamedTuple):
    """Where something is referred to; `put` makes it refer to something else, if that can be."""

    where: str
    value: Any
    put: Callable[[Any], None] | None = None


def references(wanted: Iterable[Any]) -> Iterator[Reference]:
    """Those to `wanted` in modules but torch's and ampfuse's.

    What modules and classes call by the name that it has can be changed. By another name it is
    theirs who mean torch's, to put it back say, and so it may be in dictionaries and lists. Default
    arguments, closures and partial functions cannot be changed. What is deeper down is not seen.
    """
    ids = {id(value) for value in wanted}
    # __main__ may be there by two names.
    names = reversed(sys.modules.copy().items())
    modules = {id(module): (name, module) for name, module in names}
    for name, module in modules.values():
        if name.partition(".")[0] not in ("torch", "ampfuse") and isinstance(module, ModuleType):
            yield from _in_module(ids, name, module)


def exchange(pairs: list[tuple[Any, Any]]) -> None:
    """Make what refers to the first of a pair refer to the second."""
    new = {id(old): new for old, new in pairs}
    for reference in references(old for old, _ in pairs):
        if reference.put is not None:
            with suppress(Exception):  # of modules and classes that refuse, to be told as such
                reference.put(new[id(reference.value)])


# A program's modules name tens of thousands of things: few are more than looked at. Dictionaries
# are copied before: they may change while a list of their items is made, whose tuples may have
# garbage collected. A type is compared as issubclass(type(value), type), since isinstance(value,
# type) asks the value, too: a lazy object would import something, and a weakref.proxy whose object
# is gone would raise.


def _in_module(ids: set[int], name: str, module: ModuleType) -> Iterator[Reference]:
    # Its dictionary: to ask for an attribute may import something.
    for attribute, value in vars(module).copy().items():
        kind = type(value)
        if id(value) in ids:
            yield _named(name, module, attribute, value)
        elif kind in CONTAINERS and attribute != "__builtins__":
            yield from _in_container(ids, f"{name}.{attribute}", value)
        elif kind is FunctionType and value.__module__ == name:
            yield from _in_function(ids, f"{name}.{attribute}", value)
        elif issubclass(kind, type) and value.__module__ == name:
            yield from _in_class(ids, f"{name}.{attribute}", value)


def _in_class(ids: set[int], where: str, cls: type) -> Iterator[Reference]:
    for attribute, value in vars(cls).copy().items():
        kind = type(value)
        if id(value) in ids:
            yield _named(where, cls, attribute, value)
        elif kind is staticmethod and id(value.__func__) in ids:
            yield Reference(f"{where}.{attribute}", value.__func__)
        elif kind in CONTAINERS:
            yield from _in_container(ids, f"{where}.{attribute}", value)
        elif kind is FunctionType:
            yield from _in_function(ids, f"{where}.{attribute}", value)


def _named(where: str, owner: Any, attribute: str, value: Any) -> Reference:
    put = partial(setattr, owner, attribute) if value.__name__ == attribute else None
    return Reference(f"{where}.{attribute}", value, put)


# Of exactly these: others may do something when they are asked.
CONTAINERS = (dict, list, tuple, partial)
MOST_ENTRIES = 10_000  # longer ones are a program's data


def _in_container(ids: set[int], where: str, container: Any) -> Iterator[Reference]:
    if type(container) is partial:
        if id(container.func) in ids:
            yield Reference(f"{where}.func", container.func)
        return
    if len(container) > MOST_ENTRIES:
        return
    is_dict = type(container) is dict
    for key, value in container.copy().items() if is_dict else enumerate(container):
        if id(value) in ids:
            yield Reference(f"{where}[{key!r}]", value)
        if is_dict and id(key) in ids:
            yield Reference(f"a key of {where}", key)


def _in_function(ids: set[int], where: str, function: FunctionType) -> Iterator[Reference]:
    for value in function.__defaults__ or ():
        if id(value) in ids:
            yield Reference(f"a default argument of {where}", value)
    for name, value in (function.__kwdefaults__ or {}).items():
        if id(value) in ids:
            yield Reference(f"the default {name} of {where}", value)
    for cell in function.__closure__ or ():
        if id(_content(cell)) in ids:
            yield Reference(f"the closure of {where}", _content(cell))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None
