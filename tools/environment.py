"""Prepares .venv to build, test and run ampfuse. This script needs only the standard library.

If the environment from which it is started has torch 2.11 or newer, that torch is used. Otherwise
the pinned torch is installed. If TORCH is set, that version is installed in any case. When a
requirement is missing, the script exits with a sentence that names it.
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
VENV = ROOT / (os.environ.get("VENV") or ".venv")
CPP_HEADERS = ROOT / ".venv" / "cpp-headers"
FRAMEWORKS = ROOT / f"{VENV.name}-frameworks"
DOCS = ROOT / f"{VENV.name}-docs"
# Debian's packages of headers for the C++ tests, and a header or folder of each.
DEBIAN = {"catch2": "catch2"}
PINNED = "2.11.0"
REQUESTED_TORCH = os.environ.get("TORCH", "")
BUILD = ["setuptools>=77,<82", "build", "cmake>=3.27,<5", "ninja", "pybind11>=3,<4"]
TOOLS = ["cmake", "ctest", "ninja", "ccache", "clang-format", "ruff"]
EXTRAS = ["test", "demo", "bench", "checkpoint", "lint"]
SYSTEM_INCLUDES = ["/usr/include", "/usr/local/include"]


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"environment: {text}", flush=True)


def run(*command: str | Path) -> None:
    """Run a command whose output the user sees."""
    subprocess.run([str(part) for part in command], check=True)


def ask(*command: str | Path) -> str:
    """Return a command's output; empty if it fails or does not exist."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def installed_torch(python: str | Path) -> str:
    """Return the version of an interpreter's torch, without importing it; empty without torch."""
    return ask(python, "-c", "import importlib.metadata as m; print(m.version('torch'))")


def torch_version(python: str | Path) -> tuple[int, ...]:
    """Return the first two numbers of the version; empty without torch."""
    return tuple(int(part) for part in re.findall(r"\d+", installed_torch(python))[:2])


def site_packages(python: Path) -> Path:
    """Return the folder in which an environment's packages are."""
    return Path(ask(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))


def pip_install(python: Path) -> list[str | Path]:
    """Return the command that installs packages into an environment."""
    return [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def make_venv() -> Path:
    """Create .venv, and make the active environment's torch visible in it if that can be used."""
    python = VENV / "bin" / "python"
    if not python.exists():
        say(f"creating {VENV.name} with Python {sys.version.split()[0]}")
        is_new = not VENV.exists()
        try:
            run(sys.executable, "-m", "venv", VENV)
        except subprocess.CalledProcessError:
            if is_new:
                shutil.rmtree(VENV, ignore_errors=True)
            sys.exit("Python's venv module does not work: install python3-venv (Debian, Ubuntu)")
    if REQUESTED_TORCH:
        return python
    site = site_packages(python)
    (site / "ampfuse_checkout.pth").write_text(f"{ROOT / 'python'}\n")
    # If this runs inside .venv, as from make, there is no other environment to use.
    if Path(sys.prefix).resolve() != VENV.resolve() and torch_version(sys.executable) >= (2, 11):
        folder = importlib.metadata.distribution("torch").locate_file("")
        say(f"using the torch in {folder}")
        # Add path entries instead of --system-site-packages, which inside a virtual environment
        # shows the interpreter's packages and not that environment's. torch's own folder comes
        # first: it may be in a user's folder, or in one that a .pth file has added.
        folders = [folder, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        lines = dict.fromkeys(str(Path(folder).resolve()) for folder in folders)
        (site / "ampfuse_active.pth").write_text("".join(f"{line}\n" for line in lines))
    return python


def extras(names: list[str]) -> list[str]:
    """Return the packages of pyproject.toml's extras. pip itself would build ampfuse for them."""
    text = (ROOT / "pyproject.toml").read_text()
    table = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    lists = dict(re.findall(r"^(\w+) = \[(.*?)\]$", table, re.MULTILINE | re.DOTALL))
    return sorted({name for extra in names for name in re.findall(r'"(.*?)"', lists[extra])})


def install_packages(python: Path) -> None:
    """Install torch, unless a usable one exists, and packages for builds, tests and the demo."""
    packages = [*BUILD, *extras(EXTRAS)]
    pip = pip_install(python)
    if not REQUESTED_TORCH and torch_version(python) >= (2, 11):
        say("installing packages for builds and tests (under a minute)")
    else:
        torch = f"torch=={REQUESTED_TORCH or PINNED}"
        say(f"installing {torch} and packages for builds and tests (3 GB; up to a few minutes)")
        packages.insert(0, torch)
        # uv is several times as fast as pip, but it ignores pip's settings. So pip is used if its
        # settings name another index, and if uv fails.
        uv = [VENV / "bin" / "uv", "pip", "install", "--quiet"]
        if "index" not in ask(python, "-m", "pip", "config", "list") and (
            succeeds([*pip, "uv"]) and succeeds([*uv, "--python", python, *packages])
        ):
            return
    run(*pip, *packages)


def link_tools() -> None:
    """Link tools that pip did not install into .venv because the active environment has them."""
    active = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name in TOOLS:
        own, found = VENV / "bin" / name, shutil.which(name, path=active)
        if not own.exists() and found:
            own.unlink(missing_ok=True)  # a link whose target is gone
            own.symlink_to(found)


def is_current(environment: Path) -> bool:
    """Return True if an environment was completed after the last change of the requirements."""
    ready, requirements = environment / ".ready", ROOT / "pyproject.toml"
    return ready.exists() and ready.stat().st_mtime > requirements.stat().st_mtime


def install_frameworks() -> None:
    """Make an environment for the frameworks' tests, which shows the packages of .venv, too."""
    if is_current(FRAMEWORKS):
        return
    say("installing Lightning, Transformers and other frameworks (under a minute)")
    base = VENV / "bin" / "python"
    run(base, "-m", "venv", FRAMEWORKS)
    python = FRAMEWORKS / "bin" / "python"
    # Unlike --system-site-packages, site.addsitedir reads the .pth files of .venv.
    line = f"import site; site.addsitedir({str(site_packages(base))!r})\n"
    (site_packages(python) / "ampfuse_venv.pth").write_text(line)
    # Without a constraint pip would install another torch, for torchvision.
    torch = f"torch=={installed_torch(base)}"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(f"{torch}\n")
        constraints.flush()
        run(*pip_install(python), "--constraint", constraints.name, *extras(["frameworks"]))
    (FRAMEWORKS / ".ready").touch()


def install_docs() -> None:
    """Make an environment with what builds the documentation, without torch."""
    if is_current(DOCS):
        return
    say("installing what builds the documentation (under a minute)")
    run(sys.executable, "-m", "venv", DOCS)
    run(*pip_install(DOCS / "bin" / "python"), *extras(["docs"]))
    (DOCS / ".ready").touch()


def install_cpp_headers() -> None:
    """Download and unpack headers for the C++ tests of all builds, which does not need root."""
    folders = [*SYSTEM_INCLUDES, CPP_HEADERS / "usr" / "include"]
    missing = [
        package
        for package, header in DEBIAN.items()
        if not any(Path(folder, header).exists() for folder in folders)
    ]
    if not missing:
        return
    say(f"fetching {', '.join(missing)}")
    CPP_HEADERS.mkdir(parents=True, exist_ok=True)  # dpkg-deb does not create parent folders
    with tempfile.TemporaryDirectory() as download:
        fetch = ["apt-get", "-qq", "-o=APT::Sandbox::User=root", "download", *missing]
        if not succeeds(fetch, download):
            # A new machine has no package lists yet; only root can fetch them.
            succeeds(["apt-get", "-qq", "update"], download)
            succeeds(fetch, download)
        packages = list(Path(download).glob("*.deb"))
        unpacked = [succeeds(["dpkg-deb", "-x", package, CPP_HEADERS]) for package in packages]
    if sum(unpacked) < len(missing):
        names = " ".join(missing)
        say(f"no {names}: install them, or the tests fail (Debian, Ubuntu: apt install {names})")


def succeeds(command: list[str | Path], folder: str | None = None) -> bool:
    """Run a command in a folder; return True if it succeeds."""
    try:
        return subprocess.run([str(part) for part in command], cwd=folder).returncode == 0
    except OSError:
        return False


def main() -> None:
    """Prepare everything; with `cpp-headers`, `frameworks` or `docs`, only install those."""
    only = {
        "cpp-headers": install_cpp_headers,
        "frameworks": install_frameworks,
        "docs": install_docs,
    }
    if sys.argv[1:]:
        only[sys.argv[1]]()
        return
    if sys.version_info < (3, 10):  # noqa: UP036 (any Python may start this script)
        sys.exit(f"ampfuse needs Python 3.10 or newer, this is {sys.version.split()[0]}")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        sys.exit("Python's C headers are missing: install python3-dev (Debian, Ubuntu)")
    if not shutil.which(os.environ.get("CXX", "g++")):
        sys.exit("no C++ compiler: install g++ 11 or newer")
    install_packages(make_venv())
    link_tools()
    (VENV / ".ready").touch()
    say("ready")


if __name__ == "__main__":
    main()
