"""clip_grad_norm_ right after unscale_ takes the norm that unscaling told, if it still holds."""

import gc
import weakref

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits, clones
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
    "a gradient got other memory": lambda params: params[1].grad.set_(torch.ones(5)),
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
