"""Tests a wheel of `make wheels` with each release of torch that it serves: `make test-wheels`.

For each release there is an environment in .venv-RELEASE, with all that torch requires (3 GB). The
wheel is installed there, and has to pass the fast tests, serve a C++ program and run the demo.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from environment import ask, is_current, pip_install, run
from wheels import DIST, RELEASES, ROOT, say

CONSUMER = ROOT / "tests" / "cpp" / "consumer"


def environment_with(release: str, wheel: Path) -> Path:
    """Return the interpreter of an environment with this torch and the wheel."""
    venv = ROOT / f".venv-{release}"
    os.environ |= {"TORCH": release, "VENV": venv.name}
    if not is_current(venv):
        run(sys.executable, ROOT / "tools" / "environment.py")
    python = venv / "bin" / "python"
    run(*pip_install(python), "--no-deps", "--no-index", "--force-reinstall", wheel)
    return python


def test(python: Path, build: Path) -> None:
    """Run what the wheel has to pass. `build` is where its library was compiled."""
    os.environ["AMPFUSE_BUILD"] = str(build.relative_to(ROOT))
    # The tests call C++ classes through a module that is no part of the wheel.
    tests = ("-DAMPFUSE_BUILD_TESTS=ON", "-DAMPFUSE_BUILD_CUDA_HOST=OFF")
    run("cmake", "-S", ROOT, "-B", build, "--log-level=WARNING", *tests)
    run("cmake", "--build", build, "--target", "ampfuse_cpp")
    chosen = ("-m", "not (slow or vectorised)", "-n", "2", "--dist", "loadfile")
    run(python, "-m", "pytest", "-q", *chosen, ROOT / "tests" / "python")

    package = ask(python, "-c", "import ampfuse; print(ampfuse.cmake_prefix_path)")
    program = build / "consumer"
    run("cmake", "-S", CONSUMER, "-B", program, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={package}")
    run("cmake", "--build", program)
    run(program / "consumer")
    run(python, ROOT / "examples" / "demo.py")


def main() -> None:
    """Test the wheel for this Python in dist/."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", default=RELEASES, help="the releases of torch")
    arguments = parser.parse_args()
    name = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = sorted(DIST.glob(f"ampfuse-*-{name}-*manylinux*.whl"))
    if not wheels:
        sys.exit("test-wheels: there is no wheel in dist/: run `make wheels`")
    for release in arguments.torch:
        start = time.monotonic()
        python = environment_with(release, wheels[-1])
        minor = ".".join(release.split(".")[:2])
        test(python, ROOT / "build" / "wheels" / name / f"torch{minor}")
        say(f"torch {release}: passed, after {(time.monotonic() - start) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
