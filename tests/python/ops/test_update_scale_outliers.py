"""Statistics of norms in update_scale, against the same in Python and NumPy."""

import math

import numpy as np
import pytest
import torch
from ampfuse.ops import update_scale

OPTIONS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
NO_NORMS = [0.0, 0.0, 0.0, math.inf]
WINDOW, FIRST = 128, 64


class Scale:
    """A loss scale with statistics of norms, and a history of one update."""

    def __init__(self, device):
        self.device = device
        self.scale = torch.tensor(1024.0, device=device)
        self.growth_tracker = torch.tensor(0, dtype=torch.int32, device=device)
        self.counters = torch.tensor([1, 0, 0], device=device)
        self.history = torch.zeros(1, 3, device=device)
        self.norms = torch.tensor(NO_NORMS, dtype=torch.float64, device=device)

    def arguments(self, norm, flag=0.0):
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "counters": self.counters,
            "found_infs": [torch.tensor(flag, device=self.device)],
            "history": self.history,
            "norm": torch.tensor(norm, device=self.device),
            "norms": self.norms,
            "skip_outliers": 6.0,
            **OPTIONS,
        }

    def update(self, norm, flag=0.0):
        """Return the kind of the step in the history: 0 if it was taken, 2 if an outlier."""
        update_scale(**self.arguments(norm, flag))
        return int(self.history[0, 1].item())


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


@pytest.mark.parametrize("size", [1, 63, 64, 65, 400])
def test_statistics_match_the_reference(device, size):
    norms, scale = random_norms(size), Scale(device)
    for norm in norms:
        scale.update(norm)
    torch.testing.assert_close(scale.norms.tolist(), reference(norms), rtol=1e-12, atol=0)


def test_first_statistics_are_those_of_numpy(device):
    norms, scale = random_norms(100), Scale(device)
    for norm in norms:
        assert scale.update(norm) == 0
    logs = np.log(np.array(norms))
    assert scale.norms[1].item() == pytest.approx(logs.mean(), rel=1e-12)
    assert scale.norms[2].item() == pytest.approx(logs.var(), rel=1e-12)


def test_no_step_is_an_outlier_before_64_norms_are_known(device):
    scale = Scale(device)
    kinds = [scale.update(norm) for norm in [1.0] * 62 + [1e30, 1.0]]
    assert kinds == [0] * 64
    assert scale.norms[3].item() < math.inf


def test_outlier_changes_neither_scale_nor_tracker_as_an_overflow_does(device):
    scale = Scale(device)
    for norm in random_norms(99):
        scale.update(norm)
    before = scale.scale.item(), scale.counters[1].item()
    assert scale.update(1000.0) == 2
    assert scale.growth_tracker.item() == 1  # the interval is 3, so it has just grown
    assert (scale.scale.item() / 2 ** (100 // 3 - 99 // 3), scale.counters[1].item()) == before
    assert scale.update(1000.0, flag=1.0) == 1
    assert scale.growth_tracker.item() == 0


def test_nearly_equal_norms_are_no_outliers(device):
    scale = Scale(device)
    for _ in range(200):
        scale.update(1.0)
    assert scale.norms[3].item() == pytest.approx(math.exp(0.6))
    assert [scale.update(1.5), scale.update(2.0)] == [0, 2]


def test_one_outlier_hardly_changes_the_limit_and_a_lasting_change_is_accepted(device):
    scale = Scale(device)
    for norm in random_norms(300):
        scale.update(norm)
    limit = scale.norms[3].item()
    assert scale.update(1e20) == 2
    assert scale.norms[3].item() < 3 * limit
    kinds = [scale.update(1000 * norm) for norm in random_norms(300)]
    accepted = kinds.index(0)
    assert 1 < accepted < 50
    assert kinds[100:] == [0] * 200


@pytest.mark.parametrize("norm", [math.inf, math.nan, 0.0, -1.0])
def test_norms_without_a_finite_logarithm_are_left_out(device, norm):
    scale = Scale(device)
    scale.update(2.0)
    before = scale.norms.tolist()
    scale.update(norm, flag=1.0)
    assert scale.norms.tolist() == before


def test_largest_and_smallest_norms_are_counted(device):
    scale, largest = Scale(device), torch.finfo(torch.float32).max
    for _ in range(70):
        assert scale.update(largest) == 0
        assert scale.update(2.0**-149) == 0
    assert scale.norms[0].item() == 140
    assert scale.norms.isfinite().all()


def test_limit_may_be_infinite(device):
    scale = Scale(device)
    for _ in range(64):
        update_scale(**scale.arguments(1.0) | {"skip_outliers": 1e4})
    assert scale.norms[3].item() == math.inf
    assert scale.update(math.inf) == 0  # an overflow whose flag is not set


def test_nan_in_damaged_statistics_skips_nothing(device):
    scale = Scale(device)
    scale.norms.fill_(math.nan)
    assert scale.update(1e30) == 0


def test_op_check(device):
    arguments = Scale(device).arguments(2.0)
    positional = [arguments.pop(name) for name in ("scale", "growth_tracker", "counters")]
    positional.append(arguments.pop("found_infs"))
    torch.library.opcheck(torch.ops.ampfuse.update_scale.default, tuple(positional), arguments)


@pytest.mark.slow
def test_compiled_updates_equal_eager_updates(device):
    eager, compiled = Scale(device), Scale(device)
    step = torch.compile(lambda tensors: update_scale(**tensors), fullgraph=True)
    for norm in [*random_norms(70), 1000.0]:
        eager.update(norm)
        step(compiled.arguments(norm))
    assert torch.equal(compiled.norms, eager.norms)
    assert torch.equal(compiled.history, eager.history)
    assert compiled.history[0, 1].item() == 2


def test_version_of_the_statistics_rises(device):
    scale = Scale(device)
    scale.update(1.0)
    assert scale.norms._version == 1
