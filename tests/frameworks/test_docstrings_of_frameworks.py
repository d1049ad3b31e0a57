"""The docstrings of the modules for frameworks describe all arguments."""

import importlib

import pytest
from docstring_sections import assert_described

MODULES = ["accelerate", "causal_lm", "lightning", "transformers"]


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_of_frameworks_describe_exactly_the_arguments(module: str) -> None:
    assert_described(importlib.import_module(f"ampfuse.integrations.{module}"))
