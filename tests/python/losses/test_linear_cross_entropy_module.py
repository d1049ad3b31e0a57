"""Tests of LinearCrossEntropyLoss, a layer and its loss in one module."""

import copy
import io

import ampfuse
import pytest
import torch
from torch import nn
from torch.nn import functional


def criterion_on(device, **options):
    torch.manual_seed(0)
    return ampfuse.LinearCrossEntropyLoss(8, 30, device=device, **options)


def batch_on(device, dtype=torch.float32):
    torch.manual_seed(1)
    hidden = torch.randn(12, 8, device=device, dtype=dtype)
    target = torch.randint(30, (12,), device=device)
    target[::5] = -100
    return hidden, target


OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": torch.linspace(0.5, 2, 30)},
    "another ignored class": {"ignore_index": 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_module_equals_a_linear_layer_followed_by_torchs_loss(device, options):
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    criterion = criterion_on(device, **options, chunk_rows=5)
    hidden, target = batch_on(device)
    if "ignore_index" in options:
        target = target.clamp(min=3)
    logits = criterion.linear(hidden)
    options.pop("bias", None)
    torch.testing.assert_close(
        criterion(hidden, target), functional.cross_entropy(logits, target, **options)
    )


def test_gradient_with_a_scaler_is_the_unscaled_one_times_the_scale(device):
    scaler = ampfuse.GradScaler(device.type, 2.0**12)
    criterion = criterion_on(device, scaler=scaler, dtype=torch.float16)
    hidden, target = batch_on(device, torch.float16)
    scaler.scale(criterion(hidden, target)).backward()
    scaled = criterion.linear.weight.grad.clone()
    criterion.linear.weight.grad = None
    criterion(hidden, target).backward()
    torch.testing.assert_close(
        scaled.float() / 2**12, criterion.linear.weight.grad.float(), rtol=2e-3, atol=1e-5
    )


@pytest.mark.parametrize("kind", [ampfuse.GradScaler, torch.amp.GradScaler])
def test_scaler_may_be_ampfuses_or_torchs(device, kind):
    scaler = kind(device.type, 256.0)
    criterion = criterion_on(device, scaler=scaler)
    hidden, target = batch_on(device)
    loss = criterion(hidden, target)
    scaler.scale(loss).backward()
    expected = torch.autograd.grad(
        functional.cross_entropy(criterion.linear(hidden), target), criterion.linear.weight
    )[0]
    torch.testing.assert_close(criterion.linear.weight.grad, 256 * expected)


def test_weight_may_be_shared_with_an_embedding(device):
    embedding = nn.Embedding(30, 8, device=device)
    criterion = criterion_on(device)
    criterion.linear.weight = embedding.weight
    tokens = torch.randint(30, (12,), device=device)
    criterion(embedding(tokens), tokens.roll(-1)).backward()
    logits = functional.linear(embedding(tokens), embedding.weight)
    expected = torch.autograd.grad(
        functional.cross_entropy(logits, tokens.roll(-1)), embedding.weight
    )[0]
    torch.testing.assert_close(embedding.weight.grad, expected)


def test_state_dict_contains_the_layer_and_the_class_weights(device):
    criterion = criterion_on(device, bias=True, weight=torch.ones(30, device=device))
    assert set(criterion.state_dict()) == {"linear.weight", "linear.bias", "weight"}
    other = criterion_on(device, bias=True, weight=torch.zeros(30, device=device))
    file = io.BytesIO()
    torch.save(criterion.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    hidden, target = batch_on(device)
    assert torch.equal(other(hidden, target), criterion(hidden, target))
    assert torch.equal(copy.deepcopy(criterion)(hidden, target), criterion(hidden, target))


def test_repr_shows_options_that_differ_from_the_defaults(device):
    assert repr(criterion_on(device)).count("\n") == 2
    told = repr(criterion_on(device, softcap=30.0, chunk_rows=64, scaler=ampfuse.GradScaler("cpu")))
    assert "softcap=30.0, chunk_rows=64, scaler=GradScaler" in told


def test_micro_batches_with_one_denominator_add_up_to_the_batch(device):
    criterion = criterion_on(device)
    hidden, target = batch_on(device)
    whole = criterion(hidden, target)
    count = (target != -100).sum()
    parts = [
        criterion(hidden[rows], target[rows], denominator=count)
        for rows in (slice(0, 5), slice(5, 12))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_module_trains_inside_a_compiled_function(device):
    torch._dynamo.reset()
    criterion = criterion_on(device, dtype=torch.bfloat16)
    hidden, target = batch_on(device, torch.bfloat16)
    optimizer = ampfuse.AdamW(criterion.parameters(), lr=0.05)

    @torch.compile(fullgraph=True)
    def loss_of(hidden, target):
        return criterion(hidden, target)

    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(hidden, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
