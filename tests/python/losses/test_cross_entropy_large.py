"""Tests of more than 2³¹ logits, of one enormous row, and of millions of tiny rows."""

import math

import ampfuse
import pytest
import torch
from cross_entropy_reference import ULPS, exact, relatively_off, ulp, ulps_off
from reference import free_gib

pytestmark = pytest.mark.slow

# The largest vocabulary of models, made odd. So many rows need 64-bit indices: 4.3 GB as bfloat16.
CLASSES = 262147
ROWS = 2**31 // CLASSES + 8
BEYOND = 2**31 // CLASSES  # the row that contains the logit of index 2³¹
RANDOM_ROWS = [0, BEYOND - 1, BEYOND, BEYOND + 1, ROWS - 1]


def needs(device, gib):
    if free_gib(device) < gib:
        pytest.skip(f"needs {gib} GiB of free memory on {device.type}")


@pytest.fixture
def logits(device):
    """Logits that are zero, except in a few rows on both sides of the limit."""
    needs(device, 8)
    logits = torch.zeros(ROWS, CLASSES, dtype=torch.bfloat16, device=device)
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(len(RANDOM_ROWS), CLASSES, generator=generator) * 4
    logits[RANDOM_ROWS] = random.to(device, torch.bfloat16)
    return logits


@pytest.fixture
def target(device):
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[BEYOND + 1] = -100
    return target.to(device)


def test_loss_of_every_row_of_more_than_2_31_logits_is_exact(logits, target):
    with torch.no_grad():
        losses = ampfuse.cross_entropy(logits, target, reduction="none")

    expected, _ = exact(logits[RANDOM_ROWS], target[RANDOM_ROWS], reduction="none")
    assert relatively_off(losses[RANDOM_ROWS], expected) <= 1e-6
    assert losses[BEYOND + 1] == 0
    losses[RANDOM_ROWS] = math.log(CLASSES)  # the loss of a row of zeros
    assert relatively_off(losses, torch.full_like(losses, math.log(CLASSES)).double()) <= 1e-6


def test_more_than_2_31_logits_are_overwritten_with_their_gradient(logits, target):
    rows, targets = logits[RANDOM_ROWS], target[RANDOM_ROWS]
    scale = torch.tensor(float(2**18), device=logits.device)

    loss = ampfuse.cross_entropy_(logits, target, reduction="sum", grad_scale=scale)

    expected, gradient = exact(rows, targets, scale, reduction="sum")
    whole = (ROWS - len(RANDOM_ROWS)) * math.log(CLASSES) + expected
    assert relatively_off(loss, whole) <= 1e-6
    assert ulps_off(logits[RANDOM_ROWS], gradient) <= ULPS
    assert (logits[BEYOND + 1] == 0).all()
    # In rows of zeros all classes have the same gradient, except the target.
    same = (scale / CLASSES).bfloat16()
    of_target = (scale / CLASSES - scale).bfloat16()
    target = target.clamp(min=0)[:, None]
    chosen = logits.gather(1, target)
    chosen[RANDOM_ROWS] = of_target
    assert (chosen == of_target).all()
    logits.scatter_(1, target, same.expand(ROWS, 1))
    logits[RANDOM_ROWS] = same
    assert logits.sub_(same).count_nonzero() == 0


def test_row_that_begins_beyond_2_31_elements_gives_exact_results(device):
    """The two rows lie at both ends of one piece of memory, 2³¹ elements apart."""
    needs(device, 6)
    memory = torch.zeros(2**31 + CLASSES, dtype=torch.bfloat16, device=device)
    logits = memory.as_strided((2, CLASSES), (2**31, 1))
    random = torch.randn(2, CLASSES, generator=torch.Generator().manual_seed(0)) * 4
    logits.copy_(random)
    target = torch.tensor([5, CLASSES - 1], device=device)
    expected, gradient = exact(logits, target)

    leaf = logits.detach().requires_grad_()
    loss = ampfuse.cross_entropy(leaf, target)
    (grad,) = torch.autograd.grad(loss, leaf)
    in_place = ampfuse.cross_entropy_(logits, target)

    assert relatively_off(loss, expected) <= 1e-6
    assert ulps_off(grad, gradient) <= ULPS
    assert torch.equal(in_place, loss)
    assert torch.equal(logits, grad)
    assert memory.count_nonzero() == grad.count_nonzero()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothed"])
def test_row_of_two_million_classes_gives_exact_results(device, dtype, options):
    classes = 2**21 + 1
    logits = torch.randn(1, classes, generator=torch.Generator().manual_seed(0)) * 4
    logits = logits.to(device, dtype).requires_grad_()
    target = torch.tensor([classes - 1], device=device)

    loss = ampfuse.cross_entropy(logits, target, **options)
    loss.backward()

    expected, gradient = exact(logits, target, **options)
    assert relatively_off(loss, expected) <= 1e-6
    allowed = ULPS * ulp(dtype, gradient)
    if options:  # terms of 0.1 / classes, rounded to float32, may cancel
        allowed = 2 * allowed + 1e-14
    assert ((logits.grad - gradient).abs() <= allowed).all()


@pytest.mark.parametrize("classes", [1, 2])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_millions_of_tiny_rows_give_exact_results(device, classes, reduction):
    rows = 2**22 + 1
    logits = torch.randn(rows, classes, generator=torch.Generator().manual_seed(0))
    logits = logits.to(device).requires_grad_()
    target = torch.arange(rows, device=device) % classes
    target[-2] = -100

    loss = ampfuse.cross_entropy(logits, target, reduction=reduction)
    loss.sum().backward()

    expected, gradient = exact(logits, target, reduction=reduction)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-12)
    assert ulps_off(logits.grad, gradient) <= ULPS
    assert (logits.grad[-2] == 0).all()
    if classes == 1:  # a single class has probability 1
        assert (loss == 0).all()
        assert (logits.grad == 0).all()
