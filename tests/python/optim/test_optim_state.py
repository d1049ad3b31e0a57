"""State dicts of ampfuse.Adam and AdamW: saving, loading, exchange with torch, and copies."""

import copy
import io
import pickle

import ampfuse
import pytest
import torch
from optim_models import (
    BOTH,
    BOTH_AND_TORCHS,
    DTYPES_16_BIT,
    assert_near,
    assert_same_bits,
    assert_same_state,
    copies,
    parameters,
    state_values,
    train,
    trained,
)

# A model's dtype and an optimizer's options for each way to keep state.
KINDS = {
    "float32": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True}),
    "fp16": (torch.float16, {}),
    "bf16": (torch.bfloat16, {}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder"}),
    "no masters": (torch.bfloat16, {"master_weights": False}),
    "bf16 moments": (torch.bfloat16, {"state_dtype": torch.bfloat16, "amsgrad": True}),
}
EVERY_KIND = pytest.mark.parametrize(("dtype", "options"), KINDS.values(), ids=KINDS)


def through_a_file(state_dict):
    """Return the state dict as `torch.load` reads it from what `torch.save` wrote."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_continue_alike(optimizer, params, other, other_params):
    """Take some more steps with both and compare all bits."""
    for o, p in ((optimizer, params), (other, other_params)):
        train(o, p, range(50, 53))
    assert_same_bits(params, other_params)
    assert_same_state(optimizer, state_values(other))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("float32", {}),
        ("amsgrad", {"max_exp_avg_sq": torch.float32}),
        ("bf16", {"master_param": torch.float32}),
        ("remainders", {"master_param": torch.float32}),
        ("no masters", {}),
    ],
)
def test_state_dict_has_torchs_keys_and_the_masters(device, kind, expected):
    dtype, options = KINDS[kind]
    params = parameters(device, dtype)

    state_dict = trained(lambda p: ampfuse.AdamW(p, **options), params, range(2)).state_dict()

    expected = {name: torch.float32 for name in ("step", "exp_avg", "exp_avg_sq")} | expected
    for index, param in enumerate(params):
        state = state_dict["state"][index]
        assert {name: value.dtype for name, value in state.items()} == expected
        assert state.pop("step").item() == 2
        assert {value.shape for value in state.values()} == {param.shape}
    assert state_dict["param_groups"][0]["params"] == [0, 1, 2, 3, 4]


@BOTH
@EVERY_KIND
def test_optimizer_loaded_from_a_file_continues_to_the_same_bits(device, cls, dtype, options):
    params = parameters(device, dtype)
    optimizer = trained(lambda p: cls(p, lr=0.01, **options), params, range(3))

    loaded = copies(params)
    other = cls(loaded, **options)
    other.load_state_dict(through_a_file(optimizer.state_dict()))

    assert other.param_groups[0]["lr"] == 0.01
    assert_continue_alike(optimizer, params, other, loaded)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@EVERY_KIND
def test_loading_writes_into_state_tensors_only_if_a_graph_uses_them(
    device, is_compiled, dtype, options
):
    params, others = parameters(device, dtype), parameters(device, dtype, seed=7)
    saved = trained(lambda p: ampfuse.AdamW(p, **options), params, range(3))
    optimizer = trained(lambda p: ampfuse.AdamW(p, **options), others, range(1))
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
    assert_same_state(optimizer, state_values(saved))


@EVERY_KIND
def test_loaded_state_is_not_shared_with_the_saved_optimizer(device, dtype, options):
    params, others = parameters(device, dtype), parameters(device, dtype)
    saved = trained(lambda p: ampfuse.AdamW(p, **options), params, range(2))
    expected = state_values(saved)

    optimizer = ampfuse.AdamW(others, **options)
    optimizer.load_state_dict(saved.state_dict())
    train(optimizer, others, range(2))

    assert_same_state(saved, expected)


@BOTH
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@EVERY_KIND
def test_copied_optimizers_continue_to_the_same_bits(device, cls, copied, dtype, options):
    params = parameters(device, dtype)
    optimizer = trained(lambda p: cls(p, max_grad_norm=1.0, **options), params, range(3))

    other, others = copied((optimizer, params))

    assert type(other) is cls
    assert other.max_grad_norm == 1.0
    assert all(a is b for a, b in zip(other.param_groups[0]["params"], others, strict=True))
    assert_continue_alike(optimizer, params, other, others)
    assert torch.equal(other.grad_norm, optimizer.grad_norm)


@BOTH_AND_TORCHS
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "weight_decay": 0.1}])
@pytest.mark.parametrize("fused", [True, False])
def test_state_moves_from_torch_to_ampfuse_and_back_in_mid_run(
    device, cls, of_torch, options, fused
):
    params = parameters(device)
    unbroken = copies(params)
    trained(lambda p: of_torch(p, **options), unbroken, range(9))

    first = trained(lambda p: of_torch(p, fused=fused, **options), params, range(3))
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
    saved = trained(
        lambda p: torch.optim.Adam(p, lr=0.5, betas=(0.5, 0.6), eps=1e-3, maximize=True),
        parameters(device, torch.bfloat16),
        range(2),
    )
    params = parameters(device, torch.bfloat16)
    optimizer = ampfuse.Adam(params, master_weights="remainder", state_dtype=torch.bfloat16)

    optimizer.load_state_dict(saved.state_dict())
    train(optimizer, params, range(1))

    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.5, 0.6), 1e-3)
    assert group["maximize"] is True
    assert "master_weights" not in group
    assert optimizer.state[params[0]]["master_param"].dtype == torch.int16
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.bfloat16


def test_options_that_torch_lacks_survive_loading_a_checkpoint_of_torch(device):
    saved = torch.optim.AdamW(parameters(device)).state_dict()
    group = {"params": parameters(device), "max_grad_norm": 3.0, "write_back_grads": True}
    optimizer = ampfuse.AdamW([group], max_grad_norm=1.0)

    optimizer.load_state_dict(saved)

    assert optimizer.max_grad_norm == 1.0
    assert optimizer.param_groups[0]["max_grad_norm"] == 3.0
    assert optimizer.param_groups[0]["write_back_grads"] is True


@BOTH
def test_loading_and_copying_add_no_options(device, cls):
    optimizer = trained(cls, parameters(device), range(1))
    expected = optimizer.state_dict()["param_groups"]

    copied = copy.deepcopy(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())

    assert copied.state_dict()["param_groups"] == expected
    assert optimizer.state_dict()["param_groups"] == expected


def test_adamw_keeps_decoupled_weight_decay_after_loading_state_of_adam(device):
    params = parameters(device)
    optimizer = ampfuse.AdamW(params)

    optimizer.load_state_dict(ampfuse.Adam(parameters(device), weight_decay=0.5).state_dict())

    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_masters_are_created_at_the_step_after_a_checkpoint_of_torch(device, dtype):
    params = parameters(device, dtype)
    saved = trained(torch.optim.AdamW, params, range(2))
    wide = copies(params, torch.float32)
    optimizer, exact = ampfuse.AdamW(params), ampfuse.AdamW(wide)

    optimizer.load_state_dict(saved.state_dict())
    exact.load_state_dict(saved.state_dict())
    assert all("master_param" not in state for state in optimizer.state.values())
    train(optimizer, params, range(2, 4))
    train(exact, wide, range(2, 4))

    assert_same_bits(optimizer.master_params(), wide)
    assert optimizer.state[params[0]]["step"] == 4


@pytest.mark.parametrize(("saved_as", "loaded_as"), [(True, "remainder"), ("remainder", True)])
def test_masters_and_remainders_load_into_each_other_exactly(device, saved_as, loaded_as):
    params = parameters(device, torch.bfloat16)
    saved = trained(lambda p: ampfuse.AdamW(p, master_weights=saved_as), params, range(3))
    others = copies(params)  # the model is loaded, too
    optimizer = ampfuse.AdamW(others, master_weights=loaded_as)

    optimizer.load_state_dict(through_a_file(saved.state_dict()))

    assert_same_bits(optimizer.master_params(), saved.master_params())
    train(saved, params, range(3, 6))
    train(optimizer, others, range(3, 6))
    assert_same_bits(optimizer.master_params(), saved.master_params())
    assert {state["master_param"].dtype for state in optimizer.state.values()} == {
        torch.int16 if loaded_as == "remainder" else torch.float32
    }


def test_loaded_masters_are_dropped_if_none_are_wanted(device):
    params = parameters(device, torch.bfloat16)
    saved = trained(ampfuse.AdamW, params, range(2)).state_dict()

    for dtype in (torch.bfloat16, torch.float32):
        optimizer = ampfuse.AdamW(parameters(device, dtype), master_weights=False)
        optimizer.load_state_dict(saved)
        assert all("master_param" not in state for state in optimizer.state.values())


def test_loaded_moments_are_converted_to_the_state_dtype(device):
    params = parameters(device)
    saved = trained(ampfuse.AdamW, params, range(2))
    optimizer = ampfuse.AdamW(copies(params), state_dtype=torch.bfloat16)

    optimizer.load_state_dict(saved.state_dict())

    for state, other in zip(state_values(optimizer), state_values(saved), strict=True):
        assert_same_bits([state["exp_avg"]], [other["exp_avg"].bfloat16()])
        assert_same_bits([state["step"]], [other["step"]])


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


@pytest.mark.parametrize(
    ("groups", "words"),
    [(2, "different number of parameter groups"), (1, "doesn't match the size of optimizer's")],
)
def test_checkpoint_of_another_model_is_refused_and_nothing_is_changed(device, groups, words):
    params = parameters(device)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    before = state_values(optimizer)
    bad = ampfuse.AdamW([{"params": [torch.ones(3, device=device)]} for _ in range(groups)])

    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(bad.state_dict())

    assert_same_state(optimizer, before)
    train(optimizer, params, range(2, 3))


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


@pytest.mark.parametrize("missing", ["step", "exp_avg", "exp_avg_sq"])
def test_state_that_lacks_an_entry_is_refused_and_nothing_is_loaded(device, missing):
    optimizer = trained(ampfuse.AdamW, parameters(device), range(2))
    state = optimizer.state_dict()
    before = state_values(optimizer)
    truncated = {**state, "state": {k: dict(v) for k, v in state["state"].items()}}
    del truncated["state"][1][missing]

    with pytest.raises(KeyError, match="parameter 1: expected Adam's step, exp_avg"):
        optimizer.load_state_dict(truncated)

    assert_same_state(optimizer, before)
