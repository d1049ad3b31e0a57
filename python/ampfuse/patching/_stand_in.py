"""Classes that stand in for torch's: called they make ours, and in all else they are torch's.

So what was made before, or by whoever still has torch's class, is an instance of either; and who
derives a class derives it from torch's, whose inside it may know.
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


class StandIn(ABCMeta):  # so that classes may derive from one and an abstract one
    """The class of these classes. Each derives from its `original`."""

    original: Any
    is_on: Callable[[], bool]
    make: Callable[[dict[str, Any]], Any]
    usage: Usage
    replaced: dict[str, FunctionType]  # torch's functions that ours has others for

    def __new__(
        mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any
    ) -> Any:
        """For class statements that have stand-ins among their bases: torch's take their place."""
        body.setdefault("__module__", sys._getframe(1).f_globals.get("__name__"))  # of type()
        originals = tuple(base.original if type(base) is mcs else base for base in bases)
        for base in bases:
            if type(base) is mcs and base.is_on():
                base.usage.leave_to_torch(f"class {name}", "it derives from torch's class")
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
        """One that makes what `make` does of the arguments by name, while `is_on()`."""
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
        """Make one."""
        if not cls.is_on():
            return cls.original(*args, **kwargs)
        if changed := cls.changed():
            reason = f"the program has put another {', '.join(changed)} into the class"
            cls.usage.leave_to_torch(f"{cls.__module__}.{cls.__qualname__}", reason)
            return cls.original(*args, **kwargs)
        try:
            given = inspect.signature(cls.original).bind(*args, **kwargs).arguments
        except TypeError:
            return cls.original(*args, **kwargs)  # which says what is wrong
        return cls.make(given)

    def changed(cls) -> list[str]:
        """Functions that a program has put into torch's class, and that ours would not call."""
        return [
            name
            for name, function in cls.replaced.items()
            if unhooked(getattr(cls.original, name, None)) is not unhooked(function)
        ]

    # Programs that put something into the class put it into torch's, and find it there to put back
    # what was before.

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
        """As torch's class says, of which ours are instances, too."""
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """The same for classes."""
        return issubclass(subclass, cls.original)


def functions_of(cls: type) -> dict[str, FunctionType]:
    """Its own and inherited ones."""
    found = {name: inspect.getattr_static(cls, name, None) for name in dir(cls)}
    return {name: value for name, value in found.items() if isinstance(value, FunctionType)}


def unhooked(function: Any) -> Any:
    """A step as it was before torch wrapped it, which it does once a class is first used."""
    is_hooked = getattr(function, "hooked", False) is True
    return function.__wrapped__ if is_hooked else function
