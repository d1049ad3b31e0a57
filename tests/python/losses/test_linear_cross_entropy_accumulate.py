"""Tests of weight gradients in float32, by accumulate_into or by weight.grad_dtype."""

import ampfuse
import pytest
import torch
from linear_reference import (
    EVERY_DTYPE,
    EVERY_WAY,
    TOLERANCE,
    WAYS,
    check_grads,
    exactly,
    head,
    off,
)
from torch.utils.checkpoint import checkpoint

FLOAT = torch.float32


def buffer_for(weight):
    wide = torch.float64 if weight.dtype == torch.float64 else FLOAT
    return torch.zeros_like(weight, dtype=wide, requires_grad=False)


@EVERY_DTYPE
def test_weight_gradient_is_added_to_the_buffer_in_backward(device, dtype):
    for way, how in WAYS.items():
        batch = head(device, dtype)
        buffer = buffer_for(batch.weight) + 1
        loss = batch.loss(accumulate_into=buffer, **how)
        with torch.no_grad():
            batch.loss(accumulate_into=buffer, **how)
        assert (buffer == 1).all()  # until backward
        upstream = 0.5
        loss.backward(torch.full_like(loss, upstream))
        assert batch.weight.grad is None
        grads = [batch.hidden.grad, buffer - 1, batch.bias.grad]
        right = exactly(batch, upstream, reduction=how["reduction"])
        check_grads(grads, right.grads, TOLERANCE[dtype], way)


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


@EVERY_WAY
@pytest.mark.parametrize("strides", [(24, 1), (1, 101)])
def test_each_backward_adds_to_a_buffer_with_any_strides(device, how, strides):
    batch = head(device, FLOAT)
    buffer = torch.zeros(101, 24, device=device).as_strided((101, 24), strides)
    loss = batch.loss(accumulate_into=buffer, **how).sum()
    loss.backward(retain_graph=True)
    once = buffer.clone()
    assert off(once, exactly(batch, reduction=how["reduction"]).grads[1]) <= TOLERANCE[FLOAT]
    (3 * loss).backward()
    torch.testing.assert_close(buffer, 4 * once)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_adds_to_the_buffer_once(device, use_reentrant):
    batch = head(device, FLOAT)
    buffer = buffer_for(batch.weight)

    def loss(_):
        return batch.loss(accumulate_into=buffer)

    checkpoint(loss, batch.hidden, use_reentrant=use_reentrant).backward()
    assert off(buffer, exactly(batch).grads[1]) <= TOLERANCE[FLOAT]


def test_buffer_may_lie_beside_the_weight_but_not_overlap_it(device):
    memory = torch.zeros(300, 24, device=device)
    batch = head(device, FLOAT, bias=False)
    batch.weight = memory[:101].requires_grad_()
    for first in (0, 1, 100):
        with pytest.raises(ValueError, match=r"accumulate_into: .* overlaps weight or hidden"):
            batch.loss(accumulate_into=memory.detach()[first : first + 101])
    batch.loss(accumulate_into=memory.detach()[101:202]).backward()
    assert batch.weight.grad is None


def test_buffer_may_not_overlap_the_hidden_states_or_itself(device):
    memory = torch.zeros(150, 24, device=device)
    batch = head(device, FLOAT, bias=False)
    batch.hidden = memory[100:121].requires_grad_()
    with pytest.raises(ValueError, match=r"accumulate_into: .* overlaps weight or hidden"):
        batch.loss(accumulate_into=memory.detach()[:101])
    shared = r"elements that share no memory, got shape \[101, 24\] with strides \[0, 1\]"
    with pytest.raises(ValueError, match=shared):
        batch.loss(accumulate_into=torch.zeros(1, 24, device=device).expand(101, 24))


def test_buffer_that_does_not_fit_the_weight_is_refused(device):
    batch = head(device, torch.bfloat16)
    good = buffer_for(batch.weight)
    fitting = r"accumulate_into: expected float32 of shape \[101, 24\]"
    for wrong in (good.bfloat16(), good[:100], good.to("meta")):
        with pytest.raises(ValueError, match=fitting):
            batch.loss(accumulate_into=wrong)
    with pytest.raises(ValueError, match="does not require grad"):
        batch.loss(accumulate_into=good.clone().requires_grad_())
    batch.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="expected a weight that requires grad"):
        batch.loss(accumulate_into=good)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [FLOAT, None], ids=["float32", "any"])
def test_weight_gets_float32_gradients_if_grad_dtype_allows_them(device, dtype, asked):
    single = [{"reduction": how["reduction"], "chunk_rows": 21} for how in WAYS.values()]
    for how in [*WAYS.values(), *single]:
        batch = head(device, dtype)
        batch.weight.grad_dtype = asked
        batch.loss(**how).sum().backward()
        grad = batch.weight.grad.clone()
        assert grad.dtype == FLOAT, how
        # It has more digits than the weight's dtype can hold.
        assert (grad != grad.to(dtype).float()).any(), how
        batch.loss(**how).sum().backward()
        torch.testing.assert_close(batch.weight.grad, 2 * grad)


def test_adamw_trains_a_bfloat16_weight_with_a_float32_gradient_buffer(device):
    """Gradients of the bfloat16 weight stay float32: accumulated, scaled, unscaled by the step."""
    torch.manual_seed(0)
    scaler = ampfuse.GradScaler(device.type, 2.0**10)
    criterion = ampfuse.LinearCrossEntropyLoss(
        16, 50, scaler=scaler, device=device, dtype=torch.bfloat16
    )
    weight = criterion.linear.weight
    weight.grad_dtype = FLOAT
    weight.grad = torch.zeros_like(weight, dtype=FLOAT)
    optimizer = ampfuse.AdamW(criterion.parameters(), lr=1e-2)
    hidden = torch.randn(64, 16, device=device, dtype=torch.bfloat16)
    target = torch.randint(50, (64,), device=device)
    losses = []
    for _ in range(30 if device.type == "cpu" else 60):  # a GPU has other random numbers
        optimizer.zero_grad(set_to_none=False)
        for part in zip(hidden.split(32), target.split(32), strict=True):
            loss = criterion(*part, denominator=64, accumulate_into=weight.grad)
            scaler.scale(loss).backward()
        losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
    assert losses[-1] < losses[0] / 2
