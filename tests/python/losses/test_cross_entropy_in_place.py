"""Tests of cross_entropy_: memory that it overwrites, and logits that it refuses."""

import ampfuse
import pytest
import torch
from cross_entropy_reference import ULPS, exact, results, ulps_off
from cross_entropy_samples import batch


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("classes", [50, 300])
def test_logits_are_overwritten_with_their_gradient(device, dtype, classes):
    leaf, target = batch(device, (37, classes), dtype)
    options = {"grad_scale": torch.tensor(8.0, device=device)}
    for upstream in (8.0, 3.0):
        loss, grad = results(ampfuse.cross_entropy, leaf, target, upstream, **options)
        logits = leaf * 1
        address = logits.data_ptr()
        in_place = ampfuse.cross_entropy_(logits, target, **options)
        (found,) = torch.autograd.grad(in_place, leaf, torch.tensor(upstream, device=device))
        assert torch.equal(in_place, loss)
        assert torch.equal(found, grad)
        assert torch.equal(logits, grad)
        assert logits.data_ptr() == address


VIEWS = {
    "columns": lambda whole: whole[:, 3:53],
    "every other row": lambda whole: whole[::2, :50],
    "rows": lambda whole: whole[2:, :50],
}


@pytest.mark.vectorised
@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_a_view_gets_its_gradient_and_memory_around_it_is_not_overwritten(device, view):
    leaf, target = batch(device, (12, 57))
    target = target[: len(view(leaf))] % 50
    before, whole = leaf.detach().clone(), leaf.detach().clone()
    _, gradient = exact(view(before), target)

    ampfuse.cross_entropy_(view(whole), target)
    ampfuse.cross_entropy_(view(leaf * 1), target).backward()

    around = torch.ones_like(whole)
    view(around).zero_()
    assert torch.equal(whole * around, before * around)
    for found in (whole, leaf.grad):
        assert ulps_off(view(found), gradient) <= ULPS
    assert (leaf.grad * around == 0).all()


WITHOUT_GRAD = [
    (torch.enable_grad, False),
    (torch.inference_mode, False),
    (torch.no_grad, False),
    (torch.no_grad, True),
]


@pytest.mark.parametrize(("mode", "leaf"), WITHOUT_GRAD)
def test_logits_of_a_loss_without_grad_are_overwritten_with_their_gradient(device, mode, leaf):
    logits, target = batch(device, leaf=leaf)
    _, gradient = exact(logits, target, 8.0)
    with mode():
        loss = ampfuse.cross_entropy_(logits, target, grad_scale=torch.tensor(8.0, device=device))
    assert not loss.requires_grad
    assert ulps_off(logits, gradient) <= ULPS


def test_version_counter_rises_in_forward_and_in_backward(device):
    leaf, target = batch(device)
    logits = leaf * 1
    before = logits._version
    loss = ampfuse.cross_entropy_(logits, target)
    assert logits._version == before + 1
    loss.backward()
    assert logits._version > before + 1


def test_backward_raises_if_the_gradient_was_overwritten(device):
    def change(logits, target):
        logits.detach().zero_()

    leaf, target = batch(device)
    for overwrite in (ampfuse.cross_entropy_, change):
        logits = leaf * 1
        loss = ampfuse.cross_entropy_(logits, target)
        overwrite(logits, target)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_backward_of_an_op_that_needs_overwritten_logits_raises(device):
    leaf, target = batch(device)
    loss = ampfuse.cross_entropy_(leaf.exp(), target)  # exp's backward reads its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_probabilities_may_share_the_memory_of_the_logits(device):
    logits = batch(device, leaf=False)[0].softmax(1)
    _, gradient = exact(logits, logits.clone())
    ampfuse.cross_entropy_(logits, logits)
    torch.testing.assert_close(logits.double(), gradient, rtol=1e-6, atol=1e-8)


# Logits that would have to be copied, or that overlap in memory.
REFUSED = {
    "one dimension": (lambda logits: logits[0], "expected logits of shape"),
    "three": (lambda logits: logits.view(6, 10, 5), "expected logits of shape"),
    "columns": (lambda logits: logits.t().contiguous().t(), "class dimension has stride 1"),
    "every other class": (lambda logits: logits[:, ::2], "class dimension has stride 1"),
    "one row for all": (lambda logits: logits[:1].expand(6, 50), "memory"),
    "rows that overlap": (lambda logits: logits.view(-1).as_strided((6, 50), (10, 1)), "memory"),
    "a negative view": (torch._neg_view, "share no memory"),
}


@pytest.mark.parametrize(("view", "words"), REFUSED.values(), ids=list(REFUSED))
def test_logits_that_cannot_be_overwritten_are_refused(device, view, words):
    logits, target = batch(device, leaf=False)
    before = logits.clone()
    with pytest.raises((RuntimeError, ValueError), match=words):
        ampfuse.cross_entropy_(view(logits), target)
    assert torch.equal(logits, before)


def test_leaves_and_their_views_are_refused_and_not_overwritten(device):
    leaf, target = batch(device)
    before = leaf.detach().clone()
    for view in (leaf, leaf.view(2, 3, 50).view(6, 50)):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            ampfuse.cross_entropy_(view, target)
    assert torch.equal(leaf, before)


def test_a_loss_of_each_row_and_torch_compile_are_refused(device):
    leaf, target = batch(device)
    with pytest.raises(ValueError, match="expected mean or sum, got none"):
        ampfuse.cross_entropy_(leaf * 1, target, reduction="none")
    with pytest.raises(Exception, match="cannot be overwritten inside"):
        torch.compile(
            lambda x: ampfuse.cross_entropy_(x * 1, target), fullgraph=True, backend="aot_eager"
        )(leaf)


def test_lazy_clone_is_copied_before_it_is_overwritten():
    logits, target = batch(torch.device("cpu"), leaf=False)
    before = logits.clone()
    clone = torch._lazy_clone(logits)
    ampfuse.cross_entropy_(clone, target)
    assert torch.equal(logits, before)
    assert ulps_off(clone, exact(before, target)[1]) <= ULPS


def test_targets_that_require_grad_are_refused_except_under_no_grad(device):
    logits, _ = batch(device, leaf=False)
    target = torch.softmax(logits, 1).requires_grad_()
    with pytest.raises(
        ValueError, match="target: gradients with respect to probabilities are not supported"
    ):
        ampfuse.cross_entropy_(logits.clone(), target)
    with torch.no_grad():
        assert ampfuse.cross_entropy_(logits.clone(), target).isfinite()


def test_float16_logits_that_require_grad_need_a_grad_scale(device):
    """Without grad_scale most of their gradient would be 0, and nobody would notice."""
    logits, target = batch(device, dtype=torch.float16)
    with pytest.raises(ValueError, match="grad_scale: expected the loss scale for float16 logits"):
        ampfuse.cross_entropy_(logits * 1, target)
    ampfuse.cross_entropy_(logits * 1, target, grad_scale=1.0).backward()
    with torch.no_grad():
        ampfuse.cross_entropy_(logits * 1, target)


def test_inference_tensors_give_the_same_loss_and_refusals(device):
    logits, target = batch(device, leaf=False)
    weight = torch.rand(50, dtype=torch.float64, device=device)
    options = {"weight": weight, "denominator": torch.tensor(3.0)}
    expected = ampfuse.cross_entropy(logits, target, **options)
    strided = target.repeat_interleave(2)[::2]
    with torch.inference_mode():
        assert torch.equal(ampfuse.cross_entropy_(logits.clone(), strided, **options), expected)
        with pytest.raises(ValueError, match="share no memory"):
            ampfuse.cross_entropy_(logits[:1].clone().expand(6, 50), target)
