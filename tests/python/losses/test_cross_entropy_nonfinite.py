"""Tests of cross_entropy for logits that are NaN."""

import ampfuse
import pytest
import torch


@pytest.mark.parametrize("payload", [0x7FC00001, 0x7FFFFFFF, 0xFFC12345 - 2**32])
@pytest.mark.parametrize("index", [0, 17, 2999])
def test_nan_with_any_payload_makes_loss_and_gradient_nan(device, payload, index):
    logits = torch.zeros(1, 3000)
    logits.view(torch.int32)[0, index] = payload
    logits = logits.to(device).requires_grad_()
    loss = ampfuse.cross_entropy(logits, torch.tensor([5], device=device))
    loss.backward()
    assert loss.isnan()
    assert logits.grad.isnan().all()


def test_gradient_of_an_ignored_row_is_zero_even_for_nan_logits(device):
    logits = torch.full((2, 40), float("nan"), device=device)
    logits[0] = 0
    logits.requires_grad_()
    loss = ampfuse.cross_entropy(logits, torch.tensor([1, -100], device=device))
    loss.backward()
    assert loss.item() == pytest.approx(torch.log(torch.tensor(40.0)).item())
    assert (logits.grad[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("classes", [40, 3000])
@pytest.mark.parametrize("index", [0, 37])
def test_nan_makes_the_whole_gradient_of_a_row_nan_with_a_softcap(device, dtype, classes, index):
    logits = torch.zeros(2, classes, dtype=dtype, device=device)
    logits[0, index] = float("nan")
    logits.requires_grad_()
    target = torch.tensor([5, 5], device=device)
    loss = ampfuse.cross_entropy(logits, target, softcap=30.0, reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [True, False]
    assert logits.grad[0].isnan().all()
    assert logits.grad[1].isfinite().all()
