"""Classes that stand in for torch's: called they make ours, and in all else they are torch's.

So what was made before, or by whoever still has torch's class, is an instance of either; and who
derives a class derives it from torch's, whose inside it may know.
"""

import inspect
import sys
import types
from abc import ABCMeta
from collections.abc import Callable
from typing import Any


class StandIn(ABCMeta):  # so that classes may derive from one and an abstract one
    """The class of these classes. Each derives from its `original`."""

    original: Any
    is_on: Callable[[], bool]
    make: Callable[[dict[str, Any]], Any]

    def __new__(
        mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any
    ) -> Any:
        """For class statements that have stand-ins among their bases: torch's take their place."""
        body.setdefault("__module__", sys._getframe(1).f_globals.get("__name__"))  # of type()
        originals = tuple(base.original if type(base) is mcs else base for base in bases)
        return types.new_class(name, originals, kwargs, lambda namespace: namespace.update(body))

    @classmethod
    def of(
        cls, original: Any, is_on: Callable[[], bool], make: Callable[[dict[str, Any]], Any]
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
        }
        return super().__new__(cls, original.__name__, (original,), body)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one."""
        if not cls.is_on():
            return cls.original(*args, **kwargs)
        try:
            given = inspect.signature(cls.original).bind(*args, **kwargs).arguments
        except TypeError:
            return cls.original(*args, **kwargs)  # which says what is wrong
        return cls.make(given)

    def __instancecheck__(cls, instance: Any) -> bool:
        """As torch's class says, of which ours are instances, too."""
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """The same for classes."""
        return issubclass(subclass, cls.original)
