"""`ampfuse.memory.Monitor`: samples of memory, growth, and what holds the memory."""

import gc
import itertools
import sys
import time
import weakref
from collections import deque
from pathlib import Path
from unittest import mock

import pytest
import torch
from ampfuse.memory import Monitor
from ampfuse.tools.memory import monitor as monitor_module
from ampfuse.tools.memory.growth import Look, is_small
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

INPUTS, WIDTH = 8, 1024  # an activation takes 4 MiB: growth stands out from a process's noise
STEPS = 60
# Steps are fast here. Otherwise only those that are 20 ms apart would have samples.
EACH_STEP = mock.patch.object(monitor_module, "LEAST_SPACING", 0)


class Model(nn.Module):
    """A model that may keep what it computes."""

    def __init__(self, keeps=False):
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, 1)
        self.keeps, self.cache = keeps, []

    def forward(self, batch):
        hidden = torch.tanh(self.first(batch))
        if self.keeps:
            self.cache.append(hidden.detach())
        return self.last(hidden)


LINE = Model.forward.__code__.co_firstlineno + 1  # that of torch.tanh


BATCH = torch.zeros(WIDTH, INPUTS)


def train(monitor, after=lambda loss: None, *, model=None, batch=BATCH, steps=STEPS):
    model = Model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with EACH_STEP, monitor:
        for _ in range(steps):
            loss = model(batch).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            after(loss)
    return monitor


# In a used process, leaks fill memory that was freed before, and memory that the kernel has taken
# back is filled again.
FRESH = """
import sys
sys.path.insert(0, {folder!r})
from ampfuse.memory import Monitor
from test_monitor import train
kept = []
for after in (lambda loss: None, kept.append):
    monitor = train(Monitor(), after)
    print(monitor.growth())
    print(monitor)
"""


@pytest.mark.slow
def test_growth_of_a_process_is_measured_and_explained(programs):
    programs.write("fresh.py", FRESH.format(folder=str(Path(__file__).parent)))
    lines = programs.run("fresh.py", fresh=True).stdout.splitlines()
    assert lines[:2] == ["None", f"no growth over {STEPS} steps"]
    growth, *text = lines[2:]
    assert float(growth) > 3 * 2**20
    assert text[0].startswith("memory grows by ")
    assert f"  test_monitor.py:{LINE} in Model: 4,096 KiB a step" in text
    assert any("kept of fresh.py has become a list of" in line for line in text)


@pytest.fixture(scope="module")
def few_objects():
    """Let a look for leaks leave out the objects of this process, over which it takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Trainer:
    """An object of the program. Before Python 3.13, variables of functions are not named."""

    def __init__(self):
        self.kept = []


@pytest.fixture
def growing(monkeypatch, few_objects):
    """Let the memory of this process seem to grow, so that a monitor looks for a leak."""
    sizes = itertools.count(2**30, 2**22)
    monkeypatch.setattr(monitor_module, "host_memory", lambda: next(sizes))


@pytest.mark.parametrize("kind", ["list", "module", "sum", "bytes"])
def test_line_and_container_whose_memory_stays_are_found(growing, kind):
    trainer, total = Trainer(), [0]

    def leak(loss):
        if kind == "list":
            trainer.kept.append(loss)
        elif kind == "sum":
            total[0] = total[0] + loss
        elif kind == "bytes":
            trainer.kept.extend(bytearray(4) for _ in range(4))

    monitor = train(Monitor(), leak, model=Model(keeps=kind == "module"))
    if kind != "bytes":  # which are no tensors
        first = monitor.suspects[0]
        assert (first.what, first.bytes) == ("in Model", 4 * 2**20)
        assert first.where == f"test_monitor.py:{LINE}"
    if kind != "sum":
        name = "Model.cache" if kind == "module" else "Trainer.kept"
        found = [one for one in monitor.suspects if one.where == name]
        assert "list of " in found[0].what


def test_training_is_the_same_if_leaks_are_looked_for(growing, monkeypatch):
    torch.manual_seed(0)
    losses, others = [], []
    assert train(Monitor(), losses.append).suspects
    torch.manual_seed(0)
    monkeypatch.setattr(Look, "may_begin", lambda: False)
    monitor = train(Monitor(), others.append)
    assert monitor.growth() > 3 * 2**20
    assert monitor.suspects == []
    assert [loss.item() for loss in losses] == [loss.item() for loss in others]


def test_samples_have_steps_and_sizes():
    monitor = train(Monitor())
    assert [one.step for one in monitor.samples] == list(range(1, STEPS + 1))
    assert all(one.host > 2**25 for one in monitor.samples)


@pytest.mark.parametrize("last", [1, 21])  # the look begins after step 20
def test_hooks_and_modes_are_restored_after_an_error(growing, last):
    losses = []

    def keep(loss):
        losses.append(loss)
        if len(losses) == last:
            raise RuntimeError("stop")

    monitor = Monitor()
    with pytest.raises(RuntimeError, match="stop"):
        train(monitor, keep)
    assert _get_current_dispatch_mode() is None
    train(Monitor(), steps=3)
    assert monitor.steps == last


def test_monitor_costs_less_than_1_percent_of_a_5_ms_step():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def seconds():
        """Return the least time of a step, of five times 200 steps."""
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(200):
                optimizer.step()
            times.append((time.perf_counter() - begin) / 200)
        return min(times)

    without = seconds()
    with Monitor():
        assert seconds() - without < 50e-6


def test_compiled_functions_are_still_compiled_after_a_look_for_leaks(growing):
    calls, kept = [], []

    def backend(module, _):
        def run(*inputs):
            calls.append(monitor.steps)
            return module.forward(*inputs)

        return run

    monitor = Monitor()
    train(monitor, kept.append, model=torch.compile(Model(), backend=backend))
    assert monitor.suspects
    assert calls[-1] == STEPS - 1


def test_sparse_gradients_are_no_obstacle_to_a_look(growing):
    embedding = nn.Embedding(1000, 4, sparse=True)
    trainer = Trainer()
    monitor = train(Monitor(), trainer.kept.append, model=embedding, batch=torch.arange(8))
    assert monitor.steps == STEPS
    assert monitor.suspects


def test_look_waits_for_a_mode_of_the_program(growing):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            return operator(*args, **(kwargs or {}))

    with Mode():
        assert not train(Monitor()).suspects
        assert isinstance(_get_current_dispatch_mode(), Mode)
    assert _get_current_dispatch_mode() is None


def test_look_leaves_no_local_variables_behind(growing):
    alive, kept = [], []

    def run():
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with EACH_STEP, Monitor() as monitor:
            for _ in range(STEPS):
                batch = torch.ones(WIDTH, INPUTS)
                alive.append(weakref.ref(batch))
                model(batch).mean().backward()
                optimizer.step()
                kept.append(batch.clone())
        assert monitor.suspects
        return [reference() is not None for reference in alive]

    # Python 3.10 keeps the values of a frame that were looked at last.
    assert sum(run()) <= 1 + (sys.version_info < (3, 11))


def test_monitor_can_be_used_again_and_counts_the_steps_of_the_first_optimizer():
    param = nn.Parameter(torch.ones(3))
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    monitor = Monitor()
    for steps, is_new in ((3, True), (6, True), (9, False)):
        if is_new:
            first = torch.optim.SGD([param])
        with EACH_STEP, monitor:
            for _ in range(3):
                param.sum().backward()
                first.step()
                other.step()
        assert monitor.steps == len(monitor.samples) == steps
    other.step()
    assert monitor.steps == 9
    assert str(monitor) == "9 steps are too few to tell whether memory grows"


def test_steps_that_follow_fast_are_enough_to_tell_whether_memory_grows():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    monitor = Monitor()
    for _ in range(25):
        monitor.end_step(optimizer)
    assert str(monitor) == "no growth over 25 steps"


def test_old_samples_are_thinned_out(monkeypatch):
    monkeypatch.setattr(monitor_module, "LEAST_SPACING", 0)
    monkeypatch.setattr(monitor_module, "KEPT", 8)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    monitor = Monitor()
    for _ in range(11):
        monitor.end_step(optimizer)
    assert [one.step for one in monitor.samples] == [1, 3, 5, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("sizes", "growth"),
    [
        (range(0, 40 * 2**20, 2**20), 2**20),
        ([5 * 2**20] * 40, None),
        (range(40 * 2**20, 0, -(2**20)), None),
        (range(0, 40 * 100, 100), None),  # too little
        ([2**22 * (i % 2) for i in range(40)], None),  # up and down
    ],
)
def test_growth_is_steady_and_large(sizes, growth):
    assert monitor_module.slope(tuple(range(40)), tuple(sizes)) == growth


@pytest.mark.parametrize("container", [[0.5] * 9, deque([1, 2]), {"loss": 0.5, "acc": 1}, {1, 2}])
def test_container_that_has_gained_few_numbers_is_no_suspect(container):
    assert is_small(container, 2)
    assert not is_small(container, 10**6)
    assert not is_small([bytearray(4), 1], 2)
    assert is_small([bytearray(4), 1, 2], 2)


def test_look_may_begin_inside_a_module_with_hooks():
    class Trainer(nn.Linear):
        def forward(self, batch):
            super().forward(batch).sum().backward()
            optimizer.step()

    trainer = Trainer(4, 4)
    trainer.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(trainer.parameters())
    look = []
    optimizer.register_step_post_hook(lambda *_: look.append(Look()) if not look else None)
    trainer(torch.ones(2, 4))
    assert look[0].stop()
