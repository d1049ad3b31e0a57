"""`ampfuse.memory.Monitor`: samples of memory, growth, and what holds the memory."""

import csv
import inspect
import json
import os
import sys
import time
import types
import weakref
from pathlib import Path

import pytest
import torch
from ampfuse.memory import Monitor, Suspect
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

WIDTH = 1024  # an activation takes 4 MiB, so that growth stands out from the noise of a process
STEPS = 60


class Model(nn.Module):
    """A model that may keep what it computes."""

    def __init__(self, keeps):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.keeps, self.cache = keeps, []

    def forward(self, batch):
        hidden = torch.tanh(self.first(batch))
        if self.keeps:
            self.cache.append(hidden.detach())
        return self.last(hidden)


LINE = next(
    number
    for number, line in enumerate(inspect.getsource(sys.modules[__name__]).splitlines(), 1)
    if "torch.tanh" in line
)


def train(monitor, after=lambda loss: None, *, keeps=False, steps=STEPS):
    model = Model(keeps)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.zeros(WIDTH, WIDTH)
    with monitor:
        for _ in range(steps):
            loss = model(batch).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            after(loss)
    return monitor


# Each program has a process of its own. In a used one, leaks fill memory that was freed before, and
# memory that the kernel has taken back is filled again.
LEAKS = """
import json, sys
sys.path.insert(0, {folder!r})
import torch
from ampfuse.memory import Monitor, Suspect
from test_monitor import train

kind, kept, total = sys.argv[1], [], [0]

def leak(loss):
    if kind == "list":
        kept.append(loss)
    elif kind == "sum":
        total[0] = total[0] + loss
    elif kind == "bytes":
        kept.extend(bytearray(b"x" * 2**20) for _ in range(4))

finds_leaks = sys.argv[2] == "True"
monitor = train(Monitor(find_leaks=finds_leaks), leak, keeps=kind == "module")
print(json.dumps([monitor.growth(), monitor.suspects, str(monitor)]))
"""


@pytest.fixture
def leaks(programs):
    programs.write("leaks.py", LEAKS.format(folder=str(Path(__file__).parent)))

    def run(kind, find_leaks=True):
        done = programs.run("leaks.py", kind, str(find_leaks))
        assert done.returncode == 0, done.stderr
        growth, suspects, text = json.loads(done.stdout)
        return growth, [Suspect(*one) for one in suspects], text

    return run


@pytest.mark.slow
def test_program_that_keeps_nothing_does_not_grow(leaks):
    growth, suspects, text = leaks("nothing")
    assert growth is None
    assert suspects == []
    assert text.splitlines()[1] == f"no growth over {STEPS} steps"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["list", "sum", "module"])
def test_line_whose_memory_stays_is_found(leaks, kind):
    growth, suspects, text = leaks(kind)
    assert growth > 3 * 2**20
    first = suspects[0]
    assert (first.what, first.bytes) == ("in Model", 4 * 2**20)
    assert first.where == f"test_monitor.py:{LINE}"
    assert "memory grows by " in text
    assert f"test_monitor.py:{LINE} in Model: 4,096 KiB a step" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [("list", "kept of leaks.py"), ("module", "Model.cache"), ("bytes", "kept of leaks.py")],
)
def test_container_that_grows_is_found(leaks, kind, name):
    growth, suspects, _ = leaks(kind)
    assert growth > 3 * 2**20
    assert any(one.where.startswith(name) and "list of " in one.what for one in suspects)


@pytest.mark.slow
def test_leaks_are_not_looked_for_on_request(leaks):
    growth, suspects, _ = leaks("list", find_leaks=False)
    assert growth > 3 * 2**20
    assert suspects == []


@pytest.mark.slow
def test_training_is_the_same_while_leaks_are_looked_for():
    torch.manual_seed(0)
    losses, others = [], []
    train(Monitor(), losses.append)
    torch.manual_seed(0)
    train(Monitor(find_leaks=False), others.append)
    assert [loss.item() for loss in losses] == [loss.item() for loss in others]


def test_samples_have_steps_and_phases():
    monitor = train(Monitor(0.001), lambda _: time.sleep(0.003))
    assert {one.phase for one in monitor.samples} >= {"forward", "backward"}
    assert [end.step for end in monitor.ends] == list(range(STEPS))
    assert all(one.host > 2**25 for one in monitor.samples)
    assert monitor.peak().host == max(one.host for one in monitor.samples)


def test_backward_and_hooks_are_restored_also_after_an_error():
    backward = torch.autograd.backward

    def fail(_):
        raise RuntimeError("stop")

    monitor = Monitor()
    with pytest.raises(RuntimeError, match="stop"):
        train(monitor, fail)
    assert torch.autograd.backward is backward
    train(Monitor(), steps=3)
    assert monitor.steps == 1


def test_error_while_leaks_are_looked_for_ends_the_look():
    losses = []

    def keep(loss):
        losses.append(loss)
        if len(losses) == 21:  # the look begins after step 20
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        train(Monitor(), keep)
    assert _get_current_dispatch_mode() is None


def test_only_the_first_optimizer_counts_steps():
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    first, second = (torch.optim.SGD([param], lr=0.1) for param in params)
    with Monitor() as monitor:
        for _ in range(4):
            params[0].sum().backward()
            first.step()
            second.step()
    assert monitor.steps == 4


def test_csv_and_picture_have_the_samples(tmp_path):
    monitor = train(Monitor(0.01))
    monitor.write_csv(tmp_path / "memory.csv")
    with (tmp_path / "memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(monitor.samples)
    assert int(rows[-1]["host"]) == monitor.samples[-1].host
    monitor.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 5_000


def test_writer_gets_a_value_after_each_step():
    class Writer:
        def __init__(self):
            self.values = []

        def add_scalar(self, name, value, step):
            self.values.append((name, value > 0, step))

    writer = Writer()
    train(Monitor(writer=writer), steps=3)
    assert writer.values == [("memory/host", True, step) for step in range(3)]


def test_memory_of_the_process_on_a_gpu_is_that_of_the_driver(monkeypatch):
    """A stand-in for nvidia-ml-py: no GPU is needed."""
    nvml = types.ModuleType("pynvml")
    process = types.SimpleNamespace
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda index: f"gpu {index}"
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: [
        process(pid=1, usedGpuMemory=7),
        process(pid=os.getpid(), usedGpuMemory=5),
    ]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 30 + device)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 40 + device)
    end = train(Monitor(), steps=2).ends[-1]
    assert (end.allocated, end.reserved, end.process) == (31, 41, 10)


def test_monitor_costs_less_than_1_percent_of_a_5_ms_step():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    with Monitor(interval=1000) as monitor:
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(200):
                monitor._before_step(optimizer)
                monitor._after_step(optimizer)
            seconds.append((time.perf_counter() - begin) / 200)
    assert min(seconds) < 50e-6


def test_compiled_functions_are_still_compiled_after_a_look_for_leaks():
    calls = []

    def backend(module, _):
        def run(*inputs):
            calls.append(len(losses))
            return module.forward(*inputs)

        return run

    weight = nn.Parameter(torch.ones(WIDTH))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    ones = torch.ones(WIDTH, WIDTH)
    compiled = torch.compile(lambda weight: (weight * ones).tanh(), backend=backend)
    losses = []
    with Monitor():
        for _ in range(STEPS):
            loss = compiled(weight).mean()
            loss.backward()
            optimizer.step()
            losses.append([loss, torch.ones(WIDTH, WIDTH)])
    assert calls[-1] == STEPS - 1


def test_sparse_gradients_are_no_obstacle():
    embedding = nn.Embedding(1000, 4, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    kept = []
    with Monitor() as monitor:
        for _ in range(STEPS):
            embedding(torch.arange(8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(torch.ones(WIDTH, WIDTH))
    assert monitor.steps == STEPS


def test_look_waits_for_a_mode_of_the_program():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            return operator(*args, **(kwargs or {}))

    kept = []
    with Mode():
        train(Monitor(), lambda _: kept.append(torch.ones(WIDTH, WIDTH)))
        assert isinstance(_get_current_dispatch_mode(), Mode)
    assert _get_current_dispatch_mode() is None


def test_look_leaves_no_local_variables_behind():
    alive = []

    def run():
        kept = []
        model = Model(keeps=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with Monitor():
            for _ in range(STEPS):
                large = torch.ones(WIDTH, WIDTH)
                alive.append(weakref.ref(large))
                model(large).mean().backward()
                optimizer.step()
                kept.append(large.clone())
        return [reference() is not None for reference in alive]

    assert sum(run()) <= 1


def test_monitor_can_be_used_twice_and_counts_the_next_optimizer():
    monitor = Monitor(0.001)
    train(monitor, steps=3)
    train(monitor, lambda _: time.sleep(0.003), steps=3)
    assert monitor.steps == 6
    assert "6 steps are too few to tell whether memory grows" in str(monitor)
    monitor.steps, monitor.ends = 18, monitor.ends * 3
    assert "18 steps are too few to tell whether memory grows" in str(monitor)
    assert str(Monitor()) == "no samples yet"


def test_monitor_that_is_entered_again_goes_on():
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param])
    monitor = Monitor(interval=10, find_leaks=False)
    for _ in range(2):
        with monitor:
            before = len(monitor.ends)
            for _ in range(3):
                param.grad = torch.ones(2)
                optimizer.step()
                time.sleep(0.06)
            assert len(monitor.ends) > before
