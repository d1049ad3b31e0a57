"""A dry run: operators return tensors of the right shape, and compute no floating-point numbers."""

import resource

import pytest
import torch
from ampfuse.tools.memory.recorder import Recorder
from torch import nn
from torch.nn import functional

BIG = (300, 200)  # more bytes than the smallest mapping


def in_dry_run(function):
    with Recorder("cpu"):
        return function()


def tensors_of(result):
    return [result] if isinstance(result, torch.Tensor) else [*result]


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
    "several results": lambda: torch.randn(*BIG).topk(3),
    "parts": lambda: torch.randn(*BIG).chunk(3),
    "view in place": lambda: torch.randn(*BIG).unsqueeze_(0).transpose_(1, 2),
    "result in out": lambda: torch.mm(torch.ones(3, 4), torch.ones(4, 5), out=torch.empty(0)),
    "results in out": lambda: torch.topk(
        torch.randn(*BIG), 3, out=(torch.empty(0), torch.empty(0, dtype=torch.long))
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_result_has_the_shape_strides_and_dtype_of_the_real_one(call):
    for real, dry in zip(tensors_of(call()), tensors_of(in_dry_run(call)), strict=True):
        assert (dry.shape, dry.stride(), dry.dtype) == (real.shape, real.stride(), real.dtype)


def test_floating_point_results_are_zeros():
    product = in_dry_run(lambda: torch.ones(*BIG) @ torch.ones(200, 5))
    assert torch.equal(product, torch.zeros(300, 5))
    assert in_dry_run(lambda: (torch.ones(*BIG).exp() + 1).mean().item()) == 0
    assert in_dry_run(lambda: torch.empty(5).normal_()).tolist() == [0] * 5
    assert in_dry_run(lambda: torch.empty(5, dtype=torch.long).copy_(torch.ones(5))).sum() == 0
    assert torch.ones(*BIG).exp().min() > 2  # operators compute again after the block


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


def test_integers_and_numbers_with_one_element_are_computed():
    assert in_dry_run(lambda: (torch.tensor(3.0) * 2 + 1).item()) == 7
    assert in_dry_run(lambda: torch.tensor([0.5]).pow(2).tolist()) == [0.25]
    order = in_dry_run(lambda: torch.arange(100_000).flip(0) * 2)
    assert order[:2].tolist() == [199998, 199996]
    mask = torch.arange(300) % 3 == 0
    assert in_dry_run(lambda: torch.randn(*BIG)[mask]).shape == (100, 200)


def test_models_and_tensors_larger_than_the_machine_take_little_memory():
    def step():
        layers = [nn.Linear(2**16, 2**16, bias=False) for _ in range(6)]
        loss = nn.Sequential(*layers)(torch.randn(4, 2**16)).sum()
        loss.backward()
        assert layers[0].weight.grad.shape == (2**16, 2**16)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    in_dry_run(step)  # of a model of 100 GiB
    large = in_dry_run(lambda: torch.randn(2**20, 2**18))  # 1 TiB
    assert large[::4096, ::4096].sum() == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024  # KiB
