"""Rebinds names that modules and classes have imported from torch before patching.

`import torch; torch.optim.AdamW` looks the name up each time. `from torch.optim import AdamW` has
looked it up already.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any


def exchange(pairs: list[tuple[Any, Any]]) -> None:
    """In modules and classes, replace the first object of each pair by the second.

    Only attributes that have the object's own name are changed: a program that uses another name
    may want torch's object, for example to restore it.

    A `patched()` block does this at its entry and at its exit, so it has to be quick: it looks up a
    few names in each module and each class, and nothing else. It caches no modules between calls,
    since Python does not report whether a dict has changed: one of the same size may hold another
    class.
    """
    replacements = {(old.__name__, id(old)): new for old, new in pairs}
    names = {name for name, _ in replacements}
    for owner in _modules_and_their_classes():
        attributes = vars(owner)
        for name in names:
            if name in attributes and (found := (name, id(attributes.get(name)))) in replacements:
                with suppress(Exception):  # some modules and classes refuse to be written to
                    setattr(owner, name, replacements[found])


def _modules() -> list[tuple[str, ModuleType]]:
    # A module, for example __main__, may have two names: keep the first one.
    names = reversed(sys.modules.copy().items())
    modules = {id(module): (name, module) for name, module in names}
    return [
        (name, module)
        for name, module in modules.values()
        if name.partition(".")[0] not in ("torch", "ampfuse") and isinstance(module, ModuleType)
    ]


# The modules of a program name tens of thousands of objects, so this looks at classes alone. It
# finds them by issubclass(type(value), type). isinstance(value, type) would read its __class__, for
# which a lazy object imports something, and a weakref.proxy whose object is gone raises.


def _modules_and_their_classes() -> Iterator[Any]:
    for name, module in _modules():
        yield module
        for value in list(vars(module).values()):
            if issubclass(type(value), type) and value.__module__ == name:
                yield value
