"""The advice is right for programs of which the answer is known."""

from pathlib import Path

import pytest
from ampfuse.precision import _advisor
from ampfuse.precision._outcome import Outcome, Program, run
from ampfuse.precision._precisions import BFLOAT16, FLOAT16, FLOAT32, UNSCALED, WEIGHTS
from ampfuse.precision._verdict import Judge

PROGRAM = str(Path(__file__).parents[1] / "support" / "known_programs.py")

pytestmark = pytest.mark.slow


def run_in_most_precisions(program, precision, *arguments):
    """Run a program, except with 16-bit weights, which have no part in these answers."""
    if precision == WEIGHTS:
        return Outcome(precision, "not tried", {}, [], {})
    return run(program, precision, *arguments)


@pytest.fixture
def advised(monkeypatch):
    monkeypatch.setattr(_advisor, "run", run_in_most_precisions)

    def advise(name, fast=(BFLOAT16, FLOAT16)):
        if fast:  # as on a GPU, whatever this machine is good at
            monkeypatch.setattr(Judge, "contenders", lambda judge: [])  # which would run again
            dtypes = {precision.dtype for precision in fast}
            monkeypatch.setattr(
                Judge,
                "time_ratio",
                lambda judge, outcome: 0.5 if outcome.precision.dtype in dtypes else 2.0,
            )
        return _advisor.advise(Program([PROGRAM, name], False, 10), lambda line: None)

    return advise


def trouble(advice, precision):
    return advice.judge.culprit(precision)


@pytest.mark.parametrize("name", ["convolutions", "language"])
def test_ordinary_model_needs_bfloat16_and_nothing_else(advised, name):
    advice = advised(name)
    assert advice.verdict.precision == BFLOAT16
    assert advice.verdict.sentences[1].endswith(
        "no scaler is needed, and no module has to stay in float32."
    )
    assert all(advice.judge.is_accurate(one) for one in (FLOAT16, UNSCALED))
    (line,) = advice.verdict.lines
    assert "`output = model(inputs)`" in line
    assert 'torch.autocast("cpu", dtype=torch.bfloat16)' in line


def test_attention_with_large_scores_overflows_in_float16(advised):
    advice = advised("attention")
    assert advice.verdict.precision == BFLOAT16
    assert not advice.judge.is_accurate(FLOAT16)
    found = trouble(advice, FLOAT16)
    assert (found["module"], found["operator"]) == ("blocks.0.attention", "bmm")
    assert "`bmm` of `blocks.0.attention` (known_programs.py:" in advice.verdict.sentences[2]


def test_norm_that_squares_overflows_in_float16_without_a_nan_at_the_end(advised):
    advice = advised("norm")
    assert advice.verdict.precision == BFLOAT16
    found = trouble(advice, FLOAT16)
    assert (found["module"], found["operator"]) == ("1", "mul")
    assert advice.judge.outcomes[FLOAT16].is_finite
    assert not advice.judge.is_accurate(FLOAT16)


def test_tiny_gradients_need_a_scaler_in_float16(advised):
    advice = advised("tiny gradients")
    assert advice.judge.is_accurate(FLOAT16)
    assert not advice.judge.is_accurate(UNSCALED)
    assert advice.judge.deviations[UNSCALED].gradient > 0.9


def test_program_that_fails_in_float16_is_for_bfloat16(advised):
    advice = advised("mask")
    assert advice.verdict.precision == BFLOAT16
    assert "the program fails with RuntimeError: value cannot be" in advice.verdict.sentences[2]
    assert "(known_programs.py:" in advice.verdict.sentences[2]


def test_small_differences_need_float16(advised):
    advice = advised("differences")
    assert advice.verdict.precision == FLOAT16
    assert not advice.judge.is_accurate(BFLOAT16)
    assert any("GradScaler" in line for line in advice.verdict.lines)
    assert any("init_scale=16384" in line for line in advice.verdict.lines)


def test_stiff_model_stays_in_float32(advised):
    advice = advised("stiff")
    assert advice.verdict.precision == FLOAT32
    first, second, third = advice.verdict.sentences
    assert first == "Stay with float32: 16 bits are not accurate enough for this program."
    assert second.startswith("In bfloat16 its gradients differ from float32's by ")
    assert third == ("`Heat` itself, beside its modules, is the first to compute something else.")


def test_module_that_needs_float32_is_found_and_the_others_are_not(advised):
    advice = advised("waves", fast=[BFLOAT16])
    assert advice.verdict.precision == BFLOAT16.keeping(["waves"])
    assert "`waves` has to stay in float32" in advice.verdict.sentences[1]
    assert any("around the call of `waves`" in line for line in advice.verdict.lines)
    assert advice.judge.deviations[advice.verdict.precision].gradient < 0.02


def test_small_layers_gain_nothing(advised):
    advice = advised("small layers", fast=())
    assert advice.verdict.precision == FLOAT32
    assert advice.verdict.lines == []
    assert advice.verdict.sentences[0].startswith("Stay with float32: ")


def test_program_that_waits_gains_nothing(advised):
    advice = advised("input", fast=())
    assert advice.verdict.precision == FLOAT32
    assert "take only " in advice.verdict.sentences[1]
    assert advice.verdict.sentences[1].endswith("the rest is the same in all precisions.")


def test_program_that_diverges_is_not_judged(advised):
    advice = advised("diverges")
    assert advice.verdict.precision == FLOAT32
    assert advice.verdict.sentences[0] == (
        "Stay with float32 for now: the loss of backward 3 is not finite even in float32."
    )
    assert not advice.judge.outcomes
