"""The docstrings of public names describe all arguments, in sections that a generator reads."""

import importlib
import inspect
import re

import ampfuse
import pytest
from docstring_sections import assert_described, mistakes

MODULES = [
    "ampfuse",
    "ampfuse.checkpoint",
    "ampfuse.distributed",
    "ampfuse.integrations",
    "ampfuse.memory",
    "ampfuse.ops",
]


def documented(argument: int, other: str = "") -> int:
    """Return a number.

    Args:
        argument: The number, which is described
            in two lines.
        other: A text.

    Returns:
        The number.
    """
    return argument


def undocumented(argument: int, other: str = "") -> int:
    """Return a number.

    Args:
        argument: The number.
        another: An argument that does not exist.

    >>> undocumented(1)
    """
    return argument


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_describe_exactly_the_arguments(module: str) -> None:
    assert_described(importlib.import_module(module))


def test_a_complete_docstring_has_no_mistakes() -> None:
    assert mistakes(documented) == []


def test_missing_and_surplus_arguments_are_found() -> None:
    assert mistakes(undocumented) == [
        "has no `other:` in Args",
        "has `another:` in Args, but no such argument",
        "has Args, but no Returns",
        "has an example outside of an `Examples:` section",
    ]


def test_adam_and_adamw_describe_their_common_arguments_alike() -> None:
    def arguments(optimizer: type) -> dict[str, str]:
        section = inspect.getdoc(optimizer).split("Args:\n")[1].split("\nRaises:")[0]
        entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
        own = ("weight_decay", "decoupled_weight_decay")
        return {name: text for name, text in entries if name not in own}

    assert len(arguments(ampfuse.Adam)) > 8
    assert arguments(ampfuse.AdamW) == arguments(ampfuse.Adam)
