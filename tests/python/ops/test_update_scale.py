"""update_scale: its policy, compared step by step with torch and other libraries."""

import math

import pytest
import torch
from ampfuse.ops import update_scale
from hypothesis import given, settings
from hypothesis import strategies as st
from scale_reference import REFERENCES, Policy, Scale, as_float32


def test_scale_grows_after_the_interval_and_backs_off_at_once(device):
    scale = Scale(device)

    scales = [scale.update(flag) for flag in (0, 0, 0, 0, 1, 0, 0, 0)]

    assert scales == [1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.booleans(), max_size=40),
    st.floats(2.0**-100, 2.0**126, width=32),
    st.floats(1.0, 16.0),
    st.floats(0.0625, 1.0),
    st.integers(1, 5),
)
def test_scale_and_tracker_have_the_bits_of_torch(flags, init_scale, growth, backoff, interval):
    ours = Scale(torch.device("cpu"), init_scale)
    scale, tracker = ours.scale.clone(), ours.growth_tracker.clone()
    names = ("growth_factor", "backoff_factor", "growth_interval")
    options = dict(zip(names, (growth, backoff, interval), strict=True))

    for flag in flags:
        ours.update(flag, **options)
        torch._amp_update_scale_(
            scale, tracker, torch.tensor(float(flag)), growth, backoff, interval
        )
        assert torch.equal(ours.scale, scale)
        assert torch.equal(ours.growth_tracker, tracker)


@pytest.mark.parametrize("refill", REFERENCES)
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.booleans(), max_size=60),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 2, 4]),
)
def test_hysteresis_matches_other_libraries(refill, flags, hysteresis, interval):
    policy = Policy(hysteresis=hysteresis, growth_interval=interval)

    options = {"growth_interval": interval, "hysteresis": hysteresis, "hysteresis_refill": refill}

    for name, reference in REFERENCES[refill]:
        ours = Scale(torch.device("cpu"), 1024.0, hysteresis)
        scales = [ours.update(flag, **options) for flag in flags]
        assert scales == reference(1024.0, flags, policy), name


@pytest.mark.parametrize(
    ("refill", "expected"),
    [
        # Once used up, the hysteresis tolerates no overflow until the scale grows.
        ("growth", [64, 32, 32, 16, 16, 16, 32, 32, 16]),
        ("clean_step", [64, 32, 32, 32, 32, 32, 64, 64, 32]),
    ],
)
def test_hysteresis_is_refilled_by_growth_or_by_a_clean_step(device, refill, expected):
    scale = Scale(device, 64.0, hysteresis=2)
    options = {"hysteresis": 2, "hysteresis_refill": refill}

    assert [scale.update(flag, **options) for flag in (1, 1, 0, 1, 0, 0, 0, 1, 1)] == expected


def test_scale_stays_between_min_scale_and_max_scale(device):
    scale = Scale(device, 8.0)
    limits = {"min_scale": 3.0, "max_scale": 20.0, "growth_interval": 1}

    assert [scale.update(1, **limits) for _ in range(3)] == [4, 3, 3]
    assert [scale.update(0, **limits) for _ in range(4)] == [6, 12, 20, 20]


def test_scale_outside_the_limits_moves_only_towards_them(device):
    limits = {"min_scale": 4.0, "max_scale": 16.0, "growth_interval": 1}

    assert Scale(device, 1.0).update(1, **limits) == 1.0
    assert Scale(device, 1.0).update(0, **limits) == 2.0
    assert Scale(device, 64.0).update(0, **limits) == 64.0
    assert Scale(device, 64.0).update(1, **limits) == 32.0


def test_scale_never_grows_to_infinity_and_has_no_floor_by_default(device):
    large = Scale(device, 3e38)
    small = Scale(device, 1e-44)

    assert large.update(0, growth_interval=1) == as_float32(3e38)
    assert [small.update(1) for _ in range(4)][-1] == 0.0


def test_fixed_scale_stays_and_skips_are_counted(device):
    scale = Scale(device)

    scales = [scale.update(flag, dynamic=False, growth_interval=1) for flag in (0, 1, 1, 0, 1)]

    assert scales == [1024] * 5
    assert scale.counters[1].item() == 1
    assert scale.growth_tracker.item() == 0


def test_consecutive_skips_are_counted(device):
    scale = Scale(device)

    counts = []
    for flag in (1, 1, 0, 1, 1, 1):
        scale.update(flag)
        counts.append(scale.counters[1].item())

    assert counts == [1, 2, 0, 1, 2, 3]


def test_scale_grows_at_once_if_a_shorter_interval_has_passed(device):
    scale = Scale(device)
    for _ in range(5):
        scale.update(0, growth_interval=100)

    assert scale.update(0, growth_interval=3) == 2048


def test_any_nonzero_flag_is_an_overflow(device):
    for flag in (1.0, 2.0, 3.0, -1.0, 1e-40, math.inf, math.nan):
        assert Scale(device).update(0.0, flag, 0.0) == 512, flag
    assert Scale(device).update(0.0, -0.0) == 1024


@pytest.mark.sanitizer
def test_more_flags_than_fit_in_a_launch_are_all_read(device):
    assert Scale(device).update(*[0.0] * 100, growth_interval=1) == 2048
    for index in (0, 63, 64, 99):
        flags = [0.0] * 100
        flags[index] = math.nan
        assert Scale(device).update(*flags) == 512, index


def test_history_is_a_ring_buffer(device):
    scale = Scale(device, history=3)

    for flag, norm in ((0, 1.5), (1, math.inf), (0, None), (1, 2.5), (0, 3.5)):
        scale.update(flag, norm=norm)

    rows = scale.history.tolist()
    assert rows[0] == [512, 1, 2.5]
    assert rows[1] == [256, 0, 3.5]
    assert rows[2][:2] == [512, 0]
    assert math.isnan(rows[2][2])
    assert scale.counters[2].item() == 5


@pytest.mark.parametrize("updates", [-1, -5, 2**63 - 1])
def test_history_is_never_written_out_of_range(device, updates):
    memory = torch.zeros(9, 3, device=device)
    scale = Scale(device, history=3)
    scale.history = memory[3:6]
    scale.counters[2] = updates

    for _ in range(4):
        scale.update(1)

    assert (memory[:3] == 0).all()
    assert (memory[6:] == 0).all()


def test_step_without_flags_is_clean(device):
    assert Scale(device).update(growth_interval=1) == 2048


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth_factor": 0.5}, "growth_factor: expected a finite number, at least 1, got 0.5"),
        ({"growth_factor": math.nan}, "growth_factor"),
        ({"backoff_factor": 1.5}, "backoff_factor: expected more than 0 and at most 1, got 1.5"),
        ({"backoff_factor": 0.0}, "backoff_factor: expected more than 0 and at most 1, got 0"),
        ({"growth_interval": 0}, "growth_interval: expected at least 1, got 0"),
        ({"hysteresis": 0}, "hysteresis: expected at least 1, got 0"),
        ({"min_scale": 2.0, "max_scale": 1.0}, "max_scale: expected at least min_scale=2, got 1"),
        ({"min_scale": math.nan}, "min_scale: expected None or more than 0, got nan"),
        ({"skip_outliers": 1.0}, "skip_outliers: expected None or a finite number above 1, got 1"),
        ({"skip_outliers": math.inf}, "skip_outliers: expected None or a finite number above 1"),
        (
            {"hysteresis_refill": "never"},
            'hysteresis_refill: expected "growth" or "clean_step", got never',
        ),
    ],
)
def test_invalid_policy_is_refused(device, options, message):
    scale = Scale(device)

    with pytest.raises(ValueError, match=message):
        scale.update(1, **options)

    assert scale.scale.item() == 1024
    assert scale.counters.tolist() == [1, 0, 0]


INT64 = torch.int64
INVALID = [
    ("scale", torch.tensor(1.0).double(), TypeError, "scale: expected dtype float32"),
    ("scale", torch.ones(2), ValueError, "scale: expected a contiguous tensor with 1"),
    ("scale", torch.tensor(1.0).to_sparse(), ValueError, "scale: expected a strided tensor"),
    ("growth_tracker", torch.tensor(0), TypeError, "growth_tracker: expected dtype int32"),
    ("counters", torch.zeros(2, dtype=INT64), ValueError, "counters.*with 3 elements"),
    ("counters", torch.zeros(6, dtype=INT64)[::2], ValueError, "counters.*contiguous"),
    ("found_infs", [torch.ones(2)], ValueError, r"found_infs\[0\]: expected.*1 element,"),
    ("found_infs", [torch.tensor(1)], TypeError, r"found_infs\[0\]: expected dtype float32"),
    ("history", torch.zeros(2, 2), ValueError, r"history: expected.*shape \[n, 3\]"),
    ("history", torch.zeros(0, 3), ValueError, r"history: expected.*shape \[n, 3\]"),
    ("history", torch.zeros(3, 3).int(), TypeError, "history: expected dtype float32"),
    ("norm", torch.ones(1, 2), ValueError, "norm: expected"),
    ("norms", torch.zeros(4), TypeError, "norms: expected dtype float64"),
    ("norms", torch.zeros(3).double(), ValueError, "norms: expected.*with 4 elements"),
    ("norms", torch.zeros(4).double(), ValueError, "norms: only allowed with norm"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), INVALID)
def test_invalid_tensor_is_refused(device, name, value, error, message):
    if isinstance(value, list):
        value = [x.to(device) for x in value]
    elif not value.is_sparse and not value.is_contiguous():  # copies are contiguous
        value = value.repeat_interleave(2).to(device)[::2]
    else:
        value = value.to(device)
    scale = Scale(device)

    with pytest.raises(error, match=message):
        update_scale(**scale.arguments() | {name: value})

    assert scale.counters.tolist() == [1, 0, 0]


def test_version_of_every_written_tensor_rises(device):
    scale = Scale(device, history=2, statistics=True)

    scale.update(0, norm=1.0, skip_outliers=6.0)

    written = (scale.scale, scale.growth_tracker, scale.counters, scale.history, scale.norms)
    assert [x._version for x in written] == [1] * 5
