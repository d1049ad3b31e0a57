"""The error of checkpoints, and the packages that they need."""

from importlib import import_module
from typing import Any


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is missing or damaged, or does not fit the objects."""


def required(name: str) -> Any:
    """Import a module of the extra `checkpoint`."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ImportError(
            f"ampfuse.checkpoint needs {package}: pip install safetensors xxhash"
        ) from None
