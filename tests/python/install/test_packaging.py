"""Installation of ampfuse: a wheel, pip, an editable checkout, and find_package from C++."""

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import ampfuse
import pytest
import torch
from packaging_tools import (
    PACKAGE,
    ROOT,
    SITE,
    EmptyEnvironment,
    build_program,
    ccache_settings,
    environment,
    run,
    second_checkout,
)

pytestmark = pytest.mark.slow

# The architectures of the tested build, whose kernels are in ccache already. The form "80-real 90"
# of CMake becomes the form "8.0 9.0+PTX" of TORCH_CUDA_ARCH_LIST.
ARCHITECTURES = re.sub(
    r"(\d+)(\d[af]?)(-real)?",
    lambda arch: f"{arch[1]}.{arch[2]}" + ("" if arch[3] else "+PTX"),
    ampfuse.build_info()["cuda_archs"],
)

CHECK = """
import ampfuse, torch
norm = ampfuse.get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
print(norm.item(), ampfuse.has_cuda(), ampfuse.__file__)
"""

AS_ON_A_GPU = """
import ampfuse, torch
op = torch.ops.ampfuse.multi_tensor_norm.default
op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), [torch.ones(2)], 2.0)
"""


@pytest.fixture(scope="module")
def checkout() -> Path:
    return second_checkout()


@pytest.fixture
def empty(tmp_path: Path) -> EmptyEnvironment:
    return EmptyEnvironment(tmp_path / "env")


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = ("-m", "build", "--wheel", "--no-isolation", "--outdir", out)
    env = environment(TORCH_CUDA_ARCH_LIST=ARCHITECTURES, **ccache_settings(checkout / "wheel"))
    run(sys.executable, *command, cwd=checkout, env=env)
    return next(out.glob("ampfuse-*.whl"))


def build_and_run_consumer(folder: Path, prefix_path: str) -> str:
    """Configure, build and run the C++ program of tests/cpp/consumer."""
    build_program(ROOT / "tests" / "cpp" / "consumer", folder, prefix_path)
    return run(folder / "consumer", env=environment())


def test_wheel_imports_runs_an_op_and_serves_a_cpp_program(
    wheel: Path, empty: EmptyEnvironment, tmp_path: Path
) -> None:
    empty.pip_install(wheel, cwd=tmp_path)

    norm, has_cuda, where = run(empty.python, "-c", CHECK, cwd=tmp_path, env=environment()).split()
    assert (norm, has_cuda) == ("5.0", str(ampfuse.has_cuda()))
    assert where.startswith(str(empty.site))
    query = "import ampfuse; print(ampfuse.cmake_prefix_path)"
    prefix = run(empty.python, "-c", query, cwd=tmp_path, env=environment()).strip()
    build_program(ROOT / "examples" / "cpp_trainer", tmp_path / "build", prefix)
    trainer = tmp_path / "build" / "trainer"
    on_cpu = environment(CUDA_VISIBLE_DEVICES="")
    assert "step 10: loss " in run(trainer, "--steps", "10", cwd=tmp_path, env=on_cpu)
    assert str(empty.site / "ampfuse") in run("ldd", trainer)


def test_cpu_build_with_a_cuda_torch_runs_ops_and_reports_missing_kernels(
    checkout: Path, empty: EmptyEnvironment, tmp_path: Path
) -> None:
    empty.pip_install(".", cwd=checkout, **ccache_settings(checkout / "wheel"))
    out = run(empty.python, "-c", CHECK, cwd=tmp_path, env=environment())
    assert out.startswith("5.0 False " + str(empty.site))
    with pytest.raises(AssertionError, match=r"ampfuse::multi_tensor_norm: .* no CUDA kernels\. "):
        run(empty.python, "-c", AS_ON_A_GPU, cwd=tmp_path, env=environment())

    tests = ROOT / "tests" / "python"
    files = [tests / "ops" / f"test_multi_tensor_unscale{part}.py" for part in ("", "_norm")]
    answers = "test_every_op_answers_on_cuda_with_a_kernel_or_an_error_of_ours"
    files.append(f"{tests / 'ops' / 'test_dispatcher.py'}::{answers}")
    command = ("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-c", "/dev/null")
    markers = ("-W", "ignore::pytest.PytestUnknownMarkWarning")
    out = run(
        *(empty.python, *command, *markers, "--rootdir", tests, *files),
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tests / "support")),
    )
    assert " passed" in out


def test_wheel_has_the_library_the_headers_and_the_cmake_package_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("lib/libampfuse.so", "include/ampfuse/ampfuse.h"):
        assert names.count(f"ampfuse/{part}") == 1
    assert names.count("ampfuse/share/cmake/ampfuse/ampfuseConfig.cmake") == 1
    assert not [name for name in names if "test" in name]


def test_wheel_names_and_requires_the_torch_it_was_built_for(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = archive.read(name).decode()
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"+torch{minor}-cp" in wheel.name
    assert f"Requires-Dist: torch=={minor}.*\n" in metadata


@pytest.mark.skipif(not ampfuse.has_cuda(), reason="there is no nvcc")
def test_wheel_finds_cuda_beside_torch_and_has_the_kernels_asked_for(
    wheel: Path, empty: EmptyEnvironment, tmp_path: Path
) -> None:
    empty.pip_install(wheel, cwd=tmp_path)
    library = empty.site / "ampfuse" / "lib" / "libampfuse.so"
    runpath = run("readelf", "-d", library)
    assert "$ORIGIN/../../torch/lib:$ORIGIN/../../nvidia/cu" in runpath
    assert str(ROOT) not in runpath
    query = "import ampfuse; print(ampfuse.build_info()['cuda_archs'])"
    built = run(empty.python, "-c", query, cwd=tmp_path, env=environment()).strip()
    assert built == ampfuse.build_info()["cuda_archs"]


def test_setup_passes_no_architectures_for_a_torch_without_cuda(empty: EmptyEnvironment) -> None:
    # A CPU build of torch lacks the CUDA functions. The fake cmake prints its arguments.
    (empty.site / "cpu_torch.pth").write_text("import torch; del torch._C._cuda_getArchFlags\n")
    cmake = empty.python.parent / "cmake"
    cmake.write_text(
        '#!/bin/sh\necho cmake version 4.0\nfor argument in "$@"; do echo "[$argument]"; done\n'
    )
    cmake.chmod(0o755)
    command = ("setup.py", "build_ext", "--inplace")
    out = run(empty.python, *command, cwd=ROOT, env=environment())
    assert "[-DAMPFUSE_TORCH_ARCHS=]" in out


def test_source_distribution_has_all_sources_and_configures(checkout: Path, tmp_path: Path) -> None:
    command = ("-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path)
    run(sys.executable, *command, cwd=checkout, env=environment())
    archive = next(tmp_path.glob("ampfuse-*.tar.gz"))
    run("tar", "-xf", archive, "-C", tmp_path)
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")

    listed = run(
        "git",
        "ls-files",
        "csrc",
        "python",
        "*.toml",
        "setup.py",
        "LICENSE",
        "tools/fetch_nvcc.py",
        cwd=ROOT,
    )
    assert [name for name in listed.splitlines() if not (unpacked / name).is_file()] == []
    torch_root = f"-DAMPFUSE_TORCH_ROOT={SITE / 'torch'}"
    options = (torch_root, "-DAMPFUSE_WITH_CUDA=OFF")
    run("cmake", "-S", unpacked, "-B", tmp_path / "build", "-G", "Ninja", *options)


def test_editable_install_runs_from_the_checkout(
    checkout: Path, empty: EmptyEnvironment, tmp_path: Path
) -> None:
    empty.pip_install("-e", ".", cwd=checkout, **ccache_settings(checkout / "build"))
    out = run(empty.python, "-c", CHECK, cwd=tmp_path, env=environment())
    assert out.split()[2].startswith(str(checkout))


def test_setup_without_torch_prints_what_to_install_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    with pytest.raises(AssertionError, match="pip install torch, then") as refusal:
        run(
            sys.executable,
            "setup.py",
            "build_ext",
            cwd=ROOT,
            env=environment(PYTHONPATH=str(tmp_path)),
        )
    assert "Traceback" not in str(refusal.value)


def copy_of_package(folder: Path) -> Path:
    package = folder / "ampfuse"
    shutil.copytree(PACKAGE, package)
    return package


def test_library_of_another_torch_is_refused_on_import(tmp_path: Path) -> None:
    recorded = copy_of_package(tmp_path) / "build_info.json"
    recorded.write_text(json.dumps({"torch_version": "2.99.1"}))
    with pytest.raises(AssertionError, match=r"built for torch 2\.99\.1, but torch 2\.\d+"):
        run(
            sys.executable,
            "-c",
            "import ampfuse",
            cwd=tmp_path,
            env=environment(PYTHONPATH=str(tmp_path)),
        )


def test_library_of_another_patch_release_of_torch_is_accepted(tmp_path: Path) -> None:
    recorded = copy_of_package(tmp_path) / "build_info.json"
    version = json.loads(recorded.read_text())["torch_version"]
    recorded.write_text(json.dumps({"torch_version": version.rsplit(".", 1)[0] + ".77"}))
    run(
        sys.executable,
        "-c",
        "import ampfuse",
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path)),
    )


def test_library_of_another_torch_is_refused_by_find_package(tmp_path: Path) -> None:
    package = copy_of_package(tmp_path)
    config = package / "share" / "cmake" / "ampfuse" / "ampfuseConfig.cmake"
    text = config.read_text()
    assert 'AMPFUSE_BUILT_FOR_TORCH "2.' in text
    config.write_text(text.replace('AMPFUSE_BUILT_FOR_TORCH "2.', 'AMPFUSE_BUILT_FOR_TORCH "1.'))
    with pytest.raises(AssertionError, match=r"built\s+for torch 1\.\d+\.\d+, but"):
        build_and_run_consumer(tmp_path / "consumer", f"{package};{sys.prefix}")


CONFIGURE_QUIETLY = """
cmake_minimum_required(VERSION 3.21)
project(quiet CXX)
find_package(ampfuse QUIET)
message(STATUS "found: ${ampfuse_FOUND}")
message(STATUS "because: ${ampfuse_NOT_FOUND_MESSAGE}")
"""


def test_find_package_without_torch_reports_not_found_and_the_reason(tmp_path: Path) -> None:
    package = copy_of_package(tmp_path)
    config = package / "share" / "cmake" / "ampfuse" / "ampfuseConfig.cmake"
    config.write_text(config.read_text().replace(str(SITE), "/nowhere"))
    (tmp_path / "CMakeLists.txt").write_text(CONFIGURE_QUIETLY)
    # CMake gets an interpreter without torch.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    options = [f"-DCMAKE_PREFIX_PATH={package}", f"-DPython_EXECUTABLE={tmp_path}/bin/python3"]
    out = run("cmake", "-S", tmp_path, "-B", tmp_path / "build", *options, env=environment())
    assert "found: 0" in out or "found: FALSE" in out
    assert "because: ampfuse needs torch" in out


def test_cpp_program_links_the_library_built_in_place_without_naming_torch(tmp_path: Path) -> None:
    assert "norm" in build_and_run_consumer(tmp_path, str(PACKAGE))


def test_import_of_an_unbuilt_checkout_reports_how_to_build(tmp_path: Path) -> None:
    (copy_of_package(tmp_path) / "build_info.json").unlink()
    with pytest.raises(AssertionError, match="make build"):
        run(
            sys.executable,
            "-c",
            "import ampfuse",
            cwd=tmp_path,
            env=environment(PYTHONPATH=str(tmp_path)),
        )
