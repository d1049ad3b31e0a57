"""The verdict follows from times, memory and deviations."""

import math

import pytest
import torch
from ampfuse.precision._judge import Judge, largest_scale, underflow
from ampfuse.precision._lines import lines_to_change
from ampfuse.precision._outcome import Deviation, Outcome, distance, noise, relative_difference
from ampfuse.precision._precisions import BFLOAT16, FLOAT16, FLOAT32, UNSCALED, WEIGHTS
from ampfuse.precision._verdict import percent, reason, verdict

MIB = 2**20
PLACE = {"where": "train.py:7", "text": "y = model(x)", "call": "model"}
PLACES = {
    **dict.fromkeys(("model", "backward", "step", "optimizer"), PLACE),
    **dict.fromkeys(("autocast", "scaler")),
}


def outcome(precision, milliseconds=10.0, error=0.0, peak=1000 * MIB, failure=None, **data):
    """Return an outcome whose gradients differ from (1, 1) and (1, -1) by a part `error`."""
    first = torch.tensor([1.0, 1.0])
    second = torch.tensor([1.0, -1.0])
    gradients = [
        {"layer.weight": (one + error * torch.tensor([1.0, 1.0]), 10.0)} for one in (first, second)
    ]
    found = {
        "losses": [2.0, 1.0],
        "steps": 2,
        "seconds": [milliseconds / 1e3] * 5,
        "input_seconds": [0.0] * 5,
        "peak": peak,
        "inputs": 1.0,
        "weights": 2.0,
        "gpu": "GPU",
        "capability": [9, 0],
        "operators": {
            "seconds": {"float32": 0.01, "16 bits": 0.01},
            "exponents": {"-10": 5, "-30": 3, "-45": 2},
            "nonfinite": [],
        },
        "own_dtype": "None",
        "compiled": False,
        "optimizer": "Adam",
        "roots": ["Model"],
        "places": PLACES,
    } | data
    return Outcome(precision, failure, found, gradients, {})


def judged(*outcomes, **base):
    judge = Judge(outcome(FLOAT32, **base))
    for one in outcomes:
        judge.add(one)
    return judge


def test_fastest_accurate_precision_is_used():
    found = verdict(judged(outcome(BFLOAT16, 6.0), outcome(FLOAT16, 4.0)))
    assert found.precision == FLOAT16
    assert found.sentences[0] == (
        "Use float16 with a scaler: a step takes 4.0 ms in place of 10.0, so it is 2.50 times as "
        "fast."
    )


def test_simplest_of_equally_fast_precisions_is_used():
    judge = judged(outcome(BFLOAT16, 6.0), outcome(FLOAT16, 5.9), outcome(WEIGHTS, 5.8))
    assert judge.best() == BFLOAT16


def test_smaller_one_of_equally_fast_precisions_is_used():
    judge = judged(outcome(BFLOAT16, 6.0), outcome(WEIGHTS, 6.0, peak=600 * MIB))
    assert judge.best() == WEIGHTS
    assert "takes 600 MiB in place of 1,000 MiB" in verdict(judge).sentences[0]


def test_memory_alone_is_worth_it_unless_it_costs_time():
    assert judged(outcome(BFLOAT16, 10.0, peak=700 * MIB)).best() == BFLOAT16
    assert judged(outcome(BFLOAT16, 11.0, peak=700 * MIB)).best() is None


def test_little_memory_is_noise():
    judge = judged(outcome(BFLOAT16, 10.0, peak=50 * MIB), peak=100 * MIB)
    assert judge.best() is None


def test_precision_without_gain_is_not_used():
    found = verdict(judged(outcome(BFLOAT16, 9.5)))
    assert found.precision == FLOAT32
    assert found.sentences[0] == (
        "Stay with float32: bfloat16 saves only 5.0 % (9.5 ms in place of 10.0 for a step)."
    )
    assert found.lines == []


@pytest.mark.parametrize("error", [0.31, math.nan, math.inf])
def test_precision_with_wrong_gradients_is_not_used(error):
    found = verdict(judged(outcome(BFLOAT16, 5.0, error), outcome(FLOAT16, 5.0)))
    assert found.precision == FLOAT16
    assert found.sentences[2].startswith("Bfloat16 is no alternative: its gradients ")


def test_precision_with_wrong_losses_is_not_used():
    judge = judged(outcome(BFLOAT16, 5.0, losses=[2.2, 1.1]))
    assert not judge.is_accurate(BFLOAT16)


def test_deviation_is_judged_beside_that_of_batches():
    judge = judged(outcome(BFLOAT16, 5.0, 0.2))
    assert judge.noise == pytest.approx(math.sqrt(2))
    assert judge.is_accurate(BFLOAT16)
    judge.limit = 0.05  # of batches that are all the same
    assert not judge.is_accurate(BFLOAT16)


def test_scaler_is_not_left_out_because_first_gradients_are_large():
    judge = judged(outcome(FLOAT16, 5.0), outcome(UNSCALED, 4.0))
    assert judge.best() == FLOAT16
    assert "a scaler is needed later at least" in verdict(judge).sentences[1]
    judge = judged(outcome(FLOAT16, 5.0), outcome(UNSCALED, 4.0, 1.0))
    assert "without one they differ by 100 %" in verdict(judge).sentences[1]


def test_overflow_that_float32_has_too_is_no_reason():
    mask = {"phase": "forward", "module": "a", "operator": "masked_fill", "where": None}
    real = {"phase": "forward", "module": "b", "operator": "mul", "where": "train.py:3"}
    backward = {"phase": "backward", "module": "a", "operator": "mm", "where": None}
    operators = outcome(FLOAT32).operators | {"nonfinite": [mask]}
    other = operators | {"nonfinite": [backward, mask, real]}
    judge = judged(outcome(FLOAT16, operators=other), operators=operators)
    assert judge.culprit(FLOAT16) == real
    assert judge.candidates(FLOAT16) == ["b"]
    judge.outcomes[FLOAT16].data["operators"]["nonfinite"] = [real | {"module": "layers.1.b"}]
    assert judge.candidates(FLOAT16) == ["layers.1.b"]
    judge.add(Outcome(FLOAT16.keeping(["layers.0.b"]), None, judge.outcomes[FLOAT16].data, [], {}))
    assert judge.candidates(FLOAT16.keeping(["layers.0.b"])) == []  # it is kept, too


def test_programs_that_cannot_be_compared_are_not_judged():
    found = verdict(judged(outcome(BFLOAT16, 5.0, inputs=1.5)))
    assert found.precision == FLOAT32
    assert "cannot be compared" in found.sentences[0]
    assert verdict(judged(outcome(WEIGHTS, 5.0, weights=1.5))).precision == WEIGHTS


def test_failure_is_told():
    failed = Outcome(FLOAT16, "ValueError: no (train.py:3)", {}, [], {})
    found = verdict(judged(outcome(BFLOAT16, 5.0), failed))
    assert found.sentences[2] == (
        "Float16 with a scaler is no alternative: the program fails with ValueError: no "
        "(train.py:3)."
    )


@pytest.mark.parametrize(
    ("base", "other", "text"),
    [
        ({"input_seconds": [0.008] * 5}, {}, "80 % of a step waits for input"),
        ({"operators": {"seconds": {"float32": 0.002}}}, {}, "take only 10 % of a step"),
        ({}, {"operators": {"seconds": {"casts": 3.0, "16 bits": 7.0}}}, "casts take 30 %"),
        ({}, {"operators": {"seconds": {"float32": 8.0, "16 bits": 2.0}}}, "float32 take 80 %"),
        ({}, {"operators": {"seconds": {"16 bits": 2.0}}}, "are hardly faster in 16 bits here"),
    ],
)
def test_reason_of_no_gain_is_given(base, other, text):
    judge = judged(outcome(BFLOAT16, **other), **base)
    assert text in reason(judge, BFLOAT16)


def test_gpu_without_fast_products_is_named():
    judge = judged(outcome(BFLOAT16), outcome(FLOAT16), gpu="Tesla T4", capability=[7, 5])
    assert reason(judge, BFLOAT16) == "Tesla T4 has no fast products in bfloat16."
    assert "T4" not in reason(judge, FLOAT16)


def test_underflow_is_the_share_below_the_smallest_float16():
    exponents = {-10: 5, -25: 1, -26: 2, -45: 2, -150: 100}
    assert underflow(exponents) == 0.4
    assert underflow(exponents, 65536.0) == 0.2
    assert underflow({}) == 0.0


@pytest.mark.parametrize(
    ("exponents", "scale"), [({}, 65536), ({-5: 1}, 65536), ({3: 1}, 2048), ({20: 1}, 1)]
)
def test_scale_is_the_largest_one_without_overflow(exponents, scale):
    assert largest_scale(exponents) == scale
    for exponent in exponents:
        assert scale == 1 or 2.0 ** (exponent + 1) * scale < 65504


def test_distance_counts_missing_gradients_as_zero():
    first = {"a": (torch.tensor([3.0, 0.0]), 1.0), "b": (torch.tensor([4.0]), 1.0)}
    assert distance(first, {"a": first["a"]}) == pytest.approx(0.8)
    assert distance(first, first) == 0.0
    assert math.isnan(distance({}, first))


def test_deviation_of_modules_leaves_out_those_with_hardly_any_gradient():
    base, other = outcome(FLOAT32), outcome(BFLOAT16)
    base.gradients[0]["bias"] = (torch.tensor([1e-9]), 1.0)
    other.gradients[0]["bias"] = (torch.tensor([1e-7]), 1.0)
    other.gradients[0]["layer.weight"] = (torch.tensor([1.1, 1.1]), 10.0)
    assert Deviation(base, other).kinds == {"layer": pytest.approx(0.1 / math.sqrt(2))}


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
    assert noise(one) == pytest.approx(math.sqrt(2))
    del one.gradients[1:]
    assert math.isnan(noise(one))


def test_times_of_the_faster_run_count():
    judge = judged(outcome(BFLOAT16, 9.0))
    judge.run_again(outcome(FLOAT32, 8.0))
    judge.run_again(outcome(BFLOAT16, 12.0))
    assert judge.base.milliseconds == 8.0
    assert judge.outcomes[BFLOAT16].milliseconds == 9.0
    assert judge.spread == pytest.approx(1 / 3)
    judge.run_again(outcome(FLOAT32, seconds=[]))
    assert judge.base.milliseconds == 8.0


def test_verdict_from_times_that_vary_asks_for_a_run_on_a_quiet_machine():
    judge = judged(outcome(BFLOAT16, 4.0))
    judge.run_again(outcome(BFLOAT16, 6.0))
    first = verdict(judge).sentences[0]
    assert first.startswith("Use bfloat16, if a run on a quiet machine confirms it: a step ")


def test_module_that_is_far_off_is_not_hidden_by_others():
    judge = judged(outcome(BFLOAT16, 5.0))
    for gradients in (judge.base.gradients, judge.outcomes[BFLOAT16].gradients):
        gradients[0]["small.weight"] = torch.tensor([0.5]), 1.0
    judge.outcomes[BFLOAT16].gradients[0]["small.weight"] = torch.tensor([0.8]), 1.0
    judge.add(judge.outcomes[BFLOAT16])
    assert judge.deviations[BFLOAT16].gradient < 0.1
    assert judge.deviations[BFLOAT16].main_modules["small"] == pytest.approx(0.6)
    assert not judge.is_accurate(BFLOAT16)
    right = outcome(FLOAT16, 5.0)
    right.gradients[0]["small.weight"] = torch.tensor([0.5]), 1.0
    judge.add(right)
    assert verdict(judge).sentences[2].endswith("but those of `small` by 60 %.")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(0.0, 0.0, 0.0), (2.0, 1.0, 0.5), (1e-9, 1e-3, 1e-3), (-2.0, -2.2, 0.1)],
)
def test_losses_near_zero_are_compared_with_their_spread(a, b, expected):
    assert relative_difference(a, b, 1.0) == pytest.approx(expected)
    assert math.isnan(relative_difference(0.0, 1.0, 0.0))
    assert math.isnan(relative_difference(1.0, math.nan, 1.0))


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (1e-9, "< 0.0001 %"),
        (1.0, "100 %"),
        (0.1234, "12 %"),
        (0.00012, "0.012 %"),
        (9.99, "999 %"),
        (12.3, "> 1,000 %"),
    ],
)
def test_percent_has_two_digits(share, text):
    assert percent(share) == text
    assert percent(math.nan) == "an unknown amount"


def test_lines_of_a_program_without_autocast():
    lines = lines_to_change(outcome(FLOAT32), FLOAT16, 1024.0)
    assert lines[0] == (
        "train.py:7 `y = model(x)`: put it and the loss, but not backward(), into "
        '`with torch.autocast("cuda", dtype=torch.float16):`'
    )
    assert 'GradScaler("cuda", init_scale=1024)' in lines[1]
    assert lines_to_change(outcome(FLOAT32), BFLOAT16, 1024.0)[1:] == []
    assert lines_to_change(outcome(FLOAT32), FLOAT32, 1.0) == []


def test_lines_of_a_program_with_autocast_and_scaler():
    used = PLACES | {"autocast": PLACE, "scaler": PLACE}
    base = outcome(FLOAT32, places=used, own_dtype="float16")
    assert lines_to_change(base, FLOAT16, 65536.0) == []
    change, scaler = lines_to_change(base, BFLOAT16, 65536.0)
    assert change.endswith('`with torch.autocast("cuda", dtype=torch.bfloat16):`')
    assert scaler.endswith("add enabled=False")
    assert len(lines_to_change(base, FLOAT32, 1.0)) == 2


def test_lines_for_16_bit_weights_name_the_optimizer():
    lines = lines_to_change(outcome(FLOAT32), WEIGHTS, 1.0)
    assert "torch.bfloat16" in lines[0]
    assert lines[1].startswith("train.py:7 `y = model(x)`: before it, `for param in ")
    assert "`ampfuse.Adam` in place of `torch.optim.Adam`" in lines[2]


def test_trainers_have_an_option():
    where = {"where": "transformers/trainer.py:99", "text": "", "call": ""}
    base = outcome(FLOAT32, places=PLACES | {"model": where})
    assert lines_to_change(base, BFLOAT16, 1.0) == ["bf16=True in TrainingArguments"]
    assert lines_to_change(base, FLOAT32, 1.0) == []
    base.data["places"]["autocast"] = where
    assert lines_to_change(base, FLOAT32, 1.0) == ["neither bf16 nor fp16 in TrainingArguments"]


def test_lightning_has_names_of_its_own_for_precisions():
    where = {"where": "lightning/pytorch/trainer.py:99", "text": "", "call": ""}
    base = outcome(FLOAT32, places=PLACES | {"model": where})
    assert lines_to_change(base, BFLOAT16, 1.0) == ['Trainer(precision="bf16-mixed")']
    assert lines_to_change(base, FLOAT16, 65536.0) == ['Trainer(precision="16-mixed")']
