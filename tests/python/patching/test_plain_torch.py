"""Programs written against torch alone give the same results under `python -m ampfuse`."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "examples" / "plain_torch"

# Any difference may change how later 16-bit activations are rounded. WEIGHTS is the relative
# tolerance of the trained weights, PRINTED that of printed numbers. ONE_IMAGE lets one image of 512
# change its class.
WEIGHTS = 3e-2
PRINTED = 2e-3
ONE_IMAGE = 2.5e-3

# In bfloat16, scalers are disabled. LBFGS cannot have one, and convolutions in float16 are slow.
IN_BFLOAT16 = ("image_classifier", "lbfgs")

USED = {
    "accumulation": {"scaler", "optimizers", "cross_entropy", "clip_grad_norm"},
    "char_language_model": {"scaler", "optimizers", "cross_entropy", "clip_grad_norm"},
    "gan": {"scaler", "optimizers"},
    "image_classifier": {"optimizers", "cross_entropy"},
    "lbfgs": {"cross_entropy"},
    "resume": {"scaler", "optimizers", "cross_entropy"},
}

# Fewer steps than a user would take, to save time.
STEPS = {"char_language_model": ["--steps", "20"], "image_classifier": ["--epochs", "2"]}


def weights(path):
    state = torch.load(path)
    parts = [value.values() if isinstance(value, dict) else [value] for value in state.values()]
    return torch.cat([tensor.double().flatten() for part in parts for tensor in part])


def printed(text):
    """Return the printed numbers, each with the word before it."""
    return re.findall(r"(\w*)\W*?(\d+\.\d+)", text)


def test_examples_are_the_expected_programs():
    assert {path.stem for path in FOLDER.glob("*.py")} == USED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("program", USED)
def test_results_under_ampfuse_match_those_of_plain_torch(programs, program, monkeypatch, capsys):
    dtype = "bfloat16" if program in IN_BFLOAT16 else "float16"
    command = [FOLDER / f"{program}.py", "--dtype", dtype, *STEPS.get(program, ()), "--save"]
    saved = [programs.folder / name for name in ("plain.pt", "ours.pt")]
    monkeypatch.setattr(sys, "argv", [*map(str, command), str(saved[0])])
    runpy.run_path(sys.argv[0], run_name="__main__")  # in this process, which has imported torch
    told = capsys.readouterr().out
    ours = programs.ours(*command, saved[1])
    assert ours.returncode == 0, ours.stderr

    one, other = map(weights, saved)
    assert (one - other).norm() <= WEIGHTS * one.norm()
    assert re.sub(r"\d+\.\d+", "N", ours.stdout) == re.sub(r"\d+\.\d+", "N", told)
    for (name, mine), (_, torchs) in zip(printed(ours.stdout), printed(told), strict=True):
        near = ONE_IMAGE if name == "accuracy" else PRINTED
        assert float(mine) == pytest.approx(float(torchs), rel=PRINTED, abs=near), name

    for part in ("scaler", "optimizers", "cross_entropy", "clip_grad_norm"):
        is_used = re.search(rf"^  {part} +used ", ours.stderr, re.MULTILINE) is not None
        assert is_used == (part in USED[program]), part
    left = [line for line in ours.stderr.splitlines() if "left to torch" in line]
    assert len(left) == (program == "lbfgs"), left  # LBFGS is always torch's
