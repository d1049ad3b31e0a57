"""State dicts of ampfuse.Adam and AdamW: saving, loading, exchange with torch, and copies."""

import copy
import io
import pickle

import ampfuse
import pytest
import torch
from optim_models import (
    BOTH_AND_TORCHS,
    EVERY_KIND,
    KINDS,
    assert_near,
    assert_same_bits,
    assert_same_state,
    copies,
    default_dtype,
    parameters,
    state_values,
    train,
    trained,
)
from torch.nn import Parameter


def through_a_file(state_dict):
    """Return the state dict as `torch.load` reads it from what `torch.save` wrote."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def public_names(optimizer):
    return {name for name in vars(optimizer) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("float32", {}),
        ("amsgrad", {"max_exp_avg_sq": torch.float32}),
        ("bf16", {"master_param": torch.float32}),
        ("remainders", {"master_param": torch.float32}),
        ("no masters", {"max_exp_avg_sq": torch.float32}),
    ],
)
def test_state_dict_has_torchs_keys_and_the_masters(device, kind, expected):
    dtype, options = KINDS[kind]
    params = parameters(device, dtype)
    state_dict = trained(ampfuse.AdamW, params, range(2), **options).state_dict()
    expected = {name: torch.float32 for name in ("step", "exp_avg", "exp_avg_sq")} | expected
    for index, param in enumerate(params):
        state = state_dict["state"][index]
        assert {name: value.dtype for name, value in state.items()} == expected
        assert state.pop("step").item() == 2
        assert {value.shape for value in state.values()} == {param.shape}
    assert state_dict["param_groups"][0]["params"] == [0, 1, 2, 3, 4]


@EVERY_KIND
def test_optimizer_loaded_from_a_file_continues_to_the_same_bits(device, dtype, options):
    params = parameters(device, dtype)
    of_group = {"lr": torch.tensor(0.01), "weight_decay": 0.1, "maximize": True}
    optimizer = trained(ampfuse.AdamW, params, range(3), **options | of_group)
    loaded = copies(params)
    other = ampfuse.AdamW(loaded, **options)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    train(optimizer, params, range(3, 6))
    train(other, loaded, range(3, 6))
    assert_same_bits(params, loaded)
    assert_same_state(optimizer, state_values(other))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("kind", "is_compiled"),
    [
        *((kind, False) for kind in KINDS),
        *((kind, True) for kind in ("bf16", "remainders", "bf16 moments")),
    ],
)
def test_loading_writes_into_state_tensors_only_if_a_graph_uses_them(device, kind, is_compiled):
    dtype, options = KINDS[kind]
    params, others = parameters(device, dtype), parameters(device, dtype, seed=7)
    saved = trained(ampfuse.AdamW, params, range(3), **options)
    expected = state_values(saved)
    optimizer = trained(ampfuse.AdamW, others, range(1), **options)
    if is_compiled:
        torch.compile(optimizer.step, backend="eager")()
    before = {
        (i, name): (value, value.data_ptr())
        for i, param in enumerate(others)
        for name, value in optimizer.state[param].items()
    }

    optimizer.load_state_dict(saved.state_dict())

    for (i, name), (value, address) in before.items():
        assert (optimizer.state[others[i]][name] is value) == is_compiled
        assert value.data_ptr() == address
    assert_same_state(optimizer, expected)
    train(optimizer, others, range(2))
    assert_same_state(saved, expected)  # the state is not shared with the saved optimizer


@EVERY_KIND
def test_copied_optimizers_continue_to_the_same_bits(device, dtype, options):
    params = parameters(device, dtype)
    optimizer = trained(ampfuse.AdamW, params, range(3), max_grad_norm=1.0, **options)
    pair = optimizer, params
    copied = copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))

    train(optimizer, params, range(3, 6))

    for other, others in copied:
        train(other, others, range(3, 6))
        assert type(other) is ampfuse.AdamW
        assert public_names(other) == public_names(optimizer)
        assert other.max_grad_norm == 1.0
        assert all(a is b for a, b in zip(other.param_groups[0]["params"], others, strict=True))
        assert_same_bits(params, others)
        assert_same_state(optimizer, state_values(other))
        assert torch.equal(other.grad_norm, optimizer.grad_norm)


@BOTH_AND_TORCHS
@pytest.mark.parametrize(
    ("fused", "options"), [(True, {}), (False, {"amsgrad": True, "weight_decay": 0.1})]
)
def test_state_moves_from_torch_to_ampfuse_and_back_in_mid_run(
    device, cls, of_torch, fused, options
):
    params = parameters(device)
    unbroken = copies(params)
    trained(of_torch, unbroken, range(9), **options)

    first = trained(of_torch, params, range(3), fused=fused, **options)
    second = cls(params, **options)
    second.load_state_dict(through_a_file(first.state_dict()))
    train(second, params, range(3, 6))
    third = of_torch(params, **options)
    third.load_state_dict(through_a_file(second.state_dict()))
    train(third, params, range(6, 9))

    assert_near(params, unbroken, steps=9)
    for param, other in zip(params, third.state_dict()["state"].values(), strict=True):
        assert other["step"] == 9
        assert other["exp_avg"].shape == param.shape


def test_loading_sets_hyperparameters_but_not_master_weights_or_state_dtype(device):
    options = {"lr": 0.5, "betas": (0.5, 0.6), "eps": 1e-3, "maximize": True}
    saved = trained(torch.optim.Adam, parameters(device, torch.bfloat16), range(2), **options)
    params = parameters(device, torch.bfloat16)
    optimizer = ampfuse.Adam(params, master_weights="remainder", state_dtype=torch.bfloat16)

    optimizer.load_state_dict(saved.state_dict())
    train(optimizer, params, range(1))

    group = optimizer.param_groups[0]
    assert group.items() >= options.items()
    assert "master_weights" not in group
    assert optimizer.state[params[0]]["master_param"].dtype == torch.int16
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.bfloat16


def test_loading_keeps_options_that_torch_lacks_and_adds_none(device):
    own = {"max_grad_norm": 3.0, "write_back_grads": True}
    optimizer = ampfuse.AdamW([{"params": parameters(device), **own}], max_grad_norm=1.0)
    expected = optimizer.state_dict()["param_groups"]
    copied = copy.deepcopy(optimizer)
    optimizer.load_state_dict(torch.optim.AdamW(parameters(device)).state_dict())
    assert optimizer.max_grad_norm == 1.0
    assert optimizer.param_groups[0].items() >= own.items()
    assert copied.state_dict()["param_groups"] == expected
    assert optimizer.state_dict()["param_groups"] == expected


def test_adamw_keeps_decoupled_weight_decay_after_loading_state_of_adam(device):
    optimizer = ampfuse.AdamW(parameters(device))
    optimizer.load_state_dict(ampfuse.Adam(parameters(device), weight_decay=0.5).state_dict())
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_loaded_moments_are_converted_to_the_state_dtype(device):
    params = parameters(device)
    saved = trained(ampfuse.AdamW, params, range(2), amsgrad=True)
    optimizer = ampfuse.AdamW(copies(params), amsgrad=True, state_dtype=torch.bfloat16)
    optimizer.load_state_dict(saved.state_dict())
    for state, other in zip(state_values(optimizer), state_values(saved), strict=True):
        assert_same_bits([state.pop("step")], [other.pop("step")])
        assert_same_bits(state.values(), [value.bfloat16() for value in other.values()])


def test_state_missing_from_a_checkpoint_is_dropped_on_loading(device):
    params = parameters(device)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    optimizer.load_state_dict(ampfuse.AdamW(parameters(device)).state_dict())
    assert len(optimizer.state) == 0
    fresh = parameters(device)
    for param, other in zip(params, fresh, strict=True):
        param.detach().copy_(other)
    train(optimizer, params, range(2))
    assert_same_state(optimizer, state_values(trained(ampfuse.AdamW, fresh, range(2))))


def test_state_dict_hooks_may_change_the_saved_and_loaded_state(device):
    params = parameters(device)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "epoch": 3})
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))

    def rename(_, saved):
        calls.append(f"loading epoch {saved['epoch']}")
        zeros = {name: torch.zeros_like(value) for name, value in saved["state"][0].items()}
        return {**saved, "state": {**saved["state"], 0: zeros}}

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.load_state_dict(optimizer.state_dict())

    assert calls == ["saving", "loading epoch 3", "loaded"]
    assert optimizer.state[params[0]]["step"] == 0
    assert optimizer.state[params[1]]["step"] == 2


# --- learning rates in tensors ------------------------------------------------------------------


def pair(lr, device):
    """Return an optimizer of two groups that share a learning rate."""
    params = [torch.nn.Parameter(torch.ones(2, device=device)) for _ in range(2)]
    return ampfuse.AdamW([{"params": [param]} for param in params], lr=lr)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("present", "saved"),
    [
        (torch.tensor(0.25), 0.5),
        (torch.tensor(0.25), torch.tensor(0.5)),
        (torch.tensor(0.25), torch.tensor([0.5])),
        (torch.tensor(0.25, dtype=torch.float64), 3e-5),  # keeps all digits
        (torch.tensor(1), 0.5),  # replaced, as integers cannot hold it
    ],
    ids=str,
)
def test_rate_is_loaded_into_the_tensor_that_groups_share(device, present, saved):
    """Check that the groups keep the tensor object, since a graph may read it."""
    rate = present.to(device, copy=True)
    loaded = pair(rate, device)
    before = loaded.state_dict()
    with default_dtype(torch.float16):
        loaded.load_state_dict(copy.deepcopy(pair(saved, device).state_dict()))
    assert rates(loaded) == [float(saved)] * 2
    for group in loaded.param_groups:
        assert (group["lr"] is rate) == rate.is_floating_point()
        assert group["lr"].shape == ()
    assert [group["lr"].item() for group in before["param_groups"]] == [present.item()] * 2


def test_rate_that_is_a_number_is_replaced_by_loading(device):
    optimizer = pair(0.5, device)
    optimizer.load_state_dict(pair(torch.tensor(0.25, device=device), device).state_dict())
    assert rates(optimizer) == [0.25] * 2


def test_different_rates_load_into_groups_that_shared_one_rate_tensor(device):
    saved, loaded = pair(torch.tensor(1e-3), device), pair(torch.tensor(0.25), device)
    saved.param_groups[0]["lr"] = torch.tensor(0.5)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert rates(loaded) == pytest.approx([0.5, 1e-3])
    loaded.param_groups[0]["lr"].fill_(0.125)
    assert rates(loaded) == pytest.approx([0.125, 1e-3])


def test_masters_of_other_parameters_are_refused_and_leave_the_loaded_weights(device):
    params = [Parameter(torch.randn(6, 6, device=device).bfloat16()) for _ in range(2)]
    optimizer = trained(ampfuse.AdamW, params, range(3))
    state = optimizer.state_dict()
    swapped = ampfuse.AdamW(params[::-1])
    before = copies(params, torch.bfloat16)
    message = "the master of parameter 0 is the value of parameter 1, and that of parameter 1"
    with pytest.raises(ValueError, match=message):
        swapped.load_state_dict(state)
    assert_same_bits(params, before)
    swapped = ampfuse.AdamW([Parameter(torch.randn_like(param)) for param in params])
    swapped.load_state_dict(state)  # of a model that was not loaded

    copied = ampfuse.AdamW(params)  # the first layer was copied to the second one since
    with torch.no_grad():
        params[1].copy_(params[0])
        params[0].normal_()
    copied.load_state_dict(state)
    assert_same_bits(params, before)
