"""Logits that a program converts to float32 before the loss."""

import inspect

import pytest
import torch
from ampfuse.diagnosis._logits import WideLogits
from torch.nn import functional

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def logits(monkeypatch):
    from ampfuse.patching import _losses, patch, unpatch

    found = WideLogits()
    patch("cross_entropy")
    monkeypatch.setattr(_losses.USAGE, "on_input", found)
    yield found
    unpatch()


def loss_of(logits):
    target = torch.zeros(logits.shape[0], dtype=torch.long)
    return functional.cross_entropy(logits, target)


LINE = f"test_logits.py:{inspect.getsourcelines(loss_of)[1] + 2}"


VIEWS = {
    "none": lambda logits: logits.float()[:, 0],
    "view": lambda logits: logits.float().view(-1, 6),
    "flatten": lambda logits: logits.float().flatten(0, 1),
    "shifted": lambda logits: logits.float()[..., :-1, :].contiguous().view(-1, 6),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_conversion_is_noticed_also_before_a_view(logits, dtype, view):
    narrow = torch.zeros(4, 2, 6, dtype=dtype, requires_grad=True).mul(1)
    loss_of(VIEWS[view](narrow))
    assert logits.dtype == dtype
    assert logits.bytes == VIEWS[view](narrow).nbytes
    assert logits.place.where == LINE


def test_largest_conversion_is_kept(logits):
    for rows in (4, 8, 2):
        loss_of(torch.zeros(rows, 6, dtype=torch.bfloat16, requires_grad=True).float())
    assert logits.bytes == 8 * 6 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_as_they_were_computed_are_not_reported(logits, dtype):
    weight = torch.zeros(6, 6, dtype=dtype, requires_grad=True)
    loss_of(weight @ weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(torch.zeros(6, 6, requires_grad=True) @ torch.zeros(6, 6))
    assert logits.bytes == 0


def test_other_conversions_are_not_reported(logits):
    loss_of(torch.zeros(4, 6, dtype=torch.float64, requires_grad=True).float())  # narrower now
    loss_of(torch.zeros(4, 6).bfloat16().float())  # needs no gradient
    loss_of(torch.zeros(4, 6, dtype=torch.bfloat16, requires_grad=True).float() * 2)  # computed
    assert logits.bytes == 0
