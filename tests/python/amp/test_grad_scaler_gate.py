"""`scaler.gate(scheduler)`: learning rates stand still when steps are skipped."""

import copy
import pickle
import types

import ampfuse
import ampfuse.checkpoint as checkpoint
import pytest
import torch
from ampfuse._host_copy import HostCopy
from ampfuse.amp import gate
from scaler_languages import step_by
from torch.nn import Parameter
from torch.optim.lr_scheduler import ExponentialLR

FACTORS = [1.0, float("inf"), 1.0, 1.0, float("inf"), float("inf"), 1.0]  # four steps are taken


class Training:
    """A parameter whose gradient is infinite in some steps."""

    def __init__(self, device, optimizer=ampfuse.AdamW, enabled=True):
        self.param = Parameter(torch.ones(2, device=device))
        self.optimizer = optimizer([self.param], lr=1.0)
        self.scaler = ampfuse.GradScaler(device.type, enabled=enabled)
        self.scheduler = self.scaler.gate(ExponentialLR(self.optimizer, 0.5))

    def run(self, factors):
        for factor in factors:
            self.optimizer.zero_grad()
            step_by(self.scaler, self.optimizer, self.param.sum() * factor)
            self.scheduler.step()

    def rate(self):
        return self.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "optimizer", [ampfuse.AdamW, ampfuse.SGD, torch.optim.SGD, torch.optim.AdamW]
)
def test_rate_follows_the_steps_that_were_taken(device, optimizer):
    training = Training(device, optimizer)
    training.run(FACTORS)
    training.scheduler.wait()
    assert training.rate() == 0.5**4
    assert training.scheduler.get_last_lr() == [0.5**4]
    assert training.scheduler.last_epoch == 4


def test_disabled_scaler_steps_the_scheduler_each_time(device):
    training = Training(device, enabled=False)
    training.run([1.0] * 3)
    assert training.rate() == 0.5**3


class LateCopy:
    """A copy to the host that arrives after three more were sent."""

    sent = 0

    def send(self, tensor):
        self.value, self.number = tensor.clone(), LateCopy.sent
        LateCopy.sent += 1

    def latest(self):
        return self.value if LateCopy.sent > self.number + 3 else None

    def wait(self):
        return self.value


def test_rate_follows_when_the_answer_has_arrived(monkeypatch):
    monkeypatch.setattr(gate, "HostCopy", LateCopy)
    training, rates = Training(torch.device("cpu")), []
    for factor in FACTORS:
        training.run([factor])
        rates.append(training.rate())
    assert rates == [1, 1, 1, 0.5, 0.5, 0.25, 0.125]
    training.scheduler.wait()
    assert training.rate() == 0.5**4


def test_host_waits_if_16_answers_are_missing(monkeypatch):
    monkeypatch.setattr(gate, "HostCopy", LateCopy)
    monkeypatch.setattr(LateCopy, "latest", lambda self: None)
    training = Training(torch.device("cpu"))
    training.run([1.0] * 16)
    assert training.rate() == 1
    training.run([1.0])
    assert training.rate() == 0.5


def test_state_is_that_after_all_steps(device, tmp_path, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(gate, "HostCopy", LateCopy)
    first, second = Training(device), Training(device)
    first.run(FACTORS)
    # The optimizer comes first, but its rate is that after all steps, too.
    checkpoint.save(tmp_path, step=7, optimizer=first.optimizer, scheduler=first.scheduler)
    second.run([1.0])
    checkpoint.load(tmp_path, scheduler=second.scheduler, optimizer=second.optimizer)
    assert second.scheduler.last_epoch == 4
    second.run([1.0])
    second.scheduler.wait()
    assert second.rate() == 0.5**5
    # The scheduler alone loads it, too.
    optimizer = torch.optim.SGD([Parameter(torch.ones(1))], lr=1.0)
    alone = ExponentialLR(optimizer, 0.5)
    checkpoint.load(tmp_path, scheduler=alone)
    assert alone.last_epoch == 4


def test_copy_follows_its_own_scaler(device, monkeypatch):
    """The optimizer is copied before the scheduler, which may not have followed the first step."""
    if device.type == "cpu":
        monkeypatch.setattr(gate, "HostCopy", LateCopy)
    first = Training(device)
    first.run([1.0])
    second = copy.deepcopy(first)
    second.run([float("inf")])
    second.scheduler.wait()
    first.run([1.0])
    first.scheduler.wait()
    assert (first.rate(), second.rate()) == (0.25, 0.5)
    first.run([1.0])
    pickled = pickle.loads(pickle.dumps(first.scheduler))
    pickled.wait()
    assert pickled.last_epoch == 3


def test_scheduler_of_epochs_is_refused():
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.ones(1)], lr=1))
    with pytest.raises(TypeError, match="ReduceLROnPlateau is stepped by epochs"):
        ampfuse.GradScaler("cpu").gate(scheduler)


@pytest.mark.needs_cuda
def test_host_does_not_wait(waits_are_errors):
    training = Training(torch.device("cuda"))
    training.run(FACTORS)
    waits_are_errors()
    training.run([1.0] * 4)


def test_scheduler_may_step_before_the_first_step_of_the_optimizer(device):
    training = Training(device)
    training.scheduler.step()
    training.run([1.0])
    training.scheduler.wait()
    assert training.rate() == 0.25


def test_copy_to_the_host_is_pickled_after_it_has_arrived():
    """An event of CUDA, like the lambda here, cannot be pickled."""
    sent, waits = HostCopy(), []
    sent.send(torch.tensor(True))
    sent._arrived = types.SimpleNamespace(synchronize=lambda: waits.append(1))
    assert pickle.loads(pickle.dumps(sent)).wait().item() is True
    assert waits == [1]


def test_copy_of_a_tensor_on_the_cpu_is_not_used_for_a_gpu(monkeypatch):
    """Without a GPU the copy fails later, where it makes an event."""
    copy_to_host = HostCopy()
    copy_to_host.send(torch.tensor(False))
    flag = types.SimpleNamespace(is_cuda=True)
    made = []
    monkeypatch.setattr(torch, "empty_like", lambda *_, **__: made.append(True))
    with pytest.raises((RuntimeError, AttributeError)):
        copy_to_host.send(flag)
    assert made == [True]
