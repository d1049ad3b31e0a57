"""The examples in the docstrings of the package give the results that they show."""

import doctest
import importlib
import inspect
import pkgutil

import ampfuse
import pytest

MODULES = ["ampfuse"] + [
    module.name
    for module in pkgutil.walk_packages(ampfuse.__path__, "ampfuse.")
    if "integrations." not in module.name  # these need frameworks
]
OPS = [
    name
    for name, function in inspect.getmembers(ampfuse.ops, inspect.isfunction)
    if function.__module__ == "ampfuse.ops" and not name.startswith("_")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_give_the_results_that_they_show(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_an_example_in_its_docstring(name):
    assert doctest.DocTestParser().get_examples(getattr(ampfuse.ops, name).__doc__)
