"""`unscale`: whether a scaler or the step unscales gradients, and decides to skip."""

import copy
import pickle

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits
from torch import nn

SCALERS = {"ours": ampfuse.GradScaler, "torch's": torch.amp.GradScaler}
MAKERS = {"AdamW": ampfuse.AdamW, "Adam": ampfuse.Adam}


class Training:
    """A model that overflows in its third step."""

    def __init__(self, device, make=ampfuse.AdamW, scaler="ours", **options):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3).to(device)
        self.optimizer = make(self.model.parameters(), lr=0.1, **options)
        self.scaler = SCALERS[scaler](device.type, init_scale=1024.0)
        self.device, self.called = device, 0

    def count_calls(self, module="accelerate.optimizer"):
        """Wrap the step as code of a module may do, to find out whether it was called."""
        step = self.optimizer.step

        def counted(*args, **kwargs):
            self.called += 1
            return step(*args, **kwargs)

        counted.__module__ = module
        self.optimizer.step = counted

    def run(self, clip=False):
        for number in range(6):
            self.optimizer.zero_grad()
            loss = self.model(torch.full((2, 4), 0.5 + number, device=self.device)).square().sum()
            self.scaler.scale(loss * (float("inf") if number == 2 else 1)).backward()
            if clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return [param.detach() for param in self.model.parameters()]


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("clip", [False, True])
def test_weights_are_those_of_unscaling_in_the_step(device, make, scaler, clip):
    before = Training(device, MAKERS[make], scaler, unscale="before")
    in_step = Training(device, MAKERS[make], scaler, unscale="in_step")
    assert_same_bits(before.run(clip), in_step.run(clip))
    assert before.scaler.get_scale() == in_step.scaler.get_scale()


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize(("unscale", "calls"), [("auto", 5), ("before", 5), ("in_step", 6)])
def test_step_is_not_called_if_gradients_overflow(device, scaler, unscale, calls):
    training = Training(device, scaler=scaler, unscale=unscale)
    training.count_calls()
    training.run()
    assert training.called == calls


def test_gradients_are_unscaled_before_only_while_accelerate_wraps_the_step(device):
    training = Training(device)
    for _ in range(2):
        torch.optim.lr_scheduler.StepLR(training.optimizer, 2)
    assert training.optimizer._step_supports_amp_scaling
    step_of_scheduler = training.optimizer.step
    training.count_calls()
    assert not training.optimizer._step_supports_amp_scaling
    training.run()
    assert training.called == 5
    training.optimizer.step = step_of_scheduler
    assert training.optimizer._step_supports_amp_scaling


def test_step_that_other_code_wraps_unscales_by_itself(device):
    training = Training(device)
    training.count_calls(__name__)
    training.run()
    assert training.called == 6


def test_wrapped_step_of_a_process_group_unscales_by_itself(device):
    optimizer = Training(device).optimizer
    optimizer.process_group, optimizer.step = object(), lambda: None
    assert optimizer._step_supports_amp_scaling


@pytest.mark.parametrize("value", [True, False])
def test_programs_may_set_torchs_attribute(device, value):
    optimizer = Training(device).optimizer
    optimizer._step_supports_amp_scaling = value
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert one._step_supports_amp_scaling == value


@pytest.mark.parametrize("scaler", SCALERS)
def test_hooks_see_unscaled_gradients(device, scaler):
    training, seen = Training(device, scaler=scaler, unscale="before"), []
    hook = training.optimizer.register_step_pre_hook
    hook(lambda *_: seen.append(training.model.bias.grad.abs().max().item()))
    training.run()
    assert len(seen) == 5
    assert max(seen) < 100  # they are 1024 times as large while they are scaled


def test_frameworks_see_an_optimizer_that_does_not_unscale(device):
    for unscale, expected in (("before", False), ("in_step", True), ("auto", True)):
        optimizer = Training(device, unscale=unscale).optimizer
        for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert one._step_supports_amp_scaling == expected
        assert "unscale" not in optimizer.state_dict()["param_groups"][0]


def test_clipping_in_the_step_still_works(device):
    before = Training(device, unscale="before", max_grad_norm=0.5)
    in_step = Training(device, max_grad_norm=0.5)
    for one, other in zip(before.run(), in_step.run(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(before.optimizer.grad_norm, in_step.optimizer.grad_norm)


def test_process_group_is_refused():
    with pytest.raises(ValueError, match='unscale: expected "auto" or "in_step" with a process'):
        ampfuse.AdamW([nn.Parameter(torch.ones(1))], unscale="before", process_group=object())


def test_other_values_are_refused():
    with pytest.raises(ValueError, match='unscale: expected "auto", "in_step" or "before", g'):
        ampfuse.AdamW([nn.Parameter(torch.ones(1))], unscale=True)
