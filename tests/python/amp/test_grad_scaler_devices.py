"""One scaler for parameters on a CPU and a GPU combines their overflow flags, in either order."""

import pytest
import torch
from scaler_languages import EVERY_LANGUAGE
from torch.nn import Parameter

pytestmark = pytest.mark.needs_cuda


def parameters(order):
    return [Parameter(torch.ones(2, device=device)) for device in order]


ORDERS = pytest.mark.parametrize("order", [("cpu", "cuda"), ("cuda", "cpu")])
KINDS = pytest.mark.parametrize("kind", ["SGD", "AdamW", "AdamW, clipping"])
UNSCALE = pytest.mark.parametrize("unscale", [False, True])


def make(language, kind, params):
    if kind == "SGD":
        return language.sgd(params, lr=0.5)
    return language.adamw(params, lr=0.5, max_grad_norm=1.0 if "clipping" in kind else None)


@EVERY_LANGUAGE
@ORDERS
@KINDS
@UNSCALE
@pytest.mark.parametrize("spoiled", [(), (0,), (1,), (0, 1)])
def test_an_overflow_on_one_device_skips_on_both(language, order, kind, unscale, spoiled):
    params = parameters(order)
    optimizer, scaler = make(language, kind, params), language.scaler(torch.device(order[0]), 8.0)
    for param in params:
        scaler.scale(param.sum()).backward()
    for index in spoiled:
        params[index].grad[0] = float("inf")

    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()

    assert scaler.was_skipped() == bool(spoiled)
    assert scaler.get_scale() == (4.0 if spoiled else 8.0)
    for param in params:
        assert torch.equal(param.detach().cpu(), torch.ones(2)) == bool(spoiled)


@EVERY_LANGUAGE
@ORDERS
def test_history_and_overflow_report_cover_all_devices(language, order):
    params = parameters(order)
    optimizer = language.sgd(params, lr=0.5)
    scaler = language.scaler(torch.device(order[0]), 8.0, history=2)
    model = torch.nn.ParameterList(params)
    for step in range(2):
        optimizer.zero_grad()
        for param in params:
            scaler.scale(param.sum()).backward()
        if step == 1:
            params[1].grad[0] = float("nan")
        scaler.step(optimizer)
        scaler.update()

    assert scaler.history()[0].norm == pytest.approx(2.0)
    assert scaler.history()[1].skipped
    assert scaler.overflow_report(model) == ["1"]
