"""The report of `python -m ampfuse` says where the time of a step goes, and what limits it."""

import json
import time

import ampfuse
import pytest
import torch
from ampfuse.optim import _traced
from ampfuse.diagnosis import _advice
from ampfuse.diagnosis._advice import about_input, hints, summary
from ampfuse.diagnosis._clock import BACKWARD, FORWARD, INPUT, OPTIMIZER, PHASES, Loader, StepClock
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

PROGRAM = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset

PAUSE, WORKERS, FORWARD = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

class Slow(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        time.sleep(PAUSE)
        return torch.randn(8)

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu")
for epoch in range(2):
    for batch in DataLoader(Slow(), 4, num_workers=WORKERS):
        loss = model(batch).square().mean()
        time.sleep(FORWARD)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


def report(programs, *arguments):
    programs.write("train.py", PROGRAM)
    done = programs.run("-m", "ampfuse", "--json", "report.json", "train.py", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads((programs.folder / "report.json").read_text()), done.stderr


def test_wait_for_a_slow_dataset_is_measured_and_explained(programs):
    made, text = report(programs, "0.01", "0", "0.02")
    milliseconds = made["steps"]["milliseconds"]
    assert made["steps"]["count"] == 40
    assert set(milliseconds) == set(PHASES)
    assert milliseconds[INPUT] >= 40
    assert milliseconds[FORWARD] >= 20
    share = round(100 * milliseconds[INPUT] / sum(milliseconds.values()))
    assert share > 50
    assert f" ms: input {share}%, forward " in text
    (hint,) = made["hints"]
    assert "waits for input with num_workers=0: DataLoader(num_workers=" in hint


def test_program_whose_loader_keeps_up_gets_no_hint(programs):
    made, _ = report(programs, "0.001", "2", "0.1")
    assert made["hints"] == []


class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.zeros(4)


def train(clock, after=lambda: None, loader=None):
    model = nn.Linear(4, 4)
    optimizer = ampfuse.AdamW(model.parameters())
    with clock:
        for batch in DataLoader(Numbers(), 4) if loader is None else loader:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            after()
    return clock


def test_phases_of_a_step_add_up_to_its_time():
    ends = []

    def after():
        ends.append(time.perf_counter())
        time.sleep(0.005)

    clock = train(StepClock(), after)
    assert len(clock.steps) == 10
    seconds = sum(sum(step.values()) for step in clock.steps[1:])
    assert seconds == pytest.approx(ends[-1] - ends[0], rel=0.1)
    for phase in (INPUT, FORWARD, BACKWARD, OPTIMIZER):
        assert all(step[phase] > 0 for step in clock.steps)
    assert all(step["other"] > 0.004 for step in clock.steps[1:])


def test_batches_that_the_program_makes_itself_belong_to_forward():
    batches = (torch.zeros(4, 4) for _ in range(10))
    clock = train(StepClock(), lambda: time.sleep(0.005), batches)
    assert clock.loaders == []
    assert all(step[FORWARD] > 0.004 for step in clock.steps[1:])


def test_few_steps_have_no_summary():
    clock = train(StepClock(), loader=[torch.zeros(4, 4)] * 7)
    assert summary(clock) is None
    assert summary(train(StepClock(), loader=[torch.zeros(4, 4)] * 8))["count"] == 8


def test_functions_and_hooks_of_torch_are_restored_also_after_an_error():
    before = (torch.autograd.backward, DataLoader.__iter__, ampfuse.GradScaler.step)

    def fail():
        raise RuntimeError("stop")

    clock = StepClock()
    with pytest.raises(RuntimeError, match="stop"):
        train(clock, fail)
    assert (torch.autograd.backward, DataLoader.__iter__, ampfuse.GradScaler.step) == before
    train(StepClock())
    assert len(clock.steps) == 1


def test_optimizers_skip_on_the_device_while_steps_are_measured():
    optimizer = ampfuse.AdamW([nn.Parameter(torch.zeros(3))])
    with StepClock():
        assert _traced.skips_unseen(optimizer)
        handle = register_optimizer_step_post_hook(lambda *_: None)
        assert not _traced.skips_unseen(optimizer)
        handle.remove()


def test_measuring_takes_less_than_1_percent_of_a_5_ms_step():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    seconds = []
    with StepClock() as clock:
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(200):
                for _ in range(4):  # input, backward, scaler.step and scaler.update
                    with clock._phase(BACKWARD):
                        pass
                clock._enter_optimizer()
                clock._leave_optimizer(optimizer)
            seconds.append((time.perf_counter() - begin) / 200)
    assert min(seconds) < 50e-6


def loader(workers, **options):
    return Loader(workers, options.pop("persistent_workers", False), **options)


@pytest.mark.parametrize(
    ("workers", "wait", "rest", "said"),
    [
        (0, 30.0, 10.0, "DataLoader(num_workers=3) would hide it"),
        (2, 10.0, 10.0, "DataLoader(num_workers=4) would hide it"),
        (0, 300.0, 10.0, "Make the transforms faster"),
        (4, 30.0, 10.0, "Make the transforms faster"),
    ],
)
def test_number_of_workers_that_hides_the_wait_is_computed(monkeypatch, workers, wait, rest, said):
    monkeypatch.setattr(_advice, "usable_cores", lambda: 8)
    assert said in about_input(loader(workers), wait, rest)


def test_workers_that_are_started_in_each_epoch_are_noticed():
    clock = StepClock()
    clock.steps = [{INPUT: 0.001, FORWARD: 0.1}] * 20
    steps = {"milliseconds": {INPUT: 1.0, FORWARD: 100.0}}
    clock.loaders = [loader(2, starts=[1.0, 1.0, 1.0])]
    (hint,) = hints(clock, steps)
    assert "persistent_workers=True keeps them" in hint
    clock.loaders = [loader(2, starts=[1.0, 1.0, 1.0], persistent_workers=True)]
    assert list(hints(clock, steps)) == []


COMPILED = """
import torch

torch._dynamo.config.trace_autograd_ops = True
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
scaler = torch.amp.GradScaler("cpu")

@torch.compile(fullgraph=True)
def step(inputs, target):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()

for _ in range(4):
    step(torch.randn(8, 64), torch.randint(10, (8,)))
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_compiled_step_is_one_graph_while_steps_are_measured(programs):
    programs.write("train.py", COMPILED)
    done = programs.run("-m", "ampfuse", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
