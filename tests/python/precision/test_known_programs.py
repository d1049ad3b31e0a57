"""The advice is right for programs of which the answer is known."""

from pathlib import Path

import pytest
from ampfuse.tools.precision import advisor
from ampfuse.tools.precision.judge import Judge
from ampfuse.tools.precision.outcome import BFLOAT16, FLOAT16, FLOAT32, UNSCALED
from ampfuse.tools.precision.trial import Program

PROGRAM = str(Path(__file__).parents[1] / "support" / "known_programs.py")

pytestmark = pytest.mark.slow


@pytest.fixture
def advised(monkeypatch):
    def advise(name, expected, fast=(BFLOAT16, FLOAT16)):
        """Return the judge of a program, and its verdict, which is for the expected precision."""
        if fast:  # as on a GPU, whatever this machine is good at
            monkeypatch.setattr(Judge, "contenders", lambda judge: [])  # which would run again
            dtypes = {precision.dtype for precision in fast}
            monkeypatch.setattr(
                Judge,
                "time_ratio",
                lambda judge, precision: 0.5 if precision.dtype in dtypes else 2.0,
            )
        verdict = advisor.advise(Program([PROGRAM, name], False, 10), lambda line: None)
        assert verdict.precision == expected
        return verdict.judge, verdict

    return advise


def culprit_in_float16(judge):
    assert judge.trouble(FLOAT16)
    return judge.culprit(FLOAT16)[:2]


@pytest.mark.parametrize("name", ["convolutions", "language"])
def test_ordinary_model_needs_bfloat16_and_nothing_else(advised, name):
    judge, verdict = advised(name, BFLOAT16)
    assert "no scaler is needed, and no module has to stay in float32" in verdict.sentences[1]
    assert not any(judge.trouble(one) for one in (FLOAT16, UNSCALED))
    (line,) = verdict.lines
    assert "`output = model(inputs)`" in line
    assert 'torch.autocast("cpu", dtype=torch.bfloat16)' in line


def test_attention_with_large_scores_overflows_in_float16(advised):
    judge, verdict = advised("attention", BFLOAT16)
    assert culprit_in_float16(judge) == ("blocks.0.attention", "bmm")
    assert "`bmm` of `blocks.0.attention` (known_programs.py:" in verdict.sentences[2]


def test_norm_that_squares_overflows_in_float16_without_a_nan_at_the_end(advised):
    judge, _ = advised("norm", BFLOAT16)
    assert culprit_in_float16(judge) == ("1", "mul")
    assert judge.outcomes[FLOAT16].is_finite


def test_tiny_gradients_need_a_scaler_in_float16(advised):
    judge, _ = advised("tiny gradients", BFLOAT16)
    assert not judge.trouble(FLOAT16)
    assert judge.trouble(UNSCALED)
    assert judge.deviations[UNSCALED].gradient > 0.9


def test_program_that_fails_in_float16_is_for_bfloat16(advised):
    _, verdict = advised("mask", BFLOAT16)
    assert "fails with RuntimeError: value cannot be" in verdict.sentences[2]
    assert "(known_programs.py:" in verdict.sentences[2]


def test_small_differences_need_float16(advised):
    judge, verdict = advised("differences", FLOAT16)
    assert judge.trouble(BFLOAT16)
    assert any("GradScaler" in line and "init_scale=16384" in line for line in verdict.lines)


def test_stiff_model_stays_in_float32(advised):
    _, verdict = advised("stiff", FLOAT32)
    first, second, third, *_ = verdict.sentences
    assert "no precision is accurate enough" in first
    assert "The deviation in bfloat16 begins in `Heat`" in second
    assert "Do not use bfloat16: gradients differ from float32's by " in third


def test_module_that_needs_float32_is_found_and_the_others_are_not(advised):
    kept = BFLOAT16.keeping("waves")
    judge, verdict = advised("waves", kept, fast=[BFLOAT16])
    assert "`waves` has to stay in float32" in verdict.sentences[1]
    assert any("around the call of `waves`" in line for line in verdict.lines)
    assert judge.deviations[kept].gradient < 0.02


def test_program_that_waits_gains_nothing(advised):
    _, verdict = advised("input", FLOAT32, fast=())
    assert verdict.lines == []
    assert "Stay with float32" in verdict.sentences[0]


def test_program_that_diverges_is_not_judged(advised):
    judge, verdict = advised("diverges", FLOAT32)
    assert "the loss of step 3 is not finite even in float32" in verdict.sentences[0]
    assert not judge.outcomes
