"""Replaces attributes of torch for as long as something is measured."""

from contextlib import ExitStack
from typing import Any


def replace(exits: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute, and put it back when `exits` closes."""
    exits.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
