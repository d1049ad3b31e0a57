"""What the packaging tests need: a second checkout to build in, and an environment to install into.

The second checkout stays in the build folder from run to run, so that only the first run compiles.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import ampfuse
import torch

# This interpreter's cmake and ninja, also where its environment is not active.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

ROOT = Path(__file__).parents[3]
SITE = Path(torch.__file__).parents[1]
PACKAGE = Path(ampfuse.__file__).parent


def find_tool(name: str) -> str | None:
    """nvcc from the toolkit or torch's packages; cuobjdump from the toolkit or triton."""
    folders = [Path("/usr/local/cuda/bin"), *SITE.glob("nvidia/cu*/bin")]
    folders += [SITE / "triton" / "backends" / "nvidia" / "bin"]
    found = [folder / name for folder in folders if (folder / name).exists()]
    return shutil.which(name) or (str(found[0]) if found else None)


NVCC = find_tool("nvcc")


def run(*command: str | Path, **options: object) -> str:
    """A command's output; its error output in the failure when it fails."""
    done = subprocess.run(
        [str(part) for part in command], text=True, capture_output=True, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def second_checkout() -> Path:
    """The sources of this checkout, copied where they differ, times kept for ninja's sake."""
    copy = Path(os.environ.get("AMPFUSE_SECOND_CHECKOUT", ROOT / "build" / "packaging"))
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listed.splitlines():
        source, target = ROOT / name, copy / name
        if not source.is_file():
            target.unlink(missing_ok=True)
        elif not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return copy


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without its own ampfuse, with changes."""
    kept = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CMAKE_ARGS")
    }
    return {**kept, **changes}


def ccache_settings(build_dir: Path) -> dict[str, str]:
    """The settings with which ccache finds what `make build` compiled.

    The folder is as deep in its checkout as that of `make build`, since ccache makes paths
    relative, and torch is not reached over a link.
    """
    torch_root = shlex.quote(f"-DAMPFUSE_TORCH_ROOT={SITE / 'torch'}")
    return {
        "AMPFUSE_BUILD_DIR": str(build_dir),
        "CMAKE_ARGS": f"-DCMAKE_COMPILE_WARNING_AS_ERROR=ON {torch_root}",
    }


class EmptyEnvironment:
    """A virtual environment with torch in its own site-packages and no ampfuse.

    torch and its CUDA libraries are links, to spare gigabytes; what ampfuse looks for beside itself
    is found as in a real installation.
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
        """Install with this interpreter's pip, CPU kernels only."""
        build = environment(AMPFUSE_WITH_CUDA="OFF", **changes)
        options = ("--no-build-isolation", "--no-deps", "--disable-pip-version-check")
        run(self.python, "-m", "pip", "install", *options, *arguments, cwd=cwd, env=build)
