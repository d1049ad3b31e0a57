"""The pages of the documentation: links are right, names exist, numbers match the results."""

import csv
import importlib.util
import re

import ampfuse
import pytest
import schemas
import tables
import torch
from packaging_tools import ROOT
from pages import PAGES, code_block
from programs import Programs

DOCS = ROOT / "docs"
OUTSIDE_OF_DOCS = [
    *("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    "examples/cpp_trainer/README.md",
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TRANSLATED = {
    "README.zh-CN.md": "README.md",
    "docs/zh/index.md": "docs/index.md",
    "docs/zh/start.md": "docs/start.md",
}
VERSIONS = {
    "pyproject.toml": r'^version = "(.*)"',
    "CITATION.cff": r"^version: (.*)",
    "CHANGELOG.md": r"^## ([\d.]+) ",
    "README.md": r"^Version ([\d.]+), for",
    "README.zh-CN.md": r"^版本 ([\d.]+)，支持",
}


def read(page):
    return (ROOT / page).read_text()


def without_code(text):
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page):
    """Return the names of a page's headings, as GitHub and MkDocs make them."""
    heads = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


def test_links_lead_to_files_and_headings():
    wrong = []
    for page in [*OUTSIDE_OF_DOCS, *PAGES]:
        for link in LINK.findall(without_code(read(page))):
            if re.match(r"https?:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (ROOT / page).parent / file if file else ROOT / page
            is_published = page in OUTSIDE_OF_DOCS or target.resolve().is_relative_to(DOCS)
            if (
                not target.exists()
                or not is_published
                or (anchor and anchor not in anchors(target))
            ):
                wrong.append(f"{page}: {link}")
    assert wrong == []


@pytest.mark.parametrize(
    ("words", "page"),
    [
        *(("OOM", "troubleshooting"), ("out of memory", "troubleshooting")),
        *(("resume", "checkpoints"), ("SGD", "optimizers"), ("NaN", "troubleshooting")),
    ],
)
def test_words_that_readers_search_are_in_a_heading(words, page):
    # The search of the site ranks headings first, and finds whole words.
    heads = re.findall(r"^#+ (.+)$", without_code(read(f"docs/{page}.md")), re.MULTILINE)
    assert [head for head in heads if re.search(rf"\b{words}\b", head, re.IGNORECASE)]


def test_troubleshooting_begins_with_out_of_memory():
    first = re.search(r"^## (.+)$", read("docs/troubleshooting.md"), re.MULTILINE)
    assert first[1] == "Out of memory (OOM)"


def parts_in_common(page):
    """Return what a page and its translation have in common."""
    text = read(page)
    prose = without_code(text)
    code = re.findall(r"```(?!.*```)(.*?)```", text, re.DOTALL)
    rows = " ".join(re.findall(r"^\|.*\|$", prose, re.MULTILINE))
    names = re.findall(r"`[^`\n]+`", re.sub(r"^\|.*$", "", prose, flags=re.MULTILINE))
    return {
        "headings": re.findall(r"^#+ ", prose, re.MULTILINE),
        "code, without comments": [re.sub(r" *# .*", "", block) for block in code],
        "numbers in tables": re.findall(r"\d+(?:[.,]\d+)*", rows),
        "names in code": {*names},
    }


@pytest.mark.parametrize("page", TRANSLATED)
def test_translation_has_the_parts_of_the_english_page(page):
    assert parts_in_common(page) == parts_in_common(TRANSLATED[page])


def test_every_page_is_in_the_navigation():
    navigation = read("mkdocs.yml").split("\nnav:\n")[1]
    named = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    assert named == {page.removeprefix("docs/") for page in PAGES}


def test_tables_have_the_numbers_of_the_results():
    assert tables.main(["--check"]) == 0


def test_schemas_on_the_page_are_those_of_the_library():
    page = schemas.PAGE.read_text()
    assert page == schemas.with_schemas(page), "run python tools/schemas.py"


def test_every_public_name_is_in_the_reference():
    page = read("docs/reference/python.md")
    names = set(ampfuse.__all__) - {"ops"}  # which has a page of its own
    assert [name for name in sorted(names) if not re.search(rf"\.{name}$", page, re.M)] == []


def test_modules_of_the_reference_are_imported_on_their_first_use(tmp_path):
    names = re.findall(r"^## ampfuse\.(\w+)$", read("docs/reference/modules.md"), re.MULTILINE)
    program = (
        "import sys, ampfuse\n"
        f"print([name for name in {names} if f'ampfuse.{{name}}' in sys.modules])\n"
        f"print([getattr(ampfuse, name).__name__ for name in {names}])\n"
    )
    printed = Programs(tmp_path).write("program.py", program).run("program.py", fresh=True).stdout
    assert printed == f"[]\n{[f'ampfuse.{name}' for name in names]}\n"


def test_names_on_the_page_about_cpp_exist_in_their_language():
    page = read("docs/cpp.md")
    headers = "".join(path.read_text() for path in (ROOT / "csrc/include").rglob("*.h*"))
    in_cpp = {*re.findall(r"(?:ampfuse|checkpoint)::(\w+)", page)}
    assert [name for name in sorted(in_cpp) if not re.search(rf"\b{name}\b", headers)] == []
    in_python = {*re.findall(r"ampfuse\.(\w+)", page.replace("ampfuse.h", ""))}
    unknown = [name for name in sorted(in_python) if not hasattr(ampfuse, name)]
    assert [name for name in unknown if not importlib.util.find_spec(f"ampfuse.{name}")] == []


def test_version_is_the_same_everywhere():
    found = {page: re.search(how, read(page), re.MULTILINE) for page, how in VERSIONS.items()}
    versions = {page: match and match[1] for page, match in found.items()}
    assert versions == dict.fromkeys(VERSIONS, ampfuse.__version__)


def test_front_page_is_short():
    assert len(read("README.md").splitlines()) <= 150


@pytest.mark.parametrize(
    ("front", "start"), [("README.md", "docs/index.md"), ("README.zh-CN.md", "docs/zh/index.md")]
)
def test_start_page_has_the_change_of_the_front_page(front, start):
    assert code_block("diff", front) == code_block("diff", start)


def bytes_per_element(weight, optimizer_class, **options):
    param = torch.nn.Parameter(torch.ones(1024, dtype=weight))
    optimizer = optimizer_class([param], **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    tensors = [tensor for tensor in optimizer.state[param].values() if tensor.dim()]
    state = sum(tensor.nbytes for tensor in tensors) / param.numel()
    return [round(size, 1) for size in (param.itemsize, state, param.itemsize + state)]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_table_of_bytes_per_parameter_is_what_optimizers_hold(page):
    small, remainder = {"state_dtype": "8bit"}, {"master_weights": "remainder"}
    expected = [
        bytes_per_element(torch.float32, torch.optim.AdamW),
        bytes_per_element(torch.float32, ampfuse.AdamW, **small),
        bytes_per_element(torch.bfloat16, torch.optim.AdamW),
        bytes_per_element(torch.bfloat16, ampfuse.AdamW),
        bytes_per_element(torch.bfloat16, ampfuse.AdamW, **remainder),
        bytes_per_element(torch.bfloat16, ampfuse.AdamW, **remainder, **small),
        bytes_per_element(torch.bfloat16, ampfuse.AdamW, master_weights="stochastic", **small),
    ]
    assert bytes_per_element(torch.float32, ampfuse.AdamW) == expected[0]
    rows = re.findall(r"\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", read(page), re.MULTILINE)
    assert [[float(cell) for cell in row] for row in rows] == expected


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/install.md"])
def test_every_make_target_on_a_page_is_in_the_makefile(page):
    verbs = set(re.findall(r"(?:^|`)make ([a-z-]+)", read(page), re.MULTILINE))
    assert "demo" in verbs or page == "CONTRIBUTING.md"
    assert verbs <= {*re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)}


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_memory_in_the_text_is_that_of_the_results(page):
    with (ROOT / "benchmarks/results/amd-epyc/linear_cross_entropy.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["shape"] == "4096x512x50257"]
    peaks = {row["provider"]: f"{float(row['peak_mib']):,.0f}" for row in rows}
    assert f"{peaks['ampfuse']} MiB" in read(page)
    assert peaks["torch"] in read(page)


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_memory_of_the_language_model_is_that_on_the_page_of_examples(page):
    rows = read("docs/examples.md").split("`python examples/seventy_percent.py`")[1]
    first, last = (
        int(re.search(rf"^\| {re.escape(name)} \| [\d.]+ \| [\d.]+ \| (\d+) ", rows, re.M)[1])
        for name in ("float32", "+ micro-batches")
    )
    numbers = re.findall(r"\d+", read(page).split("seventy_percent.py`")[1].split("## ")[0])
    assert {str(first), str(last)} <= {*numbers}
    assert f"{last / first:.0%}".replace("%", " %") in read(page)


@pytest.mark.parametrize("program", ["fp16_fsdp", "fp16_pipeline"])
def test_lines_on_the_page_about_float16_are_those_of_the_programs(program):
    file = f"examples/distributed/{program}.py"
    part = read("docs/fp16.md").split(f"`{file}`")[1]
    quoted = part.split("```python\n")[1].split("```")[0].splitlines()
    code = " ".join(read(file).split())
    assert len(quoted) > 8
    assert [line for line in quoted if " ".join(line.split()) not in code] == []
