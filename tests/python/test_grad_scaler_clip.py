"""clip_grad_norm_ right after unscale_ takes the norm that unscaling told, if it still holds."""

import gc
import threading
import weakref
from functools import partial

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits, clones
from scaler_languages import EVERY_LANGUAGE, ready
from torch.nn import Parameter


def unscaled(device, count=3, scale=8.0):
    """Parameters whose gradients a scaler has just unscaled."""
    params = [Parameter(torch.ones(5, device=device)) for _ in range(count)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = ampfuse.GradScaler(device.type, scale)
    scaler.scale(sum((i + 1) * param.sum() for i, param in enumerate(params))).backward()
    scaler.unscale_(optimizer)
    return params, optimizer, scaler


def reads(call):
    """What it returns, and how often gradients are read for a norm meanwhile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()
    names = [event.name for event in profile.events()]
    return result, names.count("ampfuse::multi_tensor_norm")


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_the_norm_is_not_measured_again(device, max_norm):
    params, _, _ = unscaled(device)
    grads = clones(param.grad for param in params)

    norm, count = reads(lambda: ampfuse.clip_grad_norm_(params, max_norm))

    assert count == 0
    measured = [Parameter(torch.ones(5, device=device)) for _ in params]
    for param, grad in zip(measured, grads, strict=True):
        param.grad = grad
    assert_same_bits([norm], [ampfuse.clip_grad_norm_(measured, max_norm)])
    assert_same_bits([p.grad for p in params], [p.grad for p in measured])


CHANGES = {
    "a gradient was written": lambda params: params[1].grad.mul_(2),
    "a gradient was written through a view": lambda params: params[1].grad[:2].zero_(),
    "a gradient was replaced": lambda params: setattr(params[1], "grad", params[1].grad.clone()),
    "a gradient is gone": lambda params: setattr(params[1], "grad", None),
    "a backward pass has added to them": lambda params: sum(p.sum() for p in params).backward(),
    "they were clipped": lambda params: ampfuse.clip_grad_norm_(params, 0.1),
    "a gradient got other memory": lambda params: params[1].grad.set_(
        torch.ones_like(params[1].grad)
    ),
    "a gradient's data was replaced": lambda params: setattr(
        params[1].grad, "data", torch.ones_like(params[1])
    ),
    "one fewer": lambda params: params.pop(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_it_is_when_something_has_changed(device, change):
    params, _, _ = unscaled(device)
    change(params)
    expected = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])

    norm, count = reads(lambda: ampfuse.clip_grad_norm_(params, 1e9))

    assert count == 1
    torch.testing.assert_close(norm, expected)


def test_another_order_is_the_same_norm(device):
    """Groups of an optimizer, those without weight decay first say, and the model's parameters."""
    params, _, _ = unscaled(device)
    params.reverse()

    norm, count = reads(lambda: ampfuse.clip_grad_norm_(params, 1e9))

    assert count == 0
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad for p in params]))


@pytest.mark.parametrize("unscale", [False, True])
def test_a_step_that_writes_gradients_unseen_leaves_no_norm(device, unscale):
    """torch's fused optimizers unscale without moving a version counter."""
    param = Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.AdamW([param], fused=True)
    scaler = ampfuse.GradScaler(device.type, 1024.0)
    scaler.scale((param * torch.tensor([3.0, 4.0], device=device)).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)

    scaler.step(optimizer)

    assert ampfuse.get_total_norm([param.grad]).item() == pytest.approx(5.0)


def test_other_norms_are_measured(device):
    params, _, _ = unscaled(device)

    _, count = reads(lambda: ampfuse.clip_grad_norm_(params, 1e9, norm_type=1.0))

    assert count == 1


def test_each_optimizers_norm_is_known(device):
    params, _, scaler = unscaled(device)
    others = [Parameter(torch.ones(5, device=device))]
    scaler.scale(others[0].sum()).backward()
    scaler.unscale_(torch.optim.SGD(others, lr=0.1))

    for these in (params, others):
        _, count = reads(lambda these=these: ampfuse.clip_grad_norm_(these, 1e9))
        assert count == 0


def test_what_is_returned_may_be_written(device):
    params, _, _ = unscaled(device)

    first = ampfuse.clip_grad_norm_(params, 1e9)
    kept = first.clone()
    first.zero_()

    assert torch.equal(ampfuse.clip_grad_norm_(params, 1e9), kept)


def test_gradients_are_not_kept_alive(device):
    params, optimizer, _ = unscaled(device)
    ghosts = [weakref.ref(param.grad) for param in params]
    storages = [weakref.ref(param.grad.untyped_storage()) for param in params]

    optimizer.zero_grad()
    gc.collect()

    assert [ghost() for ghost in ghosts] == [None] * 3
    assert [storage() for storage in storages] == [None] * 3


@EVERY_LANGUAGE
def test_clipping_after_unscaling_reads_no_gradient_for_its_norm(language, device):
    param, optimizer, scaler = ready(language, device)
    scaler.unscale_(optimizer)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        norm = ampfuse.clip_grad_norm_([param], 1.0)

    assert norm.item() == pytest.approx(2**0.5)
    assert "ampfuse::multi_tensor_norm" not in {event.name for event in profile.events()}


@EVERY_LANGUAGE
def test_an_optimizer_that_clips_reads_its_gradients_twice(language, device):
    """Once to look for overflow and for the norm, once for the update."""
    param, _, scaler = ready(language, device)
    optimizer = language.adamw([param], lr=0.5, max_grad_norm=1.0)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaler.step(optimizer)

    names = {event.name for event in profile.events() if event.name.startswith("ampfuse::")}
    assert names == {"ampfuse::multi_tensor_unscale_norm", "ampfuse::fused_adam"}
    assert optimizer.grad_norm.item() == pytest.approx(2**0.5)


def multiply(param, factor, *_):
    """As a hook of an optimizer."""
    param.grad.mul_(factor)


def multiply_unseen(param, factor, *_):
    """Without moving the version counter."""
    param.grad.data.mul_(factor)


@pytest.mark.parametrize("write", [multiply, multiply_unseen])
def test_a_hook_that_changes_gradients_is_clipped_for(device, write):
    norms = []
    for factor in (1.0, 100.0):
        param = Parameter(torch.zeros(4, device=device))
        optimizer = ampfuse.AdamW([param], max_grad_norm=1.0)
        optimizer.register_step_pre_hook(partial(write, param, factor))
        scaler = ampfuse.GradScaler(device.type, 4.0)
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        norms.append(optimizer.grad_norm.item())
    assert norms == [pytest.approx(2.0), pytest.approx(200.0)]


@EVERY_LANGUAGE
@pytest.mark.parametrize("write", [multiply, multiply_unseen])
def test_an_optimizer_that_clips_does_not_rely_on_what_unscale_told(language, device, write):
    param, _, scaler = ready(language, device)
    optimizer = language.adamw([param], lr=0.5, max_grad_norm=1.0)
    scaler.unscale_(optimizer)
    write(param, 10.0)

    scaler.step(optimizer)

    assert optimizer.grad_norm.item() == pytest.approx(10 * 2**0.5)


@EVERY_LANGUAGE
def test_a_gradient_in_other_memory_is_another(language, device):
    """Of a flat buffer, say, of which the same tensor takes one part and then the next."""
    param, optimizer, scaler = ready(language, device)
    flat = torch.tensor([[4.0, 4.0], [40.0, 40.0]], device=device)
    param.grad.data = flat[0]
    scaler.unscale_(optimizer)
    param.grad.data = flat[1]

    assert ampfuse.clip_grad_norm_([param], 1.0).item() == pytest.approx(40 * 2**0.5)


@EVERY_LANGUAGE
def test_memory_at_the_address_of_memory_that_is_gone_is_another(language, device):
    for _ in range(20):
        param, optimizer, scaler = ready(language, device)
        scaler.unscale_(optimizer)
        for factor in (10.0, 10.0):
            param.grad.data = param.grad.data * factor
        assert ampfuse.clip_grad_norm_([param], 1.0).item() == pytest.approx(100 * 2**0.5)


@EVERY_LANGUAGE
def test_a_step_in_another_thread_ends_what_is_known_in_this_one(language, device):
    param, optimizer, scaler = ready(language, device)
    scaler.unscale_(optimizer)

    def step():
        scaler.step(optimizer)
        multiply_unseen(param, 10.0)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()

    assert ampfuse.clip_grad_norm_([param], 1.0).item() == pytest.approx(10 * 2**0.5)


def test_the_norm_of_an_optimizer_that_unscales_itself_is_not_unscaled_again(device):
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            grad_scaler.unscale_(self)
            return super().step()

    param = Parameter(torch.zeros(4, device=device))
    optimizer, scaler = Old([param], lr=1.0), ampfuse.GradScaler(device.type, 1024.0, history=1)
    scaler.scale(param.sum()).backward()
    with pytest.warns(FutureWarning):
        scaler.step(optimizer)
    scaler.update()

    assert scaler.history()[0].norm == pytest.approx(2.0)


@pytest.mark.needs_cuda
def test_a_norm_from_before_is_not_taken_into_a_graph():
    params, _, _ = unscaled(torch.device("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = ampfuse.clip_grad_norm_(params, 1e9)
    for param in params:
        param.grad.mul_(3)

    graph.replay()

    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad for p in params]))
