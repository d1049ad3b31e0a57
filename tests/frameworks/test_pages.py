"""The programs of the frameworks' pages run as they are printed."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def output(page, folder):
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (folder / "train.py").write_text(program)
    command = [sys.executable, "train.py"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_lightning_trains_and_logs_the_scale(tmp_path):
    output("lightning.md", tmp_path)
    (logged,) = tmp_path.glob("logs/**/metrics.csv")
    names, *rows = logged.read_text().splitlines()
    assert {"loss_scale", "skipped_steps", "grad_norm"} <= set(names.split(","))
    assert rows


def test_accelerate_trains_and_prints_the_scale(tmp_path):
    lines = output("accelerate.md", tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == ["0", "20", "40", "60", "80"]
    assert "'loss_scale': 131072.0" in lines[-1]


def test_transformers_trains_and_logs_the_scale(tmp_path):
    printed = output("transformers.md", tmp_path)
    assert "'loss_scale'" in printed
    assert "'skipped_steps'" in printed
