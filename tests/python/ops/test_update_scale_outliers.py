"""Statistics of norms in update_scale, against the same in Python and NumPy."""

import math

import numpy as np
import pytest
import torch
from ampfuse.ops import update_scale
from scale_reference import Scale

WINDOW, FIRST = 128, 64
SKIPPING = {"skip_outliers": 6.0}


@pytest.fixture
def scale(device):
    return Scale(device, history=1, statistics=True)


def kind_of(scale, norm, flag=0.0):
    """Update, and return the kind of the step: 0 if it was taken, 2 if it was an outlier."""
    scale.update(flag, norm=norm, **SKIPPING)
    return int(scale.history[0, 1].item())


def reference(norms, factor=6.0):
    """Return the statistics after these norms, in float64."""
    mean = variance = 0.0
    limit = math.inf
    for number, norm in enumerate(norms, 1):
        weight = 1 / min(number, WINDOW)
        log = math.log(min(norm, limit))
        variance = (1 - weight) * (variance + weight * (log - mean) ** 2)
        mean += weight * (log - mean)
        if number >= FIRST:
            limit = math.exp(mean + factor * max(math.sqrt(variance), 0.1))
    return [float(len(norms)), mean, variance, limit]


def random_norms(size, spread=0.5):
    return torch.tensor(np.random.default_rng(0).lognormal(1.0, spread, size)).float().tolist()


def test_statistics_match_the_reference(scale):
    norms = random_norms(400)
    for count, norm in enumerate(norms, 1):
        kind_of(scale, norm)
        if count in (1, FIRST - 1, FIRST, FIRST + 1, 400):
            expected = reference(norms[:count])
            torch.testing.assert_close(scale.norms.tolist(), expected, rtol=1e-12, atol=0)
        if count == 100:  # all norms have the same weight until there are more than WINDOW
            logs = np.log(norms[:100])
            of_numpy = pytest.approx([logs.mean(), logs.var()], rel=1e-12)
            assert scale.norms[1:3].tolist() == of_numpy


def test_no_step_is_an_outlier_before_64_norms_are_known(scale):
    kinds = [kind_of(scale, norm) for norm in [1.0] * 62 + [1e30, 1.0]]
    assert kinds == [0] * 64
    assert scale.norms[3].item() < math.inf


def test_outlier_changes_neither_scale_nor_tracker_as_an_overflow_does(scale):
    for norm in random_norms(99):
        kind_of(scale, norm)
    before = scale.scale.item(), scale.counters[1].item()
    assert kind_of(scale, 1000.0) == 2
    assert scale.growth_tracker.item() == 1  # the interval is 3, so it has just grown
    assert (scale.scale.item() / 2 ** (100 // 3 - 99 // 3), scale.counters[1].item()) == before
    assert kind_of(scale, 1000.0, flag=1.0) == 1
    assert scale.growth_tracker.item() == 0


def test_nearly_equal_norms_are_no_outliers(scale):
    for _ in range(200):
        kind_of(scale, 1.0)
    assert scale.norms[3].item() == pytest.approx(math.exp(0.6))
    assert [kind_of(scale, 1.5), kind_of(scale, 2.0)] == [0, 2]


def test_one_outlier_hardly_changes_the_limit_and_a_lasting_change_is_accepted(scale):
    for norm in random_norms(300):
        kind_of(scale, norm)
    limit = scale.norms[3].item()
    assert kind_of(scale, 1e20) == 2
    assert scale.norms[3].item() < 3 * limit
    kinds = [kind_of(scale, 1000 * norm) for norm in random_norms(300)]
    accepted = kinds.index(0)
    assert 1 < accepted < 50
    assert kinds[100:] == [0] * 200


def test_norms_without_a_finite_logarithm_are_left_out(scale):
    kind_of(scale, 2.0)
    before = scale.norms.tolist()
    for norm in (math.inf, math.nan, 0.0, -1.0):
        kind_of(scale, norm, flag=1.0)
        assert scale.norms.tolist() == before, norm


def test_largest_and_smallest_norms_are_counted(scale):
    largest = torch.finfo(torch.float32).max
    for _ in range(70):
        assert kind_of(scale, largest) == 0
        assert kind_of(scale, 2.0**-149) == 0
    assert scale.norms[0].item() == 140
    assert scale.norms.isfinite().all()


def test_limit_may_be_infinite(scale):
    for _ in range(64):
        scale.update(0, norm=1.0, skip_outliers=1e4)
    assert scale.norms[3].item() == math.inf
    assert kind_of(scale, math.inf) == 0  # an overflow whose flag is not set


def test_nan_in_damaged_statistics_skips_nothing(scale):
    scale.norms.fill_(math.nan)
    assert kind_of(scale, 1e30) == 0


def test_op_check(scale):
    arguments = scale.arguments(0.0, norm=2.0, **SKIPPING)
    names = ("scale", "growth_tracker", "counters", "found_infs")
    positional = tuple(arguments.pop(name) for name in names)
    torch.library.opcheck(torch.ops.ampfuse.update_scale.default, positional, arguments)


def test_compiled_updates_equal_eager_updates(device):
    eager, compiled = (Scale(device, history=5, statistics=True) for _ in range(2))
    step = torch.compile(lambda tensors: update_scale(**tensors), fullgraph=True)
    norms = [*random_norms(70), 1000.0]
    for norm, flag in zip(norms, [0.0, 1.0, *[0.0] * 69], strict=True):
        eager.update(flag, norm=norm, **SKIPPING)
        step(compiled.arguments(flag, norm=norm, **SKIPPING))

    of_both = (
        [x.scale, x.growth_tracker, x.counters, x.history, x.norms] for x in (eager, compiled)
    )
    assert all(map(torch.equal, *of_both))
    assert compiled.history[70 % 5, 1].item() == 2
