"""Written tensors must not share memory. They may be parts of one storage."""

import ampfuse
import pytest
import torch
from ampfuse import ops
from torch.nn import Parameter


def unscale(tensors):
    one = torch.ones((), device=tensors[0].device)
    ops.multi_tensor_unscale(tensors, one * 0, one * 0.5)


def unscale_norm(tensors):
    one = torch.ones((), device=tensors[0].device)
    ops.multi_tensor_unscale_norm(tensors, one * 0, one * 0.5)


def clip(tensors):
    ops.multi_tensor_clip(tensors, torch.tensor(2.0, device=tensors[0].device), 1.0)


def adam(params, grads, **options):
    def state():
        return [torch.zeros_like(param) for param in params]

    steps = [torch.zeros((), device=params[0].device) for _ in params]
    ops.fused_adam(
        params,
        grads,
        state(),
        state(),
        [],
        steps,
        lr=torch.tensor(0.5),
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
        decoupled_weight_decay=True,
        **options,
    )


def adam_params(tensors):
    adam(tensors, [torch.ones_like(tensor) for tensor in tensors])


def adam_grads(tensors):
    params = [torch.ones_like(tensor) for tensor in tensors]
    adam(params, tensors, write_back_grads=True, grad_scale=torch.tensor(2.0).to(params[0].device))


CALLS = [unscale, unscale_norm, clip, adam_params, adam_grads]
EVERY_CALL = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)

OVERLAPS = {
    "one element": lambda x: [x[:51], x[50:]],
    "one inside the other": lambda x: [x, x[10:20]],
    "the same start": lambda x: [x, x[:20]],
    "the same end": lambda x: [x, x[80:]],
    "three, of which the first and the last overlap": lambda x: [x[:60], x.new_ones(3), x[59:]],
    "another dtype's view": lambda x: [x, x.view(torch.bfloat16)[3:5]],
    "the same strided tensor": lambda x: [x[::2], x[::2]],
    "a strided one inside a dense one": lambda x: [x, x[1::2]],
    "a strided one that begins in a dense one": lambda x: [x[31::3], x[:40]],
}


@EVERY_CALL
@pytest.mark.parametrize("make", OVERLAPS.values(), ids=list(OVERLAPS))
def test_tensors_that_overlap_are_refused_and_nothing_is_written(device, call, make):
    x = torch.full((100,), 8.0, device=device)
    tensors = make(x)

    with pytest.raises(
        ValueError, match=r"\[\d\]: expected (distinct tensors|a tensor that shares)"
    ):
        call(tensors)

    assert (x == 8).all()


@EVERY_CALL
def test_error_names_both_overlapping_tensors(device, call):
    x = torch.ones(100, device=device)

    with pytest.raises(ValueError, match=r"\[2\].* shares no memory .* overlaps \w+\[0\]"):
        call([x[:50], torch.ones(3, device=device), x[49:]])


NEIGHBOURS = {
    "halves": lambda x: [x[:50], x[50:]],
    "the other way round": lambda x: [x[50:], x[:50]],
    "interleaved": lambda x: [x[::2], x[1::2]],
    "columns": lambda x: [x.view(10, 10)[:, :5], x.view(10, 10)[:, 5:]],
    "with one that is empty": lambda x: [x, x[50:50]],
}


@EVERY_CALL
@pytest.mark.parametrize("make", NEIGHBOURS.values(), ids=list(NEIGHBOURS))
def test_parts_of_one_buffer_that_do_not_overlap_are_written(device, call, make):
    x = torch.full((100,), 8.0, device=device)

    call(make(x))

    assert (x == x[0]).all()
    assert x[0] != 8


@EVERY_CALL
def test_lazy_clones_of_one_tensor_are_written_separately(device, call):
    x = torch.full((100,), 8.0, device=device)
    clones = [torch._lazy_clone(x), torch._lazy_clone(x)]

    call(clones)

    assert (x == 8).all()
    assert all((clone == clone[0]).all() and clone[0] != 8 for clone in clones)


@EVERY_CALL
def test_lazy_clone_listed_twice_is_refused(device, call):
    clone = torch._lazy_clone(torch.full((100,), 8.0, device=device))

    with pytest.raises(ValueError, match="expected distinct tensors"):
        call([clone, clone])


def test_tensors_that_are_only_read_may_overlap(device):
    x = torch.ones(100, device=device)
    assert ops.multi_tensor_norm([x, x[50:]]).total_norm.item() == pytest.approx(150**0.5)
    adam([torch.ones(50, device=device), torch.ones(50, device=device)], [x[:50], x[25:75]])


def test_parameter_listed_twice_is_clipped_twice_as_in_torch(device):
    results = []
    for clip_grad_norm_ in (ampfuse.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        params = [Parameter(torch.zeros(3, device=device)) for _ in range(2)]
        for param in params:
            param.grad = torch.full_like(param, 8.0)
        norm = clip_grad_norm_([params[0], params[1], params[0]], 1.0)
        results.append([norm, *(param.grad for param in params)])
    torch.testing.assert_close(*results)


@EVERY_CALL
def test_long_overlapping_tensors_are_refused_and_nothing_is_written(device, call):
    x = torch.full((300_001,), 8.0, device=device)

    with pytest.raises(ValueError, match="shares no memory"):
        call([x, x[1:]])

    assert (x == 8).all()
