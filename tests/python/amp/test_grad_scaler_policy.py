"""Features that torch's scaler lacks, in both languages: limits, hysteresis, history, reports."""

import gc
import weakref
from math import inf, isnan, nan

import ampfuse
import pytest
import torch
from scale_reference import REFERENCES, Policy
from scaler_languages import EVERY_LANGUAGE, LANGUAGES, step_by
from torch.nn import Parameter
from torch.optim import SGD


class Run:
    """A scaler whose steps overflow when asked to."""

    def __init__(self, language, device, init_scale=64.0, optimizer="adamw", **options):
        self.model = torch.nn.Linear(3, 2, device=device)
        limit = {"max_grad_norm": 1.0} if optimizer == "adamw" else {}
        make = getattr(language, optimizer)
        self.optimizer = make(list(self.model.parameters()), lr=1e-3, **limit)
        self.scaler = language.scaler(device, init_scale, growth_interval=3, **options)

    def step(self, overflow=False, unscale=False):
        """Run one iteration and return the new scale."""
        self.optimizer.zero_grad()
        inputs = torch.ones(1, 3, device=self.model.weight.device)
        self.scaler.scale(self.model(inputs).sum()).backward()
        if overflow:
            self.model.weight.grad[1, 1] = inf
        step_by(self.scaler, self.optimizer, unscale=unscale)
        return self.scaler.get_scale()


# --- the scale ----------------------------------------------------------------------------------


@EVERY_LANGUAGE
@pytest.mark.parametrize("refill", REFERENCES)
def test_scale_moves_as_in_the_library_that_has_the_same_refill_policy(language, device, refill):
    flags = [bool(int(c)) for c in "0011010001110000101"]
    run = Run(language, device, hysteresis=2, hysteresis_refill=refill)
    scale = run.scaler.scale_tensor()
    scales = [run.step(flag) for flag in flags]
    for name, reference in REFERENCES[refill]:
        assert scales == reference(64.0, flags, Policy(hysteresis=2)), name
    assert run.scaler.scale_tensor() is scale  # it was updated in place
    assert scale.item() == scales[-1]


@EVERY_LANGUAGE
def test_scale_respects_min_and_max_and_is_constant_if_not_dynamic(language, device):
    limited = Run(language, device, 8.0, min_scale=3.0, max_scale=20.0)
    fixed = Run(language, device, 8.0, dynamic=False)
    assert [limited.step(True) for _ in range(3)] == [4, 3, 3]
    assert [limited.step() for _ in range(9)][2::3] == [6, 12, 20]
    assert [fixed.step(flag) for flag in (1, 0, 0, 0, 0)] == [8] * 5


def test_factors_of_one_keep_the_scale_constant(device):
    """torch's constructor refuses factors of 1, but its setters and states accept them."""
    frozen = Run(LANGUAGES["Python"], device)
    frozen.scaler.set_growth_factor(1.0)
    frozen.scaler.set_backoff_factor(1.0)
    other = Run(LANGUAGES["C++"], device)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(frozen.scaler.state_dict())
    other.scaler.load_state_dict(theirs.state_dict())
    for run in (frozen, other):
        assert [run.step(overflow) for overflow in (0, 0, 0, 1, 1, 0)] == [64.0] * 6


@EVERY_LANGUAGE
def test_too_many_consecutive_skips_raise_scale_collapse_error(language, device):
    run = Run(language, device, max_consecutive_skips=3)

    run.step(True)
    run.step(True)
    run.step()

    def go_on():
        for _ in range(3 if device.type == "cpu" else 100):  # a GPU may report some steps later
            run.step(True)

    with pytest.raises(ampfuse.ScaleCollapseError, match=r"\d+ steps in a row overflowed"):
        go_on()
    assert run.scaler.state_dict()["_consecutive_skips"] >= 3


@EVERY_LANGUAGE
def test_skipped_steps_are_reported_on_the_device_and_on_the_host(language, device):
    run = Run(language, device)
    assert run.scaler.was_skipped() is False
    assert run.scaler.step_skipped.item() is False
    for flag in (True, False, True, True, False):
        run.step(flag)
        assert run.scaler.step_skipped.dtype == torch.bool
        assert run.scaler.step_skipped.item() is flag
        assert run.scaler.was_skipped() is flag


# --- the history --------------------------------------------------------------------------------


@EVERY_LANGUAGE
@pytest.mark.parametrize("unscale", [False, True])
def test_history_has_scales_skips_and_unscaled_norms(language, device, unscale):
    run = Run(language, device, history=3)
    assert run.scaler.history() == []
    for flag in (False, True, False, False):
        run.step(flag, unscale)
    records = run.scaler.history()
    assert [record.scale for record in records] == [64, 32, 32]
    assert [record.skipped for record in records] == [True, False, False]
    assert records[0].norm == inf
    assert records[1].norm == pytest.approx(8**0.5, rel=1e-6)
    assert isinstance(records[1], ampfuse.ScaleRecord)


@EVERY_LANGUAGE
def test_history_is_empty_by_default_and_after_a_state_is_loaded(language, device):
    run = Run(language, device)
    run.step()
    assert run.scaler.history() == []

    run, fresh = (Run(language, device, history=4) for _ in range(2))
    for _ in range(6):
        run.step()
    state = run.scaler.state_dict()
    fresh.step()

    for again in (run, fresh):
        again.scaler.load_state_dict(state)
        assert again.scaler.history() == []
        again.step(overflow=True)
        assert [record.skipped for record in again.scaler.history()] == [True]


@EVERY_LANGUAGE
def test_history_norm_covers_all_optimizers_that_stepped(language, device):
    params = [Parameter(torch.ones(1, device=device)) for _ in range(2)]
    optimizers = [language.sgd(params[:1], lr=0.1), language.adamw(params[1:])]
    scaler = language.scaler(device, 8.0, history=2)
    for stepping in (optimizers, optimizers[:1]):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(3 * params[0] + 4 * params[1]).sum().backward()
        for optimizer in stepping:
            scaler.step(optimizer)
        scaler.update()
    assert [record.norm for record in scaler.history()] == pytest.approx([5.0, 3.0])


@EVERY_LANGUAGE
def test_gradients_are_clipped_if_their_scaled_norm_overflows_float32(language, device):
    """No scaled element overflows float32, but the norm of the scaled gradients would."""
    outcomes = []
    for scale in (1.0, 2.0**120):
        param = Parameter(torch.zeros(1_000_000, device=device))
        optimizer = language.adamw([param], lr=0.5, max_grad_norm=1000.0)
        scaler = language.scaler(device, scale, history=1)
        step_by(scaler, optimizer, (param * 5.0).sum())
        assert optimizer.grad_norm.item() == pytest.approx(5000.0)
        assert scaler.history()[0].norm == pytest.approx(5000.0)
        outcomes.append(param.detach())
    torch.testing.assert_close(*outcomes)
    assert (outcomes[0] != 0).all()


@EVERY_LANGUAGE
def test_history_norm_of_sparse_gradients_is_nan(language, device):
    indices = torch.tensor([[0, 0]], device=device)
    param = Parameter(torch.zeros(2, device=device))
    param.grad = torch.sparse_coo_tensor(indices, torch.tensor([2.0, 2.0], device=device), (2,))
    scaler = language.scaler(device, 1.0, history=1)
    scaler.scale(torch.ones((), device=device))
    step_by(scaler, language.sgd([param], lr=0.1))
    assert isnan(scaler.history()[0].norm)


# --- overflow reports ---------------------------------------------------------------------------


@EVERY_LANGUAGE
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_overflow_report_names_parameters_of_the_last_skipped_step(language, device, optimizer):
    run = Run(language, device, optimizer=optimizer)
    assert run.scaler.overflow_report(run.model) == []
    run.step(overflow=True)
    for _ in range(16):  # as many steps are searched
        assert run.scaler.overflow_report(run.model) == ["weight"]
        run.step()
    assert run.scaler.overflow_report(run.model) == []


@EVERY_LANGUAGE
def test_overflow_report_omits_large_finite_gradients(language, device):
    names = ("finite", "nan")
    network = torch.nn.ParameterDict({name: torch.zeros(4, device=device) for name in names})
    scaler = language.scaler(device, 1.0)
    scaler.scale(torch.ones((), device=device))
    for name, value in zip(names, (3e38, nan), strict=True):
        network[name].grad = torch.full((4,), value, device=device)
    scaler.step(language.sgd(list(network.parameters()), lr=0.1))
    assert scaler.overflow_report(network) == ["nan"]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dupl")
def test_overflow_report_names_a_parameter_that_is_listed_twice(device):
    once, twice = (Parameter(torch.ones(2, device=device)) for _ in range(2))
    model = torch.nn.ParameterDict({"once": once, "twice": twice})
    optimizers = [SGD([once], lr=0.1), SGD([twice, twice], lr=0.1)]
    scaler = ampfuse.GradScaler(device.type, init_scale=4.0, history=3)
    for factors in ((inf, 1.0), (1.0, inf)):
        for param, factor, optimizer in zip((once, twice), factors, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale((param * factor).sum()).backward()
            scaler.step(optimizer)
        reports = scaler.overflow_report(model)
        scaler.update()
    assert reports == ["twice"]
    assert all(isnan(record.norm) for record in scaler.history())


def test_overflow_report_checks_each_gradient_that_shares_memory(device):
    memory = torch.tensor([1.0, inf], device=device)
    part, whole = (Parameter(torch.ones(size, device=device)) for size in (1, 2))
    model = torch.nn.ParameterDict({"part": part, "whole": whole})
    part.grad, whole.grad = memory[:1], memory
    scaler = ampfuse.GradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    scaler.step(SGD(model.parameters(), lr=0.1))
    assert scaler.overflow_report(model) == ["whole"]


@EVERY_LANGUAGE
def test_scaler_does_not_keep_a_deleted_model_alive(language, device):
    run = Run(language, device)
    run.step(overflow=True)
    ghost = weakref.ref(run.model.weight)
    model = torch.nn.Linear(3, 2, device=device)
    run.model, run.optimizer = model, None
    gc.collect()
    assert ghost() is None
    assert run.scaler.overflow_report(model) == []


@pytest.mark.parametrize("clips", [False, True])
def test_a_model_may_be_cast_by_swapping_its_parameters_after_a_step(device, clips):
    """Torch casts and moves DTensors so. It refuses tensors to which there are weak references."""
    network = torch.nn.Linear(3, 2).to(device)
    scaler, optimizer = ampfuse.GradScaler(device.type, 1.0), SGD(network.parameters(), lr=0.1)
    scaler.scale(network(torch.full((2, 3), inf, device=device)).sum()).backward()
    if clips:
        scaler.clip_grad_norm_(optimizer, 1.0)
    step_by(scaler, optimizer)

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        network.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)

    assert network.weight.dtype == torch.float64
    assert scaler.overflow_report(network) == ["weight"]
