"""Cost of a scaler apart from its arithmetic: host waits, launches, allocations."""

from collections import Counter
from functools import partial

import ampfuse
import pytest
import torch
from scaler_languages import EVERY_LANGUAGE, LANGUAGES
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

PYTHON = LANGUAGES["Python"]


class Dispatched(TorchDispatchMode):
    """Mode that counts the calls of each operator, from Python or from C++."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


# Operators by which the host reads the values of a tensor.
WAITS = {"_local_scalar_dense", "is_nonzero", "item", "equal"}
# Python methods that read a tensor; on the CPU they dispatch no operator.
READERS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


@pytest.fixture
def reading_is_an_error(monkeypatch):
    """A function that makes every read of a tensor raise until the test ends."""

    def refuse(*_):
        raise AssertionError("the host waits here")

    return lambda: [monkeypatch.setattr(torch.Tensor, name, refuse) for name in READERS]


class Loop:
    """The scaler's part of a training loop; the gradients exist already."""

    def __init__(self, device, make_scaler, make_optimizer, clip=None):
        self.params = [Parameter(torch.ones(5, device=device)) for _ in range(20)]
        for param in self.params:
            param.grad = torch.ones(5, device=device)
        self.scaler, self.optimizer = make_scaler(device), make_optimizer(self.params)
        self.loss, self.clip = torch.ones((), device=device), clip
        for _ in range(3):  # later iterations create no state or cache
            self.iterate()

    def iterate(self):
        self.scaler.scale(self.loss)
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            self.clip(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def ours(language, limit):
    return partial(language.adamw, max_grad_norm=limit)


def theirs(device):
    """Return a scaler of torch."""
    return torch.amp.GradScaler(device.type)


CLIPS = pytest.mark.parametrize("clip", [None, ampfuse.clip_grad_norm_], ids=["", "clip"])
# Gradients are not clipped, clipped by the optimizer, or by the program.
WAYS = pytest.mark.parametrize(
    ("limit", "clip"), [(None, None), (1.0, None), (None, ampfuse.clip_grad_norm_)]
)


@EVERY_LANGUAGE
@WAYS
def test_host_reads_no_tensor_with_our_optimizers(
    device, language, limit, clip, reading_is_an_error
):
    options = {"history": 4, "hysteresis": 2, "min_scale": 1.0}
    loop = Loop(device, lambda d: language.scaler(d, **options), ours(language, limit), clip)
    reading_is_an_error()
    with Dispatched() as dispatched:
        loop.iterate()
    assert "ampfuse::update_scale" in dispatched.names
    assert not WAITS & dispatched.names.keys()


@CLIPS
@pytest.mark.parametrize(
    ("scaler", "optimizer", "reads"),
    [
        (PYTHON.scaler, partial(torch.optim.AdamW, fused=True), 0),
        *((each.scaler, partial(each.sgd, lr=0.1), 1) for each in LANGUAGES.values()),
    ],
    ids=["torch's fused AdamW", "SGD", "C++ SGD"],
)
def test_host_reads_one_tensor_unless_the_optimizer_takes_the_flag(
    device, scaler, optimizer, reads, clip
):
    loop = Loop(device, scaler, optimizer, clip)
    with Dispatched() as dispatched:
        loop.iterate()
    assert sum(dispatched.names[name] for name in WAITS) == reads


@pytest.mark.needs_cuda
@EVERY_LANGUAGE
@WAYS
def test_iterations_pass_torchs_sync_debug_mode(language, limit, clip, waits_are_errors):
    options = {"history": 4, "max_consecutive_skips": 3}
    cuda = torch.device("cuda")
    loop = Loop(cuda, lambda d: language.scaler(d, **options), ours(language, limit), clip)
    loop.scaler.was_skipped()  # from here on, each step copies its flag to the host
    torch.cuda.synchronize()
    waits_are_errors()
    for _ in range(3):
        loop.iterate()
    torch.cuda.set_sync_debug_mode("default")
    assert not loop.scaler.was_skipped()


# --- launches and allocations -------------------------------------------------------------------


def launches(loop):
    """Count kernels and copies on a GPU. On the CPU count operators: each launches at least one."""
    if loop.loss.is_cuda:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            loop.iterate()
            torch.cuda.synchronize()
        return sum(1 for event in profiled.events() if event.device_type.name == "CUDA")
    with Dispatched() as dispatched:
        loop.iterate()
    return sum(n for name, n in dispatched.names.items() if not name.startswith("profiler"))


def allocations(loop):
    if loop.loss.is_cuda:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        loop.iterate()
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loop.iterate()
    return sum(
        1
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.nbytes() > 0
    )


# Operators of an iteration on 20 tensors, including the optimizer's: mul by the scale, two fills, a
# copy, check and norm, Adam with its learning rate, update. With clipping: mul, three for the
# reciprocal, a fill, a copy, unscale and norm, copy of the norm, clip, Adam, update.
MOST = {None: 8, ampfuse.clip_grad_norm_: 12}


@EVERY_LANGUAGE
@CLIPS
def test_launches_are_fewer_than_torchs_and_allocations_at_most_4_more(device, language, clip):
    if device.type == "cuda":
        torch.cuda.synchronize()
    loop = Loop(device, language.scaler, ours(language, None), clip)
    torchs_clip = clip and torch.nn.utils.clip_grad_norm_
    other = Loop(device, theirs, partial(torch.optim.AdamW, fused=True), torchs_clip)
    assert launches(loop) < launches(other)
    if device.type == "cpu":
        assert allocations(loop) < allocations(other)
        assert launches(loop) <= MOST[clip]
    else:  # kernels allocate scratch memory for partial results of blocks
        assert allocations(loop) <= allocations(other) + 4


def test_torchs_optimizers_take_no_more_launches_under_our_scaler(device):
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    for make in (partial(sgd, lr=0.1, foreach=True), partial(adamw, fused=True)):
        for clip in (None, ampfuse.clip_grad_norm_):
            loop = Loop(device, PYTHON.scaler, make, clip)
            other = Loop(device, theirs, make, clip and torch.nn.utils.clip_grad_norm_)
            # On a GPU our check of gradients also computes their norm, in one more launch.
            most = launches(other) - (device.type == "cpu")
            assert launches(loop) <= most


@EVERY_LANGUAGE
def test_every_iteration_allocates_equally_often(device, language):
    loop = Loop(device, language.scaler, ours(language, 1.0))
    counts = {allocations(loop) for _ in range(20)}
    assert len(counts) == 1
