"""Tests of cross_entropy_: memory that it overwrites, and logits that it refuses."""

import ampfuse
import pytest
import torch
from cross_entropy_reference import ULPS, exact, ulps_off
from torch.nn import functional


def batch(device, rows=6, classes=50):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator).to(device)
    return logits, torch.randint(classes, (rows,), generator=generator).to(device)


VIEWS = {
    "columns": lambda whole: whole[:, 3:53],
    "every other row": lambda whole: whole[::2, :50],
    "rows": lambda whole: whole[2:, :50],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_memory_around_a_view_is_not_overwritten(device, view):
    whole, target = batch(device, rows=12, classes=57)
    before = whole.clone()
    expected, target = view(before), target[: len(view(whole))] % 50
    _, gradient = exact(expected, target)

    ampfuse.cross_entropy_(view(whole), target)

    assert ulps_off(view(whole), gradient) <= ULPS
    around = torch.ones_like(whole)
    view(around).zero_()
    assert torch.equal(whole * around, before * around)


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_gradient_of_a_view_reaches_the_leaf(device, view):
    leaf, target = batch(device, rows=12, classes=57)
    leaf.requires_grad_()
    target = target[: len(view(leaf))] % 50
    functional.cross_entropy(view(leaf), target).backward()
    expected, leaf.grad = leaf.grad, None

    ampfuse.cross_entropy_(view(leaf * 1), target).backward()

    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_logits_without_requires_grad_are_overwritten_with_their_gradient(device, mode):
    logits, target = batch(device)
    _, gradient = exact(logits, target, 8.0)
    with mode():
        loss = ampfuse.cross_entropy_(logits, target, grad_scale=torch.tensor(8.0, device=device))
    assert not loss.requires_grad
    assert ulps_off(logits, gradient) <= ULPS


def test_leaf_may_be_overwritten_under_no_grad(device):
    leaf, target = batch(device)
    _, gradient = exact(leaf, target)
    leaf.requires_grad_()
    with torch.no_grad():
        ampfuse.cross_entropy_(leaf, target)
    assert ulps_off(leaf, gradient) <= ULPS


def test_version_counter_rises_in_forward_and_in_backward(device):
    leaf, target = batch(device)
    logits = leaf.requires_grad_() * 1
    before = logits._version
    loss = ampfuse.cross_entropy_(logits, target)
    assert logits._version == before + 1
    loss.backward()
    assert logits._version > before + 1


CHANGES = {
    "a second loss": lambda logits, target: ampfuse.cross_entropy_(logits, target),
    "another operation": lambda logits, target: logits.detach().zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_backward_raises_if_the_gradient_was_overwritten(device, change):
    leaf, target = batch(device)
    logits = leaf.requires_grad_() * 1
    loss = ampfuse.cross_entropy_(logits, target)
    change(logits, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_probabilities_may_share_the_memory_of_the_logits(device):
    logits = batch(device)[0].softmax(1)
    _, gradient = exact(logits, logits.clone())
    ampfuse.cross_entropy_(logits, logits)
    torch.testing.assert_close(logits.double(), gradient, rtol=1e-6, atol=1e-8)


REFUSED = {
    "one dimension": (lambda logits: logits[0], "expected logits of shape"),
    "three": (lambda logits: logits.view(6, 10, 5), "expected logits of shape"),
    "columns": (lambda logits: logits.t().contiguous().t(), "class dimension has stride 1"),
    "every other class": (lambda logits: logits[:, ::2], "class dimension has stride 1"),
}


@pytest.mark.parametrize(("view", "words"), REFUSED.values(), ids=list(REFUSED))
def test_logits_that_would_have_to_be_copied_are_refused(device, view, words):
    logits, target = batch(device)
    before = logits.clone()
    with pytest.raises(ValueError, match=words):
        ampfuse.cross_entropy_(view(logits), target)
    assert torch.equal(logits, before)


OVERLAPS = {
    "one row for all": lambda logits: logits[:1].expand(6, 50),
    "rows that overlap": lambda logits: logits.view(-1).as_strided((6, 50), (10, 1)),
}


@pytest.mark.parametrize("overlapping", OVERLAPS.values(), ids=list(OVERLAPS))
def test_logits_that_overlap_in_memory_are_refused(device, overlapping):
    logits, target = batch(device)
    before = logits.clone()
    with pytest.raises((RuntimeError, ValueError), match="memory"):
        ampfuse.cross_entropy_(overlapping(logits), target)
    assert torch.equal(logits, before)


def test_view_of_a_leaf_is_refused_and_not_overwritten(device):
    logits, target = batch(device)
    leaf = logits.clone().view(2, 3, 50).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        ampfuse.cross_entropy_(leaf.view(6, 50), target)
    assert torch.equal(leaf.view(6, 50), logits)


def test_lazy_clone_is_copied_before_it_is_overwritten():
    logits, target = batch(torch.device("cpu"))
    before = logits.clone()
    clone = torch._lazy_clone(logits)
    ampfuse.cross_entropy_(clone, target)
    assert torch.equal(logits, before)
    assert ulps_off(clone, exact(before, target)[1]) <= ULPS


def test_negative_views_are_refused(device):
    logits, target = batch(device)
    with pytest.raises(ValueError, match="share no memory"):
        ampfuse.cross_entropy_(torch._neg_view(logits), target)


def test_targets_that_require_grad_are_refused_except_under_no_grad(device):
    logits, _ = batch(device)
    target = torch.softmax(logits, 1).requires_grad_()
    with pytest.raises(
        ValueError, match="target: gradients with respect to probabilities are not supported"
    ):
        ampfuse.cross_entropy_(logits.clone(), target)
    with torch.no_grad():
        assert ampfuse.cross_entropy_(logits.clone(), target).isfinite()


def test_float16_logits_that_require_grad_need_a_grad_scale(device):
    """Without grad_scale most of their gradient would be 0, and nobody would notice."""
    logits, target = batch(device)
    logits = logits.half().requires_grad_()
    with pytest.raises(ValueError, match="grad_scale: expected the loss scale for float16 logits"):
        ampfuse.cross_entropy_(logits * 1, target)
    ampfuse.cross_entropy_(logits * 1, target, grad_scale=1.0).backward()
    with torch.no_grad():
        ampfuse.cross_entropy_(logits * 1, target)


def test_inference_tensors_give_the_same_loss_and_refusals(device):
    logits, target = batch(device)
    weight = torch.rand(50, dtype=torch.float64, device=device)
    options = {"weight": weight, "denominator": torch.tensor(3.0)}
    expected = ampfuse.cross_entropy(logits, target, **options)
    strided = target.repeat_interleave(2)[::2]
    with torch.inference_mode():
        assert torch.equal(ampfuse.cross_entropy_(logits.clone(), strided, **options), expected)
        with pytest.raises(ValueError, match="share no memory"):
            ampfuse.cross_entropy_(logits[:1].clone().expand(6, 50), target)
