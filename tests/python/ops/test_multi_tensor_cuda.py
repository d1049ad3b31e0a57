"""The ops on a GPU: host, streams, CUDA graphs, and several GPUs."""

import ampfuse
import pytest
import torch
from ampfuse import ops
from reference import heavy_tailed, same_bits

pytestmark = pytest.mark.needs_cuda

# The arguments of a launch have room for 2320 tensors with one pointer each.
MANY = 2400


def tensors_on(device, count=3, seed=0):
    device = torch.device(device)
    return [heavy_tailed(257, torch.float32, device, seed + i) for i in range(count)]


def step(tensors, found_inf, inv_scale):
    """Call every op once."""
    ops.multi_tensor_unscale(tensors, found_inf, inv_scale)
    total_norm = ops.multi_tensor_unscale_norm(tensors, found_inf, inv_scale).total_norm
    ops.multi_tensor_clip(tensors, total_norm, 1.0)
    return ops.multi_tensor_norm(tensors).total_norm


def result_of(run, tensors):
    device = tensors[0].device
    norm = run(tensors, torch.zeros((), device=device), torch.tensor(0.5, device=device))
    torch.cuda.synchronize(device)
    return [norm, *tensors]


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
ORDERS = pytest.mark.parametrize("ord", [1.0, 2.0, float("inf")])


def gradients():
    """Return many tensors of all dtypes, some of them strided."""
    cuda = torch.device("cuda")
    tensors = [heavy_tailed(3, DTYPES[i % 5], cuda, seed=i) for i in range(700)]
    return [*tensors, *(heavy_tailed((33, 2), dtype, cuda)[:, 1] for dtype in DTYPES)]


def test_waiting_for_the_gpu_raises_an_error(waits_are_errors):
    number = torch.ones((), device="cuda")
    waits_are_errors()

    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        number.item()


@ORDERS
@pytest.mark.parametrize("inv_scale", [0.5, 1.0, float("nan")])
def test_operators_do_not_wait_for_the_gpu(waits_are_errors, inv_scale, ord):
    tensors, found_inf = gradients(), torch.zeros((), device="cuda")
    inv_scale = torch.tensor(inv_scale, device="cuda")
    torch.cuda.synchronize()
    waits_are_errors()

    ops.multi_tensor_unscale(tensors, found_inf, inv_scale)
    total_norm = ops.multi_tensor_norm(tensors, ord).total_norm
    ops.multi_tensor_clip(tensors, total_norm, 1.0)
    ops.multi_tensor_unscale_norm(tensors, found_inf, inv_scale, ord)


@ORDERS
def test_gradient_clipping_does_not_wait_for_the_gpu(waits_are_errors, ord):
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in gradients()]
    for parameter, grad in zip(parameters, gradients(), strict=True):
        parameter.grad = grad
    torch.cuda.synchronize()
    waits_are_errors()

    ampfuse.clip_grad_norm_(parameters, 1.0, ord)


@pytest.mark.sanitizer
def test_ops_are_launched_on_the_current_stream():
    expected = result_of(step, tensors_on("cuda"))
    stream = torch.cuda.Stream()
    tensors = tensors_on("cuda")
    late = [torch.zeros_like(tensor) for tensor in tensors]
    stream.wait_stream(torch.cuda.current_stream())

    def on_a_stream(late, found_inf, inv_scale):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # work on other streams runs ahead of the copies
            torch._foreach_copy_(late, tensors)
            return step(late, found_inf, inv_scale)

    assert all(map(same_bits, result_of(on_a_stream, late), expected))


def test_graph_replays_the_ops_with_the_current_values_of_tensors():
    tensors = tensors_on("cuda", MANY)
    found_inf = torch.zeros((), device="cuda")
    inv_scale = torch.tensor(0.5, device="cuda")
    step(tensors, found_inf, inv_scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = step(tensors, found_inf, inv_scale)

    for seed in (1, 2):
        torch._foreach_copy_(tensors, tensors_on("cuda", MANY, seed))
        graph.replay()
        expected = result_of(step, tensors_on("cuda", MANY, seed))
        assert all(map(same_bits, [norm, *tensors], expected))


def test_more_tensors_than_fit_in_a_launch_are_all_written():
    tensors = [torch.full((3,), 4.0, device="cuda") for _ in range(MANY)]
    found_inf = torch.zeros((), device="cuda")

    ops.multi_tensor_unscale(tensors, found_inf, torch.tensor(0.5, device="cuda"))

    assert torch.stack(tensors).eq(2.0).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_ops_run_on_the_device_of_the_tensors_not_the_current_one():
    expected = result_of(step, tensors_on("cuda:0"))

    results = result_of(step, tensors_on("cuda:1"))

    assert torch.cuda.current_device() == 0
    assert all(
        same_bits(ours.cpu(), theirs.cpu()) for ours, theirs in zip(results, expected, strict=True)
    )
