"""The pages of the documentation: programs run, links are right, numbers match the results."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import ampfuse
import pytest
import tables
from packaging_tools import END_OF_RANK, PACKAGE, ROOT, environment, run
from pages import code_block, code_blocks

PACKAGES = environment(PYTHONPATH=str(PACKAGE.parent))
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))
# Pages whose blocks are one program, in their order.
PROGRAMS = [
    *("start", "optimizers", "losses", "grad-scaler", "clipping"),
    *("patching", "troubleshooting", "memory", "accumulation"),
]
# Pages whose blocks are tested elsewhere: each block is a program of its own, or needs a framework,
# torchrun or a copy of the sources.
TESTED_ELSEWHERE = [
    *("compile", "distributed", "checkpoints", "fp16", "lightning", "accelerate"),
    *("transformers", "adding_an_operator", "cpp"),
]
OUTSIDE_OF_DOCS = [
    *("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    "examples/cpp_trainer/README.md",
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def test_python_blocks_of_each_page_run_in_their_order(tmp_path: Path) -> None:
    # One process runs all pages, since to import torch takes longer than a page.
    pages = {page: "\n".join(code_blocks("python", f"docs/{page}.md")) for page in PROGRAMS}
    lines = [f"exec(compile({code!r}, {page!r}, 'exec'), {{}})" for page, code in pages.items()]
    (tmp_path / "pages.py").write_text("\n".join(lines))
    run(sys.executable, "pages.py", cwd=tmp_path, env=PACKAGES)
    assert (tmp_path / "memory.png").is_file()


@pytest.mark.slow
def test_each_program_of_the_page_about_compiled_steps_runs(tmp_path: Path) -> None:
    for number, block in enumerate(code_blocks("python", "docs/compile.md")):
        (tmp_path / f"example{number}.py").write_text(block)
        run(sys.executable, f"example{number}.py", cwd=tmp_path, env=PACKAGES)


@pytest.mark.slow
def test_program_of_the_page_about_several_ranks_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(code_block("python", "docs/distributed.md") + END_OF_RANK)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run(*start, "train.py", cwd=tmp_path, env=PACKAGES).splitlines()
    lines = [line.split() for line in printed if line[:1].isdigit()]
    assert [line[0] for line in lines] == ["0", "20", "40", "60", "80"]
    assert float(lines[-1][1]) < 0.9 * float(lines[0][1])
    assert any("no group is needed" in line for line in printed)


def test_every_page_with_programs_has_a_test() -> None:
    with_programs = [page for page in PAGES if code_blocks("python", page)]
    expected = [f"docs/{page}.md" for page in [*PROGRAMS, *TESTED_ELSEWHERE, "zh/start"]]
    assert sorted(with_programs) == sorted(expected), "name the page in a list of this file"


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings, as GitHub and MkDocs make them."""
    heads = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.M
    )
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*OUTSIDE_OF_DOCS, *PAGES])
def test_links_lead_to_files_and_headings(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    wrong = []
    for link in LINK.findall(text):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        is_published = page in OUTSIDE_OF_DOCS or target.resolve().is_relative_to(DOCS)
        if not target.exists() or not is_published or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


TRANSLATED = {
    "README.zh-CN.md": "README.md",
    "docs/zh/index.md": "docs/index.md",
    "docs/zh/start.md": "docs/start.md",
}


def parts_in_common(page: str) -> dict[str, list[str]]:
    """Return what a page and its translation have in common."""
    text = (ROOT / page).read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    code = re.findall(r"```(?!.*```)(.*?)```", text, re.DOTALL)
    rows = re.findall(r"^\|.*\|$", prose, re.MULTILINE)
    return {
        "headings": re.findall(r"^#+ ", prose, re.MULTILINE),
        "code, without comments": [re.sub(r" *# .*", "", block) for block in code],
        "numbers in tables": [
            number for row in rows for number in re.findall(r"\d+(?:[.,]\d+)*", row)
        ],
        "names in code": sorted(
            set(re.findall(r"`[^`\n]+`", re.sub(r"^\|.*$", "", prose, flags=re.M)))
        ),
    }


@pytest.mark.parametrize("page", TRANSLATED)
def test_translation_has_the_parts_of_the_english_page(page: str) -> None:
    assert parts_in_common(page) == parts_in_common(TRANSLATED[page])


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    named = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    assert named == {page.removeprefix("docs/") for page in PAGES}


def test_tables_have_the_numbers_of_the_results() -> None:
    assert tables.main(["--check"]) == 0


def test_every_public_name_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "python.md").read_text()
    names = set(ampfuse.__all__) - {"ops"}  # which has a page of its own
    assert [name for name in sorted(names) if not re.search(rf"\.{name}$", page, re.M)] == []


def test_version_is_the_same_everywhere() -> None:
    version = ampfuse.__version__
    for page, pattern in {
        "pyproject.toml": r'^version = "(.*)"',
        "CITATION.cff": r"^version: (.*)",
        "CHANGELOG.md": r"^## ([\d.]+) ",
        "README.md": r"^Version ([\d.]+), for",
        "README.zh-CN.md": r"^版本 ([\d.]+)，支持",
    }.items():
        found = re.search(pattern, (ROOT / page).read_text(), re.MULTILINE)
        assert found, page
        assert found[1] == version, page


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_schemas_on_the_page_are_those_of_the_library() -> None:
    schemas = tool("schemas")
    page = schemas.PAGE.read_text()
    assert page == schemas.with_schemas(page), "run python tools/schemas.py"
