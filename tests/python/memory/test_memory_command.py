"""`python -m ampfuse memory program` accounts for the memory of an unchanged program."""

import json
import re

import pytest
from packaging_tools import ROOT

pytestmark = pytest.mark.slow  # each test starts processes

PROGRAM = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

words = torch.randint(500, (4096, 33))
model = torch.nn.Sequential(
    torch.nn.Embedding(500, 64), torch.nn.Linear(64, 256), torch.nn.ReLU(),
    torch.nn.Linear(256, 500),
).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
loader = DataLoader(
    TensorDataset(words), 8, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True
)
step = torch.compile(lambda batch: model(batch))
for epoch in range(1000):
    for (batch,) in loader:
        batch = batch.to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.float16):
            logits = step(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print("loss", loss.item(), "of", len(batch), sys.argv[1:], flush=True)
"""


def memory(programs, *arguments):
    return programs.run("-m", "ampfuse", "memory", *arguments)


def test_program_for_a_gpu_is_accounted_without_one(programs):
    programs.write("train.py", PROGRAM)
    done = memory(programs, "train.py", "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "loss 0.0 of 8 ['--lr', '1']"
    assert lines[2].startswith("peak of a training step on a GPU: ")
    for kind in ("parameters", "copies of weights", "moments", "activations"):
        assert any(line.startswith(f"  {kind} ") for line in lines)


def test_json_has_the_account_and_batch_sets_the_batch_size(programs):
    programs.write("train.py", PROGRAM)
    accounts = {}
    for batch in ("8", "16"):
        done = memory(programs, "--json", f"{batch}.json", "--batch", batch, "train.py")
        assert f"loss 0.0 of {batch} []" in done.stdout
        accounts[batch] = json.loads((programs.folder / f"{batch}.json").read_text())
        assert accounts[batch]["batch"] == int(batch)
        assert sum(accounts[batch]["kinds"].values()) == accounts[batch]["peak"]
    small, large = accounts["8"]["kinds"], accounts["16"]["kinds"]
    assert large["moments"] == small["moments"]
    assert large["activations"] == pytest.approx(2 * small["activations"], rel=0.05)


def test_fit_finds_the_largest_batch(programs):
    programs.write("train.py", PROGRAM)
    done = memory(programs, "--fit", "64MiB", "--batch", "64", "train.py")
    words = done.stdout.splitlines()[-1].split()
    assert words[:5] == ["largest", "batch", "in", "64.0", "MiB:"]
    largest = int(words[5].strip(","))
    peaks = []
    for batch in (largest, largest + 1):
        memory(programs, "--json", "account.json", "--batch", str(batch), "train.py")
        peaks.append(json.loads((programs.folder / "account.json").read_text())["peak"])
    # The account is not exactly linear in the batch: sizes are multiples of 512 bytes.
    assert peaks[0] <= 1.01 * 64 * 2**20
    assert peaks[1] >= 0.99 * 64 * 2**20


def test_fit_says_if_no_batch_fits(programs):
    programs.write("train.py", PROGRAM)
    assert memory(programs, "--fit", "1MB", "train.py").stdout.splitlines()[-1] == (
        "no batch fits in 1,024 KiB"
    )


def test_plot_draws_the_account(programs):
    programs.write("train.py", PROGRAM)
    memory(programs, "--plot", "account.png", "train.py")
    assert (programs.folder / "account.png").stat().st_size > 10_000


def test_module_is_accounted(programs):
    programs.write("pack/__init__.py", "").write("pack/train.py", PROGRAM)
    done = memory(programs, "-m", "pack.train", "x")
    assert "['x']\n\npeak of a training step" in done.stdout


def test_account_is_about_a_cpu_on_request(programs):
    programs.write("train.py", PROGRAM.replace('"cuda"', '"cpu"').replace("float16", "bfloat16"))
    assert (
        "peak of a training step on a CPU: "
        in memory(programs, "--device", "cpu", "train.py").stdout
    )


@pytest.mark.parametrize("name", ["accumulation", "char_language_model", "gan", "image_classifier"])
def test_ordinary_programs_are_accounted(programs, name):
    done = memory(programs, ROOT / "examples" / "plain_torch" / f"{name}.py")
    assert done.returncode == 0, done.stderr
    assert "peak of a training step on a GPU: " in done.stdout


REFUSED = {
    "no second step": (
        ["once.py"],
        "memory: expected two steps of an optimizer, but the program has taken 1",
    ),
    "no script": (["absent.py"], "cannot read absent.py: No such file or directory"),
    "no loader": (
        ["--batch", "3", "twice.py"],
        "--batch: no torch.utils.data.DataLoader makes the program's batches",
    ),
    "no size": (
        ["--fit", "much", "twice.py"],
        "argument --fit: expected a size like 24GiB, got much",
    ),
    "no unit": (["--fit", "24", "twice.py"], "argument --fit: expected a size like 24GiB, got 24"),
    "no batch": (["--batch", "0", "twice.py"], "--batch: expected at least 1, got 0"),
    "no folder": (["--json", "no/a.json", "twice.py"], "--json: there is no folder no"),
    "no picture": (["--plot", "a.txt", "twice.py"], "--plot: expected a file that ends in"),
}
TWICE = """
import torch
param = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([param], 0.1)
for _ in range({steps}):
    param.sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("arguments", "why"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_accounted_is_refused_in_one_line(programs, arguments, why):
    programs.write("once.py", TWICE.format(steps=1)).write("twice.py", TWICE.format(steps=2))
    done = memory(programs, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"python -m ampfuse: {why}")
    assert done.stderr.count("\n") == 1


def test_error_of_the_program_is_shown_with_a_hint(programs):
    programs.write("train.py", "import torch\n1 / torch.ones(300, 300).exp().sum().item()\n")
    done = memory(programs, "train.py")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "python -m ampfuse: memory: the program failed. It ran without a GPU, and its operators "
        "computed no numbers, but zeros. If it cannot run like this, call ampfuse.memory.account "
        "for its step alone"
    )


def test_without_a_script_the_usage_is_printed(programs):
    done = memory(programs)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m ampfuse memory")
    assert "--fit SIZE" in memory(programs, "--help").stdout


def test_checkpoints_are_not_overwritten(programs):
    programs.write("model.pt", "trained for days")
    programs.write("train.py", TWICE.format(steps=3) + "    torch.save(param, 'model.pt')\n")
    assert memory(programs, "train.py").returncode == 0
    assert (programs.folder / "model.pt").read_text() == "trained for days"


def test_runs_of_checkpoints_stay_as_they_are(programs):
    save = "from ampfuse import checkpoint; checkpoint.save('run', step=9, o=optimizer).wait()"
    programs.write("train.py", TWICE.format(steps=3) + f"    {save}\n")
    assert memory(programs, "train.py").returncode == 0
    assert not (programs.folder / "run").exists()


def test_program_that_catches_everything_is_accounted(programs):
    caught = TWICE.replace("    optimizer.step()", "    try: optimizer.step()\n    except: pass")
    programs.write("train.py", caught.format(steps=5))
    done = memory(programs, "train.py")
    assert done.returncode == 0
    assert "peak of a training step on a GPU" in done.stdout


LOADERS = """
import os, torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
train, test = DataLoader(torch.randn(4096, 512), 8), DataLoader(torch.randn(4096, 512), 1000)
os.chdir("/")
for batch in train:
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_batch_is_that_of_the_loader_that_the_steps_use(programs):
    programs.write("train.py", LOADERS)
    done = memory(programs, "--fit", "20MiB", "train.py")
    found = re.search(r"largest batch in 20.0 MiB: (\d+), which takes", done.stdout)
    assert 8 <= int(found[1]) < 1000


def test_batch_is_that_of_the_step_if_another_loader_begins_later(programs):
    begun = "train_batches, test_batches = iter(train), iter(test)\nfor batch in train_batches:"
    programs.write("train.py", LOADERS.replace("for batch in train:", begun))
    done = memory(programs, "--fit", "20MiB", "train.py")
    found = re.search(r"largest batch in 20.0 MiB: (\d+), which takes", done.stdout)
    assert 8 <= int(found[1]) < 1000


def test_larger_batch_that_the_program_does_not_allow_is_reported(programs):
    programs.write("train.py", LOADERS.replace("4096", "16"))
    done = memory(programs, "--fit", "64MiB", "train.py")
    assert done.returncode == 0
    found, why = done.stdout.splitlines()[-2:]
    assert found.startswith("largest batch in 64.0 MiB: at least 8, which takes ")
    assert why.startswith("with batches of 16 the program fails: ")


SMALL = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10))
optimizer = torch.optim.AdamW(model.parameters())
for (batch,) in DataLoader(TensorDataset(torch.zeros(2**16, 64)), 32):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_batch_fits_also_where_the_optimizer_decides_the_peak_of_small_ones(programs):
    programs.write("train.py", SMALL)
    done = memory(programs, "--fit", "64MiB", "train.py")
    found = re.search(r"largest batch in 64.0 MiB: (\d+), which takes ([\d.]+) MiB", done.stdout)
    assert int(found[1]) > 32
    assert 0.8 * 64 < float(found[2]) <= 64


def test_dataset_may_be_smaller_than_a_batch(programs):
    small = PROGRAM.replace("(4096, 33)", "(5, 33)")
    programs.write("train.py", small)
    done = memory(programs, "train.py")
    assert done.returncode == 0, done.stderr
    assert "peak of a training step on a GPU: " in done.stdout


def test_fit_counts_no_samples_that_are_not_there(programs):
    programs.write("train.py", PROGRAM.replace("(4096, 33)", "(20, 33)"))
    done = memory(programs, "--fit", "200MiB", "train.py")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-2:]
    assert re.match(r"largest batch in 200 MiB: at least (8|16|17|18|19|20), ", last[0]), last
