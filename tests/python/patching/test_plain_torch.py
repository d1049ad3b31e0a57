"""Programs written against torch alone give the same results under `python -m ampfuse`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "examples" / "plain_torch"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))

# Any difference may change how later 16-bit activations are rounded. WEIGHTS is the relative
# tolerance of the trained weights, PRINTED that of printed numbers. ONE_IMAGE lets one image of 512
# change its class.
WEIGHTS = 3e-2
PRINTED = 2e-3
ONE_IMAGE = 2.5e-3

USED = {
    "accumulation": {"scaler", "optimizers", "cross_entropy", "clip_grad_norm"},
    "char_language_model": {"scaler", "optimizers", "cross_entropy", "clip_grad_norm"},
    "gan": {"scaler", "optimizers"},
    "image_classifier": {"scaler", "optimizers", "cross_entropy"},
    "lbfgs": {"cross_entropy"},
    "resume": {"scaler", "optimizers", "cross_entropy"},
}

# Fewer steps than a user would take, to save time.
STEPS = {"char_language_model": ["--steps", "20"], "image_classifier": ["--epochs", "2"]}


def weights(path):
    state = torch.load(path)
    tensors = [
        t
        for value in state.values()
        for t in (value.values() if isinstance(value, dict) else [value])
    ]
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def printed(text):
    """Return the printed numbers, each with the word before it."""
    return re.findall(r"(\w*)\W*?(\d+\.\d+)", text)


def run(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_examples_are_the_six_expected_programs():
    assert (
        sorted(
            ["accumulation", "char_language_model", "gan", "image_classifier", "lbfgs", "resume"]
        )
        == PROGRAMS
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_under_ampfuse_match_those_of_plain_torch(tmp_path, program, dtype):
    script = FOLDER / f"{program}.py"
    options = ["--dtype", dtype, *STEPS.get(program, ())]
    plain = run(script, *options, "--save", tmp_path / "plain.pt")
    ours = run("-m", "ampfuse", script, *options, "--save", tmp_path / "ours.pt")

    one, other = weights(tmp_path / "plain.pt"), weights(tmp_path / "ours.pt")
    assert (one - other).norm() <= WEIGHTS * one.norm()
    assert re.sub(r"\d+\.\d+", "N", ours.stdout) == re.sub(r"\d+\.\d+", "N", plain.stdout)
    for (name, mine), (_, torchs) in zip(printed(ours.stdout), printed(plain.stdout), strict=True):
        near = ONE_IMAGE if name == "accuracy" else PRINTED
        assert float(mine) == pytest.approx(float(torchs), rel=PRINTED, abs=near), name

    for part in ("scaler", "optimizers", "cross_entropy", "clip_grad_norm"):
        is_used = re.search(rf"^  {part} +used ", ours.stderr, re.MULTILINE) is not None
        assert is_used == (part in USED[program]), part
    assert "left to torch" not in ours.stderr
