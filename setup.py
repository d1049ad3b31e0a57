"""Builds and installs ampfuse by calling CMake once for each torch.

torch is not a build requirement in pyproject.toml: an isolated build would fetch a second torch,
and a library built against that one would not load into yours. Hence --no-build-isolation.

Environment: AMPFUSE_WITH_CUDA (AUTO, ON, OFF), TORCH_CUDA_ARCH_LIST, AMPFUSE_FETCH_NVCC (OFF, ON),
CMAKE_ARGS, CMAKE_BUILD_TYPE (Release), AMPFUSE_BUILD_DIR (build/ in place, else build/wheel/), and
AMPFUSE_TORCHES: the folders of several releases of torch, separated by colons, for a wheel that
serves them all. Each is built in a folder of its own in AMPFUSE_BUILD_DIR (tools/wheels.py).
"""

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"building ampfuse needs setuptools 77 or newer, this is {setuptools.__version__}: "
        'pip install "setuptools>=77,<82"'
    )
TORCHES = [Path(folder) for folder in os.environ.get("AMPFUSE_TORCHES", "").split(":") if folder]
if not TORCHES:
    try:
        import torch
    except ImportError:
        sys.exit(
            "building ampfuse needs the torch that it will be used with, and found none: "
            "pip install torch, then pip install --no-build-isolation . "
            "(without that option pip hides the installed torch from the build)"
        )


def put_own_tools_first() -> None:
    """Put the interpreter's own cmake and ninja before the system's on PATH.

    This also works if the environment is not active (bin/pip was called by its path), and if it
    uses the packages of another environment.
    """
    folders = [str(Path(sys.executable).parent)]
    for name, folder in (("cmake", "CMAKE_BIN_DIR"), ("ninja", "BIN_DIR")):
        if importlib.util.find_spec(name) is not None:
            folders.append(str(getattr(importlib.import_module(name), folder, folders[0])))
    os.environ["PATH"] = os.pathsep.join([*folders, os.environ["PATH"]])


def is_new_enough(cmake: str | None) -> bool:
    """Return True if this CMake supports C++20 for CUDA 13."""
    if cmake is None:
        return False
    version = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) >= (3, 27)


def check_build_requirements() -> None:
    """Exit if a build requirement is missing: without build isolation, pip does not install it."""
    missing = [] if shutil.which("ninja") else ["ninja"]
    if not is_new_enough(shutil.which("cmake")):
        missing.append("cmake 3.27 or newer")
    if importlib.util.find_spec("pybind11") is None:
        missing.append("pybind11")
    if missing:
        sys.exit(
            f"building ampfuse needs {', '.join(missing)}: "
            'pip install "setuptools>=77,<82" "cmake>=3.27" ninja "pybind11>=3"'
        )


def nvidia_packages() -> str:
    """Return the folders where pip installed CUDA, in this environment or another on its path."""
    spec = importlib.util.find_spec("nvidia")
    return ";".join(spec.submodule_search_locations or []) if spec else ""


def torch_archs() -> str:
    """Return the GPU architectures that torch was built for; a CPU build lacks this function."""
    return getattr(torch._C, "_cuda_getArchFlags", str)() or ""


def gpus() -> str:
    """Return the compute capabilities of the GPUs that torch sees."""
    if not torch.cuda.is_available():
        return ""
    devices = range(torch.cuda.device_count())
    found = {torch.cuda.get_device_capability(device) for device in devices}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(found))


def installed_torch() -> list[str]:
    """Return CMake's options for the torch that is installed."""
    return [
        f"-DAMPFUSE_TORCH_ROOT={Path(torch.__file__).parent}",
        f"-DAMPFUSE_TORCH_ARCHS={torch_archs()}",
        f"-DAMPFUSE_GPUS={gpus()}",
    ]


def minor_release(folder: Path) -> tuple[int, int]:
    """Return (2, 11) for the folder of torch 2.11.0."""
    found = re.search(r"__version__ = '(\d+)\.(\d+)", (folder / "version.py").read_text())
    if found is None:
        sys.exit(f"AMPFUSE_TORCHES: {folder} is not the folder of a torch")
    return int(found[1]), int(found[2])


def required_torch() -> str:
    """Return the requirement: a library for a minor release of torch does not load in another."""
    if not TORCHES:
        return f"torch=={torch_minor}.*"
    releases = sorted(map(minor_release, TORCHES))
    (major, first), (_, last) = releases[0], releases[-1]
    return f"torch>={major}.{first},<{major}.{last + 1}"


class TorchInVersion(egg_info):
    """Puts torch's version into the name of a wheel for one: ampfuse-0.2.0+torch2.11-….whl."""

    def finalize_options(self) -> None:
        if "sdist" not in self.distribution.commands and not TORCHES:
            self.tag_build = f"+torch{torch_minor}"
        super().finalize_options()


class FreshBuild(build_py):
    """Empties the build folder, so that a wheel has no files that the sources no longer have."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "ampfuse", ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    def run(self) -> None:
        put_own_tools_first()
        check_build_requirements()
        in_place = self.inplace or self.editable_mode
        packages = ROOT / "python" if in_place else Path(self.build_lib).resolve()
        prefix = packages / "ampfuse"
        # The flags of these builds differ: in one folder, each would recompile everything.
        default_build = ROOT / "build" if in_place else ROOT / "build" / "wheel"
        build = Path(os.environ.get("AMPFUSE_BUILD_DIR", default_build))
        if not TORCHES:
            self.build_for(installed_torch(), build, prefix, in_place)
        kernels: Path | str = ""
        for folder in TORCHES:
            major, minor = minor_release(folder)
            here = build / f"torch{major}.{minor}"
            # CMake would keep the headers of the Python of an earlier build in this folder.
            options = ["-U*Python_*", f"-DAMPFUSE_TORCH_ROOT={folder}"]
            options.append(f"-DAMPFUSE_CUDA_LIBRARY={kernels}")
            self.build_for(options, here, prefix, in_place)
            # The first build compiles the CUDA kernels, if they are wanted, for all.
            if not kernels:
                installed = next(prefix.glob("lib/libampfuse_cuda.so.*"), None)
                kernels = here / installed.name if installed else ""

    def build_for(self, of_torch: list[str], build: Path, prefix: Path, in_place: bool) -> None:
        """Build in a folder, and install into the package `prefix`."""
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"--log-level={'STATUS' if self.verbose else 'NOTICE'}",
            f"-DCMAKE_INSTALL_PREFIX={prefix}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('CMAKE_BUILD_TYPE', 'Release')}",
            *of_torch,
            f"-DAMPFUSE_NVIDIA_PACKAGES={nvidia_packages()}",
            f"-DAMPFUSE_WITH_CUDA={os.environ.get('AMPFUSE_WITH_CUDA', 'AUTO')}",
            f"-DAMPFUSE_FETCH_NVCC={os.environ.get('AMPFUSE_FETCH_NVCC', 'OFF')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DAMPFUSE_BUILD_PYTHON=ON",
            "-DAMPFUSE_BUILD_TESTS=OFF",
            f"-DAMPFUSE_BESIDE_TORCH={'OFF' if in_place else 'ON'}",
            f"-DCMAKE_COMPILE_WARNING_AS_ERROR={'ON' if in_place else 'OFF'}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        for command in (configure, ["cmake", "--build", str(build), "--target", "install"]):
            # CMake has printed the error; a traceback below would hide it.
            if subprocess.run(command).returncode != 0:
                sys.exit(f"{command[0]} failed: see above")


torch_minor = "" if TORCHES else ".".join(torch.__version__.split(".")[:2])
setup(
    install_requires=[required_torch()],
    # The one "extension" stands for everything CMake installs; setuptools never compiles it.
    ext_modules=[Extension("ampfuse._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": FreshBuild, "egg_info": TorchInVersion},
)
