"""The change that docs/adding_an_operator.md shows, applied to a copy of the sources."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging_tools import NVCC, ROOT, SITE, environment, run, source_files, write_if_changed

PAGE = (ROOT / "docs" / "adding_an_operator.md").read_text()
SECOND = Path(os.environ.get("AMPFUSE_SECOND_CHECKOUT", ROOT / "build" / "packaging"))
COPY = SECOND.parent / "recipe"
BUILD = COPY / "build"


def new_files():
    """Return the files that the page shows whole: `path` in a paragraph, then a block of code."""
    block = r"(?m)^`([^`]+/[^`]+)`[^\n]*:\n\n```\w+\n(.*?)^```$"
    return dict(re.findall(block, PAGE, re.DOTALL))


def changed(name, hunks):
    """Return a source file with the hunks of one block applied, each at its only place."""
    text = (ROOT / name).read_text()
    for hunk in hunks.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert text.count(before) == 1, f"{name} has not exactly one place for\n{hunk}"
        text = text.replace(before, after)
    return text


def changed_files():
    blocks = re.findall(r"(?m)^```diff\n--- a/(\S+)\n\+\+\+ b/\S+\n(.*?)^```$", PAGE, re.DOTALL)
    return {name: changed(name, hunks) for name, hunks in blocks}


def test_operator_needs_at_most_eleven_files_and_its_tests():
    files = [*new_files(), *changed_files()]
    assert len([name for name in files if not name.startswith("tests/")]) == 11
    assert len(files) == 15


@pytest.fixture(scope="module")
def copy():
    """A copy of the sources with the change, built for CPUs. Unchanged files keep their times."""
    change = new_files() | changed_files()
    run("git", "init", "--quiet", COPY)  # the rules of the layout read the files that git would add
    sources = {name for name in source_files() if (ROOT / name).is_file()} | change.keys()
    # A file that has left the sources since an earlier run would break these rules.
    for name in {*source_files(COPY)} - sources:
        (COPY / name).unlink()
    for name in sources:
        content = change[name].encode() if name in change else (ROOT / name).read_bytes()
        write_if_changed(COPY / name, content)
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_INSTALL_PREFIX": COPY / "python" / "ampfuse",
        "CMAKE_PREFIX_PATH": ROOT / ".venv" / "cpp-headers" / "usr",
        "AMPFUSE_TORCH_ROOT": SITE / "torch",
        "AMPFUSE_WITH_CUDA": "OFF",
        "AMPFUSE_BUILD_PYTHON": "ON",
        "AMPFUSE_BUILD_TESTS": "ON",
        "AMPFUSE_BUILD_CUDA_HOST": "ON",
        "Python_EXECUTABLE": sys.executable,
    }
    # A batch of their own for the new sources leaves the others' batches as they are in ccache.
    new = [name for name in new_files() if re.match(r"csrc/(?!cuda/).*\.cpp", name)]
    batch = "".join(f'#include "../{name}"\n' for name in new)
    write_if_changed(BUILD / "new.cpp", batch.encode())
    (BUILD / "new.cmake").write_text(
        f"set_source_files_properties({' '.join(new)} PROPERTIES\n"
        "  SKIP_UNITY_BUILD_INCLUSION ON HEADER_FILE_ONLY ON)\n"
        f'cmake_language(DEFER CALL target_sources ampfuse PRIVATE "{BUILD}/new.cpp")\n'
    )
    options["CMAKE_PROJECT_INCLUDE"] = BUILD / "new.cmake"
    given = [f"-D{name}={value}" for name, value in options.items()]
    run("cmake", "-S", COPY, "-B", BUILD, "-G", "Ninja", *given, env=environment())
    targets = ("ampfuse", "_C", "test_multi_tensor_negate_asan")
    run("cmake", "--build", BUILD, "--target", *targets, env=environment())
    run("cmake", "--install", BUILD, env=environment())
    return COPY


@pytest.mark.slow
def test_operator_passes_its_tests_and_the_rules_of_the_layout(copy):
    files = ["ops/test_multi_tensor_negate.py", "ops/test_dispatcher.py", "project/test_layout.py"]
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    paths = [copy / "tests" / "python" / file for file in files]
    env = environment(PYTHONPATH=str(copy / "python"), AMPFUSE_BUILD="build")
    out = run(*command, *paths, "-k", "negate or layout", cwd=copy, env=env)
    assert " passed" in out
    run("ctest", "--test-dir", BUILD, "--no-tests=error", "-R", "test_multi_tensor_negate_asan")


def test_code_of_the_page_is_formatted(tmp_path):
    formatter = shutil.which("clang-format")
    if formatter is None:
        pytest.skip("clang-format is not installed")
    for name, code in new_files().items():
        if not name.endswith(".py"):
            how = (formatter, f"--assume-filename={ROOT / name}", "--dry-run", "-Werror")
            assert subprocess.run(how, input=code, text=True).returncode == 0, name


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_operators_cuda_source_compiles_to_ptx(copy, tmp_path):
    torch_headers = SITE / "torch" / "include"
    includes = [copy / "csrc" / "include", BUILD / "include"]
    # nvcc's front end parses the host's code, too. The host's compiler and ptxas do not run.
    run(
        *(NVCC, "-ptx", "-std=c++20", "-arch=sm_90", "-Werror=all-warnings"),
        *(f"-I{folder}" for folder in includes),
        *("-isystem", torch_headers),
        *("-isystem", torch_headers / "torch" / "csrc" / "api" / "include"),
        *("-o", tmp_path / "negate.ptx", copy / "csrc" / "cuda" / "multi_tensor_negate.cu"),
        env=environment(),
    )
