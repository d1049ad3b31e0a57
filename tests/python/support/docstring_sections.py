"""Compares the docstrings of public names with the names' signatures."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import ampfuse

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def assert_described(module: ModuleType) -> None:
    """Fail if a docstring of a public name of the module lacks an argument, or invents one."""
    wrong = [f"{name} {one}" for name, value in public_names(module) for one in mistakes(value)]
    assert not wrong, "\n".join(
        ["describe each argument in the section `Args:`, a class's in the class", *wrong]
    )


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes of a module, and the methods of the classes."""
    for name in getattr(module, "__all__", vars(module)):
        value = getattr(module, name)
        is_own = hasattr(module, "__all__") or getattr(value, "__module__", "") == module.__name__
        if name.startswith("_") or not is_own:
            continue
        if inspect.isfunction(value):
            yield f"{module.__name__}.{name}", value
        elif inspect.isclass(value):
            yield from _of_class(f"{module.__name__}.{name}", value)


def _of_class(name: str, cls: type) -> Iterator[tuple[str, Any]]:
    """Yield a class and those of its methods that the package defines."""
    yield name, cls
    for method, value in inspect.getmembers(cls, inspect.isfunction):
        home = inspect.unwrap(value).__module__
        if not method.startswith("_") and home.startswith("ampfuse"):
            yield f"{name}.{method}", value


def mistakes(value: Any) -> list[str]:
    """Return what is wrong with the sections of a docstring, each as a phrase."""
    if not value.__doc__:
        return ["has no docstring"]
    doc = inspect.cleandoc(value.__doc__)
    entries = set(entries_of(doc))
    parameters = _parameters(value)
    required = {parameter.name for parameter in parameters if parameter.kind not in VARIADIC}
    if shared := re.search(r"other\s+arguments\s+are\s+those\s+of\s+`(\w+)`", doc):
        required -= set(entries_of(inspect.getdoc(getattr(ampfuse, shared[1])) or ""))
    allowed = {parameter.name for parameter in parameters}
    found = [f"has no `{name}:` in Args" for name in sorted(required - entries)]
    found += [f"has `{name}:` in Args, but no such argument" for name in sorted(entries - allowed)]
    if entries and _returns_a_value(value) and not re.search(r"^(Returns|Yields):$", doc, re.M):
        found.append("has Args, but no Returns")
    if re.search(r"^>>>", doc, re.M):
        found.append("has an example outside of an `Examples:` section")
    return found


def entries_of(doc: str) -> list[str]:
    """Return the names that the section Args of a docstring describes."""
    section = re.search(r"^Args:\n((?: {4}.*\n?|\n(?= {4}))+)", doc, re.M)
    return re.findall(r"^ {4}\*{0,2}(\w+): \S", section[1], re.M) if section else []


def _parameters(value: Any) -> list[inspect.Parameter]:
    """Return the parameters that a user may pass; none for classes of results."""
    if inspect.isclass(value):
        if dataclasses.is_dataclass(value) or "__init__" not in vars(value):
            return []
        value = value.__init__
    parameters = inspect.signature(value).parameters.values()
    return [one for one in parameters if one.name != "self" and not one.name.startswith("_")]


def _returns_a_value(value: Any) -> bool:
    if inspect.isclass(value):
        return False
    return inspect.signature(value).return_annotation not in (None, "None", inspect.Signature.empty)
