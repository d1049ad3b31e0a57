"""The rules of the folders, each as a test: what may include what, how long a file may get."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"

# The folders that a folder may include from, besides itself. linear/ is above cpu/, since
# linear_cross_entropy is made of other operators; what is in csrc/ itself may see everything.
MAY_INCLUDE = {
    "math": set(),
    "tensors": set(),
    "ops": {"math", "tensors"},
    "cpu": {"cpu/vec", "math", "ops", "tensors"},
    "cpu/vec": {"cpu", "math"},
    "cuda": {"math", "ops", "tensors"},
    "linear": {"cpu", "math", "ops"},
    "meta": {"ops"},
    "autograd": {"ops"},
    "optim": {"ops", "tensors"},
    "amp": {"ops", "tensors"},
    "nn": {"ops"},
    "python": {"ops", "tensors"},
}

SCALAR_TYPES = re.compile(r"torch/headeronly/|c10/util/(Half|BFloat16|complex)")

STEMS = [
    "cross_entropy",
    "fused_adam",
    "multi_tensor_norm",
    "multi_tensor_unscale",
    "multi_tensor_clip",
    "update_scale",
]
MADE_OF_OTHERS = ["linear_cross_entropy"]


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in out.splitlines() if (ROOT / name).is_file()]


SOURCES = tracked("csrc/*.h", "csrc/*.cpp", "csrc/*.cu", "csrc/*.cuh")
CODE = [*SOURCES, *tracked("tests/*.cpp", "tests/*.h", "*.py", "*.sh")]


def includes(file: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', file.read_text(), re.MULTILINE)


def names(files: list[Path]) -> list[str]:
    return [str(file.relative_to(ROOT)) for file in files]


def test_arithmetic_and_kernels_know_no_torch() -> None:
    offenders = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in SOURCES
        if file.suffix == ".cuh" or file.parent.name == "math"
        for name in includes(file)
        if re.match(r"torch/|ATen/|c10/|cuda", name) and not SCALAR_TYPES.match(name)
    ]
    assert offenders == []


def test_no_folder_includes_from_above() -> None:
    offenders = []
    for file in SOURCES:
        folder = str(file.parent.relative_to(CSRC))
        if folder == "." or folder.startswith("include"):
            continue
        for name in includes(file):
            target = (file.parent / name).resolve()
            if not target.is_file():
                continue  # a system or a public header
            other = str(target.parent.relative_to(CSRC))
            if other != folder and other not in MAY_INCLUDE[folder]:
                offenders.append(f"{file.relative_to(ROOT)} includes {name}")
    assert offenders == []


def test_public_headers_include_public_headers_alone() -> None:
    # The standard library (<cstdint>), torch, and each other: ampfuse/ is all that is installed.
    allowed = re.compile(r"[a-z_]+$|ATen/|c10/(core|util)/|torch/")
    public = {f"ampfuse/{file.name}" for file in (CSRC / "include" / "ampfuse").iterdir()}
    public.add("ampfuse/version.h")  # made by CMake
    offenders = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in SOURCES
        if "include/ampfuse" in str(file)
        for name in includes(file)
        if name not in public and not allowed.match(name)
    ]
    assert offenders == []


def test_every_source_is_named_in_cmake() -> None:
    listed = (ROOT / "CMakeLists.txt").read_text() + "".join(
        file.read_text() for file in (CSRC / "cmake").glob("*.cmake")
    )
    missing = [
        name
        for name in names([f for f in SOURCES if f.suffix in (".cpp", ".cu")])
        if name not in listed
    ]
    assert missing == []


@pytest.mark.parametrize("stem", STEMS)
def test_an_op_is_found_by_its_stem(stem: str) -> None:
    expected = {
        *(f"csrc/{layer}/{stem}.cpp" for layer in ("ops", "cpu", "meta", "autograd")),
        *(f"csrc/cuda/{stem}.{suffix}" for suffix in ("cu", "cuh")),
        f"csrc/include/ampfuse/{stem}.h",
        f"csrc/math/{stem}.h",
        f"tests/cuda_host/test_{stem}.cpp",
    }
    assert {name for name in expected if not (ROOT / name).exists()} == set()
    assert list((ROOT / "tests" / "python").glob(f"*/test_{stem}*.py"))


# Made of products of ATen's and the kernels of another op.
@pytest.mark.parametrize("stem", MADE_OF_OTHERS)
def test_an_op_made_of_others_is_found_by_its_stem(stem: str) -> None:
    layers = ("ops", "linear", "meta", "autograd")
    expected = {*(f"csrc/{layer}/{stem}.cpp" for layer in layers), f"csrc/include/ampfuse/{stem}.h"}
    assert {name for name in expected if not (ROOT / name).exists()} == set()
    assert list((ROOT / "tests" / "python").glob(f"*/test_{stem}*.py"))


def test_every_op_is_listed_here() -> None:
    listed = {*STEMS, *MADE_OF_OTHERS}
    assert {file.stem for file in (CSRC / "meta").glob("*.cpp")} == listed


def test_kernels_and_ops_stay_small() -> None:
    # Elsewhere a class that is one idea stays in one file.
    limits = dict.fromkeys(("autograd", "cpu", "cuda", "linear", "math", "meta", "ops"), 350)
    long = []
    for file in SOURCES:
        folder = file.relative_to(CSRC).parts[0]
        limit = 150 if file.suffix == ".cu" else limits.get(folder, 1000)
        lines = len(file.read_text().splitlines())
        if lines > limit:
            long.append(f"{file.relative_to(ROOT)} has {lines} lines; split it below {limit}")
    assert long == []


def test_files_end_in_one_newline_and_have_no_tabs() -> None:
    offenders = [
        str(file.relative_to(ROOT))
        for file in CODE
        if file.stat().st_size
        and (
            not file.read_text().endswith("\n")
            or file.read_text().endswith("\n\n")
            or "\t" in file.read_text()
        )
    ]
    assert offenders == []
