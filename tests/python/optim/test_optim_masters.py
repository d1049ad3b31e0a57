"""Masters of 16-bit models that are loaded, written or cast, and masters in saved state."""

import copy

import ampfuse
import pytest
import torch
from optim_models import (
    DTYPES_16_BIT,
    FORMS,
    assert_same_bits,
    assert_same_state,
    clones,
    overwrite,
    parameters,
    random_param,
    state_values,
    still,
    train,
    trained,
)
from torch.nn import Parameter

WITH_MASTERS = pytest.mark.parametrize(("dtype", "master_weights"), FORMS)
pytestmark = pytest.mark.filterwarnings("error")


@WITH_MASTERS
def test_synced_masters_take_over_the_loaded_model_in_place(device, dtype, master_weights):
    params = parameters(device, dtype)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = ampfuse.AdamW(groups, master_weights=master_weights)
    train(optimizer, params, range(2))
    loaded = parameters(device, dtype, seed=9)
    addresses = [state["master_param"].data_ptr() for state in optimizer.state.values()]
    overwrite(params, loaded)
    optimizer.sync_masters_from_model()
    assert_same_bits([master.to(dtype) for master in optimizer.master_params()], loaded)
    assert_same_bits(params, loaded)
    assert addresses == [state["master_param"].data_ptr() for state in optimizer.state.values()]
    train(optimizer, params, range(2, 4))


@WITH_MASTERS
def test_syncing_keeps_the_additional_bits_of_elements_that_were_not_written(
    device, dtype, master_weights
):
    params = parameters(device, dtype)
    optimizer = trained(ampfuse.AdamW, params, range(2), master_weights=master_weights)
    expected = clones(optimizer.master_params())
    with torch.no_grad():
        params[0][::2] = 3.0
    optimizer.sync_masters_from_model()
    masters = list(optimizer.master_params())
    assert (masters[0][::2].to(dtype) == 3.0).all()
    masters[0], expected[0] = masters[0][1::2], expected[0][1::2]
    assert_same_bits(masters, expected)


def test_overwriting_parameters_without_masters_does_not_warn(device):
    params = parameters(device)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    overwrite(params, parameters(device, seed=9))
    train(optimizer, params, range(2, 4))


def test_ordinary_training_does_not_warn(device):
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16, device=device)
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    # torch's scaler refuses bfloat16 gradients on a GPU.
    of = torch.amp if device.type == "cpu" else ampfuse
    scaler = of.GradScaler(device.type, init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)

    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = torch.ones(2, 4, dtype=torch.bfloat16, device=device)
        scaler.scale(model(x).float().square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if step == 3:  # save and load a checkpoint of model and optimizer
            model.load_state_dict(model.state_dict())
            optimizer.sync_masters_from_model()
            optimizer.load_state_dict(optimizer.state_dict())


@WITH_MASTERS
def test_master_params_have_the_order_of_the_parameters(device, dtype, master_weights):
    first, second = parameters(device, dtype), parameters(device, seed=9)
    groups = [{"params": first}, {"params": second}]
    optimizer = ampfuse.AdamW(groups, master_weights=master_weights)
    assert_same_bits(optimizer.master_params(), [*first, *second])
    assert len(optimizer.state) == 0  # reading master_params() created no state
    train(optimizer, [*first, *second], range(2))
    masters = list(optimizer.master_params())
    assert [master.dtype for master in masters] == [torch.float32] * 10
    for master, param in zip(masters, first, strict=False):
        assert ((master - param).abs() <= torch.finfo(dtype).eps / 2 * master.abs() + 2**-25).all()
    assert all(a is b for a, b in zip(masters[5:], second, strict=True))


@pytest.mark.parametrize("master_weights", [True, "remainder"])
def test_deleted_masters_are_created_from_the_parameters(device, master_weights):
    params = parameters(device, torch.bfloat16)
    optimizer = trained(ampfuse.AdamW, params, range(2), master_weights=master_weights)
    synced, others = copy.deepcopy((optimizer, params))
    for param, state in synced.state.items():
        state["master_param"].copy_(param if master_weights is True else torch.zeros(()))
    for state in optimizer.state.values():
        del state["master_param"]
    assert_same_bits(optimizer.master_params(), params)
    train(optimizer, params, [2])
    train(synced, others, [2])
    assert_same_state(optimizer, state_values(synced))


@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_saved_masters_have_what_was_written_after_the_last_step(device, dtype):
    param = random_param(device, dtype)
    optimizer = still(param)
    (before,) = clones(optimizer.master_params())
    mask = torch.arange(300, device=device) % 2 == 0
    with torch.no_grad():
        param.mul_(mask)
    saved = copy.deepcopy((param.detach(), optimizer.state_dict()))

    loaded = Parameter(saved[0].clone())
    other = ampfuse.AdamW([loaded], lr=0.01, weight_decay=0)
    other.load_state_dict(saved[1])

    assert_same_bits([loaded], [param])
    assert_same_bits(other.master_params(), [before * mask])  # other elements keep all their bits
    assert_same_bits(optimizer.master_params(), [before])  # the old weights may be written back


def test_saved_masters_of_unwritten_parameters_are_not_copied(device):
    optimizer = still(random_param(device))
    (master,) = optimizer.master_params()
    assert optimizer.state_dict()["state"][0]["master_param"] is master


@pytest.mark.parametrize("order", ["load, cast", "cast, load"])
@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_weights_loaded_before_or_after_a_cast_survive_the_next_step(device, dtype, order):
    model = torch.nn.Linear(5, 3, bias=False).to(device, dtype)
    optimizer = still(model.weight)
    (before,) = clones(optimizer.master_params())
    new = {"weight": model.weight.detach().float().clone()}
    new["weight"][0] = 3.0

    if order == "load, cast":
        model.load_state_dict(new)
    model.float()
    if order == "cast, load":
        model.load_state_dict(new)
    train(optimizer, [model.weight], [3])

    assert_same_bits([model.weight[0]], [new["weight"][0]])
    assert_same_bits([model.weight[1:]], [before[1:]])  # others have all bits of their masters


def test_weights_written_before_masters_become_remainders_survive_the_next_step(device):
    param = random_param(device)
    optimizer = still(param)
    (before,) = clones(optimizer.master_params())
    with torch.no_grad():
        param[:100] = before[:100] = 3.0
    optimizer.param_groups[0]["master_weights"] = "remainder"
    train(optimizer, [param], [3])
    assert_same_bits(optimizer.master_params(), [before])


@pytest.mark.parametrize("is_model_loaded", [False, True])
def test_loaded_masters_set_their_parameters_until_the_model_is_loaded(device, is_model_loaded):
    params, others = parameters(device, torch.bfloat16), parameters(device, torch.bfloat16, seed=9)
    saved = trained(ampfuse.AdamW, params, range(3))
    optimizer = ampfuse.AdamW(others)

    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert_same_bits(others, params)
    if is_model_loaded:
        optimizer.param_groups[0].update(lr=0.0)
        params = parameters(device, torch.bfloat16, seed=5)
        overwrite(others, params)
    else:
        train(saved, params, range(3, 5))
    train(optimizer, others, range(3, 5))

    assert_same_bits(others, params)
