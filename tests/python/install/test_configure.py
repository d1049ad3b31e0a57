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
OF_TORCH = f"-DAMPFUSE_TORCH_ROOT={TORCH}"
ON, OFF = "-DAMPFUSE_WITH_CUDA=ON", "-DAMPFUSE_WITH_CUDA=OFF"


def configure(folder, *options, gpus="", source=ROOT, **variables):
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
    command = ["cmake", "-S", str(source), "-B", str(folder / "build"), "-G", "Ninja", *options]
    return subprocess.run(command, text=True, capture_output=True, env=environment(**variables))


def refused(folder, *options, **settings):
    """Return why CMake fails, in one line, since it breaks lines anywhere."""
    done = configure(folder, *options, **settings)
    assert done.returncode != 0, done.stderr
    return " ".join(done.stderr.split())


def accepted(folder, *options, **settings):
    """Return what CMake reports when it succeeds, in one line."""
    done = configure(folder, *options, **settings)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stderr.split())


def pretend_torch(folder, cuda):
    """Return the option for a torch with the files of the real one and another CUDA version."""
    root = folder / "torch"
    root.mkdir()
    (root / "version.py").write_text(f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n")
    for name in ("include", "lib"):
        (root / name).symlink_to(TORCH / name)
    return f"-DAMPFUSE_TORCH_ROOT={root}"


def without_nvcc():
    """Return the option that hides every nvcc from CMake."""
    folders = [folder for folder in os.environ["PATH"].split(":") if Path(folder, "nvcc").exists()]
    return f"-DCMAKE_IGNORE_PATH={';'.join(['/usr/local/cuda/bin', *folders])}"


def test_option_on_without_nvcc_fails_and_reports_it(tmp_path):
    options = [ON, pretend_torch(tmp_path, "'13.0'"), without_nvcc()]
    message = refused(tmp_path, *options, CUDA_HOME="")
    assert "since AMPFUSE_WITH_CUDA is ON, but no nvcc was found" in message


def test_torch_without_cuda_has_no_kernels_and_is_refused_with_option_on(tmp_path):
    cpu_torch = pretend_torch(tmp_path, "None")
    assert "torch 2.11.0 is a CPU build" in refused(tmp_path, ON, cpu_torch)
    report = accepted(tmp_path, "-UAMPFUSE_WITH_CUDA", cpu_torch, gpus="9.0")
    assert "ampfuse: no CUDA kernels: torch 2.11.0 is a CPU build" in report


def nvcc_that_says(release, folder):
    """Return the path of an nvcc that claims to be of another release."""
    nvcc = folder / "other" / "nvcc"
    nvcc.parent.mkdir()
    answer = f'[ "$1" = --version ] && echo "release {release}, V0" && exit'
    nvcc.write_text(f'#!/bin/sh\n{answer}\nexec {NVCC} "$@"\n')
    nvcc.chmod(0o755)
    return nvcc


@needs_nvcc
def test_option_of_a_compiler_with_a_newer_major_version_is_refused(tmp_path):
    nvcc = nvcc_that_says("99.1", tmp_path)
    options = [ON, pretend_torch(tmp_path, "'13.0'"), f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    message = refused(tmp_path, *options, gpus="9.0")
    assert f"expected CUDA 13, as torch's, or older, got {nvcc} with CUDA 99.1" in message


@needs_nvcc
def test_option_on_with_nvcc_of_a_newer_cuda_fails_and_names_both(tmp_path):
    message = refused(tmp_path, ON, pretend_torch(tmp_path, "'12.6'"))
    assert "torch 2.11.0 is built for CUDA 12.6, but" in message
    assert "nvcc has CUDA" in message


@needs_nvcc
def test_nvcc_of_an_older_cuda_compiles_kernels_which_every_newer_driver_runs(tmp_path):
    report = accepted(tmp_path, pretend_torch(tmp_path, "'99.1'"), gpus="9.0")
    assert "(torch 2.11.0, CUDA 99.1)" in report


def test_option_auto_builds_none_of_the_kernels_without_a_gpu(tmp_path):
    report = accepted(tmp_path, pretend_torch(tmp_path, "'13.0'"))
    why = "there is no GPU here, and TORCH_CUDA_ARCH_LIST names none"
    assert f"ampfuse: no CUDA kernels: {why}" in report


@pytest.mark.parametrize(
    ("gpus", "archs", "because"),
    [
        ("9.0", "", "there is a GPU here, of compute capability 9.0"),
        ("", "8.6", "TORCH_CUDA_ARCH_LIST is 8.6"),
    ],
)
def test_option_auto_without_nvcc_fails_and_lists_the_remedies(tmp_path, gpus, archs, because):
    options = [pretend_torch(tmp_path, "'13.0'"), without_nvcc()]
    message = refused(tmp_path, *options, gpus=gpus, CUDA_HOME="", TORCH_CUDA_ARCH_LIST=archs)
    assert f"CUDA kernels are wanted, since {because}, but no nvcc was found. Do" in message
    assert "have nvcc fetched from Python packages: AMPFUSE_FETCH_NVCC=ON" in message
    assert "install the toolkit of CUDA 13.0" in message
    assert "leave the kernels out: AMPFUSE_WITH_CUDA=OFF" in message


def test_build_folder_may_be_a_symbolic_link(tmp_path):
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "build").symlink_to(tmp_path / "far" / "away")
    accepted(tmp_path, OFF, OF_TORCH)
    batch = tmp_path / "build" / "batches" / "ampfuse_1.cpp"
    for name in re.findall(r'#include "(.*)"', batch.read_text()):
        assert (tmp_path / "far" / "away" / "batches" / name).is_file()


def environment_whose_pip(folder, script):
    """Return the option for a build in an environment whose pip is `script`."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "pip").mkdir()
    (site / "pip" / "__init__.py").touch()
    (site / "pip" / "__main__.py").write_text(script)
    return f"-DPython_EXECUTABLE={python}"


@needs_nvcc
def test_nvcc_is_fetched_on_request(tmp_path):
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


def test_failure_to_fetch_nvcc_is_reported_with_the_remedy(tmp_path):
    python = environment_whose_pip(tmp_path, "import sys; sys.exit('no network')")
    options = [pretend_torch(tmp_path, "'13.0'"), without_nvcc(), "-DAMPFUSE_FETCH_NVCC=ON", python]
    message = refused(tmp_path, *options, gpus="9.0", CUDA_HOME="")
    assert "no network" in message
    assert "no nvcc was found, and none could be fetched (see above)" in message
    assert "leave the kernels out: AMPFUSE_WITH_CUDA=OFF" in message


def test_option_off_needs_no_toolkit(tmp_path):
    report = accepted(tmp_path, OFF, OF_TORCH, without_nvcc(), CUDA_HOME="")
    assert "ampfuse: no CUDA kernels: it was switched off" in report


def test_unknown_value_of_the_option_is_refused(tmp_path):
    message = refused(tmp_path, "-DAMPFUSE_WITH_CUDA=MAYBE", OF_TORCH)
    assert "expected AUTO, ON or OFF, got MAYBE" in message


def test_libtorch_archive_is_found_without_python(tmp_path):
    # The archive has the version in build-version, and no version.py.
    archive = tmp_path / "libtorch"
    archive.mkdir()
    for name in ("include", "lib", "share"):
        (archive / name).symlink_to(TORCH / name)
    (archive / "build-version").write_text(f"{torch.__version__}\n")
    no_python = "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON"
    accepted(tmp_path, f"-DCMAKE_PREFIX_PATH={archive}", OFF, no_python)


def test_project_that_contains_ampfuse_links_it_and_keeps_its_own_warnings(tmp_path):
    (tmp_path / "main.cpp").touch()
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.27)\nproject(train CXX)\n"
        f"add_subdirectory({ROOT} ampfuse)\n"
        "add_executable(train main.cpp)\ntarget_link_libraries(train PRIVATE ampfuse::ampfuse)\n"
    )
    options = (OF_TORCH, OFF, "-DBUILD_SHARED_LIBS=OFF")
    report = accepted(tmp_path, *options, source=tmp_path)
    assert "ampfuse is a shared library also with BUILD_SHARED_LIBS=OFF" in report
    assert "-Werror" not in (tmp_path / "build" / "build.ninja").read_text()


@needs_nvcc
def test_nvcc_is_found_among_packages_of_another_environment(tmp_path):
    packages = tmp_path / "site-packages" / "nvidia"
    (packages / "cu13").mkdir(parents=True)
    toolkit = Path(str(NVCC)).resolve().parents[1]
    for name in toolkit.iterdir():
        (packages / "cu13" / name.name).symlink_to(name)
    options = [f"-DAMPFUSE_NVIDIA_PACKAGES={packages}", pretend_torch(tmp_path, "'13.0'")]
    report = accepted(tmp_path, *options, without_nvcc(), gpus="9.0", CUDA_HOME="")
    assert "ampfuse: CUDA 13.0 kernels" in report


MINOR_RELEASE = f"{str(torch.version.cuda).partition('.')[0]}.99"  # other than torch's


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    """Return a folder that was configured with the option of a compiler of another minor release.

    Most time goes into the first look at the compilers.
    """
    folder = tmp_path_factory.mktemp("configured")
    compiler = f"-DCMAKE_CUDA_COMPILER={nvcc_that_says(MINOR_RELEASE, folder)}"
    accepted(folder, OF_TORCH, compiler, gpus="9.0", CUDAFLAGS="-DFROM_THE_USER")
    return folder


@needs_nvcc
def test_flags_of_the_user_reach_the_compiler(configured):
    assert "-DFROM_THE_USER" in (configured / "build" / "build.ninja").read_text()


@needs_nvcc
@pytest.mark.parametrize(
    ("gpus", "option", "asked", "kernels"),
    [
        ("9.0\\n8.6\\n9.0", "", "", "90-real;86-real"),
        ("", "-DAMPFUSE_GPUS=8.6;9.0", "", "86-real;90-real"),
        ("", "", "8.0 9.0+PTX;9.0a,10.0f,12.0f+PTX", "80-real;90;90a-real;100f-real;120f"),
        # The option ON is for other machines, so that the GPU that is here means nothing. sm_50 is
        # too old.
        ("8.6", "-DAMPFUSE_TORCH_ARCHS=sm_50 sm_80 sm_120 sm_90", "", "80-real;90-real;120"),
        ("8.6", ON, "", "75-real;80-real;86-real;90-real;100-real;120"),
    ],
)
def test_architectures_are_chosen_anew_at_each_configure(configured, gpus, option, asked, kernels):
    options = ["-UAMPFUSE_*", OF_TORCH, *([option] if option else [])]
    if "TORCH_ARCHS" in option:
        options.append(ON)
    report = accepted(configured, *options, gpus=gpus, TORCH_CUDA_ARCH_LIST=asked)
    assert f"ampfuse: CUDA {MINOR_RELEASE} kernels for {kernels} (" in report


@needs_nvcc
def test_changed_option_counts_in_a_configured_folder(configured):
    options = ["-UAMPFUSE_*", ON, OF_TORCH]
    configure(configured, *options, TORCH_CUDA_ARCH_LIST="8.6")
    for archs, kernels in {"sm_80 sm_90": "80-real;90", "sm_90 sm_100": "90-real;100"}.items():
        report = accepted(configured, f"-DAMPFUSE_TORCH_ARCHS={archs}")
        assert f"kernels for {kernels} (" in report


@needs_nvcc
def test_gpus_too_old_for_this_cuda_are_named_and_left_out(configured):
    report = accepted(configured, "-UAMPFUSE_*", OF_TORCH, gpus="5.2\\n9.0")
    assert "does not compile for the GPU of compute capability 5.2" in report
    assert "kernels for 90-real (" in report
    report = accepted(configured, "-UAMPFUSE_*", OF_TORCH, gpus="5.2")
    assert "ampfuse: no CUDA kernels: CUDA" in report
    assert "does not compile for any GPU that is here" in report


@needs_nvcc
@pytest.mark.parametrize(
    ("asked", "answer"), [("Hopper", "expected entries like 9.0"), ("9.0 5.2", "got 5.2")]
)
def test_unknown_architecture_is_refused(configured, asked, answer):
    options = ["-UAMPFUSE_*", OF_TORCH]
    assert answer in refused(configured, *options, TORCH_CUDA_ARCH_LIST=asked)
