"""The first steps of a program are measured, and the program itself runs as it is."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch
from ampfuse import checkpoint
from ampfuse.tools.command import advise as command
from ampfuse.tools.precision import advisor, show
from ampfuse.tools.precision.advisor import NoAdviceError, advise, keep_modules, run
from ampfuse.tools.precision.deviation import Deviation
from ampfuse.tools.precision.outcome import BFLOAT16, FLOAT16, FLOAT32
from ampfuse.tools.precision.trial import Program

TRAIN = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range({steps}):
    x = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)) / {parts}
    {before}
    loss.backward()
    if step % {parts} == {parts} - 1:
        optimizer.step()
        optimizer.zero_grad()
"""
# Functions are called with names of parameters and a generator. A parameter is named module.
UNUSUAL = """
import torch
from torch import nn
class Model(nn.Linear):
    def forward(self, x, module):
        return super().forward(x)
model = Model(8, 4)
torch.save(obj=model.state_dict(), f="start.pt")
model.load_state_dict(torch.load(f="start.pt"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(20):
    x = torch.randn(16, 8).to(torch.float8_e4m3fn).float()
    loss = model(x=x, module=None).square().mean()
    torch.autograd.backward(loss if step % 2 else (one for one in [loss]))
    optimizer.step()
    optimizer.zero_grad()
"""
DEFAULTS = {"steps": 100, "parts": 1, "before": "pass"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return the outcomes of the program in some precisions."""
    file = tmp_path_factory.mktemp("program") / "train.py"
    file.write_text(TRAIN.format(**DEFAULTS))
    given = Program([str(file)], False, 10)
    return [run(given, precision, backwards=10) for precision in (FLOAT32, FLOAT32, BFLOAT16)]


@pytest.fixture
def program(programs):
    def write(text=TRAIN, steps=10, **parts):
        text = text.format(**DEFAULTS | parts) if text is TRAIN else text
        programs.write("train.py", text)
        return Program([str(programs.folder / "train.py")], False, steps)

    return write


def test_program_ends_after_its_steps(outcomes):
    outcome = outcomes[0]
    assert outcome.failure is None
    assert outcome.steps == len(outcome.losses) == 10
    assert len(outcome.gradients) == 4
    assert len(outcome.seconds) == 4  # four are analysed, and two warm up
    assert outcome.milliseconds > 0
    assert list(outcome.outputs) == ["0", "1", "2", "3", "Sequential"]
    assert outcome.places == {
        "model": "train.py:8 `loss = nn.functional.cross_entropy(model(x), x[:, :4].argma…`",
        "backward": "train.py:10 `loss.backward()`",
        "step": "train.py:12 `optimizer.step()`",
    }


def test_runs_have_the_same_weights_batches_and_dropout(outcomes):
    first, second, other = outcomes
    assert second.losses == first.losses
    other = Deviation(first, other)
    assert other.is_comparable
    assert 0 < other.gradient < 0.02
    assert 0 < other.loss < 0.005


def test_runs_with_other_weights_are_noticed(outcomes, program):
    text = TRAIN.format(**DEFAULTS).replace("model = ", "torch.seed(); model = ")
    assert not Deviation(outcomes[0], run(program(text), FLOAT32)).is_comparable


def test_accumulated_gradients_are_compared_part_by_part(program):
    given = program(parts=2, steps=4)
    base = run(given, FLOAT32)
    assert (base.steps, len(base.losses)) == (4, 8)
    other = run(given, FLOAT16, backwards=8)
    assert len(other.losses) == 8
    assert Deviation(base, other).gradient < 0.02


ACCUMULATE = """
import ampfuse, torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(part, denominator):
    logits = model(part[0])
    return ampfuse.cross_entropy(logits, part[1], denominator=denominator)
for _ in range(4):
    parts = [(torch.ones(2, 8), torch.zeros(2).long()) for _ in range(4)]
    loss = ampfuse.accumulate(step, parts)
    loss *= 0  # a program may change its loss
    optimizer.step()
    optimizer.zero_grad()
"""


def test_last_loss_is_that_of_the_whole_batch_that_was_accumulated(program):
    outcome = run(program(ACCUMULATE, steps=4), FLOAT32)
    assert len(outcome.losses) == 16
    whole = sum(outcome.losses[-4:])
    assert outcome.last_loss == pytest.approx(whole)
    advice = SimpleNamespace(judge=SimpleNamespace(base=outcome, deviations={}))
    assert show.row(advice, outcome)[-1] == f"{whole:.4g}"


def test_last_loss_is_that_of_the_last_backward_without_accumulation(outcomes):
    assert all(outcome.last_loss == outcome.losses[-1] for outcome in outcomes)


TWO_MODELS = """
import torch
from torch import nn
first, second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
one, two = (torch.optim.SGD(model.parameters(), lr=1e-2) for model in (first, second))
scaler = torch.amp.GradScaler("cpu")
for step in range(100):
    x = torch.randn(16, 8)
    for optimizer, target in ((one, 1.0), (two, 0.0)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (second(first(x)).float() - target).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def test_gradients_of_two_models_with_one_scaler_are_compared(program):
    given = program(TWO_MODELS)
    base = run(given, FLOAT32)
    assert Deviation(base, run(given, FLOAT16, backwards=len(base.losses))).gradient < 0.02


def test_run_that_skips_steps_ends_with_its_backwards(program):
    given = program(before="loss = loss * float('inf')")
    outcome = run(given, FLOAT16, backwards=10)
    assert (len(outcome.losses), outcome.skipped) == (10, 10)


STUBBORN = """
import queue, subprocess, sys, threading, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
subprocess.Popen(["sleep", "600"])
full = queue.Queue(1)
threading.Thread(target=lambda: [full.put(0) for _ in range(9)]).start()
first, last = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = first, last
    def forward(self, x):
        return self.last(checkpoint(self.first, x, use_reentrant=False))
model = Model()
optimizer = torch.optim.SGD(model.parameters())
while True:
    try:
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    except:
        pass
"""


def test_program_that_would_not_end_is_ended_and_its_checkpoints_do_no_harm(program, monkeypatch):
    monkeypatch.setattr(advisor, "subprocess", subprocess)  # its child keeps pipes open
    outcome = run(program(STUBBORN), BFLOAT16)
    assert outcome.failure is None
    assert (outcome.steps, len(outcome.gradients)) == (10, 4)


def test_backward_of_torch_autograd_is_measured_once(program):
    outcome = run(program(UNUSUAL), FLOAT16)
    assert outcome.failure is None
    assert len(outcome.losses) == 10
    assert len(outcome.gradients) == 4


def test_slow_run_ends_early(program):
    outcome = run(program(steps=100), FLOAT32, slowest=0.0)
    assert (outcome.steps, len(outcome.seconds)) == (9, 3)


def test_program_finds_what_it_has_saved_and_its_own_files_stay(program, programs):
    (programs.folder / "old.pt").write_text("old")
    saved = checkpoint.save(programs.folder / "run", step=1, keep=1, module=torch.nn.Linear(2, 2))
    before = (
        "torch.save(step, 'old.pt'); assert torch.load('old.pt') == step; "
        f"from ampfuse import checkpoint; run = {str(saved.path.parent)!r}; "
        "own = torch.nn.Linear(2, 2); "
        "assert checkpoint.load(run, module=own).step == step + 1; "
        "checkpoint.save(run, step=step + 2, keep=1, module=own); "
        "assert checkpoint.latest(path=run).name.endswith(str(step + 2)); "
        "assert checkpoint.verify(run).name.endswith(str(step + 2))"
    )
    assert run(program(before=before), FLOAT32).failure is None
    assert (programs.folder / "old.pt").read_text() == "old"
    assert [path.name for path in saved.path.parent.glob("step-*")] == ["step-00000001"]


def test_compiled_model_is_measured_compiled(program):
    compiled = "model.compile(backend='eager')\noptimizer ="
    text = TRAIN.format(**DEFAULTS).replace("optimizer =", compiled, 1)
    base = run(program(text), FLOAT32)
    assert base.failure is None
    assert len(base.gradients) == 4
    assert base.gradients[0].keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}


class NeverAccurate:
    """A judge of gradients that are never accurate."""

    def __init__(self, gradients):
        self.gradients = gradients  # deviations, by the number of modules in float32
        self.deviations = {}
        self.add(BFLOAT16)

    def trouble(self, precision):
        return "its gradients differ"

    def suspect(self, precision):
        return f"layer{'abc'[len(precision.kept)]}"

    def add(self, precision):
        self.deviations[precision] = SimpleNamespace(gradient=self.gradients[len(precision.kept)])


def test_search_for_modules_ends_when_one_more_helps_little():
    judge = NeverAccurate([1.0, 0.1, 0.1, 0.1])
    tried = []

    def attempt(precision):
        tried.append(len(precision.kept))
        judge.add(precision)

    keep_modules(judge, BFLOAT16, attempt)

    assert tried == [1, 2]


def loop(setup, params, output):
    return f"""
import torch
{setup}
optimizer = torch.optim.SGD({params})
while True:
    {output}.sum().backward()
    optimizer.step()
"""


STEPS_IN_BACKWARD = """
model = torch.nn.Linear(4, 1)
def step(weight):
    optimizer.step()
    weight.grad = None
model.weight.register_post_accumulate_grad_hook(step)
model.bias.requires_grad_(False)
"""
HALF = "model = torch.nn.Linear(8, 4).half()"
REFUSED = {
    "error": ("1 / 0", "fails in float32: ZeroDivisionError: division by zero (train.py:1)"),
    "exit": ("import sys; sys.exit('no')", "fails in float32: SystemExit: no"),
    "end of the process": ("import os; os._exit(3)", "float32: the process ended with code 3"),
    "no backward": ("pass", "ended without a call of backward"),
    "no step": (
        "import torch; torch.ones(1, requires_grad=True).sum().backward()",
        "ended without a step of an optimizer of torch.optim",
    ),
    "no module": (
        loop("weight = torch.ones(2, requires_grad=True)", "[weight]", "(weight * 2)"),
        "called no torch.nn.Module",
    ),
    "float16 parameters": (
        loop(HALF, "model.parameters()", "model(torch.randn(2, 8).half())"),
        "expected a program with float32 parameters, got torch.float16",
    ),
    "steps in backward": (
        loop(STEPS_IN_BACKWARD, "model.parameters()", "model(torch.randn(2, 4))"),
        "an optimizer that steps during backward (train.py:6)",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=list(REFUSED))
def test_programs_that_cannot_be_advised_are_refused(program, text, message):
    with pytest.raises(NoAdviceError) as error:
        advise(program(text), lambda line: None)
    assert message in str(error.value)


def test_command_lines_that_make_no_sense_are_refused(programs):
    for arguments, message in (
        (["--steps", "3", "x.py"], "--steps: expected 10 to 200, got 3"),
        (["-"], "advise: expected a file, which can run again, got -"),
        (["--json", "no/a.json", "x.py"], "--json: there is no folder no"),
        (["missing.py"], "got missing.py"),
    ):
        done = programs.ours("advise", *arguments)
        assert done.returncode == 2, arguments
        assert message in done.stderr


def test_command_prints_a_table_a_verdict_and_lines(programs, program, monkeypatch, capfd):
    program()
    monkeypatch.chdir(programs.folder)
    with pytest.raises(SystemExit, match="0"):
        command.main(["--steps", "10", "--json", "a.json", "--plot", "a.png", "train.py"])
    printed, told = capfd.readouterr()
    assert "train.py: 10 steps in each precision, on a CPU with " in printed
    rows = [line.strip() for line in printed.splitlines()]
    for name in (
        *("float32", "bfloat16", "float16 with a scaler", "float16 without a scaler"),
        *("largest scale", "gradients off", "two batches"),
    ):
        assert any(row.startswith(f"{name} ") for row in rows), name
    report = json.loads((programs.folder / "a.json").read_text())
    assert report["sentences"][0] in " ".join(rows)
    assert (programs.folder / "a.png").stat().st_size > 1000
    assert "python -m ampfuse: running it in bfloat16" in told
