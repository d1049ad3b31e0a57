"""AMPFUSE_WITH_CUDA and TORCH_CUDA_ARCH_LIST: what CMake decides and what it says."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from packaging_tools import NVCC, ROOT, environment

pytestmark = pytest.mark.slow
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
TORCH = Path(torch.__file__).parent


def configure(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", str(ROOT), "-B", str(folder / "build"), "-G", "Ninja", *options]
    return subprocess.run(command, text=True, capture_output=True, env=environment(**variables))


def pretend_torch(folder: Path, cuda: str) -> str:
    """The option that shows CMake a torch with the headers of the real one and another CUDA."""
    root = folder / "torch"
    root.mkdir()
    (root / "version.py").write_text(f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n")
    for name in ("include", "lib"):
        (root / name).symlink_to(TORCH / name)
    return f"-DAMPFUSE_TORCH_ROOT={root}"


def without_nvcc() -> str:
    """The option that hides every nvcc from CMake."""
    folders = [folder for folder in os.environ["PATH"].split(":") if Path(folder, "nvcc").exists()]
    return f"-DCMAKE_IGNORE_PATH={';'.join(['/usr/local/cuda/bin', *folders])}"


def test_on_without_nvcc_fails_and_says_so(tmp_path: Path) -> None:
    options = ["-DAMPFUSE_WITH_CUDA=ON", pretend_torch(tmp_path, "'13.0'"), without_nvcc()]
    done = configure(tmp_path, *options, CUDA_HOME="")
    assert done.returncode != 0
    assert "AMPFUSE_WITH_CUDA is ON, but no nvcc was found" in done.stderr


def test_on_with_a_torch_without_cuda_fails_and_says_so(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DAMPFUSE_WITH_CUDA=ON", pretend_torch(tmp_path, "None"))
    assert done.returncode != 0
    assert "torch 2.11.0 is a CPU build" in done.stderr


@needs_nvcc
def test_on_with_nvcc_of_another_cuda_fails_and_names_both(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DAMPFUSE_WITH_CUDA=ON", pretend_torch(tmp_path, "'99.1'"))
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "torch 2.11.0 is built for CUDA 99.1, but" in message
    assert "nvcc is of CUDA" in message


def test_auto_goes_on_without_cuda_and_says_why(tmp_path: Path) -> None:
    done = configure(tmp_path, pretend_torch(tmp_path, "None"))
    assert done.returncode == 0, done.stderr
    assert "ampfuse: no CUDA kernels: torch 2.11.0 is a CPU build" in done.stdout


def test_off_asks_for_no_toolkit(tmp_path: Path) -> None:
    options = ["-DAMPFUSE_WITH_CUDA=OFF", f"-DAMPFUSE_TORCH_ROOT={TORCH}", without_nvcc()]
    done = configure(tmp_path, *options, CUDA_HOME="")
    assert done.returncode == 0, done.stderr
    assert "ampfuse: no CUDA kernels: it was switched off" in done.stdout


@pytest.mark.parametrize("preset", ["dev", "release", "asan"])
def test_presets_configure(tmp_path: Path, preset: str) -> None:
    command = ["cmake", "--preset", preset, "-B", tmp_path, f"-DAMPFUSE_TORCH_ROOT={TORCH}"]
    done = subprocess.run(command, text=True, capture_output=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr


def test_another_value_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DAMPFUSE_WITH_CUDA=MAYBE", f"-DAMPFUSE_TORCH_ROOT={TORCH}")
    assert done.returncode != 0
    assert "expected AUTO, ON or OFF, got MAYBE" in done.stderr


@needs_nvcc
@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ("8.0", "80-real"),
        ("8.0 9.0+PTX", "80-real;90"),
        ("8.6;9.0a", "86-real;90a-real"),
        ("10.0f,12.0f+PTX", "100f-real;120f"),
    ],
)
def test_torch_cuda_arch_list_chooses_the_architectures(
    tmp_path: Path, asked: str, got: str
) -> None:
    done = configure(tmp_path, f"-DAMPFUSE_TORCH_ROOT={TORCH}", TORCH_CUDA_ARCH_LIST=asked)
    assert done.returncode == 0, done.stderr
    assert f"kernels for {got} (" in done.stdout


@needs_nvcc
@pytest.mark.parametrize(
    ("asked", "answer"),
    [("Hopper", "expected entries like 9.0"), ("9.0 5.2", "5.2 is not among what CUDA")],
)
def test_unknown_architecture_is_refused(tmp_path: Path, asked: str, answer: str) -> None:
    done = configure(tmp_path, f"-DAMPFUSE_TORCH_ROOT={TORCH}", TORCH_CUDA_ARCH_LIST=asked)
    assert done.returncode != 0
    assert answer in " ".join(done.stderr.split())


@needs_nvcc
@pytest.mark.parametrize(
    ("torch_archs", "got"),
    [
        ("sm_50 sm_80 sm_120 sm_90", "80-real;90-real;120"),  # one too old, and out of order
        ("", "75-real;80-real;86-real;90-real;100-real;120"),
    ],
)
def test_architectures_are_those_of_torch_by_default(
    tmp_path: Path, torch_archs: str, got: str
) -> None:
    options = [f"-DAMPFUSE_TORCH_ROOT={TORCH}", f"-DAMPFUSE_TORCH_ARCHS={torch_archs}"]
    done = configure(tmp_path, *options, TORCH_CUDA_ARCH_LIST="")
    assert done.returncode == 0, done.stderr
    assert f"kernels for {got} (" in done.stdout


@needs_nvcc
def test_architectures_are_chosen_anew_each_time(tmp_path: Path) -> None:
    torch_root = f"-DAMPFUSE_TORCH_ROOT={TORCH}"
    configure(tmp_path, torch_root, TORCH_CUDA_ARCH_LIST="8.6")
    done = configure(tmp_path, "-DAMPFUSE_TORCH_ARCHS=sm_80 sm_90", TORCH_CUDA_ARCH_LIST="")
    assert "kernels for 80-real;90 (" in done.stdout
    done = configure(tmp_path, "-DAMPFUSE_TORCH_ARCHS=sm_90 sm_100", TORCH_CUDA_ARCH_LIST="")
    assert "kernels for 90-real;100 (" in done.stdout


@needs_nvcc
def test_nvcc_is_found_among_packages_of_another_environment(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages" / "nvidia"
    (packages / "cu13").mkdir(parents=True)
    toolkit = Path(str(NVCC)).resolve().parents[1]
    for name in toolkit.iterdir():
        (packages / "cu13" / name.name).symlink_to(name)
    options = [f"-DAMPFUSE_NVIDIA_PACKAGES={packages}", pretend_torch(tmp_path, "'13.0'")]
    done = configure(tmp_path, *options, without_nvcc(), CUDA_HOME="")
    assert done.returncode == 0, done.stderr
    assert "ampfuse: CUDA 13.0 kernels" in done.stdout


@needs_nvcc
def test_flags_of_the_user_reach_the_compiler(tmp_path: Path) -> None:
    done = configure(tmp_path, f"-DAMPFUSE_TORCH_ROOT={TORCH}", CUDAFLAGS="-DFROM_THE_USER")
    assert done.returncode == 0, done.stderr
    assert "-DFROM_THE_USER" in (tmp_path / "build" / "build.ninja").read_text()
