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
for epoch in range(9):
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
TRYING = r"python -m ampfuse: trying batches of( \d+)*\n"
WITHOUT_WORKERS = re.sub(r", num_workers.*", "", PROGRAM)


def memory(programs, *arguments):
    return programs.ours("memory", *arguments)


def account_of(programs, *arguments):
    """Return the printed lines of a program that is accounted."""
    done = memory(programs, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or done.stderr.startswith("python -m ampfuse: trying batches of")
    assert "peak of a training step on a GPU: " in done.stdout
    return done.stdout.splitlines()


def test_program_for_a_gpu_is_accounted_without_one(programs):
    programs.write("train.py", PROGRAM)
    lines = account_of(
        programs, "--json", "8.json", "--plot", "account.png", "train.py", "--lr", "1"
    )
    assert lines[0] == "loss 0.0 of 8 ['--lr', '1']"
    for kind in ("parameters", "copies of weights", "moments", "activations"):
        assert any(line.startswith(f"  {kind} ") for line in lines)
    assert (programs.folder / "account.png").stat().st_size > 10_000
    larger = account_of(programs, "--json", "16.json", "--batch", "16", "train.py")
    assert larger[0] == "loss 0.0 of 16 []"
    accounts = {}
    for batch in (8, 16):
        accounts[batch] = json.loads((programs.folder / f"{batch}.json").read_text())
        assert accounts[batch]["batch"] == batch
        assert sum(accounts[batch]["kinds"].values()) == accounts[batch]["peak"]
    small, large = accounts[8]["kinds"], accounts[16]["kinds"]
    assert large["moments"] == small["moments"]
    assert large["activations"] == pytest.approx(2 * small["activations"], rel=0.05)


def test_module_is_accounted_for_a_cpu_on_request(programs):
    on_cpu = PROGRAM.replace('"cuda"', '"cpu"').replace("float16", "bfloat16")
    programs.write("pack/__init__.py", "").write("pack/train.py", on_cpu)
    done = memory(programs, "--device", "cpu", "-m", "pack.train", "x")
    assert "['x']\n\npeak of a training step on a CPU: " in done.stdout


@pytest.mark.parametrize("name", ["accumulation", "char_language_model", "gan", "image_classifier"])
def test_ordinary_programs_are_accounted(programs, name):
    account_of(programs, ROOT / "examples" / "plain_torch" / f"{name}.py")


def fitted(programs, size, *arguments):
    """Return the last lines of a search for the largest batch, and the batch itself."""
    lines = account_of(programs, "--fit", size, *arguments, "train.py")
    found = re.search(
        r"largest batch in [\d.]+ MiB: (?:at least )?(\d+), which takes", "\n".join(lines)
    )
    return lines[-2:], int(found[1]) if found else 0


def test_fit_finds_the_largest_batch(programs):
    programs.write("train.py", WITHOUT_WORKERS)
    _, largest = fitted(programs, "64MiB", "--batch", "64")
    peaks = []
    for batch in (largest, largest + 1):
        memory(programs, "--json", "account.json", "--batch", str(batch), "train.py")
        peaks.append(json.loads((programs.folder / "account.json").read_text())["peak"])
    # The account is not exactly linear in the batch: sizes are multiples of 512 bytes.
    assert peaks[0] <= 1.01 * 64 * 2**20
    assert peaks[1] >= 0.99 * 64 * 2**20


def test_fit_shows_the_batches_that_it_tries(programs):
    programs.write("train.py", WITHOUT_WORKERS)
    assert re.fullmatch(TRYING, memory(programs, "--fit", "9MiB", "train.py").stderr)


def test_program_in_float32_is_accounted_under_autocast(programs):
    programs.write("train.py", SMALL.replace("32)", "8192)"))
    (row,) = (line for line in account_of(programs, "train.py") if line.startswith("  autocast "))
    assert "torch.autocast with torch.bfloat16" in row


def test_fit_says_if_no_batch_fits(programs):
    programs.write("train.py", LOADERS)
    (*_, last), largest = fitted(programs, "1MB")
    assert "no batch fits in 977 KiB" in last
    assert largest == 0


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
BOTH_BEGIN = "train_batches, test_batches = iter(train), iter(test)\nfor batch in train_batches:"


@pytest.mark.parametrize("begin", ["for batch in train:", BOTH_BEGIN], ids=["one", "both"])
def test_batch_is_that_of_the_loader_that_the_steps_use(programs, begin):
    programs.write("train.py", LOADERS.replace("for batch in train:", begin))
    _, largest = fitted(programs, "20MiB")
    assert 8 <= largest < 1000


def test_larger_batch_that_the_program_does_not_allow_is_reported(programs):
    programs.write("train.py", LOADERS.replace("4096", "16"))
    done = memory(programs, "--fit", "64MiB", "train.py")
    *_, found, why = done.stdout.splitlines()
    assert "at least 8, which takes " in found
    assert why == (
        "with batches of 16 the program fails: expected two steps of an optimizer, but the program "
        "has taken 1: its data have 1 whole batch of 16 samples"
    )
    assert re.fullmatch(f"{TRYING}{re.escape(why)}\n{TRYING}", done.stderr)


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
    (*_, last), largest = fitted(programs, "64MiB")
    assert largest > 32
    assert 0.8 * 64 < float(re.search(r"takes ([\d.]+) MiB", last)[1]) <= 64


def test_dataset_may_be_smaller_than_a_batch(programs):
    programs.write("train.py", PROGRAM.replace("(4096, 33)", "(5, 33)"))
    account_of(programs, "train.py")


def test_fit_counts_no_samples_that_are_not_there(programs):
    programs.write("train.py", SMALL.replace("2**16", "20").replace("32)", "8)"))
    (found, _), largest = fitted(programs, "200MiB")
    assert "at least" in found
    assert 8 <= largest <= 20


def test_fit_tries_no_batches_that_are_larger_than_the_data(programs):
    # Linear layers take so little here that the data end long before the memory does.
    two_epochs = LOADERS.replace("4096", "100").replace(
        "for batch in train:", "for batch in [*train, *train]:"
    )
    programs.write("train.py", two_epochs)
    done = memory(programs, "--fit", "1GiB", "train.py")
    assert done.stdout.splitlines()[-1].endswith("; the data have no more samples")
    assert "largest batch in 1,024 MiB: 100, which takes " in done.stdout
    assert "fails" not in done.stderr


TWICE = """
import torch
param = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([param], 0.1)
for _ in range({steps}):
    param.sum().backward()
    optimizer.step()
"""
REFUSED = {
    "no second step": (
        ["once.py"],
        "expected two steps of an optimizer, but the program has taken 1",
    ),
    "no script": (["absent.py"], "cannot read absent.py: No such file or directory"),
    "no loader": (
        ["--batch", "3", "twice.py"],
        "--batch: no torch.utils.data.DataLoader makes the program's batches",
    ),
    "no size": (["--fit", "much", "twice.py"], "--fit: expected a size like 24GiB, got much"),
    "no batch": (["--batch", "0", "twice.py"], "--batch: expected at least 1, got 0"),
    "no folder": (["--json", "no/a.json", "twice.py"], "--json: there is no folder no"),
    "no picture": (["--plot", "a.txt", "twice.py"], "--plot: expected a file that ends in"),
}


@pytest.mark.parametrize(("arguments", "why"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_accounted_is_refused_in_one_line(programs, arguments, why):
    programs.write("once.py", TWICE.format(steps=1)).write("twice.py", TWICE.format(steps=2))
    done = memory(programs, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("python -m ampfuse: ")
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


def test_error_of_the_program_is_shown_with_a_hint(programs):
    programs.write("train.py", "import torch\n1 / torch.ones(300, 300).exp().sum().item()\n")
    done = memory(programs, "train.py")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
    assert "ampfuse.memory.account" in done.stderr.splitlines()[-1]


def test_without_a_script_the_usage_is_printed(programs):
    done = memory(programs)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m ampfuse memory")
    assert "--fit SIZE" in memory(programs, "--help").stdout


def test_program_that_catches_everything_is_accounted_and_saves_nothing(programs):
    programs.write("model.pt", "trained for days")
    caught = TWICE.replace("    optimizer.step()", "    try: optimizer.step()\n    except: pass")
    saving = """    torch.save(param, 'model.pt')
    from ampfuse import checkpoint
    checkpoint.save('run', step=9, o=optimizer).wait()
"""
    programs.write("train.py", caught.format(steps=5) + saving)
    account_of(programs, "train.py")
    assert (programs.folder / "model.pt").read_text() == "trained for days"
    assert not (programs.folder / "run").exists()
