"""Loads libampfuse into the torch it was built for, and no other."""

import contextlib
import ctypes
import json
import re
from pathlib import Path

import torch

from ampfuse._warning import warn_caller

PACKAGE = Path(__file__).parent
DRIVER = "libcuda.so.1"


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
    library = PACKAGE / "lib" / "libampfuse.so"
    other = _other_build(library)
    if other is not None:
        raise ImportError(
            f"another build of ampfuse is loaded in this process, {other}, and this one is "
            f"{library}: build what loads the other one against this one, or use the two in "
            "different processes"
        )
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]


def _other_build(library: Path) -> str | None:
    """Where a library that has registered the operators already was loaded from.

    A C++ extension may have brought it. Loading this one beside it would register nothing.
    """
    if not torch._C._jit_get_schemas_for_operator("ampfuse::update_scale"):
        return None
    # The path is the sixth field, and may have spaces; memory without a file has five.
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split(maxsplit=5)[-1] for line in lines}
    others = [
        path
        for path in loaded
        if "libampfuse" in path and Path(path).resolve() != library.resolve()
    ]
    return others[0] if others else None


def _driver_version() -> int:
    """The newest CUDA that the driver serves: 13000 for 13.0, and 0 where there is no driver."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    return version.value


def warn_of_old_driver() -> None:
    """Kernels take 32,764 bytes of arguments, which drivers before 530 (CUDA 12.1) refuse."""
    version = _driver_version()
    if 0 < version < 12010:
        warn_caller(
            f"this NVIDIA driver serves CUDA {version // 1000}.{version % 1000 // 10}, and "
            "ampfuse's kernels need 12.1: with CUDA tensors they will fail at their first launch. "
            "Update the driver to 530 or newer"
        )
