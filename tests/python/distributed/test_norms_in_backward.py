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


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("bytes_at_once", [2**24, 1000])
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


def test_backward_pass_after_one_that_raised_is_inspected():
    model = Model()
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    norms_in_backward(model, optimizer)
    inputs = torch.ones(1, 7, requires_grad=True)
    hidden = model.first(inputs)
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.last(hidden).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(1, 7)).sum().backward()
    with GradientReads(model.parameters()) as counted:
        optimizer.step()
    assert counted.read == counted.size


def test_gradients_are_freed_as_without_norms():
    model = Model()
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    norms_in_backward(model, optimizer)
    model(torch.ones(1, 7)).sum().backward()
    records = optimizer._backward_norms._records
    optimizer.zero_grad()
    assert records
    assert all(record.unwritten() is None for record in records)


def test_groups_with_limits_of_their_own_are_read_once():
    model = Model()
    groups = [{"params": layer.parameters(), "max_grad_norm": 0.5} for layer in model.children()]
    optimizer = ampfuse.AdamW(groups)
    norms_in_backward(model, optimizer)
    for _ in range(2):  # the first step checks the arguments of all groups before it writes any
        model(torch.ones(1, 7)).sum().backward()
        with GradientReads(model.parameters()) as counted:
            optimizer.step()
        optimizer.zero_grad()
    assert counted.read == counted.size


def test_graph_of_a_backward_pass_is_freed():
    model = Model()
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    norms_in_backward(model, optimizer)
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


def test_wrapped_optimizer_gets_the_norms_of_the_one_inside():
    model = Model()
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    norms = norms_in_backward(model, SimpleNamespace(optimizer=optimizer))
    assert optimizer._backward_norms is not None
    again = norms_in_backward(model, optimizer)
    norms.remove()
    assert optimizer._backward_norms is not None
    again.remove()
    assert optimizer._backward_norms is None


def test_overflow_report_names_parameters_in_their_order():
    model = Model()
    optimizer, scaler = ampfuse.AdamW(model.parameters()), ampfuse.GradScaler("cpu")
    norms_in_backward(model, optimizer)
    scaler.scale(model(torch.ones(1, 7)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert scaler.overflow_report(model) == [name for name, _ in model.named_parameters()]


def test_removed_norms_are_computed_in_the_step_again():
    model = Model()
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    norms_in_backward(model, optimizer).remove()
    model(torch.ones(1, 7)).sum().backward()
    with GradientReads(model.parameters()) as counted:
        optimizer.step()
    assert counted.read == 2 * counted.size


def test_other_optimizers_are_refused():
    model = Model()
    with pytest.raises(TypeError, match=r"optimizer: expected ampfuse\.Adam or AdamW, got SGD"):
        norms_in_backward(model, torch.optim.SGD(model.parameters()))


def test_comm_hook_of_a_model_that_is_not_ddps_is_refused():
    model = Model()
    with pytest.raises(ValueError, match="comm_hook: expected None"):
        norms_in_backward(model, ampfuse.AdamW(model.parameters()), (None, bf16_compress_hook))
