"""The README's quick starts run as they are printed."""

import re
import sys
from pathlib import Path

import pytest
from packaging_tools import END_OF_RANK, PACKAGE, ROOT, environment, run


def code_blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def code_block(language: str, page: str = "README.md") -> str:
    (block,) = code_blocks(language, page)
    return block


# `tensors` is how many tensors the example prints.
@pytest.mark.parametrize(("number", "tensors"), list(enumerate([4, 0, 0, 0, 0])))
def test_python_examples_run(tmp_path: Path, number: int, tensors: int) -> None:
    blocks = code_blocks("python")
    assert len(blocks) == 5
    script = tmp_path / "example.py"
    script.write_text(blocks[number])
    package = environment(PYTHONPATH=str(PACKAGE.parent))
    assert run(sys.executable, script, cwd=tmp_path, env=package).count("tensor(") == tensors


def test_python_examples_of_the_page_about_memory_run(tmp_path: Path) -> None:
    blocks = code_blocks("python", "docs/memory.md")
    (tmp_path / "example.py").write_text("\n".join(blocks))
    package = environment(PYTHONPATH=str(PACKAGE.parent))
    printed = run(sys.executable, "example.py", cwd=tmp_path, env=package)
    assert printed.startswith("peak of a training step on a GPU: ")
    assert (tmp_path / "memory.png").is_file()


@pytest.mark.slow
def test_program_of_the_page_about_several_ranks_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(code_block("python", "docs/distributed.md") + END_OF_RANK)
    package = environment(PYTHONPATH=str(PACKAGE.parent))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run(*start, "train.py", cwd=tmp_path, env=package).splitlines()
    lines = [line.split() for line in printed if line[:1].isdigit()]
    assert [line[0] for line in lines] == ["0", "20", "40", "60", "80"]
    assert float(lines[-1][1]) < 0.9 * float(lines[0][1])
    assert any("no group is needed" in line for line in printed)


def test_python_example_of_the_page_about_accumulation_runs(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code_block("python", "docs/accumulation.md") + "print(loss)")
    package = environment(PYTHONPATH=str(PACKAGE.parent))
    assert run(sys.executable, script, cwd=tmp_path, env=package).startswith("tensor(2.")


@pytest.mark.slow
def test_cpp_quick_start_builds_and_runs(tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(code_block("cpp"))
    (tmp_path / "CMakeLists.txt").write_text(code_block("cmake"))
    prefix = f"-DCMAKE_PREFIX_PATH={PACKAGE}"
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja", prefix)
    run("cmake", "--build", tmp_path / "build")
    assert "CPUFloatType" in run(tmp_path / "build" / "train", cwd=tmp_path, env=environment())


def test_every_make_target_in_the_readme_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(
        re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    )
    assert verbs >= {"demo", "test", "help"}
    assert [verb for verb in verbs if f"\n{verb}: " not in makefile] == []
