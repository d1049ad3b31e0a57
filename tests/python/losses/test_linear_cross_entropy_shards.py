"""Tests of linear_cross_entropy on two ranks that each hold the weight of some classes."""

from dataclasses import replace

import ampfuse
import pytest
import torch
import torch.distributed as dist
from linear_reference import DTYPES, OPTIONS, Head, check_results, exactly, head, off, with_options
from processes import Scenarios
from torch.nn import functional

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FLOAT = torch.float32
# Rows of few classes are computed in tiles of many rows, others one by one, in blocks of classes.
CLASSES = {"tiles": 74, "rows": 602, "blocks": 6002, "shards of different sizes": 601}
SIZES = ["tiles", "rows", "blocks"]
CASES = dict.fromkeys(
    # Each option for each way to compute rows, and for a backward that computes the logits again.
    [(FLOAT, "mean", size, options) for size in SIZES for options in OPTIONS]
    + [(FLOAT, "none", "rows", options) for options in OPTIONS]
    + [(dtype, "mean", size, "all") for dtype in DTYPES for size in SIZES]
    + [(dtype, "mean", size, "probabilities") for dtype in DTYPES for size in SIZES]
    + [(dtype, reduction, "rows", "all") for dtype in DTYPES for reduction in ("sum", "none")]
    + [(FLOAT, reduction, "shards of different sizes", "all") for reduction in ("mean", "none")]
)
ROWS = 21
scenario = Scenarios()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run the scenarios, and return the function that looks up their results."""
    scenario.play(tmp_path_factory.mktemp("processes"))
    return scenario.results


def whole_head(dtype, classes):
    return head(CPU, dtype, rows=ROWS, classes=classes)


def my_shard(batch, even=True):
    """Return this rank's shard, and the arguments that describe it."""
    classes = batch.weight.shape[0]
    middle = classes // 2 if even else classes // 3
    first, last = (0, middle) if dist.get_rank() == 0 else (middle, classes)
    how = {"process_group": dist.group.WORLD}
    if not even:
        how |= {"first_class": first, "num_classes": classes}
    weight, bias = (
        None if whole is None else whole.detach()[first:last].clone().requires_grad_()
        for whole in (batch.weight, batch.bias)
    )
    is_index = not batch.target.is_floating_point()
    target = batch.target if is_index else batch.target[:, first:last]
    return Head(batch.hidden.detach().requires_grad_(), weight, bias, target), how


def upstream_of(reduction):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, generator=generator) if reduction == "none" else torch.tensor(0.5)


def result_of(mine, loss, upstream=0.5):
    hidden, *of_classes = mine.grads(loss, upstream)
    return {"loss": loss.detach(), "hidden": hidden, "of_classes": of_classes}


def check_joined(results, batch, upstream=0.5, **options):
    """Check the loss, and the gradients of all classes.

    The ranks must agree in the loss and in the gradient of the hidden states.
    """
    one, other = results
    assert torch.equal(one["loss"], other["loss"])
    assert torch.equal(one["hidden"], other["hidden"])
    of_classes = map(torch.cat, zip(one["of_classes"], other["of_classes"], strict=True))
    # In products that add up thousands of numbers, torch's own errors are as large.
    tolerance = 2 if batch.weight.shape[0] > 5000 else 1
    expected = exactly(batch, upstream, **options)
    check_results(batch, one["loss"], [one["hidden"], *of_classes], expected, tolerance)


@scenario(*CASES)
def shared_out(case):
    dtype, reduction, size, options = case
    batch, options = with_options(whole_head(dtype, CLASSES[size]), options)
    mine, how = my_shard(batch, even=size in SIZES)
    loss = mine.loss(reduction=reduction, chunk_rows=8, **options, **how)
    return result_of(mine, loss, upstream_of(reduction))


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_two_ranks_together_give_the_exact_loss_and_gradients(outcomes, case):
    dtype, reduction, size, options = case
    batch, options = with_options(whole_head(dtype, CLASSES[size]), options)
    results = outcomes("shared_out", case)
    check_joined(results, batch, upstream_of(reduction), reduction=reduction, **options)


# --- unusual batches ------------------------------------------------------------------------------


def apart(dtype, size, distance):
    """Return a batch whose logits on rank 0 are `distance` higher. The targets are on rank 1."""
    batch = whole_head(dtype, CLASSES[size])
    with torch.no_grad():
        batch.bias[: CLASSES[size] // 2] += distance
    batch.target.fill_(CLASSES[size] - 1)
    return batch


def of_class_156(dtype):
    batch = whole_head(FLOAT, 202)
    return replace(batch, target=torch.full((ROWS,), 156, dtype=dtype))


# Functions that return a batch, the options of its loss, and the upstream gradient.
UNUSUAL = {
    "exponentials of one rank are negligible": lambda: (apart(torch.float64, "rows", 1e4), {}, 0.5),
    "exponentials of one rank are 0": lambda: (apart(torch.float64, "rows", -torch.inf), {}, 0.5),
    "uint8 targets equal ignore_index cast to a byte": lambda: (of_class_156(torch.uint8), {}, 0.5),
    "int32 targets": lambda: (of_class_156(torch.int32), {}, 0.5),
    "grad_scale": lambda: (whole_head(torch.float16, 602), {"grad_scale": 1024.0}, 1024.0),
    "denominator": lambda: (whole_head(FLOAT, 602), {"denominator": 0.01}, 0.5),
}


@scenario(*UNUSUAL)
def unusual(name):
    batch, options, upstream = UNUSUAL[name]()
    mine, how = my_shard(batch)
    return result_of(mine, mine.loss(**options, **how), upstream)


@pytest.mark.parametrize("name", UNUSUAL)
def test_two_ranks_together_give_exact_results_for_unusual_batches(outcomes, name):
    batch, options, upstream = UNUSUAL[name]()
    options.pop("grad_scale", None)
    check_joined(outcomes("unusual", name), batch, upstream, **options)


@scenario(*SIZES)
def smoothed(size):
    mine, how = my_shard(apart(FLOAT, size, -torch.inf))
    return {"loss": mine.loss(label_smoothing=0.1, **how).detach()}


@pytest.mark.parametrize("size", SIZES)
def test_smoothed_loss_is_infinite_if_all_logits_of_a_rank_are_minus_infinity(outcomes, size):
    assert all(result["loss"] == torch.inf for result in outcomes("smoothed", size))


@scenario("gap")
def shards_with_a_gap(_):
    batch = whole_head(FLOAT, 602)
    mine, how = my_shard(batch)
    at = {"first_class": 300 * dist.get_rank(), "num_classes": 603}
    return {"loss": mine.loss(reduction="none", **how | at)[batch.target != -100]}


def test_loss_is_nan_where_shards_leave_classes_out(outcomes):
    assert all(result["loss"].isnan().all() for result in outcomes("shards_with_a_gap", "gap"))


@scenario("no rows", "all ignored")
def nothing_counted(what):
    batch = whole_head(FLOAT, 602)
    if what == "no rows":
        batch.hidden, batch.target = batch.hidden.detach()[:0], batch.target[:0]
    batch.target.fill_(-100)
    mine, how = my_shard(batch)
    loss = mine.loss(**how)
    return {"loss": loss.detach(), "of_weight": mine.grads(loss)[1]}


@pytest.mark.parametrize("what", ["no rows", "all ignored"])
def test_mean_without_counted_rows_is_nan(outcomes, what):
    for result in outcomes("nothing_counted", what):
        assert result["loss"].isnan()
        if what == "no rows":
            assert result["of_weight"].abs().max() == 0


@scenario("rows", "tiles")
def with_metrics(size):
    mine, how = my_shard(whole_head(FLOAT, CLASSES[size]))
    _, metrics = mine.loss(return_metrics=True, chunk_rows=8, **how)
    return {"metrics": list(metrics)}


@pytest.mark.parametrize("size", ["rows", "tiles"])
def test_metrics_are_those_of_all_classes(outcomes, size):
    _, expected = whole_head(FLOAT, CLASSES[size]).loss(return_metrics=True)
    for result in outcomes("with_metrics", size):
        torch.testing.assert_close(result["metrics"], list(expected), rtol=1e-6, atol=1e-6)


@scenario("tie")
def equal_logits(_):
    # Rank 1 has the first classes.
    at = {"first_class": 100 * (1 - dist.get_rank()), "num_classes": 200}
    batch = Head(torch.ones(3, 4), torch.zeros(100, 4), None, torch.zeros(3, dtype=torch.long))
    _, metrics = batch.loss(process_group=dist.group.WORLD, return_metrics=True, **at)
    return {"argmax": metrics.argmax}


def test_argmax_is_the_first_class_of_equal_logits_on_two_ranks(outcomes):
    for result in outcomes("equal_logits", "tie"):
        assert result["argmax"].tolist() == [0, 0, 0]


# --- other calls ----------------------------------------------------------------------------------


@scenario("accumulated", "frozen", "no gradient")
def otherwise(what):
    mine, how = my_shard(whole_head(FLOAT, 602))
    mine.hidden.requires_grad_(what != "frozen")
    buffer = torch.ones_like(mine.weight, requires_grad=False)
    with torch.set_grad_enabled(what != "no gradient"):
        loss = mine.loss(**how, accumulate_into=buffer if what == "accumulated" else None)
    if what != "no gradient":
        loss.backward()
    grads = {"hidden": mine.hidden.grad, "weight": mine.weight.grad, "buffer": buffer}
    return {"loss": loss.detach()} | grads


@pytest.mark.parametrize("what", ["accumulated", "frozen", "no gradient"])
def test_loss_and_the_gradients_that_are_wanted_are_exact(outcomes, what):
    right = exactly(whole_head(FLOAT, 602))
    one, other = outcomes("otherwise", what)
    for result in (one, other):
        torch.testing.assert_close(result["loss"].double(), right.loss, rtol=1e-6, atol=0)
        assert (result["hidden"] is None) == (what != "accumulated")
        assert (result["weight"] is None) == (what != "frozen")
    if what == "frozen":
        assert off(torch.cat([one["weight"], other["weight"]]), right.grads[1]) <= 2e-6
    if what == "accumulated":  # each rank adds the gradient of its own classes
        assert off(torch.cat([one["buffer"], other["buffer"]]) - 1, right.grads[1]) <= 1e-5
        assert off(one["hidden"], right.grads[0]) <= 2e-6


@scenario("compiled")
def compiled(_):
    batch, options = with_options(whole_head(FLOAT, 602), "all")
    mine, how = my_shard(batch)
    run = torch.compile(
        lambda hidden, weight, bias, target: ampfuse.linear_cross_entropy(
            hidden, weight, target, bias, **options, **how
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    return result_of(mine, run(mine.hidden, mine.weight, mine.bias, mine.target))


def test_compiled_loss_and_gradients_of_two_ranks_are_exact(outcomes):
    batch, options = with_options(whole_head(FLOAT, 602), "all")
    check_joined(outcomes("compiled", "compiled"), batch, **options)


def accurate_batch(dtype):
    return head(CPU, dtype, 256, 64, 2002, bias=False)


@scenario(torch.bfloat16, torch.float16)
def accurate(dtype):
    mine, how = my_shard(accurate_batch(dtype))
    return {"hidden": mine.grads(mine.loss(chunk_rows=64, **how))[0]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_ranks_are_as_accurate_as_torch_in_one_process(outcomes, dtype):
    batch = accurate_batch(dtype)
    right = exactly(batch).grads[0]
    logits = functional.linear(batch.hidden, batch.weight).float()
    loss = functional.cross_entropy(logits, batch.target)
    scale = 2.0**16 if dtype == torch.float16 else 1.0  # at 1 torch's gradients underflow
    torchs = torch.autograd.grad(loss, batch.hidden, torch.tensor(scale))[0].double() / scale
    for result in outcomes("accurate", dtype):
        error = (result["hidden"].double() - right).norm()
        assert error <= 1.1 * (torchs - right).norm()


@scenario("threads")
def with_other_threads(_):
    torch.set_num_threads(1 + dist.get_rank())
    mine, how = my_shard(head(CPU, torch.float64, 100_000, 2, 6, bias=False))
    with torch.no_grad():
        loss = mine.loss(**how)
    torch.set_num_threads(2)
    return {"loss": loss}


def test_ranks_with_different_numbers_of_threads_get_the_same_loss_bits(outcomes):
    one, other = outcomes("with_other_threads", "threads")
    assert torch.equal(one["loss"], other["loss"])


# --- refusals -------------------------------------------------------------------------------------


def refusal(call):
    try:
        call()
    except (ValueError, IndexError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@scenario("refusals")
def refused(_):
    mine, how = my_shard(whole_head(FLOAT, 602))
    outside = replace(mine, target=mine.target.clone().fill_(602))
    probable = replace(mine, target=torch.ones(ROWS, 301) / 602)
    calls = {
        "Target 602 is out of bounds": lambda: outside.loss(**how),
        "class_weight": lambda: mine.loss(class_weight=torch.ones(301), **how),
        "expected both or neither": lambda: mine.loss(first_class=0, **how),
        "only allowed with process_group": lambda: mine.loss(first_class=0, num_classes=602),
        "expected indices, since metrics": lambda: probable.loss(return_metrics=True, **how),
    }
    return {"errors": {expected: refusal(call) for expected, call in calls.items()}}


def test_invalid_arguments_of_shards_are_refused_on_both_ranks(outcomes):
    for result in outcomes("refused", "refusals"):
        for expected, error in result["errors"].items():
            assert expected in error
