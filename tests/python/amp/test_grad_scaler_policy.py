"""Features that torch's scaler lacks, in both languages: limits, hysteresis, history, reports."""

import gc
import math
import weakref

import ampfuse
import pytest
import torch
from scale_reference import REFERENCES, Policy
from scaler_languages import EVERY_LANGUAGE, LANGUAGES
from torch.nn import Parameter


class Run:
    """A scaler whose steps overflow when asked to."""

    def __init__(self, language, device, init_scale=64.0, **options):
        self.model = torch.nn.Linear(3, 2, device=device)
        self.optimizer = language.adamw(list(self.model.parameters()), max_grad_norm=1.0)
        self.scaler = language.scaler(device, init_scale, growth_interval=3, **options)

    def step(self, overflow=False):
        """Run one iteration and return the new scale."""
        self.optimizer.zero_grad()
        inputs = torch.ones(1, 3, device=self.model.weight.device)
        self.scaler.scale(self.model(inputs).sum()).backward()
        if overflow:
            self.model.weight.grad[1, 1] = math.nan
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


@EVERY_LANGUAGE
@pytest.mark.parametrize("refill", REFERENCES)
def test_scale_moves_as_in_the_library_that_has_the_same_refill_policy(language, device, refill):
    flags = [bool(int(c)) for c in "0011010001110000101"]
    run = Run(language, device, hysteresis=2, hysteresis_refill=refill)

    scales = [run.step(flag) for flag in flags]

    for name, reference in REFERENCES[refill]:
        assert scales == reference(64.0, flags, Policy(hysteresis=2)), name


@EVERY_LANGUAGE
def test_scale_respects_min_and_max_and_is_constant_if_not_dynamic(language, device):
    limited = Run(language, device, 8.0, min_scale=3.0, max_scale=20.0)
    fixed = Run(language, device, 8.0, dynamic=False)

    assert [limited.step(True) for _ in range(3)] == [4, 3, 3]
    assert [limited.step() for _ in range(9)][2::3] == [6, 12, 20]
    assert [fixed.step(flag) for flag in (1, 0, 0, 0, 0)] == [8] * 5


@EVERY_LANGUAGE
@pytest.mark.parametrize("unscale", [False, True])
def test_history_has_scales_skips_and_unscaled_norms(language, device, unscale):
    run = Run(language, device, history=3)
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


@EVERY_LANGUAGE
def test_history_is_empty_by_default_and_before_the_first_update(language, device):
    run = Run(language, device)
    run.step()

    assert run.scaler.history() == []
    assert Run(language, device, history=5).scaler.history() == []


@EVERY_LANGUAGE
def test_loading_a_state_clears_the_history(language, device):
    run = Run(language, device, history=4)
    for _ in range(6):
        run.step()
    state = run.scaler.state_dict()
    fresh = Run(language, device, history=4)
    fresh.step()

    for again in (run, fresh):
        again.scaler.load_state_dict(state)
        assert again.scaler.history() == []
        again.step(overflow=True)
        assert [record.skipped for record in again.scaler.history()] == [True]


@EVERY_LANGUAGE
def test_history_norm_covers_all_optimizers(language, device):
    params = [Parameter(torch.ones(1, device=device)) for _ in range(2)]
    optimizers = [language.sgd(params[:1], lr=0.1), language.adamw(params[1:])]
    scaler = language.scaler(device, 8.0, history=1)
    scaler.scale(3 * params[0] + 4 * params[1]).sum().backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()

    assert scaler.history()[0].norm == pytest.approx(5.0)


@EVERY_LANGUAGE
def test_overflow_report_names_parameters_of_the_last_skipped_step(language, device):
    run = Run(language, device)
    assert run.scaler.overflow_report(run.model) == []

    run.step(overflow=True)
    run.step()

    assert run.scaler.overflow_report(run.model) == ["weight"]
    for _ in range(16):
        run.step()
    assert run.scaler.overflow_report(run.model) == []


@EVERY_LANGUAGE
def test_overflow_report_works_for_an_optimizer_of_torch(language, device):
    run = Run(language, device)
    run.optimizer = language.sgd(list(run.model.parameters()), lr=0.1)

    run.step(overflow=True)

    assert run.scaler.overflow_report(run.model) == ["weight"]


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


@EVERY_LANGUAGE
def test_scale_tensor_is_updated_in_place(language, device):
    run = Run(language, device)
    scale = run.scaler.scale_tensor()

    run.step(True)

    assert scale.item() == 32.0
    assert run.scaler.scale_tensor() is scale


NAN, INF = math.nan, math.inf
SENSELESS = [
    ({"init_scale": 0.0}, ValueError, "init_scale: expected a finite float above 0, got 0"),
    ({"init_scale": -1.0}, ValueError, "init_scale: expected a finite float above 0, got -1"),
    ({"init_scale": NAN}, ValueError, "init_scale: expected a finite float above 0, got nan"),
    ({"init_scale": INF}, ValueError, "init_scale: expected a finite float above 0, got inf"),
    ({"init_scale": 1e-60}, ValueError, "init_scale: expected a finite float above 0, got 1e-60"),
    ({"init_scale": 1e39}, ValueError, "init_scale: expected a finite float above 0, got 1e"),
    ({"min_scale": 1e6}, ValueError, "init_scale: expected at least min_scale=1"),
    ({"max_scale": 1.0}, ValueError, "init_scale: expected at most max_scale=1"),
    ({"growth_factor": 1.0}, AssertionError, "growth factor must be > 1.0"),
    ({"growth_factor": NAN}, ValueError, "growth_factor: expected a finite number, at least 1"),
    (
        {"growth_factor": INF},
        ValueError,
        "growth_factor: expected a finite number, at least 1, got inf",
    ),
    ({"backoff_factor": 1.0}, AssertionError, "backoff factor must be < 1.0"),
    ({"backoff_factor": NAN}, ValueError, "backoff_factor: expected more than 0 and at most 1"),
    ({"backoff_factor": 0.0}, ValueError, "backoff_factor: expected more than 0 and at most 1"),
    ({"backoff_factor": -0.5}, ValueError, "backoff_factor: expected more than 0 and at most 1"),
    ({"growth_interval": 0}, ValueError, "growth_interval: expected at least 1, got 0"),
    ({"growth_interval": -3}, ValueError, "growth_interval: expected at least 1, got -3"),
    ({"min_scale": 0.0}, ValueError, "min_scale: expected None or more than 0, got 0"),
    ({"max_scale": -1.0}, ValueError, "max_scale: expected None or more than 0, got -1"),
    ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, "max_scale: expected at least min_scale"),
    ({"min_scale": NAN}, ValueError, "min_scale: expected None or more than 0, got nan"),
    ({"hysteresis": 0}, ValueError, "hysteresis: expected at least 1, got 0"),
    ({"hysteresis_refill": "x"}, ValueError, "hysteresis_refill: expected .*, got '?x"),
    ({"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips: expected .*at least 1"),
    ({"history": -1}, ValueError, "history: expected at least 0, got -1"),
]


@EVERY_LANGUAGE
@pytest.mark.parametrize(
    ("options", "error", "words"), SENSELESS, ids=[str(o) for o, *_ in SENSELESS]
)
def test_invalid_options_are_refused(language, device, options, error, words):
    error = language.misuse if error is AssertionError else error
    with pytest.raises(error, match=f"(?i){words}"):
        language.scaler(device, **options)


WRONG_TYPES = [
    ({"init_scale": True}, "init_scale: expected a number, got bool"),
    ({"init_scale": "big"}, "init_scale: expected a number, got str"),
    ({"backoff_factor": False}, "backoff_factor: expected a number, got bool"),
    ({"growth_interval": True}, "growth_interval: expected an int, got bool"),
    ({"growth_interval": 1.5}, "growth_interval: expected an int, got float"),
    ({"growth_interval": 2000.0}, "growth_interval: expected an int, got float"),
    ({"min_scale": "1"}, "min_scale: expected a number, got str"),
    ({"hysteresis": True}, "hysteresis: expected an int, got bool"),
    ({"hysteresis": 1.5}, "hysteresis: expected an int, got float"),
    ({"dynamic": 2}, "dynamic: expected a bool, got int 2"),
    ({"dynamic": "no"}, "dynamic: expected a bool, got str 'no'"),
    ({"max_consecutive_skips": 1.5}, "max_consecutive_skips: expected an int, got float"),
    ({"history": True}, "history: expected an int, got bool"),
]


@pytest.mark.parametrize(("options", "words"), WRONG_TYPES, ids=[str(o) for o, _ in WRONG_TYPES])
def test_options_of_a_wrong_type_are_refused(device, options, words):
    with pytest.raises(TypeError, match=words):
        ampfuse.GradScaler(device.type, **options)


def test_setters_refuse_invalid_values(device):
    scaler = ampfuse.GradScaler(device.type)
    before = scaler.state_dict()

    with pytest.raises(
        ValueError, match=r"growth_factor: expected a finite number, at least 1, got 0\.5"
    ):
        scaler.set_growth_factor(0.5)
    with pytest.raises(
        ValueError, match="backoff_factor: expected more than 0 and at most 1, got 2"
    ):
        scaler.set_backoff_factor(2)
    with pytest.raises(ValueError, match="backoff_factor: expected more than 0 and at most 1"):
        scaler.set_backoff_factor(0.0)
    with pytest.raises(TypeError, match="growth_interval: expected an int, got float"):
        scaler.set_growth_interval(7.0)
    with pytest.raises(ValueError, match="growth_interval: expected at least 1, got 0"):
        scaler.set_growth_interval(0)

    assert scaler.state_dict() == before


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
@pytest.mark.parametrize("new_scale", [0.0, -1.0, NAN, INF, 1e39])
def test_update_refuses_an_invalid_new_scale(language, device, new_scale):
    run = Run(language, device)
    run.scaler.scale(torch.ones((), device=device))

    with pytest.raises(ValueError, match="new_scale: expected a finite float above 0"):
        run.scaler.update(new_scale)

    assert run.scaler.get_scale() == 64.0


def test_numpy_and_tensor_options_are_saved_as_python_numbers(device):
    """torch.load(weights_only=True) accepts only plain Python numbers."""
    np = pytest.importorskip("numpy")
    given = {
        "min_scale": np.float32(1),
        "max_scale": torch.tensor(1e6),
        "hysteresis": np.int64(2),
        "dynamic": np.bool_(True),
    }

    state = ampfuse.GradScaler(device.type, **given).state_dict()

    assert [type(state[name]) for name in given] == [float, float, int, bool]
    assert type(state["_hysteresis_tracker"]) is int


def test_a_disabled_scaler_has_max_consecutive_skips_and_process_group(device):
    scaler = ampfuse.GradScaler(device.type, enabled=False, max_consecutive_skips=3)

    assert (scaler.max_consecutive_skips, scaler.process_group) == (3, None)


def test_options_that_torch_lacks_are_keyword_only():
    with pytest.raises(TypeError):
        ampfuse.GradScaler("cpu", 1.0, 2.0, 0.5, 2000, True, 1.0)


def test_torchs_positional_arguments_have_torchs_meaning(device):
    scaler = ampfuse.GradScaler(device.type, 4.0, 3.0, 0.25, 7, True)

    assert isinstance(scaler, torch.amp.GradScaler)
    factors = (scaler.get_growth_factor(), scaler.get_backoff_factor())
    assert (scaler.get_scale(), *factors, scaler.get_growth_interval()) == (4.0, 3.0, 0.25, 7)
    with pytest.raises(AssertionError, match=r"growth factor must be > 1\.0"):
        ampfuse.GradScaler(device.type, growth_factor=1.0)
