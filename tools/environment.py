"""Makes .venv ready to build, test and run ampfuse; standard library only.

A torch of 2.11 or newer in the environment this is started from is used as it is; without one the
pinned torch is installed. nvcc comes from a system toolkit of torch's CUDA version or from the
packages beside torch's own CUDA libraries. Says what is missing in a sentence when it cannot go on.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
TORCH = "torch==2.11.0"
BUILD = ["setuptools>=77,<82", "wheel", "build", "cmake>=3.27,<5", "ninja", "pybind11>=3,<4"]
EXTRAS = ["test", "demo", "bench", "lint"]
# Enough of a toolkit to compile kernels, where torch's own packages bring only the libraries.
NVCC = ["nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"]
# What torch's packages bring, fetched again where torch is in another environment: nvcc looks for
# these headers beside itself.
RUNTIME = ["nvidia-cuda-runtime"]
SYSTEM_INCLUDES = ["/usr/include", "/usr/local/include"]


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"environment: {text}", flush=True)


def run(*command: str | Path) -> None:
    """Run a command whose output the user sees."""
    subprocess.run([str(part) for part in command], check=True)


def ask(*command: str | Path) -> str:
    """A command's output; empty when it fails or is not there."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def torch_version(python: str | Path) -> tuple[int, ...]:
    """The version of torch an interpreter sees, without importing it; empty if none."""
    found = ask(python, "-c", "import importlib.metadata as m; print(m.version('torch'))")
    return tuple(int(part) for part in re.findall(r"\d+", found)[:2])


def make_venv() -> Path:
    """Create .venv, in sight of the active environment's torch if that will do."""
    python = VENV / "bin" / "python"
    if not python.exists():
        say(f"creating {VENV.name} with Python {sys.version.split()[0]}")
        try:
            run(sys.executable, "-m", "venv", VENV)
        except subprocess.CalledProcessError:
            shutil.rmtree(VENV, ignore_errors=True)
            sys.exit("Python's venv module does not work: install python3-venv (Debian, Ubuntu)")
    site = Path(ask(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    (site / "ampfuse_checkout.pth").write_text(f"{ROOT / 'python'}\n")
    # Run again from inside .venv, as make does, there is no other environment to see.
    if Path(sys.prefix).resolve() != VENV.resolve() and torch_version(sys.executable) >= (2, 11):
        folder = importlib.metadata.distribution("torch").locate_file("")
        say(f"using the torch in {folder}")
        # Path entries and not --system-site-packages, which from inside a virtual environment would
        # show the interpreter's packages instead of that environment's. torch's own folder comes
        # first: it may be a user's, or one that a .pth file added.
        folders = [folder, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        lines = dict.fromkeys(str(Path(folder).resolve()) for folder in folders)
        (site / "ampfuse_active.pth").write_text("".join(f"{line}\n" for line in lines))
    return python


def install_packages(python: Path) -> None:
    """Install torch, unless there is one, and what builds, tests and the demo need."""
    wanted = [*BUILD]
    if torch_version(python) < (2, 11):
        say(f"installing {TORCH} (about 3 GB with its CUDA libraries; a few minutes)")
        wanted.insert(0, TORCH)
    run(python, "-m", "pip", "install", "--disable-pip-version-check", *wanted)
    # The extras by name, from pyproject.toml, without ampfuse itself, whose build comes later.
    code = (
        "import tomllib" if sys.version_info >= (3, 11) else "import pip._vendor.tomli as tomllib"
    )
    code += (
        "; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']"
        f"; print('\\n'.join(sorted({{p for e in {EXTRAS!r} for p in extras[e]}})))"
    )
    packages = subprocess.run(
        [str(python), "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n")
    run(python, "-m", "pip", "install", "--disable-pip-version-check", *filter(None, packages))


def nvcc_version(nvcc: str) -> str:
    """`13.0` for nvcc of CUDA 13.0; empty if it does not run."""
    match = re.search(r"release (\d+\.\d+)", ask(nvcc, "--version"))
    return match[1] if match else ""


def install_nvcc(python: Path) -> None:
    """Get an nvcc of torch's CUDA version."""
    if os.environ.get("AMPFUSE_WITH_CUDA", "AUTO") == "OFF":
        return
    cuda = ask(python, "-c", "import torch; print(torch.version.cuda or '')")
    if not cuda:
        say("torch is a CPU build: no CUDA kernels")
        return
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    candidates = [f"{home}/bin/nvcc" for home in homes if home] + [shutil.which("nvcc") or ""]
    for nvcc in filter(None, candidates):
        if nvcc_version(nvcc) == cuda:
            say(f"using {nvcc}")
            return
    if int(cuda.split(".")[0]) < 13:
        say(f"no nvcc of CUDA {cuda} found, and none can be fetched: no CUDA kernels")
        return
    say(f"installing nvcc {cuda}")
    packages = NVCC if torch_is_inside(python) else [*NVCC, *RUNTIME]
    options = ["--disable-pip-version-check", "--no-deps", "--ignore-installed"]
    versions = (f"{package}=={cuda}.*" for package in packages)
    run(python, "-m", "pip", "install", *options, *versions)


def torch_is_inside(python: Path) -> bool:
    """Whether torch is in .venv itself and not in the environment that was active."""
    code = "import importlib.metadata as m; print(m.distribution('torch').locate_file(''))"
    return VENV.resolve() in Path(ask(python, "-c", code)).resolve().parents


def install_catch2() -> None:
    """Get Catch2 for the C++ tests: unpacked into .venv, so that nobody need be root."""
    folders = [*SYSTEM_INCLUDES, VENV / "catch2" / "usr" / "include"]
    if any(Path(folder, "catch2").is_dir() for folder in folders):
        return
    say("fetching Catch2")
    VENV.mkdir(exist_ok=True)  # on a bare checkout there is none yet, and dpkg-deb makes no parents
    with tempfile.TemporaryDirectory() as download:
        fetch = ["apt-get", "-qq", "-o=APT::Sandbox::User=root", "download", "catch2"]
        if not succeeds(fetch, download):
            # A new machine has no lists of packages yet; fetching those is for root alone.
            succeeds(["apt-get", "-qq", "update"], download)
            succeeds(fetch, download)
        packages = list(Path(download).glob("catch2*.deb"))
        if packages and succeeds(
            ["dpkg-deb", "-x", str(packages[0]), str(VENV / "catch2")], download
        ):
            return
    say("no Catch2: install it, or the tests fail (Debian, Ubuntu: apt install catch2)")


def succeeds(command: list[str], folder: str) -> bool:
    """Whether a command ran in a folder, and well."""
    try:
        return subprocess.run(command, cwd=folder).returncode == 0
    except OSError:
        return False


def main() -> None:
    """Set everything up; with the argument `catch2`, what only the tests need."""
    if sys.argv[1:] == ["catch2"]:
        install_catch2()
        return
    if sys.version_info < (3, 10):  # noqa: UP036 (what may start this is not ours to choose)
        sys.exit(f"ampfuse needs Python 3.10 or newer, this is {sys.version.split()[0]}")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        sys.exit("Python's C headers are missing: install python3-dev (Debian, Ubuntu)")
    if not shutil.which(os.environ.get("CXX", "g++")):
        sys.exit("no C++ compiler: install g++ 11 or newer")
    python = make_venv()
    install_packages(python)
    install_nvcc(python)
    (VENV / f".ready-{os.environ.get('AMPFUSE_WITH_CUDA', 'AUTO')}").touch()
    say("ready")


if __name__ == "__main__":
    main()
