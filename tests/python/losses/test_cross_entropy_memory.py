"""Tests of the memory of cross_entropy: only a gradient, and not even that in place."""

import ampfuse
import pytest
import torch
from harness.memory import extra_peak as peak
from torch.nn import functional

ROWS, CLASSES = 1024, 4096
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def few(device):
    """Return bytes for some numbers per row, and on a CPU for a row's exponentials per thread."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return 96 * ROWS + 8 * CLASSES * threads + 2**14


def batch(device, dtype):
    """Return logits, their size in bytes, and targets."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, CLASSES, generator=generator).to(device, dtype).requires_grad_()
    target = torch.randint(CLASSES, (ROWS,), generator=generator).to(device)
    target[::7] = -100
    return logits, logits.numel() * logits.element_size(), target


CALLS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},  # its gradient is computed in backward
    "class weights": {"weight": torch.ones(CLASSES), "label_smoothing": 0.1},
    "metrics": {"return_metrics": True, "z_loss": 1e-4, "softcap": 30.0},
}
EVERY_CALL = pytest.mark.parametrize("options", CALLS.values(), ids=list(CALLS))


def loss_of(logits, target, options):
    """Return the loss without the metrics."""
    options = {
        name: value.to(logits.device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    loss = ampfuse.cross_entropy(logits, target, **options)
    return loss[0] if isinstance(loss, tuple) else loss


@DTYPES
@EVERY_CALL
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_forward_and_backward_allocate_only_the_gradient(device, dtype, options, upstream):
    logits, size, target = batch(device, dtype)

    def step():
        loss = loss_of(logits, target, options)
        loss.backward(torch.full_like(loss, upstream))

    assert size <= peak(device, step) <= size + few(device)


def test_float16_loss_without_grad_scale_allocates_only_the_gradient(device):
    logits, size, target = batch(device, torch.float16)
    needed = peak(device, lambda: ampfuse.cross_entropy(logits, target).backward())
    assert size <= needed <= size + few(device)


@DTYPES
def test_probabilities_are_not_copied(device, dtype):
    logits, size, _ = batch(device, dtype)
    target = torch.rand(ROWS, CLASSES, device=device).softmax(1)
    needed = peak(device, lambda: ampfuse.cross_entropy(logits, target).backward())
    assert size <= needed <= size + few(device)


@DTYPES
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_in_place_loss_and_backward_allocate_no_gradient(device, dtype, upstream):
    leaf, _, target = batch(device, dtype)
    logits = leaf * 1
    upstream = torch.tensor(upstream, device=device)

    def step():
        loss = ampfuse.cross_entropy_(logits, target)
        (grad,) = torch.autograd.grad(loss, logits, upstream)
        assert grad.data_ptr() == logits.data_ptr()

    assert 0 < peak(device, step) <= few(device)


@DTYPES
@EVERY_CALL
def test_none_of_the_gradients_memory_is_allocated_if_it_is_not_needed(device, dtype, options):
    logits, _, target = batch(device, dtype)

    with torch.no_grad():
        assert 0 < peak(device, lambda: loss_of(logits, target, options)) <= few(device)
    logits.requires_grad_(False)
    assert 0 < peak(device, lambda: loss_of(logits, target, options)) <= few(device)


@DTYPES
def test_repeated_steps_hold_no_more_than_one_gradient(device, dtype):
    logits, size, target = batch(device, dtype)

    def steps():
        for _ in range(3):
            logits.grad = None
            ampfuse.cross_entropy(logits, target).backward()

    assert peak(device, steps) <= size + few(device)


@DTYPES
def test_peak_of_torchs_loss_is_measured_as_at_least_two_gradients(device, dtype):
    logits, size, target = batch(device, dtype)
    assert peak(device, lambda: functional.cross_entropy(logits, target).backward()) >= 2 * size
