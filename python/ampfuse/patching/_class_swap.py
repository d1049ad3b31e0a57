"""Classes that replace torch's while a program is patched.

Calling a replacement creates an object of our class. For `isinstance`, a replacement stands for
torch's class, so objects of torch's class pass. A class that derives from a replacement is derived
from torch's class instead, since it may use torch's internals.
"""

import inspect
import sys
import types
from abc import ABCMeta
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ampfuse.patching._usage import Usage

OF_ABC_META = ("__abstractmethods__", "_abc_impl")


class ClassSwap(ABCMeta):  # ABCMeta, so that a class may also derive from abstract classes
    """The metaclass of replacements. Each replacement derives from its `original`."""

    original: Any
    is_on: Callable[[], bool]
    make: Callable[[dict[str, Any]], Any]
    usage: Usage
    replaced: dict[str, FunctionType]  # torch's functions that our class overrides

    def __new__(
        mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Create a class with replacements among its bases: torch's classes take their place."""
        body.setdefault("__module__", sys._getframe(1).f_globals.get("__name__"))  # like type()
        originals = tuple(base.original if type(base) is mcs else base for base in bases)
        for base in bases:
            if type(base) is mcs and base.is_on():
                base.usage.count_fallback(f"class {name}", "it derives from torch's class")
        return types.new_class(name, originals, kwargs, lambda namespace: namespace.update(body))

    @classmethod
    def of(
        cls,
        original: Any,
        ours: type,
        is_on: Callable[[], bool],
        make: Callable[[dict[str, Any]], Any],
        usage: Usage,
    ) -> Any:
        """Return a replacement. While `is_on()`, calling it calls `make` with arguments by name."""
        body = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__signature__": inspect.signature(original),
            "original": original,
            "is_on": staticmethod(is_on),
            "make": staticmethod(make),
            "usage": usage,
            "replaced": {
                name: function
                for name, function in functions_of(original).items()
                if inspect.getattr_static(ours, name, None) is not function
            },
        }
        return super().__new__(cls, original.__name__, (original,), body)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create our object if that is possible, or else torch's."""
        if not cls.is_on():
            return cls.original(*args, **kwargs)
        if changed := cls.changed():
            reason = f"the program has put another {', '.join(changed)} into the class"
            cls.usage.count_fallback(f"{cls.__module__}.{cls.__qualname__}", reason)
            return cls.original(*args, **kwargs)
        try:
            given = inspect.signature(cls.original).bind(*args, **kwargs).arguments
        except TypeError:
            return cls.original(*args, **kwargs)  # raises torch's error
        return cls.make(given)

    def changed(cls) -> list[str]:
        """Return the names of functions that a program has set in torch's class but not in ours."""
        return [
            name
            for name, function in cls.replaced.items()
            if unhooked(getattr(cls.original, name, None)) is not unhooked(function)
        ]

    # Attributes are set in torch's class and read from it, so that a program that sets one can
    # restore the old value.

    @property  # type: ignore[misc]
    def __dict__(cls) -> Any:  # type: ignore[override]
        return vars(cls.original)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in OF_ABC_META:
            super().__setattr__(name, value)
        else:
            setattr(cls.original, name, value)

    def __delattr__(cls, name: str) -> None:
        delattr(cls.original, name)

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return True for instances of torch's class; our objects are such instances."""
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Return True for subclasses of torch's class."""
        return issubclass(subclass, cls.original)


def functions_of(cls: type) -> dict[str, FunctionType]:
    """Return the functions of a class by name, including inherited ones."""
    found = {name: inspect.getattr_static(cls, name, None) for name in dir(cls)}
    return {name: value for name, value in found.items() if isinstance(value, FunctionType)}


def unhooked(function: Any) -> Any:
    """Return a `step` without the wrapper that torch adds when a class is first used."""
    is_hooked = getattr(function, "hooked", False) is True
    return function.__wrapped__ if is_hooked else function
