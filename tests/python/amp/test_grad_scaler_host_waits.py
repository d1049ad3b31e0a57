"""What a scaler costs besides the arithmetic: host waits, launches, allocations."""

from collections import Counter

import ampfuse
import pytest
import torch
from scaler_languages import EVERY_LANGUAGE, LANGUAGES
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

PYTHON = LANGUAGES["Python"]


class Dispatched(TorchDispatchMode):
    """Notes the operators that are called, in Python or from C++."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


# Through which the host gets to know what a tensor holds.
WAITS = {"_local_scalar_dense", "is_nonzero", "item", "equal"}


# And in Python, where on the CPU nothing is dispatched for it.
READERS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


@pytest.fixture
def reading_is_an_error(monkeypatch):
    """A function after which no tensor can be read, until the test is over."""

    def refuse(*_):
        raise AssertionError("the host waits here")

    return lambda: [monkeypatch.setattr(torch.Tensor, name, refuse) for name in READERS]


class Loop:
    """The part of a training loop that the scaler has: gradients are there already."""

    def __init__(self, device, make_scaler, make_optimizer, clip=None):
        self.params = [Parameter(torch.ones(5, device=device)) for _ in range(20)]
        for param in self.params:
            param.grad = torch.ones(5, device=device)
        self.scaler, self.optimizer = make_scaler(device), make_optimizer(self.params)
        self.loss, self.clip = torch.ones((), device=device), clip
        for _ in range(3):  # until nothing is made for the first time any more
            self.iterate()

    def iterate(self):
        self.scaler.scale(self.loss)
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            self.clip(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def ours(language):
    return {
        "AdamW": lambda params: language.adamw(params),
        "AdamW, clipping": lambda params: language.adamw(params, max_grad_norm=1.0),
    }


def theirs(device):
    """torch's scaler."""
    return torch.amp.GradScaler(device.type)


CLIPS = pytest.mark.parametrize("clip", [None, ampfuse.clip_grad_norm_], ids=["", "clip"])
EVERY_OPTIMIZER_OF_OURS = pytest.mark.parametrize("kind", ours(PYTHON))


@EVERY_LANGUAGE
@EVERY_OPTIMIZER_OF_OURS
@CLIPS
def test_nothing_is_waited_for_with_our_optimizers(
    device, language, kind, clip, reading_is_an_error
):
    options = {"history": 4, "hysteresis": 2, "min_scale": 1.0}
    loop = Loop(device, lambda d: language.scaler(d, **options), ours(language)[kind], clip)

    reading_is_an_error()
    with Dispatched() as dispatched:
        loop.iterate()

    assert "ampfuse::update_scale" in dispatched.names
    assert not WAITS & dispatched.names.keys()


@CLIPS
def test_nothing_is_waited_for_with_torchs_fused_optimizers(device, clip):
    loop = Loop(device, PYTHON.scaler, lambda params: torch.optim.AdamW(params, fused=True), clip)

    with Dispatched() as dispatched:
        loop.iterate()

    assert not WAITS & dispatched.names.keys()


@EVERY_LANGUAGE
@CLIPS
def test_other_optimizers_are_waited_for_once(device, language, clip):
    loop = Loop(device, language.scaler, lambda params: language.sgd(params, lr=0.1), clip)

    with Dispatched() as dispatched:
        loop.iterate()

    assert sum(dispatched.names[name] for name in WAITS) == 1


@pytest.mark.needs_cuda
@EVERY_LANGUAGE
@EVERY_OPTIMIZER_OF_OURS
@CLIPS
def test_torch_sees_no_waiting(language, kind, clip):
    options = {"history": 4, "max_consecutive_skips": 3}
    cuda = torch.device("cuda")
    loop = Loop(cuda, lambda d: language.scaler(d, **options), ours(language)[kind], clip)
    loop.scaler.was_skipped()  # from now on each step sends its flag
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            loop.iterate()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not loop.scaler.was_skipped()


# --- launches and allocations -------------------------------------------------------------------


def launches(loop):
    """On a GPU kernels and copies; on the CPU operators, of which each would be one at least."""
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


# Of an iteration on 20 tensors, the optimizer's own included: mul by the scale, two fills, a copy,
# check and norm, Adam with its learning rate, update. And with clipping: mul, three for the
# reciprocal, a fill, a copy, unscale and norm, the norm's copy, clip, Adam, update.
MOST = {None: 8, ampfuse.clip_grad_norm_: 12}


@EVERY_LANGUAGE
@CLIPS
def test_launches_and_allocations_are_fewer_than_torchs(device, language, clip):
    if device.type == "cuda":
        torch.cuda.synchronize()
    loop = Loop(device, language.scaler, lambda params: language.adamw(params), clip)
    torchs_clip = clip and torch.nn.utils.clip_grad_norm_
    other = Loop(device, theirs, lambda params: torch.optim.AdamW(params, fused=True), torchs_clip)

    assert launches(loop) < launches(other)
    if device.type == "cpu":
        assert allocations(loop) < allocations(other)
        assert launches(loop) <= MOST[clip]
    else:  # kernels take room for what blocks tell one another from torch's cache
        assert allocations(loop) <= allocations(other) + 4


def test_torchs_own_optimizers_cost_less_under_our_scaler(device):
    for clip, torchs_clip in (
        (None, None),
        (ampfuse.clip_grad_norm_, torch.nn.utils.clip_grad_norm_),
    ):
        for make in (
            lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
            lambda params: torch.optim.AdamW(params, fused=True),
        ):
            loop = Loop(device, PYTHON.scaler, make, clip)
            other = Loop(device, theirs, make, torchs_clip)
            # On a GPU what looks at gradients also measures them, which is a launch more.
            most = launches(other) - (device.type == "cpu")
            assert launches(loop) <= most


@EVERY_LANGUAGE
def test_nothing_grows_from_step_to_step(device, language):
    """Allocations of one iteration are those of the next."""
    loop = Loop(device, language.scaler, ours(language)["AdamW, clipping"])

    counts = {allocations(loop) for _ in range(20)}

    assert len(counts) == 1
