"""AMPFUSE_WITH_CUDA and TORCH_CUDA_ARCH_LIST: what CMake decides and prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging_tools import NVCC, ROOT, environment, run

pytestmark = pytest.mark.slow
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
TORCH = Path(torch.__file__).parent


def configure(
    folder: Path, *options: str, gpus: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run CMake with a fake nvidia-smi.

    `gpus` has the compute capability of one GPU per line, and is empty for a machine without GPUs.
    """
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir(exist_ok=True)
    # Without a GPU the real nvidia-smi fails, and its error may contain version numbers.
    answer = f"printf '{gpus}\\n'" if gpus else "echo 'NVML library version: 535.18'; exit 6"
    smi.write_text(f"#!/bin/sh\n{answer}\n")
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    variables = {"PATH": path, "TORCH_CUDA_ARCH_LIST": "", **variables}
    command = ["cmake", "-S", str(ROOT), "-B", str(folder / "build"), "-G", "Ninja", *options]
    return subprocess.run(command, text=True, capture_output=True, env=environment(**variables))


def error_text(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error output in one line, since CMake breaks lines anywhere."""
    return " ".join(done.stderr.split())


def pretend_torch(folder: Path, cuda: str) -> str:
    """Return the option for a torch with the files of the real one and another CUDA version."""
    root = folder / "torch"
    root.mkdir()
    (root / "version.py").write_text(f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n")
    for name in ("include", "lib"):
        (root / name).symlink_to(TORCH / name)
    return f"-DAMPFUSE_TORCH_ROOT={root}"


def without_nvcc() -> str:
    """Return the option that hides every nvcc from CMake."""
    folders = [folder for folder in os.environ["PATH"].split(":") if Path(folder, "nvcc").exists()]
    return f"-DCMAKE_IGNORE_PATH={';'.join(['/usr/local/cuda/bin', *folders])}"


def test_option_on_without_nvcc_fails_and_reports_it(tmp_path: Path) -> None:
    options = ["-DAMPFUSE_WITH_CUDA=ON", pretend_torch(tmp_path, "'13.0'"), without_nvcc()]
    done = configure(tmp_path, *options, CUDA_HOME="")
    assert done.returncode != 0
    message = error_text(done)
    assert "since AMPFUSE_WITH_CUDA is ON, but no nvcc was found" in message


def test_option_on_with_a_torch_without_cuda_fails_and_reports_it(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DAMPFUSE_WITH_CUDA=ON", pretend_torch(tmp_path, "None"))
    assert done.returncode != 0
    assert "torch 2.11.0 is a CPU build" in error_text(done)


@needs_nvcc
@pytest.mark.parametrize("release", ["12.8", "13.1"])
def test_option_of_a_compiler_is_refused_only_if_its_major_version_differs(
    tmp_path: Path, release: str
) -> None:
    nvcc = tmp_path / "other" / "nvcc"
    nvcc.parent.mkdir()
    answer = f'[ "$1" = --version ] && echo "release {release}, V0" && exit'
    nvcc.write_text(f'#!/bin/sh\n{answer}\nexec {NVCC} "$@"\n')
    nvcc.chmod(0o755)
    options = ["-DAMPFUSE_WITH_CUDA=ON", pretend_torch(tmp_path, "'13.0'")]
    done = configure(tmp_path, *options, f"-DCMAKE_CUDA_COMPILER={nvcc}", gpus="9.0")
    if release == "12.8":
        assert done.returncode != 0
        assert f"expected CUDA 13, as torch's, got {nvcc} with CUDA 12.8" in error_text(done)
    else:
        assert "CUDA 13.1 kernels" in done.stderr


@needs_nvcc
def test_option_on_with_nvcc_of_another_cuda_fails_and_names_both(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DAMPFUSE_WITH_CUDA=ON", pretend_torch(tmp_path, "'99.1'"))
    assert done.returncode != 0
    message = error_text(done)
    assert "torch 2.11.0 is built for CUDA 99.1, but" in message
    assert "nvcc has CUDA" in message


def test_option_auto_goes_on_without_cuda_and_reports_why(tmp_path: Path) -> None:
    done = configure(tmp_path, pretend_torch(tmp_path, "None"), gpus="9.0")
    assert done.returncode == 0, done.stderr
    assert "ampfuse: no CUDA kernels: torch 2.11.0 is a CPU build" in done.stderr


def test_option_auto_builds_none_of_the_kernels_without_a_gpu(tmp_path: Path) -> None:
    done = configure(tmp_path, pretend_torch(tmp_path, "'13.0'"))
    assert done.returncode == 0, done.stderr
    why = "there is no GPU here, and TORCH_CUDA_ARCH_LIST names none"
    assert f"ampfuse: no CUDA kernels: {why}\n" in done.stderr


@needs_nvcc
def test_option_auto_chooses_the_architectures_of_the_gpus_present(tmp_path: Path) -> None:
    done = configure(tmp_path, f"-DAMPFUSE_TORCH_ROOT={TORCH}", gpus="9.0\\n8.6\\n9.0")
    assert done.returncode == 0, done.stderr
    assert "kernels for 90-real;86-real (" in done.stderr


@needs_nvcc
def test_gpus_too_old_for_this_cuda_are_named_and_left_out(tmp_path: Path) -> None:
    done = configure(tmp_path, f"-DAMPFUSE_TORCH_ROOT={TORCH}", gpus="5.2\\n9.0")
    assert done.returncode == 0, done.stderr
    assert "does not compile for the GPU of compute capability 5.2" in error_text(done)
    assert "kernels for 90-real (" in done.stderr
    (tmp_path / "build" / "CMakeCache.txt").unlink()
    done = configure(tmp_path, f"-DAMPFUSE_TORCH_ROOT={TORCH}", gpus="5.2")
    assert done.returncode == 0, done.stderr
    assert "ampfuse: no CUDA kernels: CUDA" in done.stderr
    assert "does not compile for any GPU that is here" in done.stderr


@needs_nvcc
def test_option_for_gpus_is_used_where_nvidia_smi_reports_none(tmp_path: Path) -> None:
    done = configure(tmp_path, f"-DAMPFUSE_TORCH_ROOT={TORCH}", "-DAMPFUSE_GPUS=8.6;9.0")
    assert done.returncode == 0, done.stderr
    assert "kernels for 86-real;90-real (" in done.stderr


def test_build_folder_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "build").symlink_to(tmp_path / "far" / "away")
    done = configure(tmp_path, "-DAMPFUSE_WITH_CUDA=OFF", f"-DAMPFUSE_TORCH_ROOT={TORCH}")
    assert done.returncode == 0, done.stderr
    batch = tmp_path / "build" / "batches" / "ampfuse_1.cpp"
    for name in re.findall(r'#include "(.*)"', batch.read_text()):
        assert (tmp_path / "far" / "away" / "batches" / name).is_file()


@pytest.mark.parametrize(
    ("gpus", "archs", "because"),
    [
        ("9.0", "", "there is a GPU here, of compute capability 9.0"),
        ("", "8.6", "TORCH_CUDA_ARCH_LIST is 8.6"),
    ],
)
def test_option_auto_without_nvcc_fails_and_lists_the_remedies(
    tmp_path: Path, gpus: str, archs: str, because: str
) -> None:
    options = [pretend_torch(tmp_path, "'13.0'"), without_nvcc()]
    done = configure(tmp_path, *options, gpus=gpus, CUDA_HOME="", TORCH_CUDA_ARCH_LIST=archs)
    assert done.returncode != 0
    message = error_text(done)
    assert f"CUDA kernels are wanted, since {because}, but no nvcc was found. Do" in message
    assert "have nvcc fetched from Python packages: AMPFUSE_FETCH_NVCC=ON" in message
    assert "install the toolkit of CUDA 13.0" in message
    assert "leave the kernels out: AMPFUSE_WITH_CUDA=OFF" in message


def environment_whose_pip(folder: Path, script: str) -> str:
    """Return the option for a build in an environment whose pip is `script`."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "pip").mkdir()
    (site / "pip" / "__init__.py").touch()
    (site / "pip" / "__main__.py").write_text(script)
    return f"-DPython_EXECUTABLE={python}"


@needs_nvcc
def test_nvcc_is_fetched_on_request(tmp_path: Path) -> None:
    python = environment_whose_pip(
        tmp_path,
        "import pathlib, sys, sysconfig\n"
        "assert 'nvidia-cuda-nvcc==13.0.*' in sys.argv\n"
        "nvidia = pathlib.Path(sysconfig.get_path('purelib'), 'nvidia')\n"
        "nvidia.mkdir()\n"
        f"(nvidia / 'cu13').symlink_to({str(Path(str(NVCC)).resolve().parents[1])!r})\n",
    )
    options = [pretend_torch(tmp_path, "'13.0'"), without_nvcc(), "-DAMPFUSE_FETCH_NVCC=ON", python]
    done = configure(tmp_path, *options, gpus="9.0", CUDA_HOME="")
    assert done.returncode == 0, done.stderr
    assert "fetching nvcc 13.0 from Python packages" in done.stdout
    assert "kernels for 90-real (" in done.stderr


def test_failure_to_fetch_nvcc_is_reported_with_the_remedy(tmp_path: Path) -> None:
    python = environment_whose_pip(tmp_path, "import sys; sys.exit('no network')")
    options = [pretend_torch(tmp_path, "'13.0'"), without_nvcc(), "-DAMPFUSE_FETCH_NVCC=ON", python]
    done = configure(tmp_path, *options, gpus="9.0", CUDA_HOME="")
    assert done.returncode != 0
    assert "no network" in done.stderr
    assert "no nvcc was found, and none could be fetched (see above)" in error_text(done)
    assert "leave the kernels out: AMPFUSE_WITH_CUDA=OFF" in error_text(done)


def test_option_off_needs_no_toolkit(tmp_path: Path) -> None:
    options = ["-DAMPFUSE_WITH_CUDA=OFF", f"-DAMPFUSE_TORCH_ROOT={TORCH}", without_nvcc()]
    done = configure(tmp_path, *options, CUDA_HOME="")
    assert done.returncode == 0, done.stderr
    assert "ampfuse: no CUDA kernels: it was switched off" in done.stderr


def test_libtorch_archive_is_found_without_python(tmp_path: Path) -> None:
    # The archive has the version in build-version, and no version.py.
    archive = tmp_path / "libtorch"
    archive.mkdir()
    for name in ("include", "lib", "share"):
        (archive / name).symlink_to(TORCH / name)
    (archive / "build-version").write_text(f"{torch.__version__}\n")
    no_python = "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON"
    options = [f"-DCMAKE_PREFIX_PATH={archive}", "-DAMPFUSE_WITH_CUDA=OFF", no_python]
    build = tmp_path / "build"
    run("cmake", "--preset", "release", "-B", build, *options, cwd=ROOT, env=environment())
    config = (build / "ampfuseConfig.cmake").read_text()
    assert f'AMPFUSE_BUILT_FOR_TORCH "{torch.__version__.partition("+")[0]}"' in config
    assert f'AMPFUSE_TORCH_HINT "{archive}"' in config


@pytest.mark.parametrize("preset", ["dev", "release", "asan"])
def test_presets_configure(tmp_path: Path, preset: str) -> None:
    command = ["cmake", "--preset", preset, "-B", tmp_path, f"-DAMPFUSE_TORCH_ROOT={TORCH}"]
    command += ["-DAMPFUSE_WITH_CUDA=OFF"]
    done = subprocess.run(command, text=True, capture_output=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr


def test_unknown_value_of_the_option_is_refused(tmp_path: Path) -> None:
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
    assert f"kernels for {got} (" in done.stderr


@needs_nvcc
@pytest.mark.parametrize(
    ("asked", "answer"),
    [("Hopper", "expected entries like 9.0"), ("9.0 5.2", "got 5.2")],
)
def test_unknown_architecture_is_refused(tmp_path: Path, asked: str, answer: str) -> None:
    done = configure(tmp_path, f"-DAMPFUSE_TORCH_ROOT={TORCH}", TORCH_CUDA_ARCH_LIST=asked)
    assert done.returncode != 0
    assert answer in error_text(done)


@needs_nvcc
@pytest.mark.parametrize(
    ("torch_archs", "got"),
    [
        (
            "sm_50 sm_80 sm_120 sm_90",
            "80-real;90-real;120",
        ),  # sm_50 is too old, the rest unsorted
        ("", "75-real;80-real;86-real;90-real;100-real;120"),
    ],
)
@pytest.mark.parametrize("gpus", ["", "8.6"])
def test_option_on_chooses_all_architectures_of_torch_whatever_gpu_is_present(
    tmp_path: Path, torch_archs: str, got: str, gpus: str
) -> None:
    options = ["-DAMPFUSE_WITH_CUDA=ON", f"-DAMPFUSE_TORCH_ROOT={TORCH}"]
    done = configure(tmp_path, *options, f"-DAMPFUSE_TORCH_ARCHS={torch_archs}", gpus=gpus)
    assert done.returncode == 0, done.stderr
    assert f"kernels for {got} (" in done.stderr


@needs_nvcc
def test_architectures_are_chosen_anew_at_each_configure(tmp_path: Path) -> None:
    options = ["-DAMPFUSE_WITH_CUDA=ON", f"-DAMPFUSE_TORCH_ROOT={TORCH}"]
    configure(tmp_path, *options, TORCH_CUDA_ARCH_LIST="8.6")
    done = configure(tmp_path, "-DAMPFUSE_TORCH_ARCHS=sm_80 sm_90")
    assert "kernels for 80-real;90 (" in done.stderr
    done = configure(tmp_path, "-DAMPFUSE_TORCH_ARCHS=sm_90 sm_100")
    assert "kernels for 90-real;100 (" in done.stderr


@needs_nvcc
def test_nvcc_is_found_among_packages_of_another_environment(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages" / "nvidia"
    (packages / "cu13").mkdir(parents=True)
    toolkit = Path(str(NVCC)).resolve().parents[1]
    for name in toolkit.iterdir():
        (packages / "cu13" / name.name).symlink_to(name)
    options = [f"-DAMPFUSE_NVIDIA_PACKAGES={packages}", pretend_torch(tmp_path, "'13.0'")]
    done = configure(tmp_path, *options, without_nvcc(), gpus="9.0", CUDA_HOME="")
    assert done.returncode == 0, done.stderr
    assert "ampfuse: CUDA 13.0 kernels" in done.stderr


@needs_nvcc
def test_flags_of_the_user_reach_the_compiler(tmp_path: Path) -> None:
    torch_root = f"-DAMPFUSE_TORCH_ROOT={TORCH}"
    done = configure(tmp_path, torch_root, gpus="9.0", CUDAFLAGS="-DFROM_THE_USER")
    assert done.returncode == 0, done.stderr
    assert "-DFROM_THE_USER" in (tmp_path / "build" / "build.ninja").read_text()
