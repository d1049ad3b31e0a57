"""The rules of the source tree: which folders may include which, file names, file lengths."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "ampfuse"

# The folders that each folder may include from, besides itself. linear/ is above cpu/, since
# linear_cross_entropy is made of other operators. Files directly in csrc/ may include everything.
MAY_INCLUDE = {
    "math": set(),
    "tensors": set(),
    "ops": {"math", "tensors"},
    "cpu": {"cpu/vec", "math", "ops", "tensors"},
    "cpu/vec": {"cpu", "math"},
    "cuda": {"math", "ops", "tensors"},
    "linear": {"cpu", "math", "ops", "tensors"},
    "meta": {"ops", "tensors"},
    "autograd": {"ops"},
    "optim": {"ops", "tensors"},
    "amp": {"ops", "tensors"},
    "checkpoint": set(),
    "nn": {"ops", "tensors"},
    "python": {"linear", "ops", "tensors"},
}

# The packages of python/ampfuse, and the modules beside them, from which each may import. All may
# import `ops` and the modules whose names begin with an underscore, which import nothing else.
MAY_IMPORT = {
    "gradients": set(),
    "losses": {"gradients"},
    "optim": {"gradients"},
    "clip_grad": {"gradients"},
    "amp": {"clip_grad", "gradients", "optim"},
    "accumulation": {"gradients", "losses"},
    "checkpoint": {"amp", "gradients", "optim"},
    "distributed": {"amp", "gradients", "optim"},
    "graphed_step": {"amp", "gradients", "optim"},
    "integrations": {"amp", "gradients", "losses", "optim"},
    "patching": {"amp", "clip_grad", "gradients", "losses", "optim"},
    "env": set(),
    "tools": {"amp", "checkpoint", "gradients", "losses", "optim", "patching", "env"},
    "memory": {"tools"},
    "__main__": {"env", "patching", "tools"},
}

SCALAR_TYPES = re.compile(r"torch/headeronly/|c10/util/(Half|BFloat16|complex)")

MADE_OF_OTHERS = ["linear_cross_entropy"]  # of ATen's products and another operator's kernels
# Conversions of whole tensors, made of torch's operators.
MADE_OF_TORCHS = {"coded_moment"}
STEPS = ["fused_adam", "fused_sgd"]  # their kernels are those of fused_step, for each one's rule


def tracked(*patterns):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in out.splitlines() if (ROOT / name).is_file()]


SOURCES = tracked("csrc/*.h", "csrc/*.cpp", "csrc/*.cu", "csrc/*.cuh")
CODE = [*SOURCES, *tracked("tests/*.cpp", "tests/*.h", "examples/*.cpp", "examples/*.h")]
CODE += tracked("*.py", "*.sh")


def includes(file):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', file.read_text(), re.MULTILINE)


def name_of(file):
    return str(file.relative_to(ROOT))


def assert_none(offenders, advice):
    assert not offenders, "\n".join([advice, *offenders])


def with_included(files):
    """Return the files and all files of the project that they include."""
    files, found = [*files], set()
    while files:
        file = files.pop()
        if file not in found:
            found.add(file)
            paths = [(file.parent / name).resolve() for name in includes(file)]
            files += [path for path in paths if path.is_file()]
    return found


def test_arithmetic_and_library_of_kernels_include_no_torch_headers():
    without_torch = [
        file for file in SOURCES if file.suffix in (".cu", ".cuh") or file.parent.name == "math"
    ]
    offenders = [
        f"{name_of(file)}: {name}"
        for file in with_included(without_torch)
        for name in includes(file)
        if re.match(r"torch/|ATen/|c10/", name) and not SCALAR_TYPES.match(name)
    ]
    advice = "these files are compiled without torch: pass pointers and sizes, and include only the"
    assert_none(offenders, f"{advice} scalar types of torch/headeronly and c10/util")


def test_library_of_kernels_and_its_callers_exchange_no_undefined_dtype():
    # Its number is 46 in torch 2.11 and 47 in 2.15, and one library of kernels serves both. The
    # numbers of other dtypes are asserted in csrc/cuda/caller.h.
    offenders = [
        name_of(file) for file in (CSRC / "cuda").iterdir() if "Undefined" in file.read_text()
    ]
    assert_none(offenders, "use kNoDtype of csrc/ops/step_tensor.h")


def test_only_launches_include_cudas_runtime():
    may_include = {"stream.cuh", "runtime.cu"}
    offenders = [
        name_of(file)
        for file in SOURCES
        if file.name not in may_include
        if any(re.match(r"cuda[._]", name) for name in includes(file))
    ]
    assert_none(offenders, "call CUDA in these files only: libampfuse must load without it")


def test_folders_include_only_folders_below_them():
    offenders = []
    for file in SOURCES:
        folder = str(file.parent.relative_to(CSRC))
        if folder == "." or folder.startswith("include"):
            continue
        for name in includes(file):
            target = (file.parent / name).resolve()
            if not target.is_file():
                continue  # a system header or a public header
            other = str(target.parent.relative_to(CSRC))
            if other != folder and other not in MAY_INCLUDE[folder]:
                offenders.append(f"{name_of(file)} includes {name}")
    advice = "move what both folders need further down (tensors/ serves ops, optim and amp), or"
    assert_none(offenders, f"{advice} extend MAY_INCLUDE")


def imports(file):
    """Return the modules of ampfuse that a module imports, as tuples, with the imported names."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ampfuse":
            _, *path = node.module.split(".")
            for name in node.names:
                yield (*path, name.name)
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("ampfuse."):
                    yield tuple(name.name.split(".")[1:])


def test_packages_import_only_public_names_of_packages_below_them():
    offenders = []
    for file in tracked("python/ampfuse/*.py"):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for path in imports(file):
            is_shared = path[0] == "ops" or path[0].startswith("_")
            if path[0] == room or (is_shared and path[0] != "__main__"):
                continue
            if room not in MAY_IMPORT or path[0] not in MAY_IMPORT[room]:
                offenders.append(f"{name_of(file)} imports {'.'.join(path)}")
            elif any(name.startswith("_") for name in path):
                offenders.append(f"{name_of(file)} imports {'.'.join(path)}, which is private")
    advice = "move what both need further down (gradients/ serves losses, optim and amp), or"
    assert_none(offenders, f"{advice} extend MAY_IMPORT")


def test_public_headers_include_no_private_headers():
    # Only ampfuse/ is installed. Its headers may include each other, torch and <cstdint> etc.
    allowed = re.compile(r"[a-z_]+$|ATen/|c10/(core|util)/|torch/")
    include = CSRC / "include"
    public = {str(file.relative_to(include)) for file in include.rglob("*.h")}
    public.add("ampfuse/version.h")  # generated by CMake
    offenders = [
        f"{name_of(file)}: {name}"
        for file in SOURCES
        if "include/ampfuse" in str(file)
        for name in includes(file)
        if name not in public and not allowed.match(name)
    ]
    advice = "these headers are installed: include only torch, the standard library and each other"
    assert_none(offenders, advice)


def test_every_source_is_named_in_cmake():
    files = [ROOT / "CMakeLists.txt", *(CSRC / "cmake").glob("*.cmake")]
    listed = "".join(file.read_text() for file in files)
    sources = [name_of(file) for file in SOURCES if file.suffix in (".cpp", ".cu")]
    missing = [name for name in sources if name not in listed]
    assert_none(missing, "add the file to the list of sources in CMakeLists.txt")


# An op's schema is in ops/<stem>.cpp. autograd/<stem>.cpp is missing if the op writes its arguments
# (autograd/mutating.cpp), math/<stem>.h if both kernels are one expression, and
# include/ampfuse/<stem>.h if only Python calls the op.
OF_OPS = [file for file in SOURCES if file.parent.name == "ops" and file.stem != "registration"]
STEMS = [file.stem for file in OF_OPS if "AMPFUSE_OPERATORS(" in file.read_text()]


def test_every_kernel_for_meta_tensors_belongs_to_an_op():
    extra = {file.stem for file in (CSRC / "meta").glob("*.cpp")} - {*STEMS, "fused_step"}
    assert_none(sorted(extra), "name the file by the op whose schema is in ops/")


@pytest.mark.parametrize("stem", STEMS)
def test_op_has_a_file_named_by_its_stem_in_each_layer_and_in_the_tests(stem):
    is_made_of_others = stem in MADE_OF_OTHERS
    layers = ("ops", "meta", "linear") if is_made_of_others else ("ops", "meta", "cpu")
    if stem in STEPS:
        layers = ("ops", "cpu/vec")
    if stem in MADE_OF_TORCHS:
        layers, is_made_of_others = ("ops",), True
    expected = {f"csrc/{layer}/{stem}.cpp" for layer in layers}
    if stem in STEPS:
        expected |= {f"csrc/cuda/{stem}.cu", f"csrc/math/{stem}.h"}
    elif not is_made_of_others:
        expected |= {f"csrc/cuda/{stem}.{suffix}" for suffix in ("cpp", "cu", "cuh")}
    if not is_made_of_others:
        expected.add(f"tests/cuda_host/test_{stem}.cpp")
    missing = sorted(name for name in expected if not (ROOT / name).exists())
    if not list((ROOT / "tests" / "python").glob(f"*/test_{stem}*.py")):
        missing.append(f"tests/python/*/test_{stem}*.py")
    assert_none(missing, f"add the files of {stem}: see docs/adding_an_operator.md")


def test_kernels_and_operators_have_at_most_350_lines_and_cu_files_150():
    # Elsewhere a class that is one idea stays in one file.
    limits = dict.fromkeys(("autograd", "cpu", "cuda", "linear", "math", "meta", "ops"), 350)
    long = []
    for file in SOURCES:
        folder = file.relative_to(CSRC).parts[0]
        limit = 150 if file.suffix == ".cu" else limits.get(folder, 1000)
        lines = len(file.read_text().splitlines())
        if lines > limit:
            long.append(f"{name_of(file)} has {lines} lines, more than {limit}")
    assert_none(long, "split the file where it begins another subject")


FIRST_WORDS = re.compile(r"(And|As|But|Nor|Of|Or|Those|What|Where|Whether|Which)\b")
WORDS = re.compile(r"\b(is none|are none|no number|no class|tells?|told|but for)\b|\bsays?\b[.,)]")


def blocks_of_prose(file):
    """Yield the comments and docstrings of a file, each with its first line's number."""
    text = file.read_text()
    if file.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    comment = re.compile(r"\s*(#|//+<?) ?(.*)")
    first, block = 0, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if found := comment.fullmatch(line):
            first = first if block else number
            block.append(found[2])
        elif block:
            yield first, " ".join(block)
            block = []


def test_comments_and_docstrings_are_plain_sentences():
    """A fragment shows by its first word; words that have to be decoded are listed, too."""
    offenders = [
        f"{name_of(file)}:{line}: {found[0]!r}"
        for file in CODE
        if "plain_torch" not in str(file) and file != Path(__file__)
        for line, text in blocks_of_prose(file)
        if (found := FIRST_WORDS.match(text) or WORDS.search(text))
    ]
    advice = "begin with the subject, and use the words of the field: NaN, out of range, returns"
    assert_none(offenders, advice)


def test_files_end_in_one_newline_and_have_no_tabs():
    offenders = [
        name_of(file)
        for file in CODE
        if (text := file.read_text()) and ("\t" in text or not re.search(r"[^\n]\n\Z", text))
    ]
    assert_none(offenders, "run `make format`")
