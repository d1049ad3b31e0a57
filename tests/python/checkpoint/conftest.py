"""The scenarios of a module run before its tests."""

from on_ranks import played  # noqa: F401
