"""Finds the library for the installed torch, and raises if the package has none."""

import contextlib
import ctypes
import re
import sys
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
    """Make the package find `_C`, which loads the library and so registers the operators."""
    folder = PACKAGE / "lib" / f"torch{_minor(torch.__version__)}"
    # Check this before loading: with another torch, loading fails with an undefined symbol, and
    # that error does not name the remedy.
    if not folder.is_dir():
        raise ImportError(_missing(folder.parent))
    other = _other_build(folder)
    if other is not None:
        raise ImportError(
            f"another build of ampfuse is loaded in this process, {other}, so that in {folder} "
            "cannot be loaded: rebuild the extension that has loaded the other build against this "
            "one, or use them in different processes"
        )
    sys.modules["ampfuse"].__path__.append(str(folder))


def _missing(folder: Path) -> str:
    """Return why there is no library for the installed torch, and what to do."""
    found = [one.name.removeprefix("torch") for one in folder.glob("torch*")]
    if not found:
        return (
            f"ampfuse is not built in {PACKAGE}: run `make build` in its checkout, "
            "or `pip install --no-build-isolation .`"
        )
    built = ", ".join(sorted(found, key=lambda minor: [*map(int, minor.split("."))]))
    return (
        f"this ampfuse was built for torch {built}, but torch {torch.__version__} is installed: "
        "install a torch that it was built for, or rebuild it, in its checkout, with `pip install "
        "--no-build-isolation --force-reinstall --no-deps .`"
    )


def _other_build(folder: Path) -> str | None:
    """Return the path of a libampfuse outside of the folder that has registered the operators.

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
        if "libampfuse.so" in path and Path(path).resolve().parent != folder.resolve()
    ]
    return others[0] if others else None


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports: 13000 for 13.0, 0 without driver."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    return version.value


def name_of_cuda(driver: int) -> str:
    """Return `13.0` for 13000."""
    return f"{driver // 1000}.{driver % 1000 // 10}"


def advise_on_driver(driver: int, kernels: str) -> str:
    """Return what to do if a driver is too old for kernels of a CUDA version; empty if it is not.

    driver: As from `driver_version`.
    """
    # A driver runs kernels of its own major version of CUDA, and of older ones.
    major = int(kernels.partition(".")[0])
    if not 0 < driver < max(FIRST_DRIVER, 1000 * major):
        return ""
    needed = "12.1 (530 or newer)" if major == 12 else f"{major}.0"
    older = "" if driver < FIRST_DRIVER else ", or compile ampfuse's kernels with CUDA 12"
    return (
        f"update the NVIDIA driver, which supports CUDA {name_of_cuda(driver)}, to "
        f"one for CUDA {needed}{older}: launches of kernels fail"
    )


def warn_of_old_driver(kernels: str) -> None:
    """Warn of a driver with which kernels of a CUDA version fail at their first launch."""
    if not torch.version.cuda:  # a CPU build of torch launches none
        return
    advice = advise_on_driver(driver_version(), kernels)
    if advice:
        warn_caller(advice)
