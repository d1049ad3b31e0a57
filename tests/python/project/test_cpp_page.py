"""The program of docs/cpp.md builds as it is printed, and exchanges its state with Python."""

import sys
from pathlib import Path

import pytest
from packaging_tools import PACKAGE, build_program, environment, run
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
        assert scale.startswith("scale 65536, norm 0.")
        assert 8 < float(loss.removeprefix("loss ")) < 8.5  # log(5000) is 8.52
        assert norm.startswith("norm before clipping ")
        exchanged = run(sys.executable, "exchange.py", cwd=tmp_path, env=PYTHON)
        assert exchanged == f"steps {steps} scale 65536.0\n"
