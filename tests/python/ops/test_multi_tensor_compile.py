"""The multi-tensor ops in torch.compile(fullgraph=True): eager bits, no copies, no recompiles."""

import ampfuse
import pytest
import torch
from ampfuse import ops
from reference import ORDERS, heavy_tailed, parameters_with_gradients, same_bits
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import ReinplaceCounters

pytestmark = pytest.mark.usefixtures("missed_copies")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float32]


def norm(tensors, found_inf, inv_scale):
    return ops.multi_tensor_norm(tensors, 2.0)


def unscale_norm(tensors, found_inf, inv_scale):
    return ops.multi_tensor_unscale_norm(tensors, found_inf, inv_scale, float("inf"))


def unscale_then_norm_then_clip(tensors, found_inf, inv_scale):
    ops.multi_tensor_unscale(tensors, found_inf, inv_scale)
    total_norm = ops.multi_tensor_norm(tensors).total_norm
    ops.multi_tensor_clip(tensors, total_norm, 1.0)
    return (total_norm,)


def unscale_norm_then_clip(tensors, found_inf, inv_scale):
    total_norm = ops.multi_tensor_unscale_norm(tensors, found_inf, inv_scale).total_norm
    ops.multi_tensor_clip(tensors, total_norm, 1.0)
    return (total_norm,)


SEQUENCES = [unscale_then_norm_then_clip, unscale_norm_then_clip]


def arguments(device, seed, sizes=(33, 257)):
    """Return gradients of three dtypes, one of them strided, a flag of zero and a scale."""
    tensors = [heavy_tailed((size, 2), dtype, device, seed) for size in sizes for dtype in DTYPES]
    tensors.append(heavy_tailed((9, 8), torch.float32, device, seed)[:, ::2])
    return tensors, torch.zeros((), device=device), torch.tensor(0.25 + seed, device=device)


def assert_same(compiled, eager, device, *of_arguments):
    """Run both, and compare bit by bit the results and the written tensors."""
    ours, theirs = arguments(device, *of_arguments), arguments(device, *of_arguments)
    returned = compiled(*ours) or ()
    expected = eager(*theirs) or ()
    assert all(map(same_bits, returned, expected))
    assert len(returned) == len(expected)
    assert all(map(same_bits, ours[0], theirs[0]))
    assert ours[1].item() == theirs[1].item()


@pytest.mark.parametrize("step", [norm, unscale_norm, *SEQUENCES])
def test_compiled_step_gives_the_bits_of_the_eager_one_and_copies_nothing(device, step):
    compiled = torch.compile(step, fullgraph=True)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (0, 1):  # new values, same graph
            assert_same(compiled, step, device, seed)

    assert ReinplaceCounters.get_total_missed() == 0
    assert ReinplaceCounters.get_total_missed_bytes() == 0


@pytest.mark.parametrize("step", SEQUENCES)
def test_dynamic_shapes_share_a_graph(device, step):
    compiled = torch.compile(step, fullgraph=True, dynamic=True)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for sizes in ((33, 257), (34, 100)):
            assert_same(compiled, step, device, 0, sizes)


def test_clip_grad_norm_compiles_over_parameters(device):
    def step(parameters):
        return [
            ampfuse.clip_grad_norm_(parameters[4 * i : 4 * i + 4], 1.0, norm_type)
            for i, norm_type in enumerate(ORDERS)
        ]

    compiled = torch.compile(step, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (0, 1):
            ours, theirs = (
                [p for i in range(3) for p in parameters_with_gradients(device, DTYPES, seed + i)]
                for _ in range(2)
            )

            assert all(map(same_bits, compiled(ours), step(theirs)))

            for parameter, other in zip(ours, theirs, strict=True):
                assert same_bits(parameter.grad, other.grad)
    assert ReinplaceCounters.get_total_missed_bytes() == 0


def test_norm_of_parameters_compiles_under_no_grad(device):
    @torch.no_grad()
    def weight_norm(parameters):
        return ops.multi_tensor_norm(parameters).total_norm

    parameters = [heavy_tailed(33, torch.float32, device).requires_grad_()]
    compiled = torch.compile(weight_norm, backend="aot_eager", fullgraph=True)

    assert same_bits(compiled(parameters), weight_norm(parameters))


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_change_the_bits(device, compile_it, autocast_dtype):
    def step(*args):
        with torch.autocast(device.type, dtype=autocast_dtype):
            return unscale_then_norm_then_clip(*args)

    if compile_it:
        step = torch.compile(step, backend="aot_eager", fullgraph=True)

    assert_same(step, unscale_then_norm_then_clip, device, 0)


def test_new_limits_recompile_gradient_clipping_no_more_than_in_torch(device):
    def frames(clip):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(clip, backend=counter, fullgraph=True)
        for max_norm in (1.0, 0.5, 2.5, 1e9, 0.0):
            compiled(parameters_with_gradients(device), max_norm)
        return counter.frame_count

    assert frames(ampfuse.clip_grad_norm_) <= frames(torch.nn.utils.clip_grad_norm_)


@pytest.mark.parametrize("max_norm", [1.0, 0.3, 0.0, -1.0, 1e30, float("inf"), float("nan")])
def test_compiled_gradient_clipping_scales_as_the_eager_one(device, max_norm):
    ours, theirs = parameters_with_gradients(device), parameters_with_gradients(device)
    torch.compile(ampfuse.clip_grad_norm_, backend="aot_eager", fullgraph=True)(ours, max_norm)

    ampfuse.clip_grad_norm_(theirs, max_norm)
    for parameter, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            parameter.grad, other.grad, rtol=2.0**-23, atol=0, equal_nan=True
        )


@pytest.mark.needs_cuda
def test_clip_grad_norm_compiles_over_two_devices():
    def parameters():
        made = [torch.nn.Parameter(torch.zeros(33, device=device)) for device in ("cpu", "cuda")]
        for seed, parameter in enumerate(made):
            parameter.grad = heavy_tailed(33, torch.float32, parameter.device, seed)
        return made

    ours, theirs = parameters(), parameters()
    torch.compile(ampfuse.clip_grad_norm_, fullgraph=True)(ours, 1.0)

    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    for parameter, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=2e-6, atol=0)
