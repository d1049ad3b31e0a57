"""`skip_outliers`: steps whose norm is an outlier are skipped, in both languages."""

import copy
import math

import ampfuse
import ampfuse.checkpoint as checkpoint
import pytest
import torch
from scaler_languages import EVERY_LANGUAGE, LANGUAGES, step_by
from torch.nn import Parameter


class Training:
    """A parameter whose gradients have given norms."""

    def __init__(self, language, device, optimizer="adamw", **options):
        self.param = Parameter(torch.ones(4, device=device))
        self.optimizer = getattr(language, optimizer)([self.param], lr=0.01)
        options = {"skip_outliers": 6.0, "history": 256, "growth_interval": 10**6} | options
        self.scaler = language.scaler(device, 8.0, **options)

    def step(self, norm, unscale=False):
        """Return True if the step was skipped."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.param.sum() * (norm / 2)).backward()
        if unscale:
            self.scaler.unscale_(self.optimizer)
        before = self.param.detach().clone()
        self.scaler.step(self.optimizer)
        skipped = self.scaler.was_skipped()
        self.scaler.update()
        assert torch.equal(self.param, before) == skipped
        return skipped

    def warm_up(self, steps=64):
        for number in range(steps):
            assert not self.step(1.0 + 0.25 * (number % 4))


@EVERY_LANGUAGE
@pytest.mark.parametrize(
    ("optimizer", "unscale"), [("adamw", False), ("adamw", True), ("sgd", False)]
)
def test_outlier_is_skipped_and_the_scale_stays(language, device, optimizer, unscale):
    training = Training(language, device, optimizer)
    training.warm_up()
    assert training.step(100.0, unscale)
    assert not training.step(1.5, unscale)
    assert training.scaler.get_scale() == 8
    records = training.scaler.history()
    assert [record.skipped for record in records] == [False] * 64 + [True, False]
    assert records[64].norm == pytest.approx(100.0)
    state = training.scaler.state_dict()
    assert state["_norms"] == 66
    assert state["_growth_tracker"] == 66
    assert state["_consecutive_skips"] == 0


@EVERY_LANGUAGE
def test_first_64_steps_and_scalers_without_the_option_skip_no_outlier(language, device):
    training = Training(language, device)
    training.warm_up(63)
    assert not training.step(1000.0)
    training = Training(language, device, skip_outliers=None)
    training.warm_up()
    assert not training.step(1000.0)
    assert training.scaler.state_dict()["_norms"] == 0


@EVERY_LANGUAGE
def test_overflow_backs_off_and_leaves_the_statistics(language, device):
    training = Training(language, device)
    training.warm_up()
    before = training.scaler.state_dict()
    assert training.step(math.inf)
    after = training.scaler.state_dict()
    assert after["scale"] == 4
    names = ("_norms", "_norm_mean", "_norm_variance", "_norm_limit")
    assert [after[name] for name in names] == [before[name] for name in names]


@EVERY_LANGUAGE
def test_state_carries_the_statistics(language, device):
    first = Training(language, device)
    first.warm_up()
    state = first.scaler.state_dict()
    second = Training(language, device, skip_outliers=3.0)
    second.scaler.load_state_dict(state)
    assert second.scaler.state_dict() == state
    assert second.step(100.0)
    # torch's states lack them.
    second.scaler.load_state_dict({name: state[name] for name in list(state)[:5]})
    assert second.scaler.state_dict()["_norms"] == 65


def test_languages_have_the_same_statistics(device):
    states = []
    for language in LANGUAGES.values():
        training = Training(language, device)
        training.warm_up(100)
        training.step(40.0)
        states.append(training.scaler.state_dict())
    assert states[0] == states[1]


@EVERY_LANGUAGE
def test_second_optimizer_between_two_updates_is_refused(language, device):
    training = Training(language, device)
    other = Parameter(torch.ones(4, device=device))
    optimizer = language.sgd([other], lr=0.1)
    training.scaler.scale((training.param + other).sum()).backward()
    training.scaler.step(training.optimizer)
    with pytest.raises(ValueError, match="skip_outliers: expected one optimizer between two"):
        training.scaler.step(optimizer)


@EVERY_LANGUAGE
def test_invalid_factor_is_refused(language, device):
    words = "skip_outliers: expected None or a finite number above 1"
    for value in (0.0, 1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=words):
            language.scaler(device, 8.0, skip_outliers=value)


def test_invalid_saved_statistics_are_refused():
    scaler = ampfuse.GradScaler("cpu", skip_outliers=6.0)
    for value in (None, "a", math.nan):
        state = scaler.state_dict() | {"_norm_mean": value}
        with pytest.raises((TypeError, ValueError), match="_norm_mean: expected a"):
            scaler.load_state_dict(state)


def test_sparse_gradients_are_refused_since_their_norm_is_not_known():
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    scaler = ampfuse.GradScaler("cpu", skip_outliers=6.0)
    scaler.scale(table(torch.tensor([1, 1])).sum()).backward()
    with pytest.raises(ValueError, match="some of them are sparse or occur twice"):
        scaler.step(optimizer)


def test_optimizer_without_gradients_is_no_outlier():
    optimizer = ampfuse.AdamW([Parameter(torch.ones(2))])
    scaler = ampfuse.GradScaler("cpu", skip_outliers=6.0, allow_no_grads=True)
    scaler.scale_tensor()
    step_by(scaler, optimizer)
    assert not scaler.was_skipped()


def python(device, **options):
    return Training(LANGUAGES["Python"], device, **options)


def test_checkpoints_and_copies_carry_the_statistics(device, tmp_path):
    first, second = python(device), python(device)
    first.warm_up()
    checkpoint.save(tmp_path, step=1, scaler=first.scaler)
    checkpoint.load(tmp_path, scaler=second.scaler)
    for other in (second.scaler, copy.deepcopy(first.scaler)):
        assert other.state_dict() == first.scaler.state_dict()
    assert second.step(100.0)


def test_compiled_step_skips_outliers_as_an_eager_one(device, traced_backward):
    def train(compiled):
        training = python(device)

        def step(norm):
            training.optimizer.zero_grad()
            step_by(training.scaler, training.optimizer, training.param.sum() * norm)

        step = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
        for number in range(70):
            step(torch.tensor(1.0 + 0.25 * (number % 4), device=device))
        step(torch.tensor(100.0, device=device))
        return training.scaler.state_dict(), training.scaler.was_skipped()

    state, skipped = train(True)
    assert (state, skipped) == train(False)
    assert skipped


@pytest.mark.needs_cuda
def test_host_does_not_wait(waits_are_errors):
    training = python(torch.device("cuda"))
    training.warm_up()
    training.scaler.scale(training.param.sum()).backward()
    waits_are_errors()
    step_by(training.scaler, training.optimizer)
