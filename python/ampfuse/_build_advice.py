"""Advice if the CUDA kernels are missing, or do not fit torch, the GPUs or the driver."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from ampfuse._library import cuda_text

FIRST_CUDA_IN_PACKAGES = 13  # the first major version whose nvcc the build can fetch


class Installation(NamedTuple):
    """The facts that decide whether CUDA kernels run."""

    cuda_archs: str
    """The architectures of the kernels in CMake's notation, for example "80-real 90"."""
    built_with: str
    """The CUDA version that compiled them; empty in a CPU build."""
    torchs_cuda: str | None
    driver: int
    """The newest CUDA version that the driver supports: 13000 for 13.0, 0 without a driver."""
    gpus: list[tuple[int, int]]
    """The compute capabilities of the GPUs that torch sees."""
    nvcc: str | None
    """The version of the nvcc on PATH."""


def advice(found: Installation) -> Iterator[str]:
    """Yield sentences, each with one thing to change."""
    if found.torchs_cuda is None:
        if found.driver:
            yield (
                "this torch is a CPU build, but there is an NVIDIA driver: install torch with "
                "CUDA (https://pytorch.org), and then ampfuse again"
            )
        return
    if not found.gpus:
        yield _why_no_gpu(found)
        return
    missing = [gpu for gpu in found.gpus if not _is_served(gpu, found.cuda_archs)]
    if _major(found.built_with) not in ("", _major(found.torchs_cuda)):
        missing = found.gpus
    if missing:
        archs = " ".join(sorted({f"{major}.{minor}" for major, minor in missing}))
        yield (
            f'compile kernels for {archs}: in the checkout, TORCH_CUDA_ARCH_LIST="{archs}" pip '
            f"install --no-build-isolation --force-reinstall --no-deps .{_about_nvcc(found)}"
        )


def _why_no_gpu(found: Installation) -> str:
    if not found.driver:
        return "if there is an NVIDIA GPU, install its driver: libcuda.so.1 was not found"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden!r} may hide the GPUs from torch: unset it"
    assert found.torchs_cuda is not None
    major = _major(found.torchs_cuda)
    if found.driver // 1000 < int(major):
        version = cuda_text(found.driver)
        return f"the driver supports CUDA {version}, torch needs {major}: update the driver"
    return "the driver is there, but torch sees no GPU: nvidia-smi shows whether the driver does"


def _is_served(gpu: tuple[int, int], cuda_archs: str) -> bool:
    """Return True if kernels for one of these architectures run on a GPU.

    Machine code runs on the later GPUs of its major version, and PTX on all later ones. That of an
    architecture with a letter, as in "90a", counts for one GPU only.
    """
    for arch in cuda_archs.split():
        match = re.fullmatch(r"(\d+)(\d)([a-z]?)(-real)?(?:-virtual)?", arch)
        if match is None:
            continue
        built = int(match[1]), int(match[2])
        if built == gpu or (built < gpu and not match[3] and (built[0] == gpu[0] or not match[4])):
            return True
    return False


def _about_nvcc(found: Installation) -> str:
    """Return a sentence if the nvcc here cannot compile the kernels."""
    assert found.torchs_cuda is not None
    wanted = _major(found.torchs_cuda)
    if found.nvcc is not None and _major(found.nvcc) == wanted:
        return ""
    here = "nvcc is not on PATH" if found.nvcc is None else f"the nvcc on PATH is {found.nvcc}"
    remedy = f"install the toolkit of CUDA {wanted}"
    if int(wanted) >= FIRST_CUDA_IN_PACKAGES:
        remedy = "set AMPFUSE_FETCH_NVCC=ON to have it fetched"
    return f" ({here}, and torch's CUDA is {found.torchs_cuda}: {remedy})"


def _major(version: str) -> str:
    return version.partition(".")[0]


def nvcc_version() -> str | None:
    """Return the version of the nvcc on PATH, or None."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    try:
        printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return None
    match = re.search(r"release (\d+\.\d+)", printed)
    return match[1] if match else None
