"""The verdict follows from times, memory and deviations."""

import math

import pytest
import torch
from ampfuse._texts import percent
from ampfuse.tools.precision.deviation import (
    Deviation,
    distance,
    measure_noise,
    relative_difference,
)
from ampfuse.tools.precision.judge import Judge, largest_scale
from ampfuse.tools.precision.outcome import BFLOAT16, FLOAT16, FLOAT32, UNSCALED, Outcome, Overflow
from ampfuse.tools.precision.verdict import lines_to_change, verdict

MIB = 2**20
PLACES = dict.fromkeys(("model", "backward", "step"), "train.py:7 `y = model(x)`")


def outcome(precision, milliseconds=10.0, error=0.0, peak=1000 * MIB, failure=None, **data):
    """Return an outcome whose gradients differ from (1, 1) and (1, -1) by a part `error`."""
    first, second = torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])
    gradients = [{"layer.weight": (one + error * first, 10.0)} for one in (first, second)]
    found = {
        "losses": [2.0, 1.0],
        "steps": 2,
        "seconds": [milliseconds / 1e3] * 5,
        "peak": peak,
        "inputs": 1.0,
        "weights": 2.0,
        "gpu": "GPU",
        "roots": ["Model"],
        "places": PLACES,
        "gradients": gradients,
    } | data
    return Outcome(precision, failure, **found)


def judged(*outcomes, **base):
    judge = Judge(outcome(FLOAT32, **base))
    for one in outcomes:
        judge.add(one)
    return judge


def best(*outcomes, **base):
    """Return the best precision or None, which is what the verdict is about."""
    judge = judged(*outcomes, **base)
    found = judge.best()
    assert verdict(judge).precision == (found or FLOAT32)
    return found


def assert_said(judge, *parts):
    """Compare parts of the verdict: times, memory, deviations and failures."""
    text = " ".join(verdict(judge).sentences)
    for part in parts:
        assert part in text


def test_fastest_accurate_precision_is_used():
    outcomes = outcome(BFLOAT16, 6.0), outcome(FLOAT16, 4.0)
    assert best(*outcomes) == FLOAT16
    assert_said(judged(*outcomes), "Use float16 with a scaler", "4.0 ms", "10.0", "2.50 times")


def test_simplest_of_equally_fast_precisions_is_used():
    assert best(outcome(BFLOAT16, 6.0), outcome(FLOAT16, 5.8)) == BFLOAT16


def test_memory_alone_is_worth_it_unless_it_costs_time_or_is_noise():
    smaller = outcome(BFLOAT16, 10.0, peak=700 * MIB)
    assert best(smaller) == BFLOAT16
    assert_said(judged(smaller), "700 MiB in place of 1,000 MiB")
    assert best(outcome(BFLOAT16, 11.0, peak=700 * MIB)) is None
    assert best(outcome(BFLOAT16, 10.0, peak=50 * MIB), peak=100 * MIB) is None


def test_precision_without_gain_is_not_used():
    judge = judged(outcome(BFLOAT16, 9.5))
    assert judge.best() is None
    assert_said(judge, "Stay with float32: bfloat16 saves only 5.0 %", "9.5 ms in place of 10.0")
    assert verdict(judge).lines == []


def test_precision_with_wrong_gradients_or_losses_is_not_used():
    for error in (0.31, math.nan, math.inf):
        outcomes = outcome(BFLOAT16, 5.0, error), outcome(FLOAT16, 5.0)
        assert best(*outcomes) == FLOAT16
        assert_said(judged(*outcomes), "Do not use bfloat16: gradients ")
    judge = judged(outcome(BFLOAT16, 5.0, losses=[2.2, 1.1]))
    assert "the loss by 10 %" in judge.trouble(BFLOAT16)


def test_precision_with_worse_losses_at_the_end_is_not_used():
    base = [1.0, 0.5, *[0.010, 0.012] * 5]
    for last, is_accurate in ((0.011, True), (0.001, True), (0.02, False)):
        judge = judged(outcome(BFLOAT16, 5.0, losses=[*base[:-3], *[last] * 3]), losses=base)
        assert (judge.best() == BFLOAT16) == is_accurate
    assert_said(judge, "last losses are about 0.02 in place of 0.012")
    judge = judged(outcome(BFLOAT16, 5.0, losses=[1.0, 0.5]), losses=base)
    assert not judge.trouble(BFLOAT16)  # it was slow, and has ended early


def test_loss_that_rises_in_float32_is_told_before_any_precision():
    rising = [7.7, 7.7, 300.0, 310.0, 420.0, 400.0, 430.0, 410.0]
    easy = [0.01, *[0.03] * 11]  # the first batch is easier than others
    warm = [1.0, 1.0, 9.0, 9.0, 5.0, 5.0, 4.0, 4.0]  # it falls again
    for losses, is_rising in (
        (rising, True),
        ([7.7] * 6 + [9.0] * 2, False),
        ([0.0, 1.0], False),
        (easy, False),
        (warm, False),
    ):
        judge = judged(outcome(BFLOAT16, 5.0, losses=losses), losses=losses)
        told = "rises in float32" in verdict(judge).sentences[0]
        assert told == is_rising
    assert_said(
        judged(outcome(BFLOAT16, losses=rising), losses=rising), "from about 7.7 to 420: lower"
    )


def test_deviation_is_judged_beside_that_of_batches():
    judge = judged(outcome(BFLOAT16, 5.0, 0.2))
    assert judge.noise == pytest.approx(math.sqrt(2))
    assert not judge.trouble(BFLOAT16)
    judge.limit = 0.05  # of batches that are all the same
    assert "by 20 %" in judge.trouble(BFLOAT16)


def test_scaler_is_not_left_out_because_first_gradients_are_large():
    outcomes = outcome(FLOAT16, 5.0), outcome(UNSCALED, 4.0)
    assert best(*outcomes) == FLOAT16
    assert_said(judged(*outcomes), "a scaler is needed")
    judge = judged(outcome(FLOAT16, 5.0), outcome(UNSCALED, 4.0, 1.0))
    assert_said(judge, "Do not use float16 without a scaler: gradients", "by 100 %")


def test_overflow_that_float32_has_too_is_no_reason():
    mask = Overflow("a", "masked_fill", "")
    real = Overflow("layers.1.b", "mul", "train.py:3")
    found = {"error": 1.0, "overflows": [mask, real]}
    judge = judged(outcome(FLOAT16, **found), overflows=[mask])
    assert judge.culprit(FLOAT16) == real
    assert judge.trouble(FLOAT16).startswith("`mul` of `layers.1.b` (train.py:3) is the first")
    assert judge.suspect(FLOAT16) == "layers.1.b"
    kept = FLOAT16.keeping("layers.0.b")
    judge.add(outcome(kept, **found))
    assert judge.suspect(kept) is None  # it is kept, too


def test_programs_that_cannot_be_compared_are_not_judged():
    for other in ({"inputs": 1.5}, {"weights": 1.5}):
        judge = judged(outcome(BFLOAT16, 5.0, **other))
        assert verdict(judge).precision == FLOAT32
        assert_said(judge, "cannot be compared")


def test_failure_is_told():
    failed = Outcome(FLOAT16, "ValueError: no (train.py:3)")
    judge = judged(outcome(BFLOAT16, 5.0), failed)
    assert_said(judge, "Do not use float16 with a scaler", "ValueError: no (train.py:3)")


def test_scale_is_the_largest_one_without_overflow():
    for gradient, scale in ((0.0, 65536), (0.05, 65536), (8.0, 2048), (15.9, 2048), (2e6, 1)):
        assert largest_scale(gradient) == scale
        assert scale == 1 or gradient * scale < 65504


def test_distance_counts_missing_gradients_as_zero():
    first = {"a": (torch.tensor([3.0, 0.0]), 1.0), "b": (torch.tensor([4.0]), 1.0)}
    assert distance(first, {"a": first["a"]}) == pytest.approx(0.8)
    assert distance(first, first) == 0.0
    assert distance({}, first) == math.inf
    assert distance(first, {"a": (torch.tensor([math.nan, 0.0]), 1.0)}) == math.inf


def test_deviation_of_modules_leaves_out_those_with_hardly_any_gradient():
    base, other = outcome(FLOAT32), outcome(BFLOAT16)
    base.gradients[0]["bias"] = (torch.tensor([1e-9]), 1.0)
    other.gradients[0]["bias"] = (torch.tensor([1e-7]), 1.0)
    other.gradients[0]["layer.weight"] = (torch.tensor([1.1, 1.1]), 10.0)
    assert Deviation(base, other).modules == {"layer": pytest.approx(0.1 / math.sqrt(2))}


def test_first_module_whose_output_is_far_is_found():
    base, other = outcome(FLOAT32), outcome(BFLOAT16)
    # In each: the error of the input, and of the output.
    cases = {"a": (0.0, 0.01), "part of b": (0.3, 0.3), "b": (0.01, 0.2), "c": (0.2, 0.4)}
    for name, errors in cases.items():
        base.outputs[name] = torch.ones(4), torch.ones(4)
        other.outputs[name] = tuple(torch.ones(4) * (1 + error) for error in errors)
    assert Deviation(base, other).first_module == "b"
    other.outputs["a"][1][0] = math.nan
    assert Deviation(base, other).first_module == "a"


def test_noise_compares_gradients_of_the_same_parameters():
    one = outcome(FLOAT32)
    one.gradients.append({"other": (torch.ones(3), 1.0)})  # of another model
    assert measure_noise(one) == pytest.approx(math.sqrt(2))
    del one.gradients[1:]
    assert measure_noise(one) == 0.0  # unknown


def test_times_of_the_faster_run_count():
    judge = judged(outcome(BFLOAT16, 9.0))
    judge.run_again(outcome(FLOAT32, 8.0))
    judge.run_again(outcome(BFLOAT16, 12.0))
    assert judge.base.milliseconds == 8.0
    assert judge.outcomes[BFLOAT16].milliseconds == 9.0
    judge.run_again(outcome(FLOAT32, seconds=[]))
    assert judge.base.milliseconds == 8.0


def test_module_that_is_far_off_is_not_hidden_by_others():
    judge = judged(outcome(BFLOAT16, 5.0))
    for gradients in (judge.base.gradients, judge.outcomes[BFLOAT16].gradients):
        gradients[0]["small.weight"] = torch.tensor([0.5]), 1.0
    judge.outcomes[BFLOAT16].gradients[0]["small.weight"] = torch.tensor([0.8]), 1.0
    judge.add(judge.outcomes[BFLOAT16])
    assert judge.deviations[BFLOAT16].gradient < 0.1
    assert judge.deviations[BFLOAT16].modules["small"] == pytest.approx(0.6)
    right = outcome(FLOAT16, 5.0)
    right.gradients[0]["small.weight"] = torch.tensor([0.5]), 1.0
    judge.add(right)
    assert_said(judge, "those of `small` by 60 %")


def test_losses_near_zero_are_compared_with_their_spread():
    for a, b, expected in ((0.0, 0.0, 0.0), (2.0, 1.0, 0.5), (1e-9, 1e-3, 1e-3), (-2.0, -2.2, 0.1)):
        assert relative_difference(a, b, 1.0) == pytest.approx(expected)
    assert relative_difference(0.0, 1.0, 0.0) == math.inf
    assert relative_difference(1.0, math.nan, 1.0) == math.inf


def test_percent_has_two_digits():
    shares = (0.0, 1e-9, 0.00012, 0.1234, 1.0, 9.99, 12.3)
    assert ", ".join(map(percent, shares)) == (
        "0 %, < 0.0001 %, 0.012 %, 12 %, 100 %, 999 %, > 1,000 %"
    )
    assert percent(math.inf) == "> 1,000 %"


def assert_lines(precision, *expected, **base):
    """Compare the words of each line that a precision adds or changes."""
    lines = lines_to_change(outcome(FLOAT32, **base), precision, 1024.0)
    for line, words in zip(lines, expected, strict=True):
        assert all(word in line for word in words), line


def test_lines_of_a_program_without_autocast():
    call = "train.py:7 `y = model(x)`"
    assert_lines(BFLOAT16, [call, '"cuda", dtype=torch.bfloat16', "not backward()"])
    assert_lines(
        FLOAT16,
        [call, '"cuda", dtype=torch.float16', "not backward()"],
        ['GradScaler("cuda", init_scale=1024)'],
        [call, "scaler.scale(loss).backward()"],
        [call, "scaler.step(optimizer)", "scaler.update()"],
        ["scaler.unscale_(optimizer)"],
    )
    assert_lines(FLOAT32)


def test_lines_of_a_program_with_autocast_and_scaler():
    own = {
        "places": PLACES | {"scaler": "train.py:7 `y = model(x)`"},
        "autocasts": {"train.py:7 `y = model(x)`": "torch.float16"},
    }
    off = ["train.py:7", "enabled=False"]
    assert_lines(FLOAT16, **own)
    assert_lines(BFLOAT16, ["train.py:7", "pass dtype=torch.bfloat16, and leave"], off, **own)
    assert_lines(FLOAT32, off, off, **own)
    kept = BFLOAT16.keeping("head")
    assert_lines(kept, ["pass dtype"], off, ["(<device of autocast>, enabled=False)"], **own)


def test_each_autocast_of_a_program_is_changed_or_enabled():
    own = {"autocasts": {"train.py:7": "torch.float16", "model.py:3": "torch.bfloat16"}}
    assert_lines(BFLOAT16, ["train.py:7: pass dtype=torch.bfloat16"], **own)
    assert_lines(FLOAT32, ["train.py:7: add enabled"], ["model.py:3: add enabled"], **own)
    off = {"places": PLACES | {"off": "train.py:7 `with autocast(enabled=amp):`"}}
    assert_lines(BFLOAT16, ['enabled=amp):`: enable it for "cuda", with dtype=torch.bf'], **off)
    assert_lines(FLOAT32, **off)


def test_part_that_the_program_keeps_in_float32_is_named():
    judge = judged(outcome(BFLOAT16, 5.0), places=PLACES | {"float32": "model.py:3"})
    assert_said(judge, "This part of the program stayed in float32: model.py:3.")
