"""Integrations without their frameworks, which are not installed where these tests run."""

import importlib
import sys

import pytest

PACKAGES = {"lightning": "lightning", "accelerate": "accelerate", "transformers": "transformers"}


@pytest.mark.parametrize(("module", "package"), PACKAGES.items())
def test_missing_framework_is_named(module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "ampfuse.integrations._required", raising=False)
    with pytest.raises(ImportError, match=f"needs {package}: pip install {package}"):
        importlib.import_module(f"ampfuse.integrations.{module}")


def test_integrations_are_not_imported_with_ampfuse():
    import ampfuse  # noqa: F401

    assert not [name for name in sys.modules if name in PACKAGES.values()]
