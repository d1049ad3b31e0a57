"""Exponential averages of the weights that steps update, and their use in place of the weights."""

import copy

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits, clones, feed, parameters, train, trained
from torch import nn
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def averages_of(optimizer, params):
    return [optimizer.state[param]["ema_param"] for param in params]


@pytest.mark.parametrize("make", [ampfuse.AdamW, ampfuse.SGD])
def test_averages_are_those_of_torch_within_a_last_place(device, make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 2)).to(device)
    optimizer = make(model.parameters(), lr=0.1, ema=0.99)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    for step in range(20):
        feed(list(model.parameters()), step, 1e-4)
        optimizer.step()
        averaged.update_parameters(model)
    found = averages_of(optimizer, model.parameters())
    for one, other in zip(found, averaged.module.parameters(), strict=True):
        assert ((one - other).abs() <= 1.01 * torch.finfo(torch.float32).eps * other.abs()).all()


def test_averages_of_16_bit_models_are_those_of_the_masters(device):
    ends = []
    for dtype, kind in (
        (torch.float32, True),
        (torch.bfloat16, True),
        (torch.bfloat16, "remainder"),
    ):
        params = [Parameter(p.detach().to(dtype)) for p in parameters(device, torch.bfloat16)]
        optimizer = trained(ampfuse.AdamW, params, range(5), master_weights=kind, ema=0.9)
        ends.append(averages_of(optimizer, params))
    # Gradients of both dtypes are the same numbers.
    assert_same_bits(ends[0], ends[1])
    assert_same_bits(ends[0], ends[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_take_the_place_of_weights_and_leave_nothing_behind(device, dtype):
    params = parameters(device, dtype)
    optimizer = trained(ampfuse.AdamW, params, range(4), ema=0.5)
    before, addresses = clones(params), [param.data_ptr() for param in params]
    averages = [average.to(dtype) for average in averages_of(optimizer, params)]
    with optimizer.averaged():
        assert_same_bits(params, averages)
        assert addresses == [param.data_ptr() for param in params]
    assert_same_bits(params, before)
    with pytest.raises(KeyError), optimizer.averaged():
        raise KeyError("in an evaluation")
    assert_same_bits(params, before)


@pytest.mark.filterwarnings("error")
def test_training_goes_on_as_without_an_evaluation(device):
    ends = []
    for evaluates in (False, True):
        params = parameters(device, torch.bfloat16)
        optimizer = trained(ampfuse.AdamW, params, range(3), ema=0.9)
        if evaluates:
            with optimizer.averaged():
                pass
        train(optimizer, params, range(3, 6))
        ends.append([*params, *averages_of(optimizer, params), *optimizer.master_params()])
    assert_same_bits(*ends)


def test_calls_that_would_take_averages_for_weights_are_refused(device):
    params = parameters(device, torch.bfloat16)
    optimizer = trained(ampfuse.AdamW, params, range(2), ema=0.9)
    calls = {
        "step": optimizer.step,
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict({}),
        "sync_masters_from_model": optimizer.sync_masters_from_model,
        "averaged": lambda: optimizer.averaged().__enter__(),
        "master_params": lambda: list(optimizer.master_params()),
        "copy": lambda: copy.deepcopy(optimizer),
    }
    with optimizer.averaged():
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=rf"{name}\(\): the parameters are averages"):
                call()
    optimizer.step()


def test_a_compiled_step_is_refused_inside_of_the_block_and_goes_on_after_it(device):
    params = parameters(device)
    optimizer = trained(ampfuse.AdamW, params, range(2), ema=0.9)
    step = torch.compile(optimizer.step, backend="eager")
    step()
    with optimizer.averaged(), pytest.raises(RuntimeError, match="the parameters are averages"):
        step()
    step()
    assert optimizer.state[params[0]]["step"].item() == 4
    torch._dynamo.reset()  # it traces no function again in which an error was raised


def test_weights_that_get_other_memory_inside_of_the_block_are_restored(device):
    model = nn.Conv2d(3, 4, 3, device=device)
    optimizer = trained(ampfuse.AdamW, list(model.parameters()), range(3), ema=0.5)
    before = clones(model.parameters())
    with optimizer.averaged():
        model.to(memory_format=torch.channels_last)
        model.bfloat16().float()
    assert_same_bits([*model.parameters()], before)


def test_autocast_casts_the_averages_and_then_the_weights_again(device):
    model = nn.Linear(3, 2, device=device)
    optimizer = trained(ampfuse.AdamW, list(model.parameters()), range(3), ema=0.5)
    inputs = torch.ones(1, 3, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        own = model(inputs)
        with optimizer.averaged():
            averaged = model(inputs)
        again = model(inputs)
    assert not torch.equal(averaged, own)
    assert torch.equal(again, own)


def test_an_average_goes_on_if_momentum_starts_later(device):
    param = Parameter(torch.zeros(5, device=device))
    optimizer = ampfuse.SGD([param], lr=1.0, ema=0.5)
    for momentum, average in ((0.0, -1.0), (0.0, -1.5), (0.5, -2.25), (0.5, -3.375)):
        optimizer.param_groups[0]["momentum"] = momentum
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert (optimizer.state[param]["ema_param"] == average).all()


def test_averages_that_torchs_class_has_not_stepped_are_dropped(device):
    params = parameters(device)
    saved = trained(ampfuse.AdamW, params, range(2), ema=0.5).state_dict()
    torchs = torch.optim.AdamW(params)
    torchs.load_state_dict(copy.deepcopy(saved))
    train(torchs, params, range(2, 4))
    optimizer = ampfuse.AdamW(params, ema=0.5)
    optimizer.load_state_dict(torchs.state_dict())
    assert "ema_param" not in optimizer.state[params[0]]


def test_an_optimizer_that_drops_saved_averages_warns(device):
    params = parameters(device)
    saved = trained(ampfuse.AdamW, params, range(2), ema=0.5).state_dict()
    with pytest.warns(UserWarning, match=r"it has averages .* pass for example ema=0\.999"):
        ampfuse.AdamW(params).load_state_dict(saved)


def test_an_optimizer_without_averages_says_so(device):
    optimizer = ampfuse.AdamW(parameters(device))
    with pytest.raises(RuntimeError, match=r"there are no averages; pass for example ema=0\.999"):
        optimizer.averaged().__enter__()


def test_a_group_may_have_an_average_of_its_own(device):
    first, second = (Parameter(torch.ones(5, device=device)) for _ in range(2))
    optimizer = ampfuse.AdamW([{"params": [first], "ema": 0.5}, {"params": [second]}])
    train(optimizer, [first, second], range(2))
    assert "ema_param" in optimizer.state[first]
    assert "ema_param" not in optimizer.state[second]
    value = second.detach().clone()
    with optimizer.averaged():
        assert torch.equal(second, value)


def test_averages_start_from_the_weights_if_a_checkpoint_lacks_them(device):
    params = parameters(device, torch.bfloat16)
    saved = copy.deepcopy(trained(ampfuse.AdamW, params, range(2)).state_dict())
    optimizer = ampfuse.AdamW(params, ema=0.75)
    optimizer.load_state_dict(saved)
    before = clones(optimizer.master_params())
    train(optimizer, params, [2])
    for average, old, new in zip(
        averages_of(optimizer, params), before, optimizer.master_params(), strict=True
    ):
        torch.testing.assert_close(average, old.float() + 0.25 * (new - old.float()))


def test_averages_are_deleted_without_the_option(device):
    params = parameters(device)
    optimizer = trained(ampfuse.AdamW, params, range(2), ema=0.9)
    optimizer.param_groups[0]["ema"] = None
    train(optimizer, params, [2])
    assert all("ema_param" not in optimizer.state[param] for param in params)


def test_complex_and_double_parameters_have_averages_of_their_dtype(device):
    for dtype in (torch.float64, torch.complex64):
        param = Parameter(torch.ones(5, dtype=dtype, device=device))
        optimizer = ampfuse.AdamW([param], lr=0.1, ema=0.5)
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
        average = optimizer.state[param]["ema_param"]
        assert average.dtype == dtype
        assert ((average - param).abs() > 0).all()


def test_a_loaded_group_without_an_average_keeps_that_of_the_optimizer():
    params = parameters("cpu")
    saved = copy.deepcopy(trained(ampfuse.AdamW, params, range(2)).state_dict())
    saved["param_groups"][0]["ema"] = None  # as C++ saves it
    optimizer = ampfuse.AdamW([{"params": params, "ema": 0.9}])
    optimizer.load_state_dict(saved)
    train(optimizer, params, [2])
    assert "ema_param" in optimizer.state[params[0]]
