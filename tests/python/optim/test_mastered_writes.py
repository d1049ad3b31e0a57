"""Masters of `ampfuse.Mastered` adopt what other code writes to their parameters."""

import copy
from functools import partial

import pytest
import torch
from ampfuse import Mastered
from mastered_runs import BF16, assert_all_same, made, train
from optim_models import assert_same_bits


def test_masters_begin_as_the_parameters_are_at_the_first_step(device):
    params = made(device, BF16)
    optimizer = Mastered(partial(torch.optim.RMSprop, lr=0.0), params)
    with torch.no_grad():
        params[0].zero_()  # as a checkpoint that is loaded into the model
    train(optimizer, params, [0])
    assert_all_same(params, [torch.zeros_like(params[0]), made(device, BF16)[1]])


def test_masters_adopt_what_other_code_writes_to_parameters(device):
    params = made(device, BF16)
    optimizer = Mastered(partial(torch.optim.RMSprop, lr=1e-4), params)
    train(optimizer, params, [0])
    untouched = [master.clone() for master in optimizer.master_params()][1]
    with torch.no_grad():
        params[0].fill_(3.0)
    saved = optimizer.state_dict()["state"]
    assert (saved[0]["master_param"] == 3.0).all()
    assert_same_bits(saved[1]["master_param"], untouched)
    train(optimizer, params, [1, 2, 3])
    assert (next(optimizer.master_params()) - 3.0).abs().max() < 0.01


def test_model_takes_over_masters_that_other_code_has_written(device):
    params = made(device, BF16)
    optimizer = Mastered(torch.optim.RMSprop, params)
    train(optimizer, params, [0])
    with torch.no_grad():
        for master in optimizer.master_params():
            master.mul_(1.001)
    optimizer.sync_model_from_masters()
    masters = [master.clone() for master in optimizer.master_params()]
    assert_all_same(params, [master.to(BF16) for master in masters])
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, params, [1])
    assert_all_same(optimizer.master_params(), masters)


def loads_a_state_dict(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def loads_some_masters(optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["master_param"]
    optimizer.load_state_dict(saved)


def steps_without_gradients(optimizer):
    optimizer.zero_grad()
    optimizer.step()


def steps_with_one_gradient(optimizer):
    optimizer.param_groups[0]["params"][0].grad = None
    optimizer.step()


def skips_a_step(optimizer):
    optimizer.found_inf = optimizer.grad_scale = torch.ones(())
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale


BEFORE_A_WRITE = [
    loads_a_state_dict,
    loads_some_masters,
    Mastered.sync_masters_from_model,
    Mastered.sync_model_from_masters,
    copy.deepcopy,
    steps_without_gradients,
    steps_with_one_gradient,
    skips_a_step,
]


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("before", BEFORE_A_WRITE)
def test_every_write_is_adopted_whatever_the_optimizer_did_before(before, through_data):
    params = made("cpu", BF16)
    optimizer = Mastered(partial(torch.optim.RMSprop, lr=0.0), params)
    train(optimizer, params, [0, 1])
    copied = before(optimizer)
    if copied is not None:
        optimizer = copied
        (params,) = [group["params"] for group in optimizer.param_groups]
    for param in params:
        (param.data if through_data else param.detach()).fill_(3.0)
    train(optimizer, params, [2])
    assert_all_same(params, [torch.full_like(param, 3.0) for param in params])
    assert_all_same(optimizer.master_params(), [param.float() for param in params])


def test_only_written_elements_lose_the_additional_bits_of_their_masters():
    params = made("cpu", BF16)
    optimizer = Mastered(partial(torch.optim.RMSprop, lr=1e-4), params)
    train(optimizer, params, [0])
    optimizer.param_groups[0]["lr"] = 0.0
    expected = [master.detach().clone() for master in optimizer.master_params()]
    for param, master in zip(params, expected, strict=True):
        param.data[0] = master[0] = torch.nan
        param.data[1, 1] = master[1, 1] = 3.0
    train(optimizer, params, [1])
    torch.testing.assert_close(
        list(optimizer.master_params()), expected, rtol=0, atol=0, equal_nan=True
    )


READERS = {
    "master_params": lambda optimizer: list(optimizer.master_params()),
    "state": lambda optimizer: [state["master_param"] for state in optimizer.state.values()],
    "sync_model_from_masters": lambda optimizer: (
        optimizer.sync_model_from_masters() or list(optimizer.master_params())
    ),
    "state_dict": lambda optimizer: [
        state["master_param"] for state in optimizer.state_dict()["state"].values()
    ],
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_masters_before_the_first_step_are_those_of_the_loaded_model(read):
    params = made("cpu", BF16)
    optimizer = Mastered(torch.optim.RMSprop, params)
    for param in params:
        param.detach().fill_(3.0)
    assert_all_same(read(optimizer), [torch.full(param.shape, 3.0) for param in params])
    assert_all_same(params, [torch.full_like(param, 3.0) for param in params])


def test_masters_that_a_program_writes_before_the_first_step_are_kept():
    params = made("cpu", BF16)
    optimizer = Mastered(partial(torch.optim.RMSprop, lr=0.0), params)
    for master in optimizer.master_params():
        master.detach().mul_(1.001)
    optimizer.sync_model_from_masters()
    train(optimizer, params, [0])
    expected = [param.float() * 1.001 for param in made("cpu", BF16)]
    assert_all_same(optimizer.master_params(), expected)
    assert_all_same(params, [master.to(BF16) for master in expected])


def loads_state_without_masters(optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        del state["master_param"]
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    "before", [Mastered.sync_masters_from_model, loads_a_state_dict, loads_state_without_masters]
)
def test_masters_that_the_inner_optimizer_writes_later_are_kept(before):
    params = made("cpu", BF16)
    optimizer = Mastered(torch.optim.RMSprop, params)
    train(optimizer, params, [0])
    before(optimizer)
    masters = optimizer.inner.param_groups[0]["params"]
    for master in masters:  # as the inner optimizer's `eval()` does
        master.detach().mul_(1.1)
    expected = [master.detach().clone() for master in masters]
    optimizer.sync_model_from_masters()
    assert_all_same(masters, expected)
    assert_all_same(params, [master.to(BF16) for master in expected])


def test_frozen_parameter_has_no_master_and_stays_as_it_is():
    params = made("cpu", BF16)
    params[0].requires_grad_(False)
    optimizer = Mastered(torch.optim.RMSprop, params)
    train(optimizer, params[1:], [0])
    first, second = optimizer.master_params()
    assert first is params[0]
    assert second.dtype == torch.float32
    assert_same_bits(params[0], made("cpu", BF16)[0])
    assert list(optimizer.state_dict()["state"]) == [1]
