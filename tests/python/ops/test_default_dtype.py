"""Results of ampfuse do not depend on torch.set_default_dtype: its own tensors ignore it."""

import ampfuse
import ampfuse.checkpoint as checkpoint
import pytest
import torch
from torch.nn import functional


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16])
def default(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def train(device, dtype, half, optimizer_class, scaler_class, loss_of, **options):
    """Train a model of `dtype`, and return its parameters, the scale and the history."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(device, dtype)
    with torch.no_grad():
        model.weight.copy_(torch.arange(12).reshape(3, 4) / 16)
        model.bias.zero_()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    scaler = scaler_class(device.type, init_scale=4.0, **options)
    inputs = (torch.arange(8).reshape(2, 4) / 8).to(device, dtype)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast(device.type, half, enabled=half is not None):
            loss = loss_of(model, inputs, torch.tensor([0, 2], device=device), scaler)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    told = scaler.history() if options else []
    return [param.detach() for param in model.parameters()], scaler.get_scale(), told


def of_torch(model, inputs, target, _):
    return functional.cross_entropy(model(inputs), target)


def of_ours(model, inputs, target, scaler):
    return ampfuse.CrossEntropyLoss(scaler=scaler)(model(inputs), target)


def linear(model, inputs, target, scaler):
    return ampfuse.linear_cross_entropy(
        inputs, model.weight, target, bias=model.bias, grad_scale=scaler.scale_tensor()
    )


def test_patched_program_trains_as_with_torch(device, default):
    def trained(device):
        return train(device, default, None, torch.optim.AdamW, torch.amp.GradScaler, of_torch)

    if default == torch.float16:
        pytest.skip("torch's scaler refuses such gradients")
    plain = trained(torch.device("cpu"))  # on a GPU, torch's scaler refuses those of bfloat16
    with ampfuse.patched():
        patched = trained(device)
    assert patched[1] == plain[1]
    # torch rounds to 16 bits between the operations of a step.
    atol = 1e-2 if default == torch.bfloat16 else 1e-7
    found = [param.cpu() for param in patched[0]]
    torch.testing.assert_close(found, plain[0], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_training_is_the_same_with_any_default_dtype(device, default, half):
    kinds = (device, torch.float32, half, ampfuse.AdamW, ampfuse.GradScaler)
    for loss_of in (of_torch, of_ours, linear):
        torch.set_default_dtype(default)
        there = train(*kinds, loss_of, history=5)
        torch.set_default_dtype(torch.float32)
        here = train(*kinds, loss_of, history=5)

        assert there[1:] == here[1:], loss_of
        torch.testing.assert_close(there[0], here[0], rtol=0, atol=0)


def test_loss_uses_the_scale_of_a_torch_scaler(device, default):
    logits = torch.zeros(2, 3, device=device, dtype=torch.bfloat16, requires_grad=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    target = torch.tensor([0, 2], device=device)
    loss = ampfuse.CrossEntropyLoss(scaler=scaler)(logits, target)
    scaler.scale(loss).backward()
    assert logits.grad[0].tolist() == pytest.approx([-4 / 3, 2 / 3, 2 / 3], rel=1e-2)


def test_history_that_is_loaded_keeps_its_numbers(default, tmp_path):
    scaler = ampfuse.GradScaler("cpu", init_scale=65536.0, history=3)
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float32))
    optimizer = torch.optim.SGD([param])
    scaler.scale((param * 1.23456).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    checkpoint.save(tmp_path, step=1, scaler=scaler)
    other = ampfuse.GradScaler("cpu", history=3)
    checkpoint.load(tmp_path, scaler=other)
    other.scale(torch.ones(()))
    assert other.history() == scaler.history()
    assert other.history()[0].scale == 65536.0
