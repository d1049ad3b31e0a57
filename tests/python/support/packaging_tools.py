"""A second checkout to build in, and an environment to install into, for the packaging tests.

The second checkout stays in the build folder between runs, so only the first run compiles.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import ampfuse
import torch
import warm

# Use this interpreter's cmake and ninja, even if its environment is not active.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

ROOT = Path(__file__).parents[3]
SITE = Path(torch.__file__).parents[1]
PACKAGE = Path(ampfuse.__file__).parent
LIBRARY = next(Path(ampfuse._C.__file__).parent.glob("libampfuse.so.*"))
KERNELS = None
if ampfuse.has_cuda():
    KERNELS = PACKAGE / "lib" / LIBRARY.name.replace("libampfuse", "libampfuse_cuda")
BUILD = ROOT / os.environ.get("AMPFUSE_BUILD", "build")
PROGRAMS = BUILD / "programs"
# The end of a program with ranks. Threads of gloo take Python's lock to release the tensors of the
# last collectives. If Python is ending by then, they abort the process, although all is done.
END_OF_RANK = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"


def find_tool(name: str) -> str | None:
    """Return the path of nvcc (toolkit or torch's packages) or cuobjdump (toolkit or triton)."""
    folders = [Path("/usr/local/cuda/bin"), *SITE.glob("nvidia/cu*/bin")]
    folders += [SITE / "triton" / "backends" / "nvidia" / "bin"]
    found = [folder / name for folder in folders if (folder / name).exists()]
    return shutil.which(name) or (str(found[0]) if found else None)


NVCC = find_tool("nvcc")


def run(*command: str | Path, **options: object) -> str:
    """Run a command and return its output. If it fails, the assertion shows all output."""
    done = subprocess.run(
        [str(part) for part in command], text=True, capture_output=True, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def dynamic_entries(file: Path, tag: str) -> list[str]:
    """Return the values of an entry of a library's dynamic section."""
    return re.findall(rf"\({tag}\).*\[(.*)\]", run("readelf", "-dW", file))


def run_python(*arguments: str | Path, cwd: Path, **variables: str) -> str:
    """Run a Python program in a warm process and return its output, as `run` does."""
    return run(warm.python(), *arguments, cwd=cwd, env={**os.environ, **variables})


def build_program(source: Path, build: Path, *options: str) -> None:
    """Configure and build a C++ program, with ampfuse from its package unless an option differs.

    It has the options of the tests in tests/cpp, and uses the headers that they have precompiled.
    """
    included = BUILD / "tests" / "cpp" / "precompiled_torch.cmake"
    assert included.exists(), "run `make build`, with tests"
    given = (f"-DCMAKE_PREFIX_PATH={PACKAGE}", f"-DCMAKE_PROJECT_INCLUDE={included}")
    run("cmake", "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=", *given, *options)
    run("cmake", "--build", build)


def write_if_changed(file: Path, content: bytes) -> None:
    """Write a file. If it has this content already, it keeps its time: no need to compile it."""
    if not file.exists() or file.read_bytes() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def built_program(name: str, files: dict[str, str]) -> Path:
    """Return the build folder of a program that consists of these files. It stays between runs."""
    folder = PROGRAMS / name
    for file, text in files.items():
        write_if_changed(folder / file, text.encode())
    build_program(folder, folder / "build")
    return folder / "build"


def second_checkout() -> Path:
    """Copy sources that differ to the second checkout, and return its path.

    Files keep their times, so that ninja rebuilds only what changed.
    """
    copy = Path(os.environ.get("AMPFUSE_SECOND_CHECKOUT", ROOT / "build" / "packaging"))
    for name in source_files():
        source, target = ROOT / name, copy / name
        if not source.is_file():
            target.unlink(missing_ok=True)
        elif not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return copy


def source_files(checkout: Path = ROOT) -> list[str]:
    """Return the files that git tracks, and new ones that it does not ignore."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=checkout)
    return listed.splitlines()


def environment(**changes: str) -> dict[str, str]:
    """Return the environment with changes, without CMAKE_ARGS and the path to ampfuse."""
    kept = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CMAKE_ARGS")
    }
    return {**kept, **changes}


def ccache_settings(build_dir: Path) -> dict[str, str]:
    """Return the settings with which ccache finds what `make build` compiled.

    ccache makes paths relative. So the folder must be as deep in its checkout as that of
    `make build`, and torch must not be reached through a link.
    """
    torch_root = shlex.quote(f"-DAMPFUSE_TORCH_ROOT={SITE / 'torch'}")
    return {
        "AMPFUSE_BUILD_DIR": str(build_dir),
        "CMAKE_ARGS": f"-DCMAKE_COMPILE_WARNING_AS_ERROR=ON {torch_root}",
    }


class EmptyEnvironment:
    """A virtual environment with torch in its own site-packages and no ampfuse.

    torch and its CUDA libraries are links, which saves gigabytes. ampfuse finds the packages beside
    itself as in a real installation.
    """

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.python = folder / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "lib" / version / "site-packages"
        for name in ("torch", "nvidia"):
            if (SITE / name).exists():
                (self.site / name).symlink_to(SITE / name)
        paths = {str(SITE), sysconfig.get_path("purelib")}
        (self.site / "dependencies.pth").write_text("\n".join(paths) + "\n")

    def pip_install(self, *arguments: str | Path, cwd: Path, **changes: str) -> None:
        """Install with this interpreter's pip, with CPU kernels only."""
        build = environment(AMPFUSE_WITH_CUDA="OFF", **changes)
        options = ("--no-build-isolation", "--no-deps", "--disable-pip-version-check")
        run(self.python, "-m", "pip", "install", *options, *arguments, cwd=cwd, env=build)
