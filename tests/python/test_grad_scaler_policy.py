"""What ampfuse.GradScaler has beyond torch's: limits, hysteresis, skips, history, reports."""

import math

import ampfuse
import pytest
import torch
from scale_reference import REFERENCES, Policy
from torch.nn import Parameter


class Run:
    """A scaler whose steps overflow when asked to."""

    def __init__(self, device, init_scale=64.0, **options):
        self.model = torch.nn.Linear(3, 2, device=device)
        self.optimizer = ampfuse.AdamW(self.model.parameters(), max_grad_norm=1.0)
        self.scaler = ampfuse.GradScaler(device.type, init_scale, growth_interval=3, **options)

    def step(self, overflow=False):
        """The scale afterwards."""
        self.optimizer.zero_grad()
        inputs = torch.ones(1, 3, device=self.model.weight.device)
        self.scaler.scale(self.model(inputs).sum()).backward()
        if overflow:
            self.model.weight.grad[1, 1] = math.nan
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


@pytest.mark.parametrize("refill", REFERENCES)
def test_scale_moves_as_in_the_library_that_has_the_policy(device, refill):
    flags = [bool(int(c)) for c in "0011010001110000101"]
    run = Run(device, hysteresis=2, hysteresis_refill=refill)

    scales = [run.step(flag) for flag in flags]

    for name, reference in REFERENCES[refill]:
        assert scales == reference(64.0, flags, Policy(hysteresis=2)), name


def test_limits_and_fixed_scales(device):
    limited = Run(device, 8.0, min_scale=3.0, max_scale=20.0)
    fixed = Run(device, 8.0, dynamic=False)

    assert [limited.step(True) for _ in range(3)] == [4, 3, 3]
    assert [limited.step() for _ in range(9)][2::3] == [6, 12, 20]
    assert [fixed.step(flag) for flag in (1, 0, 0, 0, 0)] == [8] * 5


@pytest.mark.parametrize("unscale", [False, True])
def test_history_has_scale_skips_and_unscaled_norms(device, unscale):
    run = Run(device, history=3)
    for flag in (False, True, False, False):
        run.optimizer.zero_grad()
        run.scaler.scale(run.model(torch.ones(1, 3, device=device)).sum()).backward()
        if flag:
            run.model.bias.grad[0] = math.inf
        if unscale:
            run.scaler.unscale_(run.optimizer)
        run.scaler.step(run.optimizer)
        run.scaler.update()

    records = run.scaler.history()

    assert [record.scale for record in records] == [64, 32, 32]
    assert [record.skipped for record in records] == [True, False, False]
    assert records[0].norm == math.inf
    assert records[1].norm == pytest.approx(math.sqrt(8), rel=1e-6)
    assert isinstance(records[1], ampfuse.ScaleRecord)


def test_history_is_empty_unless_asked_for(device):
    run = Run(device)
    run.step()

    assert run.scaler.history() == []
    assert Run(device, history=5).scaler.history() == []


def test_norms_of_several_optimizers_are_one_in_the_history(device):
    params = [Parameter(torch.ones(1, device=device)) for _ in range(2)]
    optimizers = [torch.optim.SGD(params[:1], lr=0.1), ampfuse.AdamW(params[1:])]
    scaler = ampfuse.GradScaler(device.type, 8.0, history=1)
    scaler.scale(3 * params[0] + 4 * params[1]).sum().backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()

    assert scaler.history()[0].norm == pytest.approx(5.0)


def test_report_names_the_parameters_of_the_last_skipped_step(device):
    run = Run(device)
    assert run.scaler.overflow_report(run.model) == []

    run.step(overflow=True)
    run.step()

    assert run.scaler.overflow_report(run.model) == ["weight"]
    for _ in range(16):
        run.step()
    assert run.scaler.overflow_report(run.model) == []


def test_report_of_an_optimizer_that_is_not_ours(device):
    run = Run(device)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)

    run.step(overflow=True)

    assert run.scaler.overflow_report(run.model) == ["weight"]


def test_too_many_skips_in_a_row_are_an_error_that_says_so(device):
    run = Run(device, max_consecutive_skips=3)

    run.step(True)
    run.step(True)
    run.step()

    def go_on():
        for _ in range(3 if device.type == "cpu" else 100):  # a GPU may tell later
            run.step(True)

    with pytest.raises(ampfuse.ScaleCollapseError, match=r"\d+ steps in a row were skipped"):
        go_on()
    assert run.scaler.state_dict()["_consecutive_skips"] >= 3


def test_skipped_steps_are_told_on_the_device_and_on_the_host(device):
    run = Run(device)
    assert run.scaler.was_skipped() is False
    assert run.scaler.step_skipped.item() is False

    for flag in (True, False, True, True, False):
        run.step(flag)
        assert run.scaler.step_skipped.dtype == torch.bool
        assert run.scaler.step_skipped.item() is flag
        assert run.scaler.was_skipped() is flag


def test_scale_tensor_is_the_live_one(device):
    run = Run(device)
    scale = run.scaler.scale_tensor()

    run.step(True)

    assert scale.item() == 32.0
    assert run.scaler.scale_tensor() is scale


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"min_scale": 0.0}, ValueError, "min_scale: expected None or more than 0, got 0.0"),
        ({"max_scale": -1.0}, ValueError, "max_scale: expected None or more than 0, got -1.0"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, "max_scale: expected at least"),
        ({"min_scale": math.nan}, ValueError, "min_scale"),
        ({"hysteresis": 0}, ValueError, "hysteresis: expected at least 1, got 0"),
        ({"hysteresis": True}, TypeError, "hysteresis: expected an int, got bool"),
        ({"hysteresis": 1.5}, TypeError, "hysteresis: expected an int, got float"),
        ({"hysteresis_refill": "x"}, ValueError, "hysteresis_refill: expected one of"),
        ({"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips"),
        ({"history": -1}, ValueError, "history: expected at least 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(device, options, error, words):
    with pytest.raises(error, match=words):
        ampfuse.GradScaler(device.type, **options)


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        ampfuse.GradScaler("cpu", 1.0, 2.0, 0.5, 2000, True, 1.0)


def test_torchs_arguments_are_torchs(device):
    scaler = ampfuse.GradScaler(device.type, 4.0, 3.0, 0.25, 7, True)

    assert isinstance(scaler, torch.amp.GradScaler)
    factors = (scaler.get_growth_factor(), scaler.get_backoff_factor())
    assert (scaler.get_scale(), *factors, scaler.get_growth_interval()) == (4.0, 3.0, 0.25, 7)
    with pytest.raises(AssertionError, match=r"growth factor must be > 1\.0"):
        ampfuse.GradScaler(device.type, growth_factor=1.0)
