"""Tests of CrossEntropyLoss as a module: options, copies, state, scalers and torch.compile."""

import copy
import io
import pickle
import types

import ampfuse
import pytest
import torch
from cross_entropy_reference import ULPS, exact, relatively_off, ulps_off
from cross_entropy_samples import batch
from torch.nn import functional

OPTIONS = {
    "ignore_index": 3,
    "reduction": "sum",
    "label_smoothing": 0.1,
    "z_loss": 0.25,
    "softcap": 2.0,
}
EVERY_SCALER = pytest.mark.parametrize("kind", [ampfuse.GradScaler, torch.amp.GradScaler])


def weight_of(device):
    return torch.rand(50, generator=torch.Generator().manual_seed(1)).to(device)


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
}
EVERY_COPY = pytest.mark.parametrize("copied", COPIES.values(), ids=list(COPIES))


@pytest.mark.parametrize(
    "copied", [lambda module: module, *COPIES.values()], ids=["itself", *COPIES]
)
def test_module_and_its_copies_use_every_option(device, copied):
    logits, target = batch(device)
    target[0] = 3
    module = copied(ampfuse.CrossEntropyLoss(weight_of(device), **OPTIONS))
    assert isinstance(module, torch.nn.CrossEntropyLoss)
    expected, _ = exact(logits, target, weight=weight_of(device), **OPTIONS)
    assert relatively_off(module(logits, target), expected) <= 1e-6


@EVERY_COPY
def test_copies_of_the_module_include_its_scaler(device, copied):
    """A copied criterion must not follow the scale of the original training state."""
    state = {"scaler": ampfuse.GradScaler(device.type, 1024.0)}
    state["criterion"] = ampfuse.CrossEntropyLoss(scaler=state["scaler"])
    of_copy = copied(state)
    scaler, criterion = of_copy["scaler"], of_copy["criterion"]
    assert criterion.scaler is scaler
    assert scaler is not state["scaler"]
    assert scaler.get_scale() == copied(state["criterion"]).scaler.get_scale() == 1024.0

    logits, target = batch(device, dtype=torch.float16)
    scaler.scale(criterion(logits, target)).backward()

    _, expected = exact(logits, target, 1024.0)
    torch.testing.assert_close(logits.grad.double(), expected, rtol=1e-3, atol=0)


def test_scaler_in_the_place_of_weights_is_refused():
    with pytest.raises(TypeError, match=r"^weight: expected .* got GradScaler; other arguments"):
        ampfuse.CrossEntropyLoss(ampfuse.GradScaler("cpu"))


@EVERY_SCALER
def test_scaler_may_be_ampfuses_or_torchs(device, kind):
    logits, target = batch(device, dtype=torch.float16)
    scaler = kind(device.type, 1024.0)
    loss = ampfuse.CrossEntropyLoss(scaler=scaler)(logits, target)
    # Forward computes a float16 gradient only if it knows the scale.
    assert "GradientInForward" in loss.grad_fn.name()
    scaler.scale(loss).backward()
    assert ulps_off(logits.grad, exact(logits, target, 1024.0)[1]) <= ULPS


@EVERY_SCALER
@pytest.mark.parametrize("method", ["step", "unscale_"])
def test_step_raises_if_the_program_never_scales_the_loss(device, kind, method):
    """The module knows the scale, which must not hide from the scaler that no loss was scaled."""
    logits, target = batch(device)
    scaler = kind(device.type)
    ampfuse.CrossEntropyLoss(scaler=scaler)(logits, target).backward()
    with pytest.raises(AssertionError, match=rf"Attempted {method} but .*scaler\.scale\(loss"):
        getattr(scaler, method)(torch.optim.SGD([logits], lr=1.0))


class OwnScaler(ampfuse.GradScaler):
    def scale(self, outputs):
        return outputs * self._live_scale()


@pytest.mark.parametrize(
    ("kind", "scaled"),
    [
        (ampfuse.GradScaler, lambda scaler, loss: scaler.scale(loss)),
        (ampfuse.GradScaler, lambda scaler, loss: loss * scaler.get_scale()),
        (OwnScaler, lambda scaler, loss: scaler.scale(loss)),
    ],
)
def test_step_does_not_raise_however_a_program_scales_the_loss(device, kind, scaled):
    logits, target = batch(device)
    scaler, optimizer = kind(device.type), torch.optim.SGD([logits], lr=1.0)
    criterion = ampfuse.CrossEntropyLoss(scaler=scaler)
    scaled(scaler, criterion(logits, target)).backward()
    scaler.step(optimizer)
    scaler.update()

    scaler.unscale_(optimizer)  # as in torch: a loss was scaled at some time


def test_scaler_may_be_of_any_class_with_a_scale(device):
    logits, target = batch(device, dtype=torch.float16)
    scaler = types.SimpleNamespace(is_enabled=lambda: True, scale=lambda loss: loss * 1024.0)
    scaler.scale(ampfuse.CrossEntropyLoss(scaler=scaler)(logits, target)).backward()
    assert ulps_off(logits.grad, exact(logits, target, 1024.0)[1]) <= ULPS


def test_disabled_scaler_scales_nothing(device):
    logits, target = batch(device)
    scaler = ampfuse.GradScaler(device.type, 1024.0, enabled=False)
    ampfuse.CrossEntropyLoss(scaler=scaler)(logits, target).backward()
    (expected,) = torch.autograd.grad(ampfuse.cross_entropy(logits, target), logits)
    assert torch.equal(logits.grad, expected)


def test_module_uses_the_scale_at_the_time_of_the_call(device):
    """The rounding of float16 gradients shows which scale they were computed with."""
    logits, target = batch(device, dtype=torch.float16)
    logits.data += 15 * functional.one_hot(target, 50)  # p of other classes is about 1e-7
    scaler = ampfuse.GradScaler(device.type, 1.0)
    module = ampfuse.CrossEntropyLoss(scaler=scaler, reduction="sum")
    scaler.scale(module(logits, target))
    scaler.update(2.0**12)

    scaler.scale(module(logits, target)).backward()

    expected = exact(logits, target, 2.0**12, reduction="sum")[1]
    torch.testing.assert_close(logits.grad.double(), expected, rtol=1e-3, atol=0)


def test_weight_of_the_module_may_be_converted_to_another_dtype(device):
    logits, target = batch(device)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        module = ampfuse.CrossEntropyLoss(weight_of(device)).to(dtype)
        assert module.weight.dtype == dtype
        loss = module(logits, target)
        assert loss.dtype == torch.float32
        expected, _ = exact(logits, target, weight=weight_of(device).to(dtype))
        assert relatively_off(loss, expected) <= 1e-6


def test_weight_of_the_module_moves_to_another_device(device):
    logits, target = batch(device)
    module = ampfuse.CrossEntropyLoss(weight_of("cpu")).to(device)
    expected = ampfuse.cross_entropy(logits, target, weight_of(device))
    assert torch.equal(module(logits, target), expected)
    assert module.to("meta").weight.is_meta
    with pytest.raises(ValueError, match=r"weight: expected device .*, got meta"):
        module(logits, target)


@pytest.mark.parametrize("other", [torch.nn.CrossEntropyLoss, ampfuse.CrossEntropyLoss])
def test_state_dict_contains_only_the_weight_as_in_torch(device, other):
    """The weight is a buffer and not a parameter."""
    weight = weight_of(device)
    module = ampfuse.CrossEntropyLoss(torch.ones(50, device=device))
    assert list(module.state_dict()) == ["weight"]
    assert [name for name, _ in module.named_buffers()] == ["weight"]
    assert list(ampfuse.CrossEntropyLoss(scaler=ampfuse.GradScaler("cpu")).state_dict()) == []

    module.load_state_dict(other(weight).state_dict())
    assert torch.equal(module.weight, weight)
    back = other(torch.ones(50, device=device))
    back.load_state_dict(module.state_dict())
    assert torch.equal(back.weight, weight)


@EVERY_SCALER
def test_loss_with_a_scaler_is_compiled_into_one_graph(device, kind):
    torch._dynamo.reset()
    logits, target = batch(device, dtype=torch.float16)
    scaler = kind(device.type, 1024.0)
    criterion = ampfuse.CrossEntropyLoss(weight_of(device), scaler=scaler)

    loss = torch.compile(criterion, fullgraph=True, backend="aot_eager")(logits, target)
    scaler.scale(loss).backward()

    _, gradient = exact(logits, target, 1024.0, weight=weight_of(device))
    assert ulps_off(logits.grad, gradient) <= ULPS


def test_python_denominator_is_not_compiled_anew_for_each_value(device):
    torch._dynamo.reset()
    logits, target = batch(device)
    compiled = torch.compile(
        lambda divisor: ampfuse.cross_entropy(
            logits, target, denominator=divisor, grad_scale=divisor
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    for tokens in range(1, 20):
        divisor = tokens + 0.5
        expected = ampfuse.cross_entropy(logits, target, denominator=divisor)
        torch.testing.assert_close(compiled(divisor), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_micro_batches_with_a_scaler_and_one_denominator_add_up_to_the_batch(device, dtype):
    logits, target = batch(device, (12, 300), dtype)
    target[::5] = -100
    scaler = ampfuse.GradScaler(device.type, 1024.0)
    module = ampfuse.CrossEntropyLoss(scaler=scaler)

    def results(losses):
        total = sum(losses)
        return total, *torch.autograd.grad(scaler.scale(total), logits)

    parts = zip(logits.split(5), target.split(5), strict=True)
    count = (target != -100).sum()
    loss, grad = results([module(*part, count) for part in parts])
    expected, gradient = results([module(logits, target)])
    torch.testing.assert_close(loss, expected)
    assert torch.equal(grad, gradient)


def test_repr_shows_options_that_differ_from_the_defaults():
    assert repr(ampfuse.CrossEntropyLoss()) == "CrossEntropyLoss()"
    scaler = ampfuse.GradScaler("cpu")
    module = ampfuse.CrossEntropyLoss(reduction="sum", softcap=30.0, scaler=scaler)
    assert repr(module) == "CrossEntropyLoss(reduction=sum, softcap=30.0, scaler=GradScaler)"


def test_options_are_keyword_only():
    """torch's next positional argument after weight is `size_average`."""
    with pytest.raises(TypeError, match="positional"):
        ampfuse.CrossEntropyLoss(None, True)
