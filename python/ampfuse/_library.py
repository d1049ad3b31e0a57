"""Loads libampfuse, and raises for a torch that it was not built for."""

import contextlib
import ctypes
import json
import re
from pathlib import Path

import torch

from ampfuse._warning import warn_caller

PACKAGE = Path(__file__).parent
DRIVER = "libcuda.so.1"
FIRST_DRIVER = 12010  # of CUDA 12.1: older ones refuse the kernels' 32,764 argument bytes


def _minor(version: str) -> str:
    """Return `2.11` for `2.11.0+cu130`."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version


def load() -> None:
    """Load the library, which registers the operators with torch's dispatcher."""
    try:
        built_for = json.loads((PACKAGE / "build_info.json").read_text())["torch_version"]
    except FileNotFoundError:
        raise ImportError(
            f"ampfuse is not built in {PACKAGE}: run `make build` in its checkout, "
            "or `pip install --no-build-isolation .`"
        ) from None
    # Check this before loading: with another torch, loading fails with an undefined symbol, and
    # that error does not name the remedy.
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
            f"another build of ampfuse is loaded in this process, {other}, so {library} cannot be "
            "loaded: rebuild the extension that has loaded the other build against this one, or "
            "use them in different processes"
        )
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]


def _other_build(library: Path) -> str | None:
    """Return the path of another libampfuse that has registered the operators, or None.

    A C++ extension may have loaded it. This library would then register nothing.
    """
    if not torch._C._jit_get_schemas_for_operator("ampfuse::update_scale"):
        return None
    # The path is the sixth field and may contain spaces; memory without a file has five fields.
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split(maxsplit=5)[-1] for line in lines}
    others = [
        path
        for path in loaded
        if "libampfuse" in path and Path(path).resolve() != library.resolve()
    ]
    return others[0] if others else None


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports: 13000 for 13.0, 0 without driver."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    return version.value


def warn_of_old_driver() -> None:
    """Warn of a driver with which kernels fail at their first launch."""
    if 0 < driver_version() < FIRST_DRIVER:
        warn_caller(
            "with this NVIDIA driver ampfuse's kernels will fail at their first launch with CUDA "
            "tensors. Update the driver to 530 or newer"
        )
