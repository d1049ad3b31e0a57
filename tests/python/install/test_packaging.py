"""Installation of ampfuse: a wheel, pip, an editable checkout, and find_package from C++."""

import re
import shutil
import sys
import zipfile
from pathlib import Path

import ampfuse
import pytest
import torch
from packaging_tools import (
    LIBRARY,
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

CONSUMER = ROOT / "tests" / "cpp" / "consumer"  # a C++ program
AS_ON_A_GPU = """
import ampfuse, torch
op = torch.ops.ampfuse.multi_tensor_norm.default
op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), [torch.ones(2)], 2.0)
"""


@pytest.fixture(scope="module")
def checkout():
    return second_checkout()


@pytest.fixture
def empty(tmp_path):
    return EmptyEnvironment(tmp_path / "env")


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = ("-m", "build", "--wheel", "--no-isolation", "--outdir", out)
    env = environment(TORCH_CUDA_ARCH_LIST=ARCHITECTURES, **ccache_settings(checkout / "wheel"))
    run(sys.executable, *command, cwd=checkout, env=env)
    return next(out.glob("ampfuse-*.whl"))


def test_wheel_is_named_by_its_torch_and_has_each_file_once(wheel):
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    for part in (
        f"lib/{LIBRARY.parent.name}/{LIBRARY.name}",
        "include/ampfuse/ampfuse.h",
        "share/cmake/ampfuse/ampfuseConfig.cmake",
    ):
        assert names.count(f"ampfuse/{part}") == 1, part
    assert not [name for name in names if "test" in name]

    metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"+torch{minor}-cp" in wheel.name
    assert f"Requires-Dist: torch=={minor}.*\n" in metadata


def test_wheel_imports_runs_an_op_and_serves_a_cpp_program(wheel, empty, tmp_path):
    empty.pip_install(wheel, cwd=tmp_path)

    query = "print(ampfuse.cmake_prefix_path, *ampfuse.build_info()['cuda_archs'].split())"
    printed = run(empty.python, "-c", CHECK + query, cwd=tmp_path, env=environment()).split()
    norm, has_cuda, where, prefix, *architectures = printed
    assert (norm, has_cuda) == ("5.0", str(ampfuse.has_cuda()))
    assert where.startswith(str(empty.site))
    assert architectures == ampfuse.build_info()["cuda_archs"].split()
    # Nothing is included before ampfuse's headers, which must include what they need.
    options = (f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_PROJECT_INCLUDE=")
    build_program(CONSUMER, tmp_path / "build", *options)
    program = tmp_path / "build" / "consumer"
    assert "norm" in run(program, env=environment())
    assert str(empty.site / "ampfuse") in run("ldd", program)

    section = run("readelf", "-d", empty.site / "ampfuse" / LIBRARY.relative_to(PACKAGE))
    assert str(ROOT) not in section
    assert f"Library soname: [{LIBRARY.name}]" in section
    assert "$ORIGIN/../../../torch/lib" in section


def test_editable_cpu_build_with_a_cuda_torch_runs_ops_and_reports_missing_kernels(
    checkout, empty, tmp_path
):
    empty.pip_install("-e", ".", cwd=checkout, **ccache_settings(checkout / "build"))
    out = run(empty.python, "-c", CHECK, cwd=tmp_path, env=environment())
    assert out.startswith(f"5.0 False {checkout}")
    with pytest.raises(AssertionError, match=r"ampfuse::multi_tensor_norm: .* no CUDA kernels\. "):
        run(empty.python, "-c", AS_ON_A_GPU, cwd=tmp_path, env=environment())

    tests = ROOT / "tests" / "python"
    files = [tests / "ops" / f"test_multi_tensor_unscale{part}.py" for part in ("", "_norm")]
    answers = "test_every_op_answers_on_cuda_with_a_kernel_or_an_error_of_ours"
    files.append(f"{tests / 'ops' / 'test_dispatcher.py'}::{answers}")
    command = ("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-c", "/dev/null")
    markers = ("-W", "ignore::pytest.PytestUnknownMarkWarning")
    env = environment(PYTHONPATH=str(tests / "support"))
    out = run(empty.python, *command, *markers, "--rootdir", tests, *files, cwd=tmp_path, env=env)
    assert " passed" in out


def test_project_that_fetches_ampfuse_builds_a_program_with_it(checkout, tmp_path):
    (tmp_path / "main.cpp").write_text(
        "#include <ampfuse/build_info.h>\n#include <iostream>\n"
        "int main() { std::cout << ampfuse::build_info().version; }\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.27)\nproject(train CXX)\ninclude(FetchContent)\n"
        f"FetchContent_Declare(ampfuse SOURCE_DIR {checkout} BINARY_DIR {checkout}/within)\n"
        "FetchContent_MakeAvailable(ampfuse)\n"
        "add_executable(train main.cpp)\ntarget_link_libraries(train PRIVATE ampfuse::ampfuse)\n"
    )
    options = (
        "-DAMPFUSE_WITH_CUDA=OFF",
        f"-DAMPFUSE_TORCH_ROOT={SITE / 'torch'}",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON",  # as in other builds, for ccache
    )
    build = tmp_path / "build"
    run("cmake", "-S", tmp_path, "-B", build, "-G", "Ninja", *options, env=environment())
    run("cmake", "--build", build, env=environment())
    assert run(build / "train", env=environment()) == ampfuse.__version__
    assert not list((checkout / "within").rglob("test_*"))


def set_up_with_cmake(version, empty, **variables):
    """Run setup.py with a CMake that prints its arguments."""
    cmake = empty.python.parent / "cmake"
    loop = 'for argument in "$@"; do echo "[$argument]"; done'
    cmake.write_text(f"#!/bin/sh\necho cmake version {version}\n{loop}\n")
    cmake.chmod(0o755)
    env = environment(**variables)
    return run(empty.python, "setup.py", "build_ext", "--inplace", cwd=ROOT, env=env)


def test_setup_passes_no_architectures_for_a_torch_without_cuda(empty):
    # A CPU build of torch lacks the CUDA functions.
    (empty.site / "cpu_torch.pth").write_text("import torch; del torch._C._cuda_getArchFlags\n")
    assert "[-DAMPFUSE_TORCH_ARCHS=]" in set_up_with_cmake("4.0", empty)


def test_setup_builds_a_wheel_for_several_releases_of_torch(empty, tmp_path):
    folders = [tmp_path / release for release in ("2.15.1", "2.11.0")]
    for folder in folders:
        folder.mkdir()
        (folder / "version.py").write_text(f"__version__ = '{folder.name}+cpu'\n")
    torches = ":".join(map(str, folders))
    # No torch is imported: the Python may have none.
    (empty.site / "torch").unlink()
    printed = set_up_with_cmake("4.0", empty, AMPFUSE_TORCHES=torches)
    for folder, minor in zip(folders, ("2.15", "2.11"), strict=True):
        assert f"[-DAMPFUSE_TORCH_ROOT={folder}]" in printed
        assert f"[{ROOT}/build/torch{minor}]" in printed

    command = ("setup.py", "--quiet", "egg_info", "--egg-base", tmp_path)
    run(empty.python, *command, cwd=ROOT, env=environment(AMPFUSE_TORCHES=torches))
    described = tmp_path / "ampfuse.egg-info"
    assert "torch<2.16,>=2.11" in (described / "requires.txt").read_text().splitlines()
    assert "+torch" not in (described / "PKG-INFO").read_text()


def test_setup_refuses_a_cmake_that_is_too_old(empty):
    with pytest.raises(AssertionError, match=r"building ampfuse needs cmake 3\.27 or newer"):
        set_up_with_cmake("3.5.2", empty)


def test_source_distribution_has_all_sources_and_configures(checkout, tmp_path):
    command = ("-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path)
    run(sys.executable, *command, cwd=checkout, env=environment())
    archive = next(tmp_path.glob("ampfuse-*.tar.gz"))
    run("tar", "-xf", archive, "-C", tmp_path)
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")

    parts = ("csrc", "python", "*.toml", "setup.py", "LICENSE", "tools/fetch_nvcc.py")
    listed = run("git", "ls-files", *parts, cwd=ROOT)
    assert [name for name in listed.splitlines() if not (unpacked / name).is_file()] == []
    torch_root = f"-DAMPFUSE_TORCH_ROOT={SITE / 'torch'}"
    options = (torch_root, "-DAMPFUSE_WITH_CUDA=OFF")
    run("cmake", "-S", unpacked, "-B", tmp_path / "build", "-G", "Ninja", *options)


def test_setup_without_torch_prints_what_to_install_and_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    env = environment(PYTHONPATH=str(tmp_path))
    with pytest.raises(AssertionError, match="pip install torch, then") as refusal:
        run(sys.executable, "setup.py", "build_ext", cwd=ROOT, env=env)
    assert "Traceback" not in str(refusal.value)


def copy_of_package(folder):
    return shutil.copytree(PACKAGE, folder / "ampfuse")


def copy_built_for(folder, *releases):
    """Return a copy of the package whose libraries claim to be for these releases of torch."""
    package = copy_of_package(folder)
    for parent in (package / "lib", package / "share" / "cmake" / "ampfuse"):
        (own,) = parent.glob("torch*")
        for release in releases:
            shutil.copytree(own, parent / f"torch{release}")
        shutil.rmtree(own)
    return package


@pytest.mark.parametrize(
    ("releases", "message"),
    [
        ((), "ampfuse is not built in .*: run `make build`"),
        (("2.99",), "this ampfuse was built for torch 2.99, but torch 2"),
        (("2.9", "2.100", "2.99"), "this ampfuse was built for torch 2.9, 2.99, 2.100, but torch"),
    ],
)
def test_package_without_a_library_for_the_installed_torch_is_refused(tmp_path, releases, message):
    copy_built_for(tmp_path, *releases)
    with pytest.raises(AssertionError, match=message):
        run(sys.executable, "-c", "import ampfuse", cwd=tmp_path, env=environment())


def test_library_of_another_minor_torch_is_refused_by_find_package(tmp_path):
    package = copy_built_for(tmp_path, "2.99", "2.9")
    prefix = f"-DCMAKE_PREFIX_PATH={package};{sys.prefix}"
    with pytest.raises(AssertionError, match=r"built\s+for torch 2\.9, 2\.99, but"):
        build_program(CONSUMER, tmp_path / "build", prefix)


CONFIGURE_QUIETLY = """
cmake_minimum_required(VERSION 3.21)
project(quiet CXX)
find_package(ampfuse QUIET)
message(STATUS "found: ${ampfuse_FOUND}")
message(STATUS "because: ${ampfuse_NOT_FOUND_MESSAGE}")
"""


def test_find_package_without_torch_reports_not_found_and_the_reason(tmp_path):
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
