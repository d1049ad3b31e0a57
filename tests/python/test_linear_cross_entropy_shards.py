"""linear_cross_entropy of two processes, each of which has the weight of some classes."""

import itertools

import ampfuse
import pytest
import torch
import torch.distributed as dist
from linear_reference import LOSS_TOLERANCE, TOLERANCE, Head, exactly, head, off
from processes import Scenarios

pytestmark = pytest.mark.slow

ROWS = 21
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]
# Rows of classes are taken one by one, or many at a time where there are few.
CLASSES = {"tiles": 74, "rows": 602, "blocks": 6002}
EXTREMES = {
    "far": 1e4,  # logits of one process are nothing beside the other's
    "nothing": -torch.inf,  # no exponentials here
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
    """What each process made of a scenario."""
    scenario.play(tmp_path_factory.mktemp("processes"))
    return scenario.results


def whole_head(dtype, classes, options):
    """The batch, and the options as they are passed where all classes are."""
    batch = head(torch.device("cpu"), dtype, rows=ROWS, classes=classes)
    options = dict(options)
    generator = torch.Generator().manual_seed(3)
    if options.pop("class_weight", False):
        options["class_weight"] = torch.rand(classes, generator=generator)
    if options.pop("probabilities", False):
        batch.target = torch.randn(ROWS, classes, generator=generator).softmax(1)
    if "ignore_index" in options:
        batch.target.clamp_(min=0)
        batch.target[::4] = 5
    return batch, options


def split_at(classes, even):
    return classes // 2 if even else classes // 3


def shard_of(batch, first, last):
    """The classes from one to another."""
    weight, bias = (
        None if whole is None else whole.detach()[first:last].clone().requires_grad_()
        for whole in (batch.weight, batch.bias)
    )
    is_index = not batch.target.is_floating_point()
    target = batch.target if is_index else batch.target[:, first:last]
    return Head(batch.hidden.detach().requires_grad_(), weight, bias, target)


def my_shard(batch, even=True):
    """This process's, and how it says so."""
    classes = batch.weight.shape[0]
    middle = split_at(classes, even)
    first, last = (0, middle) if dist.get_rank() == 0 else (middle, classes)
    how = {"process_group": dist.group.WORLD}
    if not even:
        how |= {"first_class": first, "num_classes": classes}
    return shard_of(batch, first, last), how


def upstream_of(reduction):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, generator=generator) if reduction == "none" else torch.tensor(0.5)


def result_of(mine, loss, reduction="mean", **more):
    hidden, *of_classes = mine.grads(loss, upstream_of(reduction))
    return {"loss": loss.detach(), "hidden": hidden, "of_classes": of_classes} | more


@scenario(*EVERY_CASE)
def shared_out(case):
    dtype, reduction, size, options = case
    batch, options = whole_head(dtype, CLASSES[size], OPTIONS[options])
    mine, how = my_shard(batch)
    loss = mine.loss(reduction=reduction, chunk_rows=8, **options, **how)
    return result_of(mine, loss, reduction)


def joined(results):
    """Loss and gradients of both: what they must agree in, and the classes' one after another."""
    one, other = results
    assert torch.equal(one["loss"], other["loss"])
    assert torch.equal(one["hidden"], other["hidden"])
    of_classes = [
        torch.cat(pair) for pair in zip(one["of_classes"], other["of_classes"], strict=True)
    ]
    return one["loss"], [one["hidden"], *of_classes]


def check_joined(results, batch, reduction="mean", **options):
    loss, grads = joined(results)
    expected = exactly(batch, upstream_of(reduction), reduction=reduction, **options)
    dtype = batch.weight.dtype
    tolerance = LOSS_TOLERANCE[dtype]
    torch.testing.assert_close(
        loss.double(), expected.loss, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    for tensor, grad, right in zip(batch.tensors(), grads, expected.grads, strict=True):
        assert grad.dtype == tensor.dtype
        # Parts of the hidden states' gradient are rounded before they are added up.
        allowed = 2 if tensor is batch.hidden else 1
        assert off(grad, right) <= TOLERANCE[dtype] * allowed


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: " ".join(map(str, case)))
def test_the_same_as_in_one_process(outcomes, case):
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
def test_logits_that_are_far_apart(outcomes, which):
    batch, _ = whole_head(torch.float64, 602, {})
    with torch.no_grad():
        batch.bias[:301] += EXTREMES[which]
        batch.target.fill_(450)
    check_joined(outcomes("far_apart", which), batch)


@scenario("mean", "none")
def uneven(reduction):
    batch, options = whole_head(torch.float32, 601, OPTIONS["all"])
    mine, how = my_shard(batch, even=False)
    return result_of(mine, mine.loss(reduction=reduction, **options, **how), reduction)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_shards_need_not_be_equal(outcomes, reduction):
    batch, options = whole_head(torch.float32, 601, OPTIONS["all"])
    check_joined(outcomes("uneven", reduction), batch, reduction, **options)


@scenario("rows", "tiles")
def with_metrics(size):
    batch, _ = whole_head(torch.float32, CLASSES[size], {})
    mine, how = my_shard(batch)
    loss, metrics = mine.loss(return_metrics=True, chunk_rows=8, **how)
    return {"loss": loss.detach(), "metrics": list(metrics)}


@pytest.mark.parametrize("size", ["rows", "tiles"])
def test_metrics_are_of_all_classes(outcomes, size):
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


def test_with_a_scale(outcomes):
    batch, _ = whole_head(torch.float16, 602, {})
    right = exactly(batch, 1024.0).grads
    one, other = outcomes("otherwise", "scaled")
    assert off(one["grads"][0], right[0]) <= 2e-3
    assert off(torch.cat([one["grads"][1], other["grads"][1]]), right[1]) <= 1e-3


def test_with_a_denominator(outcomes):
    batch, _ = whole_head(torch.float32, 602, {})
    loss, grads = joined(outcomes("otherwise", "divided"))
    right = exactly(batch, 0.5, denominator=torch.tensor(100.0, dtype=torch.float64))
    torch.testing.assert_close(loss.double(), right.loss, rtol=1e-6, atol=0)
    assert all(off(*pair) <= 2e-6 for pair in zip(grads, right.grads, strict=True))


def test_each_accumulates_the_gradient_of_its_own(outcomes):
    batch, _ = whole_head(torch.float32, 602, {})
    right = exactly(batch)
    one, other = outcomes("otherwise", "accumulated")
    assert one["weight"] is None
    assert off(torch.cat([one["buffer"], other["buffer"]]) - 1, right.grads[1]) <= 1e-5
    assert off(one["hidden"], right.grads[0]) <= 2e-6


def test_frozen_hidden_states_are_not_summed(outcomes):
    batch, _ = whole_head(torch.float32, 602, {})
    right = exactly(batch)
    one, other = outcomes("otherwise", "frozen")
    assert one["grads"][0] is None
    assert off(torch.cat([one["grads"][1], other["grads"][1]]), right.grads[1]) <= 2e-6


def test_without_gradients(outcomes):
    batch, _ = whole_head(torch.float32, 602, {})
    for result in outcomes("otherwise", "no gradient"):
        torch.testing.assert_close(result["loss"].double(), exactly(batch).loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("what", ["no rows", "all ignored"])
def test_of_nothing_the_mean_is_no_number(outcomes, what):
    for result in outcomes("otherwise", what):
        assert result["loss"].isnan()
        if what == "no rows":
            assert result["grads"][1].abs().max() == 0


def refusal(call):
    try:
        call()
    except (ValueError, IndexError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@scenario("refusals")
def refused(_):
    batch, _ = whole_head(torch.float32, 602, {})
    mine, how = my_shard(batch)
    outside = Head(mine.hidden, mine.weight, mine.bias, mine.target.clone().fill_(602))
    weight = torch.ones(301)
    probable = Head(mine.hidden, mine.weight, mine.bias, torch.ones(ROWS, 301) / 602)
    return {
        "target": refusal(lambda: outside.loss(**how)),
        "class_weight": refusal(lambda: mine.loss(class_weight=weight, **how)),
        "one of two": refusal(lambda: mine.loss(first_class=0, **how)),
        "no group": refusal(lambda: mine.loss(first_class=0, num_classes=602)),
        "too many": refusal(lambda: mine.loss(first_class=400, num_classes=602, **how)),
        "metrics": refusal(lambda: probable.loss(return_metrics=True, **how)),
    }


def test_what_cannot_be_is_refused_before_anything_is_sent(outcomes):
    for result in outcomes("refused", "refusals"):
        assert "IndexError: cross_entropy: Target 602 is out of bounds" in result["target"]
        assert "class_weight" in result["class_weight"]
        assert "expected both or none" in result["one of two"]
        assert "are for weights shared out" in result["no group"]
        assert "are more than the group's 602" in result["too many"]
        assert "expected indices as targets" in result["metrics"]


@scenario("overlap")
def overlapping(_):
    batch, _ = whole_head(torch.float32, 602, {})
    mine = shard_of(batch, 0, 301)
    how = {"process_group": dist.group.WORLD, "first_class": 0, "num_classes": 602}
    return {"losses": mine.loss(reduction="none", **how).detach()}


def test_a_target_that_no_process_has_or_several_makes_no_number(outcomes):
    batch, _ = whole_head(torch.float32, 602, {})
    for result in outcomes("overlapping", "overlap"):
        assert torch.equal(result["losses"].isnan(), batch.target >= 0)


@scenario("compiled")
def compiled(_):
    batch, options = whole_head(torch.float32, 602, OPTIONS["all"])
    mine, how = my_shard(batch)
    run = torch.compile(
        lambda hidden, weight, bias, target: ampfuse.linear_cross_entropy(
            hidden, weight, target, bias, **options, **how
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    return result_of(mine, run(mine.hidden, mine.weight, mine.bias, mine.target))


def test_compiled(outcomes):
    batch, options = whole_head(torch.float32, 602, OPTIONS["all"])
    check_joined(outcomes("compiled", "compiled"), batch, **options)
