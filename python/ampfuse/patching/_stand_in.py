"""Classes that stand in for torch's: called they make ours, and in all else they are torch's.

So what was made before, or by whoever still has torch's class, is an instance of either; and who
derives a class derives it from torch's, whose inside it may know.
"""

import inspect
import sys
import types
from abc import ABCMeta
from collections.abc import Callable, Iterable
from typing import Any

from ampfuse.patching._usage import Usage

OF_ABC_META = ("__abstractmethods__", "_abc_impl")
ABSENT = object()


class StandIn(ABCMeta):  # so that classes may derive from one and an abstract one
    """The class of these classes. Each derives from its `original`."""

    original: Any
    is_on: Callable[[], bool]
    make: Callable[[dict[str, Any]], Any]
    usage: Usage
    ours_alone: frozenset[str]
    changed: dict[str, Any]

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
        is_on: Callable[[], bool],
        make: Callable[[dict[str, Any]], Any],
        usage: Usage,
        ours_alone: Iterable[str] = (),
    ) -> Any:
        """One that makes what `make` does of the arguments by name, while `is_on()`.

        Names that are `ours_alone` may be among them, where torch would not take them.
        """
        body = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__signature__": inspect.signature(original),
            "original": original,
            "is_on": staticmethod(is_on),
            "make": staticmethod(make),
            "usage": usage,
            "ours_alone": frozenset(ours_alone),
            "changed": {},  # what torch's class had of what a program has put into its place
        }
        return super().__new__(cls, original.__name__, (original,), body)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one."""
        if not cls.is_on():
            return cls.original(*args, **kwargs)
        if cls.changed:
            names = ", ".join(cls.changed)
            cls.usage.leave_to_torch(cls.__qualname__, f"the program has changed its {names}")
            return cls.original(*args, **kwargs)
        ours = {name: kwargs.pop(name) for name in cls.ours_alone & kwargs.keys()}
        try:
            given = inspect.signature(cls.original).bind(*args, **kwargs).arguments
        except TypeError:
            return cls.original(*args, **kwargs)  # which says what is wrong
        return cls.make(given | ours)

    def __setattr__(cls, name: str, value: Any) -> None:
        """Of torch's class, which is made from then on: ours would not do what was put there."""
        if name in OF_ABC_META:
            super().__setattr__(name, value)
            return
        if not name.startswith("_"):  # which the compiler changes, too
            before = cls.changed.setdefault(name, vars(cls.original).get(name, ABSENT))
            if value is before:
                del cls.changed[name]
        setattr(cls.original, name, value)

    def __delattr__(cls, name: str) -> None:
        """Of torch's class; what was there before is there again."""
        before = cls.changed.pop(name, ABSENT)
        if before is ABSENT:
            delattr(cls.original, name)
        else:
            setattr(cls.original, name, before)

    def __instancecheck__(cls, instance: Any) -> bool:
        """As torch's class says, of which ours are instances, too."""
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """The same for classes."""
        return issubclass(subclass, cls.original)
