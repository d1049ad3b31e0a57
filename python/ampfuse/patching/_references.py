"""Who refers to something of torch's by a name of its own, and can be made to mean another thing.

`import torch; torch.optim.AdamW` asks torch each time. `from torch.optim import AdamW` has asked
already, and so has whoever keeps it in a class or in a table of optimizers.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple


class Reference(NamedTuple):
    """An object that is referred to, and where."""

    where: str
    value: Any


def exchange(pairs: list[tuple[Any, Any]]) -> None:
    """Make modules and classes that refer to the first of a pair refer to the second.

    Only attributes that have the object's own name are changed: whoever has it by another name may
    mean torch's, for example to put it back.

    A `patched()` block does this at its entry and at its exit, so it has to be quick: it asks each
    module and each class for a few names and opens nothing else. It remembers no modules between
    calls, since Python does not tell whether a dictionary has changed: one of the same size may
    hold another class.
    """
    replacements = {(old.__name__, id(old)): new for old, new in pairs}
    names = {name for name, _ in replacements}
    for owner in _modules_and_their_classes():
        attributes = vars(owner)
        for name in names:
            if name in attributes and (found := (name, id(attributes.get(name)))) in replacements:
                with suppress(Exception):  # some modules and classes refuse to be written to
                    setattr(owner, name, replacements[found])


def references(wanted: Iterable[Any]) -> Iterator[Reference]:
    """All references to `wanted` in modules other than torch's and ampfuse's.

    They are attributes of modules and of the classes there, entries of dictionaries and lists,
    default arguments, closures and partial functions. Anything nested deeper is not seen.
    """
    ids = {id(value) for value in wanted}
    for name, module in _modules() if ids else ():
        yield from _in_module(ids, name, module)


def _modules() -> list[tuple[str, ModuleType]]:
    # __main__ may be there by two names.
    names = reversed(sys.modules.copy().items())
    modules = {id(module): (name, module) for name, module in names}
    return [
        (name, module)
        for name, module in modules.values()
        if name.partition(".")[0] not in ("torch", "ampfuse") and isinstance(module, ModuleType)
    ]


# The modules of a program name tens of thousands of objects. Hence these functions look at types
# first, and call a function or make a string only for the few objects that need it. A type is
# compared as issubclass(type(value), type), since isinstance(value, type) asks the value, too: a
# lazy object would import something, and a weakref.proxy whose object is gone would raise.
# Dictionaries are copied before their items are looked at: garbage collection and other threads
# may change them meanwhile. The list of a dictionary's values is made in one piece.


def _modules_and_their_classes() -> Iterator[Any]:
    for name, module in _modules():
        yield module
        for value in list(vars(module).values()):
            if issubclass(type(value), type) and value.__module__ == name:
                yield value


def _in_module(ids: set[int], name: str, module: ModuleType) -> Iterator[Reference]:
    # Its dictionary: to ask for an attribute may import something.
    for attribute, value in vars(module).copy().items():
        kind = type(value)
        if id(value) in ids:
            yield Reference(f"{name}.{attribute}", value)
        elif kind is FunctionType:
            if value.__module__ == name and _holds_values(value):
                yield from _in_function(ids, f"{name}.{attribute}", value)
        elif kind in CONTAINERS:
            if attribute != "__builtins__":
                yield from _in_container(ids, f"{name}.{attribute}", value)
        elif issubclass(kind, type) and value.__module__ == name:
            yield from _in_class(ids, f"{name}.{attribute}", value)


def _in_class(ids: set[int], where: str, cls: type) -> Iterator[Reference]:
    for attribute, value in vars(cls).copy().items():
        kind = type(value)
        if id(value) in ids:
            yield Reference(f"{where}.{attribute}", value)
        elif kind is FunctionType:
            if _holds_values(value):
                yield from _in_function(ids, f"{where}.{attribute}", value)
        elif kind is staticmethod and id(value.__func__) in ids:
            yield Reference(f"{where}.{attribute}", value.__func__)
        elif kind in CONTAINERS:
            yield from _in_container(ids, f"{where}.{attribute}", value)


# Of exactly these: others may do something when they are asked.
CONTAINERS = frozenset((dict, list, tuple, partial))
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


def _holds_values(function: FunctionType) -> bool:
    return bool(function.__defaults__ or function.__kwdefaults__ or function.__closure__)


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
