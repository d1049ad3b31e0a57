"""The installed libraries: what they need, and what they show to other libraries of a process."""

import re
import subprocess
import sys
from pathlib import Path

import ampfuse
import pytest
from packaging_tools import KERNELS, LIBRARY, dynamic_entries, run

MODULE = Path(ampfuse._C.__file__)
OF_SYSTEM = r"lib(stdc\+\+|gcc_s|gomp|m|c)\.so\.\d|ld-linux-.*"
OF_TORCH = r"lib(c10|torch|torch_cpu|torch_python)\.so"
OF_AMPFUSE = r"libampfuse(_cuda)?\.so\.\d+\.\d+"
LIBRARIES = [file for file in (LIBRARY, MODULE, KERNELS) if file is not None]

needs_kernels = pytest.mark.skipif(KERNELS is None, reason="this build has no CUDA kernels")


def symbols(file, *which):
    """Return the types and the C++ names of a library's dynamic symbols."""
    lines = run("nm", "-DC", *which, file).splitlines()
    return [re.fullmatch(r"[0-9a-f ]* ([A-Za-z]) (.*)", line).groups() for line in lines]


@pytest.mark.parametrize("file", LIBRARIES, ids=lambda file: file.name.split(".")[0])
def test_library_needs_no_cuda_library_and_exports_only_names_of_ours(file):
    """So it loads with CPU and CUDA builds of torch, and replaces no function of theirs."""
    allowed = f"{OF_SYSTEM}|{OF_AMPFUSE}" + (f"|{OF_TORCH}" if file != KERNELS else "")
    assert [
        name for name in dynamic_entries(file, "NEEDED") if not re.fullmatch(allowed, name)
    ] == []
    # The linker keeps one copy of a weak symbol, as of a template, in a process.
    strong = [name for kind, name in symbols(file, "--defined-only") if kind in "TDBR"]
    ours = r"(vtable for |typeinfo (name )?for )?ampfuse::|PyInit__C"
    assert strong
    assert [name for name in strong if not re.match(ours, name)] == []


def test_libraries_have_a_soname_with_the_version():
    version = ".".join(ampfuse.__version__.split(".")[:2])
    assert dynamic_entries(LIBRARY, "SONAME") == [f"libampfuse.so.{version}"] == [LIBRARY.name]
    assert KERNELS is None or dynamic_entries(KERNELS, "SONAME") == [
        f"libampfuse_cuda.so.{version}"
    ]


@needs_kernels
def test_kernels_name_nothing_of_torch_and_nothing_of_a_cuda_runtime_outside():
    names = [name for _, name in symbols(KERNELS)]
    foreign = re.compile(r"\b(at|c10|torch)::|\bcu[A-Z]|cuda[A-Z]")
    assert [name for name in names if foreign.search(name)] == []


@needs_kernels
def test_kernels_load_in_a_process_without_torch():
    program = (
        "import ctypes, sys; "
        "version = ctypes.CDLL(sys.argv[1])._ZN7ampfuse20kernels_cuda_versionEv; "
        "version.restype = ctypes.c_char_p; print(version().decode())"
    )
    command = [sys.executable, "-S", "-c", program, KERNELS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (ampfuse.build_info()["cuda_version"], "")
