"""A step allocates no memory that grows with the model, and does not make the host wait."""

import ampfuse
import pytest
import torch
from optim_models import feed, parameters
from torch.autograd.profiler_util import FunctionEvent
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "float32": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True}),
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder"}),
    "bf16 moments": (torch.bfloat16, {"state_dtype": torch.bfloat16}),
    "written back": (torch.float32, {"write_back_grads": True}),
}
EVERY_KIND = pytest.mark.parametrize(("dtype", "options"), KINDS.values(), ids=KINDS)


def allocated(events: list[FunctionEvent]) -> int:
    """Return the bytes of all allocations, including those that were freed at once."""
    return sum(max(0, event.self_cpu_memory_usage) for event in events)


@EVERY_KIND
@pytest.mark.parametrize("clip", [None, 1.0])
def test_step_allocates_only_a_few_scalars(dtype, options, clip):
    params = [Parameter(torch.ones(2**16, dtype=dtype)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = ampfuse.AdamW(params, max_grad_norm=clip, **options)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        optimizer.step()

    assert 0 < allocated(watched.events()) < 1024


def test_temporary_tensors_are_counted_as_allocated():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        torch.ones(2**16).clone()

    assert allocated(watched.events()) >= 2 * 4 * 2**16


@pytest.mark.needs_cuda
@EVERY_KIND
def test_step_does_not_sync_the_host(dtype, options):
    params = parameters(torch.device("cuda"), dtype)
    optimizer = ampfuse.AdamW(params, max_grad_norm=1.0, **options)
    feed(params, 0)
    optimizer.step()
    feed(params, 1)
    optimizer.grad_scale = torch.tensor(4.0, device="cuda")

    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        optimizer.found_inf = torch.ones((), device="cuda")
        optimizer.step()
        norm = optimizer.grad_norm
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert norm.device.type == "cuda"
