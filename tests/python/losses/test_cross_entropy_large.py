"""Tests of large calls: more than 2³¹ logits, enormous rows, millions of tiny rows."""

import math

import ampfuse
import pytest
import torch
from cross_entropy_reference import allowed_ulps, assert_exact, exact, relatively_off, results, ulp
from cross_entropy_samples import batch
from reference import free_gib

# The largest vocabulary of models, made odd. So many rows need 64-bit indices: 4.3 GB as bfloat16.
CLASSES = 262147
ROWS = 2**31 // CLASSES + 8
BEYOND = 2**31 // CLASSES  # the row that contains the logit of index 2³¹
RANDOM_ROWS = [0, BEYOND - 1, BEYOND, BEYOND + 1, ROWS - 1]


def needs(device, gib):
    if free_gib(device) < gib:
        pytest.skip(f"needs {gib} GiB of free memory on {device.type}")


@pytest.mark.slow
def test_more_than_2_31_logits_have_exact_losses_and_are_overwritten_with_their_gradient(device):
    """Logits are zero, except in a few rows on both sides of the limit."""
    needs(device, 8)
    logits = torch.zeros(ROWS, CLASSES, dtype=torch.bfloat16, device=device)
    rows, _ = batch(device, (len(RANDOM_ROWS), CLASSES), torch.bfloat16, scale=4, leaf=False)
    logits[RANDOM_ROWS] = rows
    target = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1)).to(device)
    target[BEYOND + 1] = -100
    targets = target[RANDOM_ROWS]

    losses = ampfuse.cross_entropy(logits, target, reduction="none")

    expected, _ = exact(rows, targets, reduction="none")
    assert relatively_off(losses[RANDOM_ROWS], expected) <= 1e-6
    assert losses[BEYOND + 1] == 0
    losses[RANDOM_ROWS] = math.log(CLASSES)  # the loss of a row of zeros
    assert relatively_off(losses, torch.full_like(losses, math.log(CLASSES)).double()) <= 1e-6

    scale = torch.tensor(float(2**18), device=device)
    loss = ampfuse.cross_entropy_(logits, target, reduction="sum", grad_scale=scale)

    expected, gradient = exact(rows, targets, scale, reduction="sum")
    whole = (ROWS - len(RANDOM_ROWS)) * math.log(CLASSES) + expected
    assert_exact((loss, logits[RANDOM_ROWS]), (whole, gradient))
    assert (logits[BEYOND + 1] == 0).all()
    # In rows of zeros all classes have the same gradient, except the target.
    same = (scale / CLASSES).bfloat16()
    of_target = (scale / CLASSES - scale).bfloat16()
    at = torch.arange(ROWS, device=device), target.clamp(min=0)  # scatter_ would take 40 s
    chosen = logits[at]
    chosen[RANDOM_ROWS] = of_target
    assert (chosen == of_target).all()
    logits[at] = same
    logits[RANDOM_ROWS] = same
    assert logits.amin() == logits.amax() == same


@pytest.mark.slow
def test_row_that_begins_beyond_2_31_elements_gives_exact_results(device):
    """The two rows lie at both ends of one piece of memory, 2³¹ elements apart."""
    needs(device, 6)
    memory = torch.zeros(2**31 + CLASSES + 1, dtype=torch.bfloat16, device=device)
    logits = memory.as_strided((2, CLASSES), (2**31, 1))
    logits.copy_(batch(device, logits.shape, scale=4, leaf=False)[0])
    target = torch.tensor([5, CLASSES - 1], device=device)
    expected = exact(logits, target)

    loss, grad = results(ampfuse.cross_entropy, logits.detach().requires_grad_(), target)
    in_place = ampfuse.cross_entropy_(logits, target)

    assert_exact((loss, grad), expected)
    assert torch.equal(in_place, loss)
    assert torch.equal(logits, grad)
    logits.zero_()
    assert memory.view(torch.int64).count_nonzero() == 0  # nothing else was overwritten


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_row_of_two_million_classes_gives_exact_results(device, dtype):
    classes = 2**21 + 1
    logits, _ = batch(device, (1, classes), dtype, scale=4)
    target = torch.tensor([classes - 1], device=device)
    for options in ({}, {"label_smoothing": 0.1}):
        loss, grad = results(ampfuse.cross_entropy, logits, target, **options)
        expected, gradient = exact(logits, target, **options)
        assert relatively_off(loss, expected) <= 1e-6, options
        allowed = allowed_ulps(logits) * ulp(dtype, gradient)
        if options:  # terms of 0.1 / classes, rounded to float32, may cancel
            allowed = 2 * allowed + 1e-14
        assert ((grad - gradient).abs() <= allowed).all(), options


@pytest.mark.slow
@pytest.mark.parametrize("classes", [1, 2])
def test_millions_of_tiny_rows_give_exact_results(device, classes):
    rows = 2**21 + 1
    logits, _ = batch(device, (rows, classes))
    target = torch.arange(rows, device=device) % classes
    target[-2] = -100
    for reduction in ("none", "mean"):
        loss, grad = results(ampfuse.cross_entropy, logits, target, reduction=reduction)
        assert_exact((loss, grad), exact(logits, target, reduction=reduction), reduction)
        assert (grad[-2] == 0).all()
        if classes == 1:  # a single class has probability 1
            assert (loss == 0).all()
            assert (grad == 0).all()


# Several blocks of a GPU share a row. There are so many rows that each block processes a few.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classes", [16392, 32000, 50257, 65544, 128256, 131072])
def test_each_copy_of_a_long_row_has_the_exact_loss_and_gradient(device, dtype, classes):
    differ = 5  # rows
    copies = 120 if device.type == "cuda" else 1
    rows, _ = batch(device, (differ, classes), dtype, scale=4, leaf=False)
    # Targets in the first and the last class, and in classes of other blocks.
    targets = torch.tensor([0, classes - 1, classes // 2, -100, classes // 3], device=device)
    logits, target = rows.repeat(copies, 1), targets.repeat(copies)
    target[: 2 * differ] = -100 if copies > 1 else target[: 2 * differ]  # blocks without work
    options = {"reduction": "sum", "grad_scale": torch.ones((), device=device)}

    losses = ampfuse.cross_entropy(logits, target, reduction="none")
    _, grad = results(ampfuse.cross_entropy, logits.clone().requires_grad_(), target, **options)
    ampfuse.cross_entropy_(logits, target, **options)

    expected = exact(rows, targets, reduction="sum")
    for found in (grad, logits):
        gradient = found.view(copies, differ, classes)[-1]
        assert_exact((losses[-differ:].sum(), gradient), expected)
        if copies > 1:
            assert (found[: 2 * differ] == 0).all()
            assert (found.view(copies, differ, classes)[2:] == gradient).all()
            assert (losses.view(copies, differ)[2:] == losses[-differ:]).all()
