"""The notebooks run from their first cell to their last."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging_tools import PACKAGE, ROOT, environment

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_of_a_notebook_run_in_their_order(tmp_path: Path, path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n".join(code))
    env = environment(PYTHONPATH=str(PACKAGE.parent), MPLBACKEND="Agg", OMP_NUM_THREADS="1")
    command = [sys.executable, "cells.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
