"""The front page is short, and its numbers and its program are right."""

import csv
import re
import sys
from pathlib import Path

import ampfuse
import pytest
import torch
from packaging_tools import PACKAGE, ROOT, environment, run
from pages import code_block, code_blocks
from torch import nn

MOST_LINES = 150
README = (ROOT / "README.md").read_text()


def test_front_page_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_program_of_the_front_page_runs(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code_block("python"))
    package = environment(PYTHONPATH=str(PACKAGE.parent))
    printed = run(sys.executable, script, cwd=tmp_path, env=package)
    assert "ScaleRecord(scale=65536.0, skipped=False" in printed


@pytest.mark.parametrize("removed", ["+", "-"], ids=["before", "after"])
def test_loop_of_the_front_page_runs_before_and_after_the_change(removed: str) -> None:
    (difference,) = code_blocks("diff")
    lines = [line[1:] for line in difference.splitlines() if not line.startswith(removed)]
    torch.manual_seed(0)
    batch = torch.randn(8, 4), torch.randint(3, (8,))
    names = {"torch": torch, "nn": nn, "model": nn.Linear(4, 3), "loader": [batch] * 20}
    exec("\n".join(lines).replace("cuda", "cpu").replace("3e-4", "3e-2"), names)
    assert names["loss"] < 0.9 * nn.functional.cross_entropy(nn.Linear(4, 3)(batch[0]), batch[1])


@pytest.mark.parametrize(
    "translation", [("README.md", "docs/index.md"), ("README.zh-CN.md", "docs/zh/index.md")]
)
def test_start_page_has_the_change_of_the_front_page(translation: tuple[str, str]) -> None:
    front, start = translation
    assert code_block("diff", front) == code_block("diff", start)


def bytes_per_element(weight: torch.dtype, optimizer_class: type, **options: object) -> list[int]:
    param = torch.nn.Parameter(torch.ones(1000, dtype=weight))
    optimizer = optimizer_class([param], **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    tensors = [tensor for tensor in optimizer.state[param].values() if tensor.numel() == 1000]
    state = sum(tensor.element_size() for tensor in tensors)
    return [param.element_size(), state, param.element_size() + state]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_table_of_bytes_per_parameter_is_what_optimizers_hold(page: str) -> None:
    small, remainder = {"state_dtype": torch.bfloat16}, {"master_weights": "remainder"}
    expected = [
        bytes_per_element(torch.float32, torch.optim.AdamW),
        bytes_per_element(torch.float32, ampfuse.AdamW, **small),
        bytes_per_element(torch.bfloat16, torch.optim.AdamW),
        bytes_per_element(torch.bfloat16, ampfuse.AdamW),
        bytes_per_element(torch.bfloat16, ampfuse.AdamW, **remainder),
        bytes_per_element(torch.bfloat16, ampfuse.AdamW, **remainder, **small),
    ]
    assert bytes_per_element(torch.float32, ampfuse.AdamW) == expected[0]
    rows = re.findall(r"\| (\d+) \| (\d+) \| (\d+) \|$", (ROOT / page).read_text(), re.MULTILINE)
    assert [[int(cell) for cell in row] for row in rows] == expected


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/install.md"])
def test_every_make_target_on_a_page_is_in_the_makefile(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE))
    assert "demo" in verbs or page == "CONTRIBUTING.md"
    assert [
        verb for verb in verbs if f"\n{verb}: " not in makefile and f"\n{verb}:" not in makefile
    ] == []


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_memory_in_the_text_is_that_of_the_results(page: str) -> None:
    with (ROOT / "benchmarks/results/amd-epyc/linear_cross_entropy.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["shape"] == "4096x512x50257"]
    peaks = {row["provider"]: f"{float(row['peak_mib']):,.0f} MiB" for row in rows}
    text = (ROOT / page).read_text()
    assert peaks["ampfuse"] in text
    assert peaks["torch"].removesuffix(" MiB") in text
