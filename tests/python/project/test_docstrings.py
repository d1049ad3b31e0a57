"""The docstrings of public names describe all arguments, and their examples are right."""

import doctest
import importlib
import inspect
import pkgutil
import re

import ampfuse
import pytest
from docstring_sections import assert_described, mistakes

MODULES = ["checkpoint", "distributed", "integrations", "memory", "ops"]


def test_docstring_examples_give_the_results_that_they_show():
    found = [module.name for module in pkgutil.walk_packages(ampfuse.__path__, "ampfuse.")]
    assert len(found) > 100
    names = [name for name in found if "integrations." not in name]  # which need frameworks
    failed = [
        name
        for name in ["ampfuse", *names]
        if doctest.testmod(importlib.import_module(name)).failed > 0
    ]
    assert failed == []


def test_every_op_has_an_example_in_its_docstring():
    ops = [
        function
        for name, function in inspect.getmembers(ampfuse.ops, inspect.isfunction)
        if function.__module__ == "ampfuse.ops" and not name.startswith("_")
    ]
    assert len(ops) > 5
    finder = doctest.DocTestParser()
    assert [op.__name__ for op in ops if not finder.get_examples(op.__doc__)] == []


@pytest.mark.parametrize("module", ["ampfuse", *[f"ampfuse.{name}" for name in MODULES]])
def test_docstrings_describe_exactly_the_arguments(module):
    assert_described(importlib.import_module(module))


def documented(argument: int, other: str = "") -> int:
    """Return a number.

    Args:
        argument: The number, which is described
            in two lines.
        other: A text.

    Returns:
        The number.
    """


def undocumented(argument: int, other: str = "") -> int:
    """Return a number.

    Args:
        argument: The number.
        another: An argument that does not exist.

    >>> undocumented(1)
    """


def test_missing_and_surplus_arguments_are_found():
    assert mistakes(documented) == []
    assert mistakes(undocumented) == [
        "has no `other:` in Args",
        "has `another:` in Args, but no such argument",
        "has Args, but no Returns",
        "has an example outside of an `Examples:` section",
    ]


def test_adam_and_adamw_describe_their_common_arguments_alike():
    def arguments(optimizer):
        section = inspect.getdoc(optimizer).split("Args:\n")[1].split("\nRaises:")[0]
        entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
        own = ("weight_decay", "decoupled_weight_decay")
        return {name: text for name, text in entries if name not in own}

    assert len(arguments(ampfuse.Adam)) > 8
    assert arguments(ampfuse.AdamW) == arguments(ampfuse.Adam)
