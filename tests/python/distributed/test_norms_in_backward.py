"""`norms_in_backward`: steps read gradients once, with the norms that they would have computed."""

import gc
import warnings
import weakref
from types import SimpleNamespace

import ampfuse
import pytest
import torch
from ampfuse.distributed import _collector, norms_in_backward
from gradient_reads import GradientReads, Model, assert_same, train
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook


# Gradients are read together until they have so many bytes: all of them, or some.
@pytest.mark.parametrize(
    ("scaled", "passes", "bytes_at_once"),
    [(True, 1, 2**24), (False, 1, 2**24), (True, 2, 2**24), (True, 2, 1000), (False, 1, 1000)],
)
def test_one_process_reads_gradients_once(device, scaled, passes, bytes_at_once, monkeypatch):
    monkeypatch.setattr(_collector, "BYTES_AT_ONCE", bytes_at_once)
    options = {"scaled": scaled, "passes": passes, "device": device}
    found = train(True, **options)
    assert_same(found, train(False, **options))
    assert found["reads"] == [1, 1, 1]


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_were_written_after_backward_are_read_again(device, scaled):
    def clamp(model):
        model.last.bias.grad.clamp_(-1e-2, 1e-2)

    options = {"scaled": scaled, "between": clamp, "device": device}
    found = train(True, **options)
    assert_same(found, train(False, **options))
    assert found["reads"] == [2, 2, 2]


def test_replaced_gradients_are_read(monkeypatch):
    monkeypatch.setattr(_collector, "BYTES_AT_ONCE", 1)  # a record for each gradient

    def replace(model):
        model.last.bias.grad = model.last.bias.grad * 2

    found = train(True, between=replace)
    assert_same(found, train(False, between=replace))
    assert 1 < found["reads"][0] < 1.1


def stepped(optimizer, model):
    """Return how often a step reads gradients."""
    with GradientReads(model.parameters()) as counted:
        optimizer.step()
    return counted.read / counted.size


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def optimizer(model):
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    norms_in_backward(model, optimizer)
    return optimizer


INPUTS = torch.ones(1, 7)


def test_backward_pass_after_one_that_raised_is_inspected(model, optimizer):
    hidden = model.first(INPUTS)
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.last(hidden).sum().backward()
    optimizer.zero_grad()
    model(INPUTS).sum().backward()
    assert stepped(optimizer, model) == 1


def test_gradients_are_freed_as_without_norms(model, optimizer):
    model(INPUTS).sum().backward()
    gradients = [weakref.ref(param.grad) for param in model.parameters()]
    optimizer.zero_grad()
    assert all(gradient() is None for gradient in gradients)


def test_groups_with_limits_of_their_own_are_read_once(model):
    groups = [{"params": layer.parameters(), "max_grad_norm": 0.5} for layer in model.children()]
    optimizer = ampfuse.AdamW(groups)
    norms_in_backward(model, optimizer)
    for _ in range(2):  # the first step checks the arguments of all groups before it writes any
        model(INPUTS).sum().backward()
        reads = stepped(optimizer, model)
        optimizer.zero_grad()
    assert reads == 1


def test_backward_pass_that_is_captured_is_not_inspected(model, optimizer, monkeypatch):
    monkeypatch.setattr(_collector, "is_capturing", lambda: True)
    model(INPUTS).sum().backward()
    assert stepped(optimizer, model) == 2


def test_graph_of_a_backward_pass_is_freed(model, optimizer):
    inputs = torch.ones(1, 7)
    freed = weakref.ref(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of create_graph
        model(inputs).square().sum().backward(create_graph=True)
    optimizer.step()
    del inputs
    optimizer.zero_grad()
    gc.collect()
    assert freed() is None


def test_wrapped_optimizer_gets_norms_until_the_last_of_them_are_removed(model):
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    reads = []

    def step():
        model(INPUTS).sum().backward()
        reads.append(stepped(optimizer, model))
        optimizer.zero_grad()

    step()
    norms = norms_in_backward(model, SimpleNamespace(optimizer=optimizer))
    step()
    again = norms_in_backward(model, optimizer)
    norms.remove()
    step()
    again.remove()
    step()
    assert reads == [2, 1, 1, 2]


def test_overflow_report_names_parameters_in_their_order(model, optimizer):
    scaler = ampfuse.GradScaler("cpu")
    scaler.scale(model(INPUTS).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert scaler.overflow_report(model) == [name for name, _ in model.named_parameters()]


def test_other_optimizers_and_hooks_of_models_that_are_not_ddps_are_refused(model):
    words = "optimizer: expected ampfuse.Adam, AdamW or SGD, got torch.optim.sgd.SGD"
    with pytest.raises(TypeError, match=words):
        norms_in_backward(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="comm_hook: expected None"):
        norms_in_backward(model, ampfuse.AdamW(model.parameters()), (None, bf16_compress_hook))


def test_patched_optimizer_gets_norms_of_backward():
    with ampfuse.patched():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        hooks = norms_in_backward(model, optimizer)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        hooks.remove()
    assert optimizer.state[model.weight]["step"] == 1
