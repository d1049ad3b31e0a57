"""Half gradients of patched losses, where there are several scalers to guess among."""

import copy
import gc
import pickle

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


def assert_has_the_digits_of(device, factor, scaled):
    """Of the gradient of a loss times `factor`, which `scaled` makes of the loss."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(ROWS, CLASSES, generator=generator) * 4).to(device).half()
    target = torch.randint(CLASSES, (ROWS,), generator=generator).to(device)
    with torch.autocast(device.type, torch.float16):
        loss = functional.cross_entropy(logits.requires_grad_(), target)
        (grad,) = torch.autograd.grad(scaled(loss), logits)
    wide = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(torchs(wide, target) * factor, wide)
    torch.testing.assert_close(grad.double(), expected, rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("newest", [1e-30, 2.0**-10, 1.0, 2.0**16])
def test_gradients_have_the_digits_of_the_scale_that_they_are_taken_with(device, newest):
    scaler = used(device, 2.0**16)
    other = used(device, newest)
    assert_has_the_digits_of(device, 2.0**16, scaler.scale)
    del other


@pytest.mark.parametrize("scale", [1e-30, 2.0**-10, 1.0, 2.0**16])
def test_gradients_without_a_scaler_have_no_fewer_digits_than_torchs(device, scale):
    collapsed = used(device, scale)
    assert_has_the_digits_of(device, 1.0, lambda loss: loss)
    del collapsed


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_scalers_are_scalers(device, copied):
    first = used(device, 1.0)
    second = copied(torch.amp.GradScaler(device.type, 2.0**16))
    second.scale(torch.ones((), device=device))
    assert_has_the_digits_of(device, 2.0**16, second.scale)
    del first


def test_scalers_of_the_programs_own_classes_are_reckoned_with(device):
    class Mine(torch.amp.GradScaler):
        """Of which nothing is known."""

    known = used(device, 1.0)
    mine = Mine(device.type, 2.0**16)
    assert_has_the_digits_of(device, 2.0**16, mine.scale)
    del known, mine, Mine
    gc.collect()
    alone = used(device, 2.0**10)
    assert active_scale(alone.scale_tensor().device, torch.float16).item() == 2.0**10


def test_of_several_none_is_taken_for_half_logits(device):
    older = used(device, 2.0**16)
    place = older.scale_tensor().device
    assert active_scale(place, torch.float16).item() == 2.0**16
    newer = torch.amp.GradScaler(device.type)  # not used yet
    assert active_scale(place, torch.float16) is None
    assert active_scale(place, torch.bfloat16).item() == 2.0**16
    del newer
    assert active_scale(place, torch.float16).item() == 2.0**16
