"""Half gradients of patched losses, where there are several scalers to guess among."""

import ampfuse
import pytest
import torch
from ampfuse.amp._active import active_scale
from torch.nn import functional

ROWS, CLASSES = 4096, 512  # whose mean has half gradients of nothing without a scale

torchs = functional.cross_entropy


@pytest.fixture(autouse=True)
def patched():
    with ampfuse.patched():
        yield


def used(device, scale):
    scaler = torch.amp.GradScaler(device.type, scale)
    scaler.scale(torch.ones((), device=device))
    return scaler


@pytest.mark.parametrize("newest", [1e-30, 2.0**-10, 1.0, 2.0**16])
def test_gradients_have_the_digits_of_the_scale_that_they_are_taken_with(device, newest):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(ROWS, CLASSES, generator=generator) * 4).to(device).half()
    target = torch.randint(CLASSES, (ROWS,), generator=generator).to(device)
    scaler = used(device, 2.0**16)
    other = used(device, newest)
    with torch.autocast(device.type, torch.float16):
        (grad,) = torch.autograd.grad(
            scaler.scale(functional.cross_entropy(logits.requires_grad_(), target)), logits
        )
    wide = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(torchs(wide, target) * 2.0**16, wide)
    torch.testing.assert_close(grad.double(), expected, rtol=2**-10, atol=2**-24)
    del other


def test_of_several_none_is_taken_for_half_logits(device):
    older = used(device, 2.0**16)
    place = older.scale_tensor().device
    assert active_scale(place, torch.float16).item() == 2.0**16
    newer = torch.amp.GradScaler(device.type)  # not used yet
    assert active_scale(place, torch.float16) is None
    assert active_scale(place, torch.bfloat16).item() == 2.0**16
    del newer
    assert active_scale(place, torch.float16).item() == 2.0**16
