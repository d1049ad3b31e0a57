"""Loads libampfuse into the torch it was built for, and no other."""

import json
import re
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent


def _minor(version: str) -> str:
    """`2.11` of `2.11.0+cu130`."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version


def load() -> None:
    """Register the operators with torch's dispatcher."""
    try:
        built_for = json.loads((PACKAGE / "build_info.json").read_text())["torch_version"]
    except FileNotFoundError:
        raise ImportError(
            f"ampfuse is not built in {PACKAGE}: run `make build` in its checkout, "
            "or `pip install --no-build-isolation .`"
        ) from None
    # Looked at before the library is opened: in another torch it dies of an undefined symbol,
    # which tells nobody what to do.
    if _minor(built_for) != _minor(torch.__version__):
        raise ImportError(
            f"this ampfuse was built for torch {built_for}, but torch {torch.__version__} is "
            "installed: rebuild it, in its checkout, with `pip install --no-build-isolation "
            "--force-reinstall --no-deps .`, or install the torch it was built for"
        )
    torch.ops.load_library(PACKAGE / "lib" / "libampfuse.so")  # type: ignore[no-untyped-call]
