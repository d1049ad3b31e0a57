"""`ampfuse.accumulate`: the gradients of micro-batches are those of the whole batch."""

import ampfuse
import pytest
import torch
import torch.distributed as dist
from processes import Scenarios
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

scenario = Scenarios()
CLASSES = 7


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("accumulate"))


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def batch(size=23):
    """Return inputs and targets, more of which are ignored towards the end."""
    torch.manual_seed(1)
    targets = torch.randint(CLASSES, (size,))
    targets[torch.rand(size) * size < torch.arange(size)] = -100
    return torch.randn(size, 5).double(), targets


def parts_of(batch, sizes=(4, 10, 1, 8)):
    return list(zip(*(one.split(sizes) for one in batch), strict=True))


def test_uint8_targets_of_class_156_are_counted():
    """In uint8, the ignored -100 would be 156."""
    targets = torch.tensor([156, 3, 156, 7], dtype=torch.uint8)
    logits = torch.randn(4, 200, requires_grad=True)

    def loss_of(part, count):
        return ampfuse.cross_entropy(*part, denominator=count)

    halves = list(zip(logits.split(2), targets.split(2), strict=True))
    losses = [ampfuse.accumulate(loss_of, parts) for parts in (halves, [(logits, targets)])]

    torch.testing.assert_close(*losses)
    torch.testing.assert_close(losses[0], functional.cross_entropy(logits, targets.long()))


def grads(model):
    return [param.grad for param in model.parameters()]


def expected(loss_of, batch):
    """Return loss and gradients of the whole batch, in float64."""
    model = made()
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), grads(model)


WEIGHTS = torch.linspace(0.5, 3, CLASSES).double()
# For each loss: of the whole batch in torch, of a micro-batch, and what is counted.
LOSSES = {
    "ampfuse.cross_entropy": (
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        lambda model, part, n: ampfuse.cross_entropy(model(part[0]), part[1], denominator=n),
        None,
    ),
    "torch's cross_entropy": (
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        lambda model, part, n: (
            functional.cross_entropy(model(part[0]), part[1], reduction="sum") / n
        ),
        None,
    ),
    "linear_cross_entropy": (
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        lambda model, part, n: ampfuse.linear_cross_entropy(
            model[:2](part[0]), model[2].weight, part[1], bias=model[2].bias, denominator=n
        ),
        None,
    ),
    "class weights": (
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1], WEIGHTS),
        lambda model, part, n: ampfuse.cross_entropy(
            model(part[0]), part[1], WEIGHTS, denominator=n
        ),
        lambda part: WEIGHTS[part[1][part[1] >= 0]].sum(),
    ),
    "label smoothing and z-loss": (
        lambda model, batch: ampfuse.cross_entropy(
            model(batch[0]), batch[1], label_smoothing=0.1, z_loss=0.01
        ),
        lambda model, part, n: ampfuse.cross_entropy(
            model(part[0]), part[1], label_smoothing=0.1, z_loss=0.01, denominator=n
        ),
        None,
    ),
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


@pytest.mark.parametrize("sizes", [(23,), (4, 10, 1, 8), (1,) * 23])
@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradients_are_those_of_the_whole_batch(kind, sizes):
    of_whole, of_part, count = LOSSES[kind]
    loss, reference = expected(of_whole, batch())
    model = made()
    result = ampfuse.accumulate(
        lambda part, n: of_part(model, part, n), parts_of(batch(), sizes), count=count
    )
    assert not result.requires_grad
    torch.testing.assert_close(result, loss)
    torch.testing.assert_close(grads(model), reference)


def test_language_model_with_labels_shifted_by_one():
    torch.manual_seed(0)
    tokens = torch.randint(CLASSES, (6, 9))
    labels = tokens.clone()
    for row, length in enumerate([9, 2, 5, 9, 3, 1]):
        labels[row, length:] = -100

    def made():
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES, bias=False)).double()

    whole, model = made(), made()
    logits = whole(tokens)[:, :-1]
    expected = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()

    def step(part, n):
        hidden = model[0](part["input_ids"])[:, :-1].flatten(0, 1)
        return ampfuse.linear_cross_entropy(
            hidden, model[1].weight, part["labels"][:, 1:].flatten(), denominator=n
        )

    rows = zip(tokens.split(2), labels.split(2), strict=True)
    loss = ampfuse.accumulate(
        step,
        [{"input_ids": ids, "labels": of_part} for ids, of_part in rows],
        count=lambda part: (part["labels"][:, 1:] != -100).sum(),
    )
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grads(model), grads(whole))


def test_micro_batches_without_targets_change_nothing():
    inputs, targets = batch()
    targets[4:15] = -100
    of_whole, of_part, _ = LOSSES["ampfuse.cross_entropy"]
    loss, reference = expected(of_whole, (inputs, targets))
    model = made()
    result = ampfuse.accumulate(
        lambda part, n: of_part(model, part, n), iter(parts_of((inputs, targets)))
    )
    torch.testing.assert_close(result, loss)
    torch.testing.assert_close(grads(model), reference)


def test_gradients_are_added_to_those_that_are_there():
    of_whole, of_part, _ = LOSSES["ampfuse.cross_entropy"]
    _, reference = expected(of_whole, batch())
    model = made()
    for _ in range(2):
        ampfuse.accumulate(lambda part, n: of_part(model, part, n), parts_of(batch()))
    torch.testing.assert_close(grads(model), [2 * grad for grad in reference])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scaler_steps_once_with_the_gradients_of_the_whole_batch(dtype):
    def train(sizes):
        model = made().float()
        optimizer = ampfuse.AdamW(model.parameters(), lr=0.1)
        scaler = ampfuse.GradScaler("cpu", init_scale=2.0**10, history=4)
        criterion = ampfuse.CrossEntropyLoss(scaler=scaler)

        def step(part, n):
            with torch.autocast("cpu", dtype):
                return criterion(model(part[0].float()), part[1], denominator=n)

        for _ in range(3):
            ampfuse.accumulate(step, parts_of(batch(), sizes), scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [record.norm for record in scaler.history()]

    rounding = 20 * torch.finfo(dtype).eps
    assert train((4, 10, 1, 8)) == pytest.approx(train((23,)), rel=rounding)


def test_compiled_step_is_not_compiled_again_for_another_count():
    model, compilations = made(), []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def step(part, n):
        return ampfuse.cross_entropy(model(part[0]), part[1], denominator=n)

    inputs, targets = batch(24)
    for ignored in range(3):
        targets[:ignored] = -100
        ampfuse.accumulate(step, parts_of((inputs, targets), 8))
    assert len(compilations) == 1


@pytest.mark.parametrize(
    ("micro_batches", "count", "error", "message"),
    [
        ([], None, ValueError, "micro_batches: expected at least one, got none"),
        ([torch.ones(3)], None, TypeError, r"got a tensor of torch.float32 of shape \[3\]; pass"),
        ([{"labels": 1}], None, TypeError, "got dict with labels; pass count="),
        ([(torch.ones(3), torch.ones(3))], None, TypeError, "got tuple of a tensor of"),
        ([1], lambda _: 1, TypeError, "step: expected a loss, got NoneType"),
    ],
)
def test_mistakes_are_named(micro_batches, count, error, message):
    with pytest.raises(error, match=message):
        ampfuse.accumulate(lambda *_: None, micro_batches, count=count)


# --- several ranks --------------------------------------------------------------------------------


def own_parts():
    """Return this rank's micro-batches: those of rank 1 have fewer targets."""
    parts = parts_of(batch())
    return parts[2:] if dist.get_rank() else parts[:2]


@scenario("DDP", "DDP with class weights", "fully_shard")
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
    loss = "class weights" if "weights" in kind else "ampfuse.cross_entropy"
    _, of_part, count = LOSSES[loss]
    result = ampfuse.accumulate(
        lambda part, n: of_part(model, part, n), own_parts(), count=count, model=model, **options
    )
    dist.all_reduce(result)
    found = [
        grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in grads(model)
    ]
    return {"loss": result / 2, "grads": found, "sent": sent}


@pytest.mark.parametrize("kind", ["DDP", "DDP with class weights", "fully_shard"])
def test_ranks_with_different_numbers_of_targets_equal_one_process(kind):
    loss = "class weights" if "weights" in kind else "ampfuse.cross_entropy"
    reference_loss, reference = expected(LOSSES[loss][0], batch())
    for result in scenario.results("ranks", kind):
        torch.testing.assert_close(result["loss"], reference_loss)
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
def test_group_of_a_sharded_model_is_asked_for(kind):
    for result in scenario.results("missing", kind):
        assert "pass process_group= for a sharded model" in result["error"]
