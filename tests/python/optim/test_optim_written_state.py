"""Writes to parameters by other code before the state is saved, or the model cast."""

import copy

import ampfuse
import pytest
import torch
from optim_models import DTYPES_16_BIT, assert_same_bits, clones, train
from torch import nn
from torch.nn import Parameter

EVERY_HALF = pytest.mark.parametrize("dtype", DTYPES_16_BIT)


def still(param, **options):
    """Return an optimizer that has trained the parameter; later steps keep it."""
    optimizer = ampfuse.AdamW([param], lr=0.01, weight_decay=0, **options)
    train(optimizer, [param], range(3))
    optimizer.param_groups[0]["lr"] = 0.0
    return optimizer


@EVERY_HALF
def test_saved_masters_have_what_was_written_after_the_last_step(device, dtype):
    param = Parameter(torch.randn(300, device=device).to(dtype))
    optimizer = still(param)
    (before,) = clones(optimizer.master_params())
    mask = torch.arange(300, device=device) % 2 == 0
    with torch.no_grad():
        param.mul_(mask)
    saved = copy.deepcopy((param.detach(), optimizer.state_dict()))

    loaded = Parameter(saved[0].clone())
    other = ampfuse.AdamW([loaded], lr=0.01, weight_decay=0)
    other.load_state_dict(saved[1])
    (master,) = other.master_params()

    assert_same_bits([loaded], [param])
    assert_same_bits([master], [before * mask])  # other elements keep all their bits
    (now,) = optimizer.master_params()
    assert_same_bits([now], [before])  # the old weights may be written back


def test_saved_masters_of_unwritten_parameters_are_not_copied(device):
    param = Parameter(torch.randn(300, device=device).bfloat16())
    optimizer = still(param)
    (master,) = optimizer.master_params()

    assert optimizer.state_dict()["state"][0]["master_param"] is master


@pytest.mark.parametrize("order", ["load, cast", "cast, load"])
@EVERY_HALF
def test_weights_loaded_before_or_after_a_cast_survive_the_next_step(device, dtype, order):
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).to(device, dtype)
    optimizer = still(model.weight)
    (before,) = clones(optimizer.master_params())
    new = {"weight": model.weight.detach().float().clone()}
    new["weight"][0] = 3.0

    if order == "load, cast":
        model.load_state_dict(new)
    model.float()
    if order == "cast, load":
        model.load_state_dict(new)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()

    assert_same_bits([model.weight[0]], [new["weight"][0]])
    assert_same_bits([model.weight[1:]], [before[1:]])  # others have all bits of their masters


def test_weights_written_before_masters_become_remainders_survive_the_next_step(device):
    param = Parameter(torch.randn(300, device=device).bfloat16())
    optimizer = still(param)
    (before,) = clones(optimizer.master_params())
    with torch.no_grad():
        param[:100] = 3.0

    optimizer.param_groups[0]["master_weights"] = "remainder"
    param.grad = torch.ones_like(param)
    optimizer.step()

    (master,) = optimizer.master_params()
    assert_same_bits([master[:100], master[100:]], [torch.full_like(master[:100], 3), before[100:]])
