"""A dry run: operators return tensors of the right shape, and compute no floating-point numbers."""

import resource

import pytest
import torch
from ampfuse.memory._recorder import Recorder
from torch import nn
from torch.nn import functional

BIG = (300, 200)  # more bytes than the smallest mapping


def in_dry_run(function):
    with Recorder(for_gpu=False):
        return function()


def both(function):
    return function(), in_dry_run(function)


CALLS = {
    "product": lambda: torch.randn(*BIG) @ torch.randn(200, 7),
    "transposed": lambda: torch.randn(*BIG).t().exp(),
    "channels last": lambda: functional.relu(
        torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    ),
    "convolution": lambda: functional.conv2d(torch.randn(2, 3, 64, 64), torch.randn(4, 3, 3, 3)),
    "reduction": lambda: torch.randn(*BIG).sum(0),
    "comparison": lambda: torch.randn(*BIG) > 0,
    "largest index": lambda: torch.randn(*BIG).argmax(-1),
    "conversion": lambda: torch.randn(*BIG).to(torch.bfloat16),
    "complex": lambda: torch.fft.rfft(torch.randn(*BIG)),
    "attention": lambda: functional.scaled_dot_product_attention(*torch.randn(3, 2, 4, 50, 16)),
    "small new tensor": lambda: torch.ones(3),
    "empty": lambda: torch.randn(0, 5) * 2,
    "index": lambda: torch.randn(*BIG)[torch.tensor([3, 5])],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_result_has_the_shape_strides_and_dtype_of_the_real_one(call):
    real, dry = both(call)
    assert (dry.shape, dry.stride(), dry.dtype) == (real.shape, real.stride(), real.dtype)


def test_several_results_have_the_shapes_of_the_real_ones():
    for real, dry in zip(*both(lambda: torch.randn(*BIG).topk(3)), strict=True):
        assert (dry.shape, dry.dtype) == (real.shape, real.dtype)
    real, dry = both(lambda: torch.randn(*BIG).chunk(3))
    assert [part.shape for part in real] == [part.shape for part in dry]


def test_floating_point_results_are_zeros():
    product = in_dry_run(lambda: torch.ones(*BIG) @ torch.ones(200, 5))
    assert torch.equal(product, torch.zeros(300, 5))
    assert in_dry_run(lambda: (torch.ones(*BIG).exp() + 1).mean().item()) == 0


def test_operator_in_place_returns_its_argument_and_does_not_write_it():
    tensor = torch.ones(*BIG)
    assert in_dry_run(lambda: tensor.add_(1)) is tensor
    assert torch.equal(tensor, torch.ones(*BIG))
    in_dry_run(lambda: torch._foreach_mul_([tensor], 2.0))
    assert torch.equal(tensor, torch.ones(*BIG))


def test_views_share_their_memory():
    tensor = torch.ones(*BIG)
    view = in_dry_run(lambda: tensor[1:].t().reshape(100, -1)[3:5].detach())
    flat = in_dry_run(lambda: tensor.view(-1))
    assert flat.data_ptr() == tensor.data_ptr()
    assert view.shape == (2, 598)


def test_integers_are_computed():
    order = in_dry_run(lambda: torch.arange(100_000).flip(0) * 2)
    assert order[:2].tolist() == [199998, 199996]
    mask = torch.arange(300) % 3 == 0
    assert in_dry_run(lambda: torch.randn(*BIG)[mask]).shape == (100, 200)


def test_numbers_with_one_element_are_computed():
    assert in_dry_run(lambda: (torch.tensor(3.0) * 2 + 1).item()) == 7
    assert in_dry_run(lambda: torch.tensor([0.5]).pow(2).tolist()) == [0.25]


def test_results_that_are_written_into_out_are_written():
    out = torch.empty(0)
    in_dry_run(lambda: torch.mm(torch.ones(3, 4), torch.ones(4, 5), out=out))
    assert out.shape == (3, 5)


def test_model_of_100_gib_takes_a_step_in_little_memory():
    def step():
        layers = [nn.Linear(2**16, 2**16, bias=False) for _ in range(6)]
        loss = nn.Sequential(*layers)(torch.randn(4, 2**16)).sum()
        loss.backward()
        assert layers[0].weight.grad.shape == (2**16, 2**16)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    in_dry_run(step)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024  # KiB


def test_operators_run_again_after_the_block():
    in_dry_run(lambda: torch.ones(*BIG).exp())
    assert torch.ones(*BIG).exp().min() > 2


def test_compiled_functions_are_not_compiled_in_a_dry_run():
    compiled = torch.compile(lambda x: x.exp() + 1)
    assert in_dry_run(lambda: compiled(torch.ones(*BIG))).sum() == 0


def test_views_in_place_and_results_in_out_have_their_shapes():
    def call():
        tensor = torch.randn(*BIG)
        tensor.unsqueeze_(0).transpose_(1, 2)
        values, indices = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.topk(torch.randn(*BIG), 3, out=(values, indices))
        return tensor.shape, values.shape, indices.shape

    real, dry = both(call)
    assert dry == real


def test_new_tensors_of_floats_are_zeros():
    assert in_dry_run(lambda: torch.empty(5).normal_()).tolist() == [0] * 5
    assert in_dry_run(lambda: torch.empty(5, dtype=torch.long).copy_(torch.ones(5))).sum() == 0


def test_tensor_larger_than_the_machine_takes_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large = in_dry_run(lambda: torch.randn(2**20, 2**18))  # 1 TiB
    assert large[::4096, ::4096].sum() == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024  # KiB
