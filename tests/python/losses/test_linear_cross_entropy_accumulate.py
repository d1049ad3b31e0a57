"""Tests of weight gradients in float32, by accumulate_into or by weight.grad_dtype."""

import ampfuse
import pytest
import torch
from linear_reference import TOLERANCE, exactly, head, off
from torch.utils.checkpoint import checkpoint

EVERY_REDUCTION = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def buffer_for(weight):
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.zeros_like(weight, dtype=wide, requires_grad=False)


@EVERY_REDUCTION
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradient_is_added_to_the_buffer_in_backward(device, dtype, reduction):
    batch = head(device, dtype)
    buffer = buffer_for(batch.weight) + 1
    loss = batch.loss(reduction=reduction, chunk_rows=8, accumulate_into=buffer)
    assert (buffer == 1).all()  # until backward
    upstream = 0.5
    loss.backward(torch.full_like(loss, upstream))
    assert batch.weight.grad is None
    right = exactly(batch, upstream, reduction=reduction)
    assert off(buffer - 1, right.grads[1]) <= TOLERANCE[dtype]
    assert off(batch.hidden.grad, right.grads[0]) <= TOLERANCE[dtype]
    assert off(batch.bias.grad, right.grads[2]) <= TOLERANCE[dtype]


def test_buffer_accumulates_more_accurately_than_a_bfloat16_gradient(device):
    batches = [head(device, torch.bfloat16, seed=seed) for seed in range(32)]
    weight = batches[0].weight
    buffer = buffer_for(weight)
    expected = 0
    for batch in batches:
        batch.weight = weight
        batch.loss(accumulate_into=buffer).backward()
        batch.loss().backward()
        expected = expected + exactly(batch).grads[1]
    # Logit gradients are rounded. Only a bfloat16 gradient is rounded at each accumulation, too.
    assert off(buffer, expected) <= 2e-3
    assert off(weight.grad, expected) >= 2 * off(buffer, expected)


@EVERY_REDUCTION
def test_each_backward_adds_to_the_buffer(device, reduction):
    batch = head(device, torch.float32)
    buffer = buffer_for(batch.weight)
    loss = batch.loss(reduction=reduction, accumulate_into=buffer).sum()
    loss.backward(retain_graph=True)
    once = buffer.clone()
    (3 * loss).backward()
    torch.testing.assert_close(buffer, 4 * once)


@pytest.mark.parametrize("first", [0, 1, 100])
def test_buffer_may_lie_beside_the_weight_but_not_overlap_it(device, first):
    memory = torch.zeros(300, 24, device=device)
    batch = head(device, torch.float32, bias=False)
    weight = memory[:101].requires_grad_()
    batch.weight = weight
    buffer = memory.detach()[first : first + 101]
    with pytest.raises(ValueError, match=r"accumulate_into: .* overlaps"):
        batch.loss(accumulate_into=buffer)
    batch.loss(accumulate_into=memory.detach()[101:202]).backward()
    assert weight.grad is None


def test_buffer_may_not_overlap_the_hidden_states(device):
    memory = torch.zeros(150, 24, device=device)
    batch = head(device, torch.float32, bias=False)
    batch.hidden = memory[100:121].requires_grad_()
    with pytest.raises(ValueError, match=r"accumulate_into: .* overlaps"):
        batch.loss(accumulate_into=memory.detach()[:101])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_adds_to_the_buffer_once(device, use_reentrant):
    batch = head(device, torch.float32)
    buffer = buffer_for(batch.weight)

    def loss(_):
        return batch.loss(accumulate_into=buffer)

    checkpoint(loss, batch.hidden, use_reentrant=use_reentrant).backward()
    assert off(buffer, exactly(batch).grads[1]) <= TOLERANCE[torch.float32]


def test_buffer_is_unchanged_without_a_backward(device):
    batch = head(device, torch.float32)
    buffer = buffer_for(batch.weight)
    batch.loss(accumulate_into=buffer)
    with torch.no_grad():
        batch.loss(accumulate_into=buffer)
    assert (buffer == 0).all()


def test_buffer_may_be_strided(device):
    batch = head(device, torch.float32)
    buffer = torch.zeros(24, 101, device=device).t()
    batch.loss(accumulate_into=buffer).backward()
    assert off(buffer, exactly(batch).grads[1]) <= TOLERANCE[torch.float32]


def test_buffer_that_does_not_fit_the_weight_is_refused(device):
    batch = head(device, torch.bfloat16)
    good = buffer_for(batch.weight)
    for wrong in (good.bfloat16(), good[:100], good.to("meta")):
        with pytest.raises(
            ValueError, match=r"accumulate_into: expected float32 of shape \[101, 24\]"
        ):
            batch.loss(accumulate_into=wrong)
    with pytest.raises(ValueError, match="does not require grad"):
        batch.loss(accumulate_into=good.clone().requires_grad_())
    batch.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="expected a weight that requires grad"):
        batch.loss(accumulate_into=good)


@EVERY_REDUCTION
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [torch.float32, None], ids=["float32", "any"])
@pytest.mark.parametrize("chunk_rows", [8, 21])
def test_weight_gets_float32_gradients_if_grad_dtype_allows_them(
    device, dtype, reduction, asked, chunk_rows
):
    batch = head(device, dtype)
    batch.weight.grad_dtype = asked
    options = {"reduction": reduction, "chunk_rows": chunk_rows}
    batch.loss(**options).sum().backward()
    assert batch.weight.grad.dtype == torch.float32
    grad = batch.weight.grad.clone()
    batch.loss(**options).sum().backward()
    torch.testing.assert_close(batch.weight.grad, 2 * grad)
    # They have more digits than the weight's dtype can hold.
    assert (grad != grad.to(dtype).float()).any()


def test_adamw_trains_a_bfloat16_weight_with_a_float32_gradient_buffer(device):
    """Gradients of the bfloat16 weight stay float32: accumulated, scaled, unscaled by the step."""
    torch.manual_seed(0)
    scaler = ampfuse.GradScaler(device.type, 2.0**10)
    criterion = ampfuse.LinearCrossEntropyLoss(
        16, 50, scaler=scaler, device=device, dtype=torch.bfloat16
    )
    weight = criterion.linear.weight
    weight.grad_dtype = torch.float32
    optimizer = ampfuse.AdamW(criterion.parameters(), lr=1e-2)
    hidden = torch.randn(64, 16, device=device, dtype=torch.bfloat16)
    target = torch.randint(50, (64,), device=device)
    losses = []
    for _ in range(30 if device.type == "cpu" else 60):  # a GPU has other random numbers
        optimizer.zero_grad(set_to_none=False)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=torch.float32)
        for rows in (slice(0, 32), slice(32, 64)):
            loss = criterion(
                hidden[rows], target[rows], denominator=64, accumulate_into=weight.grad
            )
            scaler.scale(loss).backward()
        losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
    assert losses[-1] < losses[0] / 2
