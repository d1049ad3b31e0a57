"""Tests a wheel of `make wheels` with each release of torch that it serves: `make test-wheels`.

For each release and Python there is an environment in .venv-RELEASE-PYTHON, with all that torch
requires (3 GB). The wheel is installed there, and has to pass the fast tests, serve a C++ program
and run the demo.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from environment import ask, is_current, pip_install, run
from wheels import BUILDS, DIST, RELEASES, ROOT, fetched, name_of, say, serves

CONSUMER = ROOT / "tests" / "cpp" / "consumer"


def environment_with(release: str, python: str, wheel: Path) -> Path:
    """Return the interpreter of an environment with this torch and the wheel."""
    venv = ROOT / f".venv-{release}-{name_of(python)}"
    os.environ |= {"TORCH": release, "VENV": venv.name}
    if not is_current(venv):
        run(python, ROOT / "tools" / "environment.py")
    interpreter = venv / "bin" / "python"
    run(*pip_install(interpreter), "--no-deps", "--no-index", "--force-reinstall", wheel)
    return interpreter


def test(python: Path, wheel: Path, build: Path) -> None:
    """Run what the wheel has to pass. `build` is where its library was compiled."""
    auditwheel = BUILDS / name_of(str(python)) / "environment" / "bin" / "auditwheel"
    os.environ["AMPFUSE_BUILD"] = str(build.relative_to(ROOT))
    os.environ |= {"AMPFUSE_WHEEL": str(wheel), "AUDITWHEEL": str(auditwheel)}
    # The tests call C++ classes through a module that is no part of the wheel.
    options = ("-DAMPFUSE_BUILD_TESTS=ON", "-DAMPFUSE_BUILD_CUDA_HOST=OFF")
    options += ("-U*Python_*", f"-DPython_EXECUTABLE={python}")
    run("cmake", "-S", ROOT, "-B", build, "--log-level=WARNING", *options)
    run("cmake", "--build", build, "--target", "ampfuse_cpp")
    chosen = ("-m", "not (slow or vectorised)", "-n", "2", "--dist", "loadfile")
    run(python, "-m", "pytest", "-q", ROOT / "tests" / "wheel")
    run(python, "-m", "pytest", "-q", *chosen, ROOT / "tests" / "python")

    package = ask(python, "-c", "import ampfuse; print(ampfuse.cmake_prefix_path)")
    program = build / "consumer"
    run("cmake", "-S", CONSUMER, "-B", program, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={package}")
    run("cmake", "--build", program)
    run(program / "consumer")
    run(python, ROOT / "examples" / "demo.py")


def main() -> None:
    """Test the wheels in dist/."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", default=RELEASES, help="the releases of torch")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="the Pythons")
    arguments = parser.parse_args()
    for python in arguments.python:
        name = name_of(python)
        wheels = sorted(DIST.glob(f"ampfuse-*-{name}-*manylinux*.whl"))
        if not wheels:
            sys.exit(f"test-wheels: there is no wheel for {name} in dist/: run `make wheels`")
        for release in arguments.torch:
            if not serves(fetched(release), name):
                continue
            start = time.monotonic()
            interpreter = environment_with(release, python, wheels[-1])
            minor = ".".join(release.split(".")[:2])
            test(interpreter, wheels[-1], BUILDS / f"torch{minor}")
            minutes = (time.monotonic() - start) / 60
            say(f"torch {release}, {name}: passed, after {minutes:.0f} minutes")


if __name__ == "__main__":
    main()
