"""Tests of linear_cross_entropy on two ranks that each hold the weight of some classes."""

import itertools

import pytest
import torch
from linear_reference import exactly, off
from linear_shards import (
    check_joined,
    joined,
    my_shard,
    result_of,
    whole_head,
)
from processes import Scenarios

pytestmark = pytest.mark.slow

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]
# Rows of few classes are computed in tiles of many rows, others one by one, in blocks of classes.
CLASSES = {"tiles": 74, "rows": 602, "blocks": 6002}
EXTREMES = {
    "far": 1e4,  # exponentials of one rank are negligible beside those of the other
    "nothing": -torch.inf,  # all exponentials of one rank are 0
}
OPTIONS = {
    "plain": {},
    "weights": {"class_weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing and weights": {"label_smoothing": 0.3, "class_weight": True},
    "z-loss": {"z_loss": 1e-3},
    "softcap": {"softcap": 3.0},
    "ignored class": {"ignore_index": 5},
    "probabilities": {"probabilities": True},
    "smooth probabilities": {"probabilities": True, "label_smoothing": 0.2, "class_weight": True},
    "all": {"class_weight": True, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 4.0},
}
EVERY_CASE = list(itertools.product(DTYPES, REDUCTIONS, ["rows"], OPTIONS)) + list(
    itertools.product(DTYPES, ["mean"], ["tiles", "blocks"], OPTIONS)
)
scenario = Scenarios()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run the scenarios, and return the function that looks up their results."""
    scenario.play(tmp_path_factory.mktemp("processes"))
    return scenario.results


@scenario(*EVERY_CASE)
def shared_out(case):
    dtype, reduction, size, options = case
    batch, options = whole_head(dtype, CLASSES[size], OPTIONS[options])
    mine, how = my_shard(batch)
    loss = mine.loss(reduction=reduction, chunk_rows=8, **options, **how)
    return result_of(mine, loss, reduction)


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: " ".join(map(str, case)))
def test_two_ranks_together_give_the_exact_loss_and_gradients(outcomes, case):
    dtype, reduction, size, options = case
    batch, options = whole_head(dtype, CLASSES[size], OPTIONS[options])
    check_joined(outcomes("shared_out", case), batch, reduction, **options)


@scenario(*EXTREMES)
def far_apart(which):
    batch, _ = whole_head(torch.float64, 602, {})
    with torch.no_grad():
        batch.bias[:301] += EXTREMES[which]
        batch.target.fill_(450)
    mine, how = my_shard(batch)
    return result_of(mine, mine.loss(label_smoothing=0.0, **how))


@pytest.mark.parametrize("which", EXTREMES)
def test_logits_of_two_ranks_may_be_far_apart(outcomes, which):
    batch, _ = whole_head(torch.float64, 602, {})
    with torch.no_grad():
        batch.bias[:301] += EXTREMES[which]
        batch.target.fill_(450)
    check_joined(outcomes("far_apart", which), batch)


@scenario("tiles", "rows", "blocks")
def smoothed(size):
    batch, _ = whole_head(torch.float32, CLASSES[size], {})
    with torch.no_grad():
        batch.bias[: CLASSES[size] // 2] = -torch.inf
        batch.target.fill_(CLASSES[size] - 1)
    mine, how = my_shard(batch)
    return {"loss": mine.loss(label_smoothing=0.1, **how).detach()}


@pytest.mark.parametrize("size", ["tiles", "rows", "blocks"])
def test_smoothed_loss_is_infinite_if_all_logits_of_a_rank_are_minus_infinity(outcomes, size):
    for result in outcomes("smoothed", size):
        assert result["loss"] == torch.inf


@scenario("mean", "none")
def uneven(reduction):
    batch, options = whole_head(torch.float32, 601, OPTIONS["all"])
    mine, how = my_shard(batch, even=False)
    return result_of(mine, mine.loss(reduction=reduction, **options, **how), reduction)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_shards_may_have_different_sizes(outcomes, reduction):
    batch, options = whole_head(torch.float32, 601, OPTIONS["all"])
    check_joined(outcomes("uneven", reduction), batch, reduction, **options)


@scenario("rows", "tiles")
def with_metrics(size):
    batch, _ = whole_head(torch.float32, CLASSES[size], {})
    mine, how = my_shard(batch)
    loss, metrics = mine.loss(return_metrics=True, chunk_rows=8, **how)
    return {"loss": loss.detach(), "metrics": list(metrics)}


@pytest.mark.parametrize("size", ["rows", "tiles"])
def test_metrics_are_those_of_all_classes(outcomes, size):
    batch, _ = whole_head(torch.float32, CLASSES[size], {})
    _, expected = batch.loss(return_metrics=True)
    for result in outcomes("with_metrics", size):
        for mine, right in zip(result["metrics"], expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)


@scenario("scaled", "divided", "accumulated", "frozen", "no gradient", "no rows", "all ignored")
def otherwise(what):
    batch, _ = whole_head(torch.float16 if what == "scaled" else torch.float32, 602, {})
    if what == "no rows":
        batch.hidden, batch.target = batch.hidden.detach()[:0], batch.target[:0]
    if what == "all ignored":
        batch.target.fill_(-100)
    mine, how = my_shard(batch)
    mine.hidden.requires_grad_(what != "frozen")
    if what == "scaled":
        loss = mine.loss(grad_scale=1024.0, **how)
        return {"loss": loss.detach(), "grads": mine.grads(loss, 1024.0)}
    if what == "divided":
        return result_of(mine, mine.loss(denominator=100.0, **how))
    if what == "no gradient":
        with torch.no_grad():
            return {"loss": mine.loss(**how)}
    if what == "accumulated":
        buffer = torch.ones_like(mine.weight)
        mine.loss(accumulate_into=buffer.detach(), **how).backward()
        return {"buffer": buffer.detach(), "hidden": mine.hidden.grad, "weight": mine.weight.grad}
    loss = mine.loss(**how)
    loss.backward()
    return {"loss": loss.detach(), "grads": [mine.hidden.grad, mine.weight.grad, mine.bias.grad]}


def test_gradients_with_grad_scale_are_exact(outcomes):
    batch, _ = whole_head(torch.float16, 602, {})
    right = exactly(batch, 1024.0).grads
    one, other = outcomes("otherwise", "scaled")
    assert off(one["grads"][0], right[0]) <= 1e-3
    assert off(torch.cat([one["grads"][1], other["grads"][1]]), right[1]) <= 1e-3


def test_loss_and_gradients_with_a_denominator_are_exact(outcomes):
    batch, _ = whole_head(torch.float32, 602, {})
    loss, grads = joined(outcomes("otherwise", "divided"))
    right = exactly(batch, 0.5, denominator=torch.tensor(100.0, dtype=torch.float64))
    torch.testing.assert_close(loss.double(), right.loss, rtol=1e-6, atol=0)
    assert all(off(*pair) <= 2e-6 for pair in zip(grads, right.grads, strict=True))


def test_each_rank_accumulates_the_weight_gradient_of_its_own_classes(outcomes):
    batch, _ = whole_head(torch.float32, 602, {})
    right = exactly(batch)
    one, other = outcomes("otherwise", "accumulated")
    assert one["weight"] is None
    assert off(torch.cat([one["buffer"], other["buffer"]]) - 1, right.grads[1]) <= 1e-5
    assert off(one["hidden"], right.grads[0]) <= 2e-6


def test_frozen_hidden_states_get_no_summed_gradient(outcomes):
    batch, _ = whole_head(torch.float32, 602, {})
    right = exactly(batch)
    one, other = outcomes("otherwise", "frozen")
    assert one["grads"][0] is None
    assert off(torch.cat([one["grads"][1], other["grads"][1]]), right.grads[1]) <= 2e-6


def test_loss_under_no_grad_is_exact(outcomes):
    batch, _ = whole_head(torch.float32, 602, {})
    for result in outcomes("otherwise", "no gradient"):
        torch.testing.assert_close(result["loss"].double(), exactly(batch).loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("what", ["no rows", "all ignored"])
def test_mean_without_counted_rows_is_nan(outcomes, what):
    for result in outcomes("otherwise", what):
        assert result["loss"].isnan()
        if what == "no rows":
            assert result["grads"][1].abs().max() == 0
