"""Masters when other code loads the model, or moves, replaces or deletes state."""

import warnings
from collections import defaultdict

import ampfuse
import pytest
import torch
from optim_models import (
    DTYPES_16_BIT,
    assert_same_bits,
    assert_same_state,
    clones,
    copies,
    parameters,
    state_values,
    train,
    trained,
)

WITH_MASTERS = pytest.mark.parametrize(
    ("dtype", "master_weights"),
    [(torch.float16, True), (torch.bfloat16, True), (torch.bfloat16, "remainder")],
)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, *DTYPES_16_BIT])


@pytest.fixture(autouse=True)
def no_unexpected_warning():
    """Turn warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # from torch
        yield


def overwrite(params, values):
    """Copy values into parameters, as `load_state_dict` of a model does."""
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


@WITH_MASTERS
def test_synced_masters_take_over_the_loaded_model_in_place(device, dtype, master_weights):
    params = parameters(device, dtype)
    optimizer = trained(lambda p: ampfuse.AdamW(p, master_weights=master_weights), params, range(2))
    loaded = parameters(device, dtype, seed=9)
    addresses = [state["master_param"].data_ptr() for state in optimizer.state.values()]

    overwrite(params, loaded)
    optimizer.sync_masters_from_model()

    assert_same_bits(optimizer.master_params(), [param.float() for param in loaded])
    assert_same_bits(params, loaded)
    assert addresses == [state["master_param"].data_ptr() for state in optimizer.state.values()]
    train(optimizer, params, range(2, 4))


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
def test_loading_model_and_optimizer_together_continues_without_warning(
    device, dtype, master_weights
):
    saved_params = parameters(device, dtype)
    saved = trained(
        lambda p: ampfuse.AdamW(p, master_weights=master_weights), saved_params, range(3)
    )
    params = parameters(device, dtype, seed=9)
    optimizer = trained(lambda p: ampfuse.AdamW(p, master_weights=master_weights), params, range(1))

    overwrite(params, saved_params)
    optimizer.load_state_dict(saved.state_dict())
    train(saved, saved_params, range(3, 5))
    train(optimizer, params, range(3, 5))

    assert_same_bits(params, saved_params)
    assert_same_state(optimizer, state_values(saved))


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


@EVERY_DTYPE
@pytest.mark.parametrize("moved", ["values", "dictionaries", "everything"])
def test_new_tensors_in_the_state_are_used_from_then_on(device, dtype, moved):
    """Replace state as programs do that keep it on the host between steps."""
    params = parameters(device, dtype)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    old = {param: dict(optimizer.state[param]) for param in params}
    old_values = [clones(state.values()) for state in old.values()]
    new = {
        param: {name: value.to("cpu", copy=True).to(device) for name, value in state.items()}
        for param, state in old.items()
    }

    if moved == "everything":
        optimizer.state = defaultdict(dict, new)
    for param in params:
        if moved == "dictionaries":
            optimizer.state[param] = new[param]
        elif moved == "values":
            optimizer.state[param].update(new[param])
    train(optimizer, params, range(2, 4))

    for state, values in zip(old.values(), old_values, strict=True):
        assert_same_bits(state.values(), values)
    unbroken = parameters(device, dtype)
    expected = trained(ampfuse.AdamW, unbroken, range(4))
    assert_same_bits(params, unbroken)
    assert_same_state(optimizer, state_values(expected))


@EVERY_DTYPE
@pytest.mark.parametrize("of", ["all", "one parameter", "one tensor of each"])
def test_cleared_state_is_created_again_at_the_next_step(device, dtype, of):
    params = parameters(device, dtype)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    others = copies(params)
    fresh = ampfuse.AdamW(others)
    kept = state_values(optimizer)
    fresh.load_state_dict(optimizer.state_dict())

    if of == "all":
        optimizer.state.clear()
        fresh = ampfuse.AdamW(others)
    elif of == "one parameter":
        optimizer.state[params[2]].clear()
        del fresh.state[others[2]]
    else:
        for state in optimizer.state.values():
            del state["exp_avg"]
        for state in fresh.state.values():
            state["exp_avg"].zero_()
    train(optimizer, params, range(2, 4))
    train(fresh, others, range(2, 4))

    assert_same_bits(params, others)
    assert_same_state(optimizer, state_values(fresh))
    assert len(kept) == len(params)


@pytest.mark.parametrize("master_weights", [True, "remainder"])
def test_deleted_masters_are_created_from_the_parameters(device, master_weights):
    params = parameters(device, torch.bfloat16)
    optimizer = trained(lambda p: ampfuse.AdamW(p, master_weights=master_weights), params, range(2))

    for state in optimizer.state.values():
        del state["master_param"]
    expected = [param.detach().float() for param in params]

    assert_same_bits(optimizer.master_params(), params)
    train(optimizer, params, [2])
    assert all("master_param" in state for state in optimizer.state.values())
    assert any(
        not torch.equal(a, b) for a, b in zip(optimizer.master_params(), expected, strict=True)
    )


def test_amsgrad_switched_on_in_mid_run_starts_from_the_second_moments(device):
    params = parameters(device)
    optimizer = trained(ampfuse.AdamW, params, range(2))

    optimizer.param_groups[0]["amsgrad"] = True
    train(optimizer, params, [2])

    for state in optimizer.state.values():
        assert_same_bits([state["max_exp_avg_sq"]], [state["exp_avg_sq"]])


def test_replaced_parameters_of_a_group_are_stepped_with_new_state(device):
    params, others = parameters(device), parameters(device, seed=9)
    before = clones(others)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    left = clones(params)

    optimizer.param_groups[0]["params"] = others
    train(optimizer, others, [2])

    assert_same_bits(params, left)
    assert not torch.equal(others[0], before[0])
    assert optimizer.state[others[0]]["step"] == 1


@WITH_MASTERS
@pytest.mark.parametrize("model_first", [True, False])
def test_loading_a_checkpoint_of_torch_rewrites_masters_in_place(
    device, dtype, master_weights, model_first, fresh_compiler
):
    saved_params = parameters(device, dtype)
    saved = trained(torch.optim.AdamW, saved_params, range(2)).state_dict()
    params = parameters(device, dtype, seed=9)
    optimizer = trained(lambda p: ampfuse.AdamW(p, master_weights=master_weights), params, range(1))
    torch.compile(optimizer.step, backend="eager")()  # from now on a graph writes the masters, too
    fresh_params = copies(saved_params)
    other = ampfuse.AdamW(fresh_params, master_weights=master_weights)
    other.load_state_dict(saved)
    masters = [optimizer.state[param]["master_param"] for param in params]

    if model_first:
        overwrite(params, saved_params)
    optimizer.load_state_dict(saved)
    if model_first:  # masters must be right now, since a captured graph may take the next step
        fresh = [param.float() for param in saved_params]
        remainders = [torch.zeros_like(master) for master in masters]
        assert_same_bits(masters, remainders if master_weights == "remainder" else fresh)
    else:
        overwrite(params, saved_params)
    train(optimizer, params, range(2, 4))
    train(other, fresh_params, range(2, 4))

    assert all(
        optimizer.state[p]["master_param"] is x for p, x in zip(params, masters, strict=True)
    )
    assert_same_bits(params, fresh_params)
    assert_same_bits(optimizer.master_params(), other.master_params())


def test_masters_missing_from_a_loaded_checkpoint_are_not_saved(device):
    params = parameters(device, torch.bfloat16)
    saved = trained(torch.optim.AdamW, parameters(device, torch.bfloat16), range(2)).state_dict()
    optimizer = trained(ampfuse.AdamW, params, range(1))
    optimizer.load_state_dict(saved)
    assert "master_param" not in optimizer.state[params[0]]
    assert "master_param" not in optimizer.state_dict()["state"][0]

    train(optimizer, params, range(1))

    assert "master_param" in optimizer.state[params[0]]


@WITH_MASTERS
def test_float32_parameters_take_the_masters_of_a_16_bit_run(device, dtype, master_weights):
    narrow = parameters(device, dtype)
    saved = trained(lambda p: ampfuse.AdamW(p, master_weights=master_weights), narrow, range(3))
    wide = copies(narrow, torch.float32)  # the values that loading the model gives
    optimizer = ampfuse.AdamW(wide)

    optimizer.load_state_dict(saved.state_dict())
    train(saved, narrow, range(3, 5))
    train(optimizer, wide, range(3, 5))

    assert_same_bits(wide, saved.master_params())
