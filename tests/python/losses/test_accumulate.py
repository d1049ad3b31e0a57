"""`ampfuse.accumulate`: the gradients of micro-batches are those of the whole batch."""

import functools
import warnings
from functools import partial

import ampfuse
import pytest
import torch
import torch.distributed as dist
from processes import Scenarios
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

scenario = Scenarios()
CLASSES = 7
SIZES = (4, 10, 1, 8)
WEIGHTS = torch.linspace(0.5, 3, CLASSES).double()


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def batch(size=23):
    """Return inputs and targets, more of which are ignored towards the end."""
    torch.manual_seed(1)
    targets = torch.randint(CLASSES, (size,))
    targets[torch.rand(size) * size < torch.arange(size)] = -100
    return torch.randn(size, 5).double(), targets


def parts_of(batch, sizes=SIZES):
    return list(zip(*(one.split(sizes) for one in batch), strict=True))


def grads(model):
    return [param.grad for param in model.parameters()]


def torchs(model, part, **options):
    return functional.cross_entropy(model(part[0]), part[1], **options)


def ampfuses(model, part, n=None, **options):
    return ampfuse.cross_entropy(model(part[0]), part[1], denominator=n, **options)


def padding(targets):
    """Return the targets with the class 3 in place of -100."""
    return targets.where(targets >= 0, 3)


def padded(model, part, n):
    return ampfuses(model, (part[0], padding(part[1])), n, ignore_index=3)


def linear(model, part, n):
    hidden, last = model[:2](part[0]), model[2]
    return ampfuse.linear_cross_entropy(hidden, last.weight, part[1], last.bias, denominator=n)


SMOOTHED = partial(ampfuses, label_smoothing=0.1, z_loss=0.01)
# For each loss: of the whole batch, of a micro-batch, and what is counted.
LOSSES = {
    "ampfuse.cross_entropy": (torchs, ampfuses, None),
    "torch's cross_entropy": (
        torchs,
        lambda m, part, n: torchs(m, part, reduction="sum") / n,
        None,
    ),
    "linear_cross_entropy": (torchs, linear, None),
    "class weights": (
        partial(torchs, weight=WEIGHTS),
        partial(ampfuses, weight=WEIGHTS),
        lambda part: WEIGHTS[part[1][part[1] >= 0]].sum(),
    ),
    "label smoothing and z-loss": (SMOOTHED, SMOOTHED, None),
    "squared error, counted as a number": (
        lambda model, batch: model(batch[0]).square().mean(),
        lambda model, part, n: model(part[0]).square().sum() / n,
        lambda part: len(part[0]) * CLASSES,
    ),
    "a mean over samples": (
        lambda model, batch: model(batch[0]).square().mean(),
        lambda model, part, n: model(part[0]).square().mean() * len(part[0]) / n,
        lambda part: len(part[0]),
    ),
}


def expected(kind, batch):
    """Return loss and gradients of the whole batch."""
    model = made()
    loss = LOSSES[kind][0](model, batch)
    loss.backward()
    return loss.detach(), grads(model)


def accumulated(kind, parts, net, **options):
    _, of_part, count = LOSSES[kind]
    return ampfuse.accumulate(lambda part, n: of_part(net, part, n), parts, count=count, **options)


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradients_are_those_of_the_whole_batch(kind):
    loss, reference = expected(kind, batch())
    for sizes in ((23,), SIZES, (1,) * 23):  # the last ones have micro-batches without targets
        model = made()
        for times in (1, 2):  # gradients are added to those that are there
            result = accumulated(kind, iter(parts_of(batch(), sizes)), model)
            assert not result.requires_grad
            torch.testing.assert_close(result, loss)
            torch.testing.assert_close(grads(model), [times * grad for grad in reference])


def test_uint8_targets_of_class_156_are_counted():
    """In uint8, the ignored -100 would be 156."""
    targets = torch.tensor([156, 3, 156, 7], dtype=torch.uint8)
    logits = torch.randn(4, 200, requires_grad=True)

    def loss_of(part, count):
        return ampfuse.cross_entropy(*part, denominator=count)

    right = functional.cross_entropy(logits, targets.long()).detach()
    for sizes in ((4,), (2, 2)):
        loss = ampfuse.accumulate(loss_of, parts_of((logits, targets), sizes))
        torch.testing.assert_close(loss, right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scaler_steps_once_with_the_gradients_of_the_whole_batch(dtype):
    def norms(is_accumulated):
        model = made().float()
        optimizer = ampfuse.AdamW(model.parameters(), lr=0.1)
        scaler = ampfuse.GradScaler("cpu", init_scale=2.0**10, history=4)
        criterion = ampfuse.CrossEntropyLoss(scaler=scaler)

        def step(part, n):
            with torch.autocast("cpu", dtype):
                return criterion(model(part[0].float()), part[1], denominator=n)

        for _ in range(3):
            if is_accumulated:
                ampfuse.accumulate(step, parts_of(batch()), scaler=scaler)
            else:
                scaler.scale(step(batch(), None)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [record.norm for record in scaler.history()]

    rounding = 20 * torch.finfo(dtype).eps
    assert norms(True) == pytest.approx(norms(False), rel=rounding)


def test_compiled_step_is_not_compiled_again_for_another_count():
    counter = CompileCounter()
    step = torch.compile(partial(ampfuses, made()), backend=counter, fullgraph=True)
    inputs, targets = batch(24)
    for ignored in range(3):
        targets[:ignored] = -100
        ampfuse.accumulate(step, parts_of((inputs, targets), 8))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("micro_batches", "error", "message"),
    [
        ([], ValueError, "micro_batches: expected at least one, got none"),
        ([torch.ones(3)], TypeError, r"got a tensor of torch.float32 of shape \[3\]; pass"),
        ([{"labels": 1}], TypeError, "got dict with labels; pass count="),
        ([(torch.ones(3), torch.ones(3))], TypeError, "got tuple of a tensor of"),
        (parts_of(batch()), TypeError, "step: expected a loss, got NoneType"),
    ],
)
def test_mistakes_are_named(micro_batches, error, message):
    with pytest.raises(error, match=message):
        ampfuse.accumulate(lambda *_: None, micro_batches)


@pytest.mark.parametrize(
    ("kept", "error", "message"),
    [
        (lambda loss: loss, RuntimeError, "step calls backward.., leave it out"),
        (torch.Tensor.detach, ValueError, r"got one without gradients: .* not loss.detach\(\)"),
    ],
    ids=["loss", "detached"],
)
def test_step_that_calls_backward_is_named(kept, error, message):
    model = torch.nn.Linear(8, 50)

    def step(part, denominator):
        loss = ampfuse.cross_entropy(model(part[0]), part[1], denominator=denominator)
        loss.backward()
        return kept(loss)

    inputs, targets = torch.randn(4, 8), torch.arange(4)
    with pytest.raises(error, match=message):
        ampfuse.accumulate(step, list(zip(inputs.split(2), targets.split(2), strict=True)))


class Trainer:
    def mean(self, part, denominator):
        return part[0].mean()

    def share(self, part, denominator):
        return sum(value / denominator for value in part[0].sum(0))  # read in a function of its own


def divided(step):
    @functools.wraps(step)
    def wrapper(part, denominator):
        return step(part, denominator) / denominator

    return wrapper


@pytest.mark.parametrize("mean", [Trainer().mean, lambda part, n: part[0].mean()])
def test_step_that_ignores_the_denominator_is_warned_of(mean):
    inputs, targets = batch()
    parts = parts_of((inputs.requires_grad_(), targets))
    with pytest.warns(UserWarning, match="step does not use its second argument, the denom"):
        ampfuse.accumulate(mean, parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (Trainer().share, divided(Trainer().mean), lambda *args: args[0][0].mean()):
            ampfuse.accumulate(step, parts)


MEANS = {
    "mean": lambda loss, n: loss,
    "mean divided by the denominator": lambda loss, n: loss / n,
}


@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize("count", [None, lambda part: len(part[0])])
def test_mean_of_a_loss_of_torch_is_warned_of(kind, count):
    model = made()

    def step(part, n):
        return MEANS[kind](torchs(model, part), n)

    with pytest.warns(UserWarning, match="step returns a mean"):
        ampfuse.accumulate(step, parts_of(batch()), count=count)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda model, part, n: ampfuses(model, part), "step does not use|returns a mean"),
        (lambda model, part, n: ampfuses(model, part) / n, "step returns a mean"),
        (lambda model, part, n: ampfuses(model, part, n) / n, "that the denominator has divided"),
        (lambda model, part, n: ampfuses(model, part, n) / 4, "that the denominator has divided"),
        (padded, "ignores targets of 3"),
        (lambda model, part, n: ampfuses(model, part, n, weight=WEIGHTS), "has class weights"),
    ],
    ids=["mean", "mean divided", "divided twice", "divided by 4", "ignored", "weighted"],
)
def test_misuse_of_our_loss_is_warned_of(step, text):
    with pytest.warns(UserWarning, match=text):
        ampfuse.accumulate(partial(step, made()), parts_of(batch()))


def test_right_use_of_our_loss_gives_no_warning():
    model, parts = made(), parts_of(batch())
    steps = [
        (lambda part, n: ampfuses(model, part, n), None),
        (lambda part, n: ampfuses(model, part, reduction="sum") / n, None),
        (partial(padded, model), lambda part: padding(part[1]).ne(3).sum()),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, count in steps:
            ampfuse.accumulate(step, parts, count=count)


def test_mean_that_is_right_gives_no_warning():
    model = made()
    inputs, targets = batch(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ampfuse.accumulate(lambda part, n: [n, torchs(model, part)][1], [(inputs, targets)])
        parts = parts_of((inputs, targets.abs() % CLASSES), 1)
        ampfuse.accumulate(lambda part, n: torchs(model, part) / n, parts)
        parts = parts_of((inputs, targets), 2)
        ampfuse.accumulate(lambda part, n: n * torchs(model, part) / n / 2, parts)


def test_loss_that_step_has_scaled_is_refused():
    model, scaler = made(), ampfuse.GradScaler("cpu")

    def step(part, n):
        return scaler.scale(ampfuses(model, part, n))

    with pytest.raises(ValueError, match="step has scaled the loss, which scaler= would scale ag"):
        ampfuse.accumulate(step, parts_of(batch()), scaler=scaler)
    assert grads(model) == [None] * 4
    ampfuse.accumulate(step, parts_of(batch()))


def test_scaler_that_accumulate_did_not_get_names_the_argument():
    model, scaler = made(), ampfuse.GradScaler("cpu")
    ampfuse.accumulate(lambda part, n: ampfuses(model, part, n), parts_of(batch()))
    with pytest.raises(AssertionError, match=r"or pass scaler= to ampfuse\.accumulate"):
        scaler.step(torch.optim.SGD(model.parameters(), 0.1))


# --- several ranks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run the scenarios, and return the function that looks up their results."""
    scenario.play(tmp_path_factory.mktemp("accumulate"))
    return scenario.results


def own_parts():
    """Return this rank's micro-batches: those of rank 1 have fewer targets."""
    parts = parts_of(batch())
    return parts[2:] if dist.get_rank() else parts[:2]


KINDS_OF_RANKS = {
    "DDP": "ampfuse.cross_entropy",
    "DDP with class weights": "class weights",
    "fully_shard": "ampfuse.cross_entropy",
}


@scenario(*KINDS_OF_RANKS)
def ranks(kind):
    model = made()
    options, sent = {}, []
    if kind == "fully_shard":
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model, mesh=mesh)
        options["process_group"] = mesh.get_group()
    else:
        model = DistributedDataParallel(model)

        def hook(state, bucket):
            sent.append(bucket.index())
            return allreduce_hook(None, bucket)

        model.register_comm_hook(None, hook)
    result = accumulated(KINDS_OF_RANKS[kind], own_parts(), model, model=model, **options)
    dist.all_reduce(result)
    found = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads(model)]
    return {"loss": result / 2, "grads": found, "sent": sent}


@pytest.mark.parametrize("kind", KINDS_OF_RANKS)
def test_ranks_with_different_numbers_of_targets_equal_one_process(outcomes, kind):
    loss, reference = expected(KINDS_OF_RANKS[kind], batch())
    for result in outcomes("ranks", kind):
        torch.testing.assert_close(result["loss"], loss)
        torch.testing.assert_close(result["grads"], reference)
        assert len(result["sent"]) == (0 if kind == "fully_shard" else 1)


@scenario("fully_shard", "FullyShardedDataParallel")
def missing(kind):
    model = made()
    if kind == "fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    try:
        ampfuse.accumulate(lambda *_: None, own_parts(), model=model)
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}


@pytest.mark.parametrize("kind", ["fully_shard", "FullyShardedDataParallel"])
def test_group_of_a_sharded_model_is_asked_for(outcomes, kind):
    for result in outcomes("missing", kind):
        assert "pass process_group= for a sharded model" in result["error"]
