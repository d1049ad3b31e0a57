"""The programs of examples/distributed, run by torchrun on four ranks and on one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "distributed"
STEPS = 200
FORCED = [30, 31, 60, 90, 150]  # the steps that are made to overflow in both programs
# The largest relative difference between four ranks and one. Stages of a pipeline compute what one
# process computes, to the last bit. Tensor parallelism adds float16 numbers in another order.
TOLERANCES = {"fp16_fsdp": 1e-3, "fp16_pipeline": 0.0}


def run(program, ranks, folder):
    result = folder / f"{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks), str(FOLDER / f"{program}.py")]
    command += ["--steps", str(STEPS), "--result", str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(result.read_text()), "printed": done.stdout}


@pytest.fixture(scope="module", params=TOLERANCES)
def runs(request, tmp_path_factory):
    """Return the results of one rank and of four, and the tolerance of the program."""
    folder = tmp_path_factory.mktemp(request.param)
    alone, together = (run(request.param, ranks, folder) for ranks in (1, 4))
    return alone, together, TOLERANCES[request.param]


def as_vector(result):
    return torch.cat([torch.tensor(result["weights"][name]) for name in sorted(result["weights"])])


def largest_difference(numbers, expected):
    pairs = zip(numbers, expected, strict=True)
    return max(abs(number - other) / other for number, other in pairs if other is not None)


@pytest.mark.slow
def test_scale_skips_norm_and_weights_are_the_same_on_all_ranks(runs):
    _, together, _ = runs
    ranks = together["ranks"]

    assert len(ranks) == 4
    for name in ("scales", "skipped", "norms"):
        assert len(ranks[0][name]) == STEPS
        assert all(rank[name] == ranks[0][name] for rank in ranks), name
    for name in together["weights"]:
        assert len({rank["hashes"][name] for rank in ranks if name in rank["hashes"]}) == 1, name


@pytest.mark.slow
def test_forced_overflows_are_skipped_and_halve_the_scale(runs):
    for result in runs[:2]:
        scales, skipped = result["ranks"][0]["scales"], result["ranks"][0]["skipped"]

        assert [step for step, was_skipped in enumerate(skipped) if was_skipped] == FORCED
        assert all(scales[step + 1] == scales[step] / 2 for step in FORCED)
        assert max(scales) > 2**16


@pytest.mark.slow
def test_four_ranks_train_like_one(runs):
    alone, together, tolerance = runs
    norms, expected_norms = together["ranks"][0]["norms"], alone["ranks"][0]["norms"]
    weights, expected = as_vector(together), as_vector(alone)

    assert together["weights"].keys() == alone["weights"].keys()
    assert together["ranks"][0]["scales"] == alone["ranks"][0]["scales"]
    assert largest_difference(together["losses"], alone["losses"]) <= tolerance
    assert largest_difference(norms, expected_norms) <= tolerance
    assert (weights - expected).norm() <= tolerance * expected.norm()


@pytest.mark.slow
def test_model_learns_with_clipped_gradients_and_rank_0_reports_it(runs):
    for result in runs[:2]:
        assert result["losses"][0] > 4
        assert result["losses"][-1] < 1.6  # the least possible loss is log 4, 1.39
        assert max(filter(None, result["ranks"][0]["norms"])) > 0.5  # the limit
        lines = result["printed"].splitlines()
        assert len(lines) == STEPS / 20
        last = r"step +200   loss 1\.\d+   scale +262,144   norm 0\.\d+   skipped 5"
        assert re.fullmatch(last, lines[-1])


@pytest.mark.parametrize("program", TOLERANCES)
def test_lines_on_the_page_about_float16_are_those_of_the_programs(program):
    page = (ROOT / "docs" / "fp16.md").read_text()
    part = page.split(f"`examples/distributed/{program}.py`")[1]
    quoted = part.split("```python\n")[1].split("```")[0].splitlines()
    code = " ".join((FOLDER / f"{program}.py").read_text().split())

    assert len(quoted) > 8
    for line in quoted:
        assert " ".join(line.split()) in code
