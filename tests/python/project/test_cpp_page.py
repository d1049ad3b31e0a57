"""The program of docs/cpp.md builds as it is printed, and the names on the page exist."""

import importlib.util
import re
import sys
from pathlib import Path

import ampfuse
import pytest
from packaging_tools import PACKAGE, ROOT, build_program, environment, run
from pages import code_block

PAGE = "docs/cpp.md"
PYTHON = environment(PYTHONPATH=str(PACKAGE.parent), CUDA_VISIBLE_DEVICES="")
ON_CPU = environment(CUDA_VISIBLE_DEVICES="")


@pytest.mark.slow
def test_program_trains_and_goes_on_from_files_that_python_has_read_and_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "main.cpp").write_text(code_block("cpp", PAGE))
    (tmp_path / "CMakeLists.txt").write_text(code_block("cmake", PAGE))
    (tmp_path / "exchange.py").write_text(code_block("python", PAGE))
    build_program(tmp_path, tmp_path / "build")

    for steps in (10, 20):  # the second run goes on from the files of the first
        printed = run(tmp_path / "build" / "train", cwd=tmp_path, env=ON_CPU).splitlines()
        scale, loss, norm = printed
        assert scale.startswith("scale 65536, norm ")
        # It begins at log(5000), which is 8.52. Inputs are random; 8.04 to 8.06 were measured.
        assert 7.5 < float(loss.removeprefix("loss ")) < 8.4
        assert norm.startswith("norm before clipping ")
        exchanged = run(sys.executable, "exchange.py", cwd=tmp_path, env=PYTHON)
        assert exchanged == f"steps {steps} scale 65536.0\n"


def test_names_on_the_page_exist_in_their_language() -> None:
    page = (ROOT / PAGE).read_text()
    headers = "".join(path.read_text() for path in (ROOT / "csrc/include").rglob("*.h*"))
    in_cpp = {*re.findall(r"ampfuse::(\w+)", page), *re.findall(r"checkpoint::(\w+)", page)}
    assert [name for name in sorted(in_cpp) if not re.search(rf"\b{name}\b", headers)] == []
    in_python = {*re.findall(r"ampfuse\.(\w+)", page.replace("ampfuse.h", ""))}
    assert [
        name
        for name in sorted(in_python)
        if not hasattr(ampfuse, name) and not importlib.util.find_spec(f"ampfuse.{name}")
    ] == []
