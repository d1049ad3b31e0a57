"""The programs of the frameworks' pages run as they are printed, and docstrings are complete."""

import importlib
import re
from pathlib import Path

import pytest
from docstring_sections import assert_described
from programs import Programs

DOCS = Path(__file__).parents[2] / "docs"


def output(page, folder):
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    ran = Programs(folder).write("train.py", program).run("train.py", timeout=300)
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


@pytest.mark.parametrize("module", ["accelerate", "causal_lm", "lightning", "transformers"])
def test_docstrings_of_frameworks_describe_exactly_the_arguments(module):
    assert_described(importlib.import_module(f"ampfuse.integrations.{module}"))
