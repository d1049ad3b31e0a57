"""The programs on the pages of the documentation run as they are printed, and so do notebooks.

Programs that need a framework are tested in tests/frameworks, others in the file that the list
names.
"""

import copy
import json
import re

import pytest
import torch
import warm
from packaging_tools import ROOT, run_python
from pages import PAGES, code_block, code_blocks
from torch import nn

# Pages whose blocks are one program, in their order.
IN_ORDER = [
    *("start", "optimizers", "losses", "grad-scaler", "clipping"),
    *("patching", "troubleshooting", "memory", "accumulation"),
]
APART = [
    *("compile", "distributed", "migration"),  # below
    *("lightning", "accelerate", "transformers"),
    "checkpoints",  # test_checkpoint_page.py
    "fp16",  # test_distributed_examples.py
    "adding_an_operator",  # install/test_adding_an_operator.py
    "zh/start",  # has the code of docs/start.md: test_documentation.py
]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def test_every_page_with_programs_has_a_test():
    expected = [f"docs/{page}.md" for page in [*IN_ORDER, *APART]]
    with_programs = [page for page in PAGES if code_blocks("python", page)]
    assert sorted(with_programs) == sorted(expected), "name the page in a list of this file"


def test_blocks_of_each_page_and_of_the_front_page_run_in_their_order(tmp_path):
    # One process runs all pages, each with names of its own.
    pages = [*[f"docs/{page}.md" for page in IN_ORDER], "README.md"]
    programs = {page: "\n".join(code_blocks("python", page)) for page in pages}
    lines = [f"exec(compile({code!r}, {page!r}, 'exec'), {{}})" for page, code in programs.items()]
    (tmp_path / "pages.py").write_text("\n".join(lines))
    printed = run_python("pages.py", cwd=tmp_path)
    assert (tmp_path / "memory.png").is_file()
    assert "ScaleRecord(scale=65536.0, skipped=False" in printed  # of the front page


@pytest.mark.parametrize("removed", ["+", "-"], ids=["before", "after"])
def test_loop_of_the_front_page_runs_before_and_after_the_change(removed):
    difference = code_block("diff").splitlines()
    lines = [line[1:] for line in difference if not line.startswith(removed)]
    torch.manual_seed(0)
    batch = torch.randn(8, 4), torch.randint(3, (8,))
    names = {"torch": torch, "nn": nn, "model": nn.Linear(4, 3), "loader": [batch] * 20}
    exec("\n".join(lines).replace("cuda", "cpu").replace("3e-4", "3e-2"), names)
    assert names["loss"] < 0.9 * nn.functional.cross_entropy(nn.Linear(4, 3)(batch[0]), batch[1])


def test_programs_of_the_page_about_migration_train_alike():
    torch.manual_seed(0)
    classes = torch.arange(8) % 4
    images = torch.randn(4, 3, 8, 8)[classes] + 0.1 * torch.randn(8, 3, 8, 8)
    first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    trained = []
    for program in code_blocks("python", "docs/migration.md"):
        net = copy.deepcopy(first)
        exec(program.replace("cuda", "cpu"), {"net": net, "loader": [(images, classes)] * 10})
        trained.append(torch.cat([param.detach().flatten() for param in net.parameters()]))
        loss = nn.functional.cross_entropy
        assert loss(net(images), classes) < 0.5 * loss(first(images), classes)
    torchs, ours, torchs_amp, ours_amp = trained
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours_amp, torchs_amp, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_each_program_of_the_page_about_compiled_steps_runs(tmp_path):
    for number, block in enumerate(code_blocks("python", "docs/compile.md")):
        (tmp_path / f"example{number}.py").write_text(block)
        run_python(f"example{number}.py", cwd=tmp_path)


@pytest.mark.slow
def test_programs_of_the_page_about_several_ranks_train_alike(tmp_path):
    # The same ranks run all of them: they start as the first one does, and end as the last one.
    programs = [
        program.partition("dist.barrier()")
        for program in code_blocks("python", "docs/distributed.md")
    ]
    beginnings, _, endings = zip(*programs, strict=True)
    start = re.compile(r"^dist\.init_process_group\(\).*\n", re.MULTILINE)
    later = [start.sub("", beginning) for beginning in beginnings[1:]]
    text = "\n".join([beginnings[0], *later, f"dist.barrier(){endings[-1]}"])
    (tmp_path / "train.py").write_text(text)

    printed = run_python(*warm.TORCHRUN, "--nproc-per-node", "2", "train.py", cwd=tmp_path)

    lines = [line.split() for line in printed.splitlines() if line[:1].isdigit()]
    steps, losses, _ = zip(*lines, strict=True)
    assert steps == ("0", "20", "40", "60", "80") * len(programs)
    assert losses == losses[:5] * len(programs)
    assert float(losses[4]) < 0.9 * float(losses[0])
    assert "no group is needed" in printed
    assert "A ZeroRedundancyOptimizer steps different parameters on each rank." in printed
    # A Python that ends while threads of gloo release tensors may abort.
    assert [ending.split("\n")[-2].split("  #")[0] for ending in endings] == ["os._exit(0)"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_of_a_notebook_run_in_their_order(tmp_path, path):
    cells = json.loads(path.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    if path.stem == "vit":  # one layer, and batches that are doubled until one takes a budget
        assert code.count("32, 4, 128, 2, 4") == code.count('"1GiB"') == 1
        code = code.replace("32, 4, 128, 2, 4", "32, 4, 128, 1, 4").replace('"1GiB"', '"16MiB"')
    (tmp_path / "cells.py").write_text(code)
    printed = run_python("cells.py", cwd=tmp_path, MPLBACKEND="Agg", OMP_NUM_THREADS="1")
    assert len(printed.splitlines()) >= 2
