"""Replaces attributes of torch for as long as something is measured."""

from contextlib import ExitStack
from typing import Any


def replace(exits: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute, and put it back when `exits` closes.

    What somebody else has put in its place meanwhile stays, and may still call `value`.
    """
    original = getattr(owner, name)

    def put_back() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, original)

    setattr(owner, name, value)
    exits.callback(put_back)
