"""Tests of LinearCrossEntropyLoss, a layer and its loss in one module."""

import copy
import io

import ampfuse
import pytest
import torch
from linear_reference import head
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
    "z-loss": {"z_loss": 0.1},
    "softcap": {"softcap": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_module_equals_a_linear_layer_followed_by_the_loss(device, name):
    options = {k: v.to(device) if k == "weight" else v for k, v in OPTIONS[name].items()}
    criterion = criterion_on(device, **options, chunk_rows=5)
    hidden, target = batch_on(device)
    if "ignore_index" in options:
        target = target.clamp(min=3)
    options.pop("bias", None)
    expected = ampfuse.cross_entropy(criterion.linear(hidden), target, **options)
    torch.testing.assert_close(criterion(hidden, target), expected)


@pytest.mark.parametrize("kind", [ampfuse.GradScaler, torch.amp.GradScaler])
def test_scaler_may_be_ampfuses_or_torchs(device, kind):
    scaler = kind(device.type, 256.0)
    criterion = criterion_on(device, scaler=scaler)
    hidden, target = batch_on(device)
    weight = criterion.linear.weight
    scaler.scale(criterion(hidden, target)).backward()
    loss = functional.cross_entropy(criterion.linear(hidden), target)
    torch.testing.assert_close(weight.grad, 256 * torch.autograd.grad(loss, weight)[0])


def test_weight_may_be_shared_with_an_embedding(device):
    embedding = nn.Embedding(30, 8, device=device)
    criterion = criterion_on(device)
    criterion.linear.weight = weight = embedding.weight
    tokens = torch.randint(30, (12,), device=device)
    criterion(embedding(tokens), tokens.roll(-1)).backward()
    logits = functional.linear(embedding(tokens), weight)
    loss = functional.cross_entropy(logits, tokens.roll(-1))
    torch.testing.assert_close(weight.grad, torch.autograd.grad(loss, weight)[0])


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
    told = repr(criterion_on(device, chunk_classes=32, logits_dtype=torch.bfloat16))
    assert "chunk_classes=32, logits_dtype=torch.bfloat16" in told


def test_module_passes_its_logits_dtype(device):
    options = {"logits_dtype": torch.bfloat16, "dtype": torch.bfloat16}
    module = ampfuse.LinearCrossEntropyLoss(24, 101, device=device, **options)
    batch = head(device, torch.bfloat16, bias=False)
    batch.weight = module.linear.weight
    assert torch.equal(module(batch.hidden, batch.target), batch.loss(logits_dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["chunk_rows", "chunk_classes"])
def test_module_passes_its_chunk_sizes(device, name):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        criterion_on(device, **{name: 0})(*batch_on(device))


def test_module_passes_the_buffer_of_the_weight_gradient(device):
    criterion = criterion_on(device)
    buffer = torch.zeros(30, 8, device=device)
    criterion(*batch_on(device), accumulate_into=buffer).backward()
    assert criterion.linear.weight.grad is None
    assert buffer.any()


def test_modules_that_were_pickled_without_logits_dtype_have_the_default(device):
    criterion = criterion_on(device)
    hidden, target = batch_on(device)
    expected = criterion(hidden, target)
    del criterion.__dict__["logits_dtype"], criterion.__dict__["chunk_classes"]
    assert torch.equal(criterion(hidden, target), expected)


def test_micro_batches_with_one_denominator_add_up_to_the_batch(device):
    criterion = criterion_on(device)
    hidden, target = batch_on(device)
    count = (target != -100).sum()
    parts = [
        criterion(hidden[rows], target[rows], denominator=count)
        for rows in (slice(0, 5), slice(5, 12))
    ]
    torch.testing.assert_close(sum(parts), criterion(hidden, target))


def test_module_trains_inside_a_compiled_function(device, fresh_compiler):
    criterion = criterion_on(device, dtype=torch.bfloat16)
    hidden, target = batch_on(device, torch.bfloat16)
    optimizer = ampfuse.AdamW(criterion.parameters(), lr=0.05)

    @torch.compile(fullgraph=True, backend="aot_eager")
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
