"""Tests of linear_cross_entropy on two ranks: refusals, unusual shards, and torch.compile."""

import ampfuse
import pytest
import torch
import torch.distributed as dist
from linear_reference import Head, exactly, head
from linear_shards import (
    ROWS,
    check_joined,
    my_shard,
    result_of,
    whole_head,
)
from processes import Scenarios
from torch.nn import functional

pytestmark = pytest.mark.slow

scenario = Scenarios()
# Several options at once.
ALL = {"class_weight": True, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 4.0}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run the scenarios, and return the function that looks up their results."""
    scenario.play(tmp_path_factory.mktemp("processes"))
    return scenario.results


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
        "metrics": refusal(lambda: probable.loss(return_metrics=True, **how)),
    }


def test_invalid_arguments_of_shards_are_refused_on_both_ranks(outcomes):
    for result in outcomes("refused", "refusals"):
        assert "Target 602 is out of bounds" in result["target"]
        assert "class_weight" in result["class_weight"]
        assert "expected both or neither" in result["one of two"]
        assert "only allowed with process_group" in result["no group"]
        assert "expected indices, since metrics" in result["metrics"]


@scenario("gap")
def shards_with_a_gap(_):
    batch, _ = whole_head(torch.float32, 602, {})
    mine, how = my_shard(batch)
    at = {"first_class": 300 * dist.get_rank(), "num_classes": 603}
    return {"loss": mine.loss(reduction="none", **how | at)[batch.target != -100]}


def test_loss_is_nan_where_shards_leave_classes_out(outcomes):
    for result in outcomes("shards_with_a_gap", "gap"):
        assert result["loss"].isnan().all()


@scenario(torch.uint8, torch.int32)
def narrow_targets(dtype):
    batch, _ = whole_head(torch.float32, 202, {})
    batch.target = torch.full((ROWS,), 156, dtype=dtype)  # cast to a byte, -100 is 156
    mine, how = my_shard(batch)
    return result_of(mine, mine.loss(**how))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_target_of_a_narrow_dtype_is_not_mistaken_for_ignore_index(outcomes, dtype):
    batch, _ = whole_head(torch.float32, 202, {})
    batch.target = torch.full((ROWS,), 156)
    check_joined(outcomes("narrow_targets", dtype), batch)


@scenario(torch.bfloat16, torch.float16)
def accurate(dtype):
    batch = head(torch.device("cpu"), dtype, 256, 64, 2002, bias=False)
    mine, how = my_shard(batch)
    loss = mine.loss(chunk_rows=64, **how)
    return {"hidden": mine.grads(loss)[0]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_ranks_are_as_accurate_as_torch_in_one_process(outcomes, dtype):
    batch = head(torch.device("cpu"), dtype, 256, 64, 2002, bias=False)
    right = exactly(batch).grads[0]
    logits = functional.linear(batch.hidden, batch.weight).float()
    loss = functional.cross_entropy(logits, batch.target)
    scale = 2.0**16 if dtype == torch.float16 else 1.0  # at 1 torch's gradients underflow
    torchs = torch.autograd.grad(loss, batch.hidden, torch.tensor(scale))[0].double() / scale
    for result in outcomes("accurate", dtype):
        error = (result["hidden"].double() - right).norm()
        assert error <= 1.1 * (torchs - right).norm()


@scenario("tie")
def equal_logits(_):
    weight = torch.zeros(100, 4)
    target = torch.zeros(3, dtype=torch.long)
    # Rank 1 has the first classes.
    at = {"first_class": 100 * (1 - dist.get_rank()), "num_classes": 200}
    _, metrics = ampfuse.linear_cross_entropy(
        torch.ones(3, 4),
        weight,
        target,
        process_group=dist.group.WORLD,
        return_metrics=True,
        **at,
    )
    return {"argmax": metrics.argmax}


def test_argmax_is_the_first_class_of_equal_logits_on_two_ranks(outcomes):
    for result in outcomes("equal_logits", "tie"):
        assert result["argmax"].tolist() == [0, 0, 0]


@scenario("threads")
def with_other_threads(_):
    torch.set_num_threads(1 + dist.get_rank())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(100_000, 2, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    target = torch.randint(6, (100_000,), generator=generator)
    first = 3 * dist.get_rank()
    loss = ampfuse.linear_cross_entropy(
        hidden, weight[first : first + 3], target, process_group=dist.group.WORLD
    )
    torch.set_num_threads(2)
    return {"loss": loss}


def test_ranks_with_different_numbers_of_threads_get_the_same_loss_bits(outcomes):
    one, other = outcomes("with_other_threads", "threads")
    assert torch.equal(one["loss"], other["loss"])


@scenario("compiled")
def compiled(_):
    batch, options = whole_head(torch.float32, 602, ALL)
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
    batch, options = whole_head(torch.float32, 602, ALL)
    check_joined(outcomes("compiled", "compiled"), batch, **options)
