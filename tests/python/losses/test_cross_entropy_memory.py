"""Tests of the memory of cross_entropy: only a gradient, and not even that in place."""

import ampfuse
import pytest
import torch
from cross_entropy_samples import batch
from harness.memory import extra_peak as peak

SHAPE = ROWS, CLASSES = (1024, 4096)
DTYPES = [torch.bfloat16, torch.float32]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def few(device):
    """Return bytes for some numbers per row, and on a CPU for a row's exponentials per thread."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return 96 * ROWS + 8 * CLASSES * threads + 2**14


def some_ignored(device, dtype, shape=SHAPE):
    """Return logits, their size in bytes, and targets of which every seventh is ignored."""
    logits, target = batch(device, shape, dtype)
    target.view(-1)[::7] = -100
    return logits, logits.numel() * logits.element_size(), target


def backward_of(*arguments, upstream=1.0, **options):
    """Return a function that calls cross_entropy and runs backward."""

    def step():
        loss = ampfuse.cross_entropy(*arguments, **options)
        loss = loss[0] if isinstance(loss, tuple) else loss
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, upstream))

    return step


CALLS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},  # its gradient is computed in backward
    "class weights": {"label_smoothing": 0.1},
    "metrics": {"return_metrics": True, "z_loss": 1e-4, "softcap": 30.0},
    "probabilities": {},
}


@pytest.mark.parametrize(
    ("dtype", "call"),
    [*((dtype, call) for dtype in DTYPES for call in CALLS), (torch.float16, "mean")],
)
def test_only_the_gradient_is_allocated_and_only_if_it_is_needed(device, dtype, call):
    """float16 logits without grad_scale get their gradient in backward."""
    logits, size, target = some_ignored(device, dtype)
    options = {"target": target} | CALLS[call]
    if call == "class weights":
        options["weight"] = torch.ones(CLASSES, device=device)
    if call == "probabilities":
        options["target"] = torch.full(SHAPE, 1 / CLASSES, device=device)

    for upstream in (1.0, 3.0):
        logits.grad = None
        used = peak(device, backward_of(logits, upstream=upstream, **options))
        assert size <= used <= size + few(device)

    with torch.no_grad():
        assert 0 < peak(device, backward_of(logits, **options)) <= few(device)
    logits.requires_grad_(False)
    assert 0 < peak(device, backward_of(logits, **options)) <= few(device)


@EVERY_DTYPE
def test_positions_are_not_copied(device, dtype):
    logits, size, target = some_ignored(device, dtype, (4, 21, 128, 128))
    assert peak(device, backward_of(logits, target)) <= 1.05 * size
    with torch.no_grad():
        assert peak(device, backward_of(logits, target)) <= 0.05 * size + 2**16


@EVERY_DTYPE
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_in_place_loss_and_backward_allocate_no_gradient(device, dtype, upstream):
    leaf, _, target = some_ignored(device, dtype)
    logits = leaf * 1
    upstream = torch.tensor(upstream, device=device)

    def step():
        loss = ampfuse.cross_entropy_(logits, target)
        (grad,) = torch.autograd.grad(loss, logits, upstream)
        assert grad.data_ptr() == logits.data_ptr()

    assert 0 < peak(device, step) <= few(device)


@EVERY_DTYPE
def test_repeated_steps_hold_no_more_than_one_gradient(device, dtype):
    logits, size, target = some_ignored(device, dtype)

    def steps():
        for _ in range(3):
            logits.grad = None
            ampfuse.cross_entropy(logits, target).backward()

    assert peak(device, steps) <= size + few(device)
