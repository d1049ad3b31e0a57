"""Plants known faults in a copy of the sources, one at a time, and reports which tests notice each.

    .venv/bin/python tests/faults/plant.py                        # all faults, in this checkout
    .venv/bin/python tests/faults/plant.py --only csrc/math mean  # with a word in sentence or file
    .venv/bin/python tests/faults/plant.py --revision main~5      # in those of a revision

The copy and its build are in build/faults and stay there, so that only what a fault changes is
compiled. The first build takes ten minutes on 2 cores, and half a gigabyte. It has no CUDA kernels:
tests/cuda_host compiles these for the CPU. First all tests that any fault names run without a
fault; what fails then is not counted. `make test test-frameworks` fetch what the tests need.
"""

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from fault import Fault
from in_operators import FAULTS as IN_OPERATORS
from in_the_rest import FAULTS as IN_THE_REST
from in_training import FAULTS as IN_TRAINING

FAULTS = (*IN_OPERATORS, *IN_TRAINING, *IN_THE_REST)
ROOT = Path(__file__).parents[2]
COPY = ROOT / "build" / "faults" / "sources"
BUILD = COPY / "build"
LONGEST = 1200  # seconds until tests are taken to hang
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(COPY / "python"),
    "AMPFUSE_BUILD": "build",
    "OMP_WAIT_POLICY": "passive",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "CCACHE_DIR": str(ROOT / "build" / "ccache"),
    "CCACHE_BASEDIR": str(COPY),
    "CCACHE_NOHASHDIR": "1",
    "CCACHE_PCH_EXTSUM": "1",
    "CCACHE_SLOPPINESS": "pch_defines,time_macros,include_file_mtime,include_file_ctime",
}
LIBRARY = ("ampfuse", "_C", "ampfuse_cpp")


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    options = {"cwd": COPY, "env": ENVIRONMENT, "text": True} | options
    return subprocess.run(words, capture_output=True, check=False, **options)


def must(*command: object) -> str:
    done = run(*command)
    if done.returncode != 0:
        sys.exit(f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def listed(folder: Path) -> set[str]:
    how = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    return set(run(*how, cwd=folder).stdout.split())


def copy_sources(revision: str | None) -> None:
    """Copy what differs, so that files that stay the same are not compiled again."""
    COPY.mkdir(parents=True, exist_ok=True)
    must("git", "init", "--quiet")  # some tests ask git for the list of sources
    with tempfile.TemporaryDirectory() as folder:
        source = ROOT
        if revision is not None:
            source = Path(folder)
            archive = subprocess.run(
                ["git", "archive", revision], cwd=ROOT, capture_output=True, check=True
            )
            subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
            run("git", "init", "--quiet", cwd=source)
        names = {name for name in listed(source) if (source / name).is_file()}
        for name in listed(COPY) - names:
            (COPY / name).unlink(missing_ok=True)
        for name in names:
            if not (COPY / name).is_file() or not filecmp.cmp(source / name, COPY / name, False):
                (COPY / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / name, COPY / name)  # with a new time: Ninja compiles it


def configure() -> None:
    options = {
        "CMAKE_INSTALL_PREFIX": COPY / "python" / "ampfuse",
        "CMAKE_PREFIX_PATH": ROOT / ".venv" / "cpp-headers" / "usr",
        "AMPFUSE_TORCH_ROOT": Path(torch.__file__).parent,
        "AMPFUSE_WITH_CUDA": "OFF",
        "AMPFUSE_UNITY": "OFF",
        "AMPFUSE_BUILD_PYTHON": "ON",
        "AMPFUSE_BUILD_TESTS": "ON",
        "AMPFUSE_BUILD_CUDA_HOST": "ON",
        "CMAKE_COMPILE_WARNING_AS_ERROR": "OFF",
        "Python_EXECUTABLE": sys.executable,
    }
    given = [f"-D{name}={value}" for name, value in options.items()]
    must("cmake", "-S", COPY, "-B", BUILD, "-G", "Ninja", *given)
    (COPY / ".venv").unlink(missing_ok=True)
    (COPY / ".venv").symlink_to(ROOT / ".venv")


def ctests(wanted: str) -> list[str]:
    """Return the names of ctest's tests whose stems are in `wanted`; they are those of targets."""
    stems = tuple(word for word in wanted.split() if not word.startswith("tests/"))
    names = re.findall(r": (test_\w+)$", must("ctest", "--test-dir", BUILD, "-N"), re.MULTILINE)
    return [name for name in names if stems and name.startswith(stems)]


def build(wanted: str) -> str | None:
    """Compile the library and the C++ tests in `wanted`; return the error, if there is one."""
    targets = [*ctests(wanted), *(LIBRARY if "tests/" in wanted else [])]
    if not targets:
        sys.exit(f"no test of ctest is named by {wanted!r}")
    done = run("cmake", "--build", BUILD, "--target", *targets)
    if done.returncode != 0:
        return f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    if "tests/" in wanted:
        must("cmake", "--install", BUILD)
    return None


def failures(wanted: str, known: set[str], flags: tuple[str, ...] = ()) -> set[str]:
    """Run tests except those in `known`, and return the names of those that fail."""
    failed: set[str] = set()
    if names := set(ctests(wanted)) - known:
        chosen = f"^({'|'.join(sorted(names))})$"
        done = run("ctest", "--test-dir", BUILD, "-R", chosen, "--no-tests=error", "-j", "2")
        failed = set(re.findall(r"- (test_\w+) \(", done.stdout))
        if done.returncode != 0 and not failed:
            failed.add(f"ctest: {done.stdout[-300:]}")
    for environment, prefix in (
        (".venv", "tests/python"),
        (".venv-frameworks", "tests/frameworks"),
    ):
        folders = [word for word in wanted.split() if word.startswith(prefix)]
        if not folders or (failed and flags):
            continue
        command = (ROOT / environment / "bin" / "python", "-m", "pytest", "-q", "-n", "2")
        command += ("--dist", "loadfile", "--no-loadscope-reorder", "--no-header", "-rfE")
        command += ("-p", "no:cacheprovider", *(f"--deselect={name}" for name in known))
        try:
            done = run(*command, *flags, *folders, timeout=LONGEST if flags else None)
        except subprocess.TimeoutExpired:
            return failed | {f"no end within {LONGEST} s"}
        failed |= set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE))
        if done.returncode not in (0, 1, 2):  # for example, a folder has no tests
            sys.exit(f"pytest ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return failed


def is_compiled(fault: Fault) -> bool:
    return fault.file.startswith("csrc/") or "CMake" in fault.file


def noticed_by(fault: Fault, known: set[str]) -> set[str]:
    file = COPY / fault.file
    text = file.read_text()
    assert text.count(fault.old) == 1, f"{fault.file} does not have the text of: {fault.breaks}"
    file.write_text(text.replace(fault.old, fault.new))
    try:
        if is_compiled(fault) and (error := build(fault.tests)):
            return {f"does not compile: {error}"}
        return failures(fault.tests, known, ("--exitfirst",))
    finally:
        file.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="faults with one of these words in sentence or file"
    )
    parser.add_argument("--revision", help="whose sources and tests are taken; default: this tree")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "faults" / "noticed.txt")
    arguments = parser.parse_args()
    faults = [
        fault
        for fault in FAULTS
        if any(word in f"{fault.breaks} {fault.file}" for word in arguments.only)
    ]
    if not faults:
        sys.exit(f"no fault has one of these words in its sentence or file: {arguments.only}")
    faults.sort(key=is_compiled)  # a library keeps its fault until the next build
    copy_sources(arguments.revision)
    print("building a copy, and running the tests without a fault", flush=True)
    configure()
    wanted = " ".join(sorted({word for fault in faults for word in fault.tests.split()}))
    if error := build(wanted):
        sys.exit(error)
    known = failures(wanted, set())
    lines = [f"without a fault {len(known)} fail: {', '.join(sorted(known))}"]
    print(lines[0], flush=True)
    unnoticed = 0
    for fault in faults:
        start = time.monotonic()
        names = noticed_by(fault, known)
        unnoticed += not names
        seconds = time.monotonic() - start
        verdict = "noticed" if names else "UNNOTICED"
        lines.append(f"{verdict} ({seconds:.0f} s): {fault.breaks} [{', '.join(sorted(names))}]")
        print(lines[-1], flush=True)
        arguments.out.write_text("\n".join(lines) + "\n")
    print(f"{len(faults) - unnoticed} of {len(faults)} faults were noticed")


if __name__ == "__main__":
    main()
