"""Rows that several blocks of a GPU share, so many that each block processes a few of them."""

import ampfuse
import pytest
import torch
from cross_entropy_reference import ULPS, exact, relatively_off, ulps_off

ROWS = 5  # that differ


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classes", [16392, 32000, 50257, 65544, 128256, 131072])
@pytest.mark.parametrize("in_place", [False, True])
def test_each_copy_of_a_row_has_the_exact_loss_and_gradient(device, dtype, classes, in_place):
    copies = 120 if device.type == "cuda" else 1
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(ROWS, classes, generator=generator) * 4).to(device, dtype)
    # Targets in the first and the last class, and in classes of other blocks.
    targets = torch.tensor([0, classes - 1, classes // 2, -100, classes // 3], device=device)
    logits = rows.repeat(copies, 1).requires_grad_()
    target = targets.repeat(copies)
    target[: 2 * ROWS] = -100 if copies > 1 else target[: 2 * ROWS]  # blocks without work

    losses = ampfuse.cross_entropy(logits.detach(), target, reduction="none")
    scale = torch.tensor(1.0, device=device)
    if in_place:
        grad = logits.detach().clone()
        ampfuse.cross_entropy_(grad, target, reduction="sum", grad_scale=scale)
    else:
        ampfuse.cross_entropy(logits, target, reduction="sum", grad_scale=scale).backward()
        grad = logits.grad

    gradient = grad.view(copies, ROWS, classes)[-1]
    expected, expected_gradient = exact(rows, targets, 1.0, reduction="sum")
    assert relatively_off(losses[-ROWS:].sum(), expected) <= 1e-6
    assert ulps_off(gradient, expected_gradient) <= ULPS
    if copies > 1:
        assert (grad[: 2 * ROWS] == 0).all()
        assert (grad.view(copies, ROWS, classes)[2:] == gradient).all()
        assert (losses.view(copies, ROWS)[2:] == losses[-ROWS:]).all()
