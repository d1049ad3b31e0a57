"""The programs of examples/distributed, run by torchrun on four ranks and on one."""

import json
import re

import pytest
import torch
import warm
from packaging_tools import ROOT, run_python

FOLDER = ROOT / "examples" / "distributed"
STEPS = 100
FORCED = [30, 31, 60, 90]  # the steps that are made to overflow in both programs
# The largest relative difference between four ranks and one. Stages of a pipeline compute what one
# process computes, to the last bit. Tensor parallelism adds float16 numbers in another order.
TOLERANCES = {"fp16_fsdp": 1e-3, "fp16_pipeline": 0.0}

pytestmark = pytest.mark.slow


def run(program, ranks, folder):
    result = folder / f"{ranks}.json"
    start = (*warm.TORCHRUN, "--nproc_per_node", str(ranks), FOLDER / f"{program}.py")
    printed = run_python(*start, "--steps", str(STEPS), "--result", result, cwd=folder)
    return {**json.loads(result.read_text()), "printed": printed}


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


def test_scale_skips_norm_and_weights_are_the_same_on_all_ranks(runs):
    _, together, _ = runs
    ranks = together["ranks"]

    assert len(ranks) == 4
    for name in ("scales", "skipped", "norms"):
        assert len(ranks[0][name]) == STEPS
        assert all(rank[name] == ranks[0][name] for rank in ranks), name
    for name in together["weights"]:
        assert len({rank["hashes"][name] for rank in ranks if name in rank["hashes"]}) == 1, name


def test_four_ranks_train_like_one(runs):
    alone, together, tolerance = runs
    norms, expected_norms = together["ranks"][0]["norms"], alone["ranks"][0]["norms"]
    weights, expected = as_vector(together), as_vector(alone)

    assert together["weights"].keys() == alone["weights"].keys()
    assert together["ranks"][0]["scales"] == alone["ranks"][0]["scales"]
    assert largest_difference(together["losses"], alone["losses"]) <= tolerance
    assert largest_difference(norms, expected_norms) <= tolerance
    assert (weights - expected).norm() <= tolerance * expected.norm()


def test_model_learns_with_clipped_gradients_and_skips_only_forced_overflows(runs):
    for result in runs[:2]:
        scales, skipped = result["ranks"][0]["scales"], result["ranks"][0]["skipped"]
        assert [step for step, was_skipped in enumerate(skipped) if was_skipped] == FORCED
        assert all(scales[step + 1] == scales[step] / 2 for step in FORCED)
        assert max(scales) > 2**16

        assert result["losses"][0] > 4
        assert result["losses"][-1] < 1.65  # the least possible loss is log 4, 1.39
        assert max(filter(None, result["ranks"][0]["norms"])) > 0.5  # the limit
        lines = result["printed"].splitlines()
        assert len(lines) == STEPS / 20
        last = r"step +100   loss 1\.\d+   scale +32,768   norm 0\.\d+   skipped 4"
        assert re.fullmatch(last, lines[-1])
