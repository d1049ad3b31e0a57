"""Tests of cross_entropy on a GPU: synchronisation, graphs, launches, streams, shared memory."""

import subprocess
import sys

import ampfuse
import pytest
import torch
from cuda_graphs import capture
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.needs_cuda

CUDA = torch.device("cuda")
SHAPE = (64, 3000)


def on_gpu(number):
    return torch.tensor(number, device=CUDA)


def probabilities():
    return torch.full(SHAPE, 1 / SHAPE[1], device=CUDA)


# Calls that compute the gradient in forward or backward, and read or copy other tensors.
CALLS = {
    "mean": {},
    "sum": {"reduction": "sum", "grad_scale": lambda: on_gpu(8.0), "dtype": torch.float16},
    "none": {"reduction": "none"},
    "half": {"dtype": torch.float16},
    "in place": {"function": ampfuse.cross_entropy_},
    "weights": {"weight": lambda: torch.ones(SHAPE[1], device=CUDA), "label_smoothing": 0.1},
    "probabilities": {"target": probabilities},
    "half probabilities": {"target": lambda: probabilities().half()},
    "bytes": {"target": lambda: torch.ones(SHAPE[0], dtype=torch.uint8, device=CUDA)},
    "z-loss": {"z_loss": 1e-4, "softcap": 30.0},
    "denominator": {"denominator": 7.0},
    "denominator on the GPU": {"denominator": lambda: on_gpu(7)},
    "numbers on the host": {
        "denominator": lambda: torch.tensor(7.0),
        "grad_scale": lambda: torch.tensor(8.0),
    },
    "metrics": {"return_metrics": True},
}
EVERY_CALL = pytest.mark.parametrize("options", CALLS.values(), ids=list(CALLS))


class Step:
    """A call with its backward, which may be repeated on the same memory."""

    def __init__(self, dtype=torch.bfloat16, function=ampfuse.cross_entropy, **options):
        self.function = function
        options = {name: value() if callable(value) else value for name, value in options.items()}
        self.target = options.pop("target", torch.zeros(SHAPE[0], dtype=torch.long, device=CUDA))
        self.options = options
        self.logits = torch.zeros(SHAPE, dtype=dtype, device=CUDA, requires_grad=True)
        each = options.get("reduction") == "none"
        self.upstream = torch.ones(SHAPE[:1] if each else (), device=CUDA)

    def fill(self, seed):
        """Write new logits, indices and numbers into the memory that the call reads."""
        generator = torch.Generator().manual_seed(seed)
        self.logits.data.copy_(torch.randn(SHAPE, generator=generator) * 3)
        if not self.target.is_floating_point():
            self.target.copy_(torch.randint(200, SHAPE[:1], generator=generator))
        for name, tensor in self.tensors().items():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 8 + (name != "weight"))

    def tensors(self):
        """Return the other tensors on the GPU."""
        found = {"upstream": self.upstream} | self.options
        return {name: x for name, x in found.items() if isinstance(x, torch.Tensor) and x.is_cuda}

    def __call__(self):
        """Return the loss, its gradient, and the metrics if requested."""
        metrics = ()
        logits = self.logits
        if self.function is ampfuse.cross_entropy_:
            logits = logits * 1
        loss = self.function(logits, self.target, **self.options)
        if self.options.get("return_metrics"):
            loss, metrics = loss
        return loss, *torch.autograd.grad(loss, self.logits, self.upstream), *metrics


@EVERY_CALL
def test_call_and_backward_do_not_sync_the_host(waits_are_errors, options):
    step = Step(**options)
    step.fill(0)
    torch.cuda.synchronize()
    waits_are_errors()

    for _ in range(2):
        step()


def test_call_and_backward_with_a_scaler_do_not_sync_the_host(waits_are_errors):
    logits = torch.randn(SHAPE, device=CUDA).half().requires_grad_()
    target = torch.zeros(SHAPE[0], dtype=torch.long, device=CUDA)
    scaler = ampfuse.GradScaler("cuda")
    criterion = ampfuse.CrossEntropyLoss(scaler=scaler)
    scaler.scale(criterion(logits, target)).backward()  # creates the scale
    torch.cuda.synchronize()
    waits_are_errors()

    scaler.scale(criterion(logits, target)).backward()


# A graph cannot capture copies of numbers on the host, which may be freed before a replay.
CAPTURED = [call for name, call in CALLS.items() if name != "numbers on the host"]


@pytest.mark.parametrize("options", CAPTURED, ids=[n for n in CALLS if "on the host" not in n])
def test_graph_replay_equals_a_call_with_the_current_contents_of_memory(options):
    """A replay computes the gradient with a new scale; it does not rescale an old gradient."""
    step = Step(**options)
    step.fill(0)
    graph, results = capture(step)

    for seed in (1, 2, 3):
        step.fill(seed)
        graph.replay()
        replayed = [x.clone() for x in results]
        assert all(map(torch.equal, replayed, step()))


# Launches of a step: one each for the divisor, the rows and the sum of their losses, and one in
# backward, which finds nothing to rescale. If the gradient is computed in backward: one each for
# the upstream gradient as float64 and for the gradient. Metrics need three more, for `correct`.
MOST = {"mean": 4, "sum": 4, "none": 5, "weights": 4, "probabilities": 4, "metrics": 7}


@pytest.mark.parametrize("name", MOST)
def test_call_and_backward_launch_few_kernels(name):
    step = Step(**CALLS[name])
    step.fill(0)
    step()
    torch.cuda.synchronize()

    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        step()
        torch.cuda.synchronize()

    launched = [event.name for event in watched.events() if event.device_type.name == "CUDA"]
    assert 0 < len(launched) <= MOST[name], "\n".join(launched)


def test_kernels_run_on_the_current_stream():
    step = Step(torch.float32)
    step.fill(0)
    expected = step()
    logits = step.logits.detach().clone()
    stream = torch.cuda.Stream()
    step.logits.data.zero_()
    stream.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # work on another stream would run before the copy
        step.logits.data.copy_(logits)
        results = step()
    torch.cuda.synchronize()

    assert all(map(torch.equal, results, expected))


def test_target_out_of_range_is_named_by_a_later_call():
    logits = torch.zeros(3, 5, device=CUDA)
    loss = ampfuse.cross_entropy(logits, on_gpu([0, 7, 1]))
    assert loss.isnan()
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        ampfuse.cross_entropy(logits, on_gpu([0, 1, 1]))
    assert not ampfuse.cross_entropy(logits, on_gpu([0, 1, 1])).isnan()


# 48 KiB, all that CUDA gives a block by default, in packs of 16 bytes: the rows of eight warps, the
# row of a block, a position per thread. Once a kernel has requested more, it keeps that limit, so
# each case is the first launch of a new process.
SHAPES = {
    "float16": [(9, 3072), (2, 24576), (2, 96, 300)],
    "bfloat16": [(9, 3072), (2, 24576), (2, 96, 300)],
    "float32": [(9, 1536), (2, 12288), (2, 48, 300)],
    "float64": [(9, 768), (2, 6144), (2, 24, 300)],
}
FIRST_LAUNCH = """
import ampfuse, os, torch
from torch.nn import functional

torch.manual_seed(0)
logits = torch.randn({shape}, device="cuda").to(torch.{dtype}).requires_grad_()
target = torch.randint({shape}[1], logits[:, 0].shape, device="cuda")
wide = logits.detach().double().requires_grad_()
for options in ({{}}, {{"label_smoothing": 0.125}}):  # kernels of their own
    loss = ampfuse.cross_entropy(logits, target, **options)
    expected = functional.cross_entropy(wide, target, **options)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    ours, = torch.autograd.grad(loss, logits)
    torchs, = torch.autograd.grad(expected, wide)
    torch.testing.assert_close(ours.double(), torchs, rtol=1e-2, atol=1e-6)
# Without this, torch may abort when its thread asks for Python's lock (pytorch#38228).
os._exit(0)
"""


@pytest.mark.parametrize(
    ("dtype", "shape"), [(dtype, shape) for dtype, shapes in SHAPES.items() for shape in shapes]
)
def test_first_launch_with_48_kib_of_shared_memory_gives_torchs_results(dtype, shape):
    program = FIRST_LAUNCH.format(dtype=dtype, shape=shape)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
