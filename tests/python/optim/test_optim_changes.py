"""Changes to a running optimizer, its state or its model, and steps that are refused."""

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
    feed,
    parameters,
    state_values,
    train,
    trained,
)
from torch.nn import Parameter


def linear(device, dtype=torch.float32, **options):
    """Return a model, its parameters and its optimizer after a step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, device=device, dtype=dtype)
    params = list(model.parameters())
    return model, params, trained(ampfuse.AdamW, params, [0], **options)


@pytest.mark.parametrize("half", DTYPES_16_BIT)
def test_model_cast_to_16_bits_gets_masters_at_its_next_step(device, half):
    model, params, optimizer = linear(device)
    model.to(half)
    train(optimizer, params, [1])
    assert {state["master_param"].dtype for state in optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("before", [True, "remainder"])
def test_model_cast_to_float32_drops_masters_and_takes_over_float32_ones(device, before):
    model, params, optimizer = linear(device, torch.bfloat16, master_weights=before)
    masters = clones(optimizer.master_params())
    model.float()
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, params, [1])
    assert all("master_param" not in state for state in optimizer.state.values())
    if before is True:  # a remainder is worthless without the 16 bits of its bfloat16 parameter
        assert_same_bits(params, masters)


def test_step_with_remainders_is_refused_after_a_cast_to_fp16(device):
    model, params, optimizer = linear(device, torch.bfloat16, master_weights="remainder")
    model.half()
    with pytest.raises(ValueError, match="parameter 0 of group 0 is float16, and only bfloat16"):
        train(optimizer, params, [1])


@pytest.mark.parametrize(
    ("before", "after"),
    [(True, "remainder"), ("remainder", True), (True, False), (False, True)],
)
def test_masters_are_converted_made_or_dropped_when_master_weights_changes(device, before, after):
    _, params, optimizer = linear(device, torch.bfloat16, lr=1e-4, master_weights=before)
    masters = [master.detach().float().clone() for master in optimizer.master_params()]
    optimizer.param_groups[0].update(master_weights=after, lr=0.0)
    train(optimizer, params, [1])
    expected = {"remainder": torch.int16, True: torch.float32}.get(after)
    for state in optimizer.state.values():
        assert getattr(state.get("master_param"), "dtype", None) == expected
    if after is not False:
        assert_same_bits(optimizer.master_params(), masters)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_moments_are_converted_when_state_dtype_changes(device, dtype):
    _, params, optimizer = linear(device)
    optimizer.param_groups[0]["state_dtype"] = dtype
    train(optimizer, params, [1])
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def test_amsgrad_switched_on_in_mid_run_starts_from_the_second_moments(device):
    _, params, optimizer = linear(device)
    optimizer.param_groups[0]["amsgrad"] = True
    train(optimizer, params, [1])
    for state in optimizer.state.values():
        assert_same_bits([state["max_exp_avg_sq"]], [state["exp_avg_sq"]])


# --- parameters or state are replaced -----------------------------------------------------------


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


# The moments of each dtype are replaced alike; 16-bit models have masters, too.
@pytest.mark.parametrize(
    ("dtype", "moved"),
    [
        *((torch.bfloat16, moved) for moved in ("values", "dictionaries", "everything")),
        (torch.float32, "values"),
    ],
)
def test_new_tensors_in_the_state_are_used_from_then_on(device, dtype, moved):
    """Replace state as programs do that keep it on the host between steps."""
    params, unbroken = parameters(device, dtype), parameters(device, dtype)
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
    expected = trained(ampfuse.AdamW, unbroken, range(4))
    assert_same_bits(params, unbroken)
    assert_same_state(optimizer, state_values(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", ["all", "one parameter", "one tensor of each"])
def test_cleared_state_is_created_again_at_the_next_step(device, dtype, of):
    params = parameters(device, dtype)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    others = copies(params)
    fresh = ampfuse.AdamW(others)
    if of != "all":
        fresh.load_state_dict(optimizer.state_dict())

    if of == "all":
        optimizer.state.clear()
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


def test_step_counter_of_another_type_is_converted_at_the_next_step(device):
    params = [Parameter(torch.ones(3, device=device))]
    optimizer = ampfuse.AdamW(params)
    for step in (torch.tensor(5, dtype=torch.int64), 7, torch.tensor(9.0, dtype=torch.float64)):
        train(optimizer, params, [0])
        optimizer.state[params[0]]["step"] = step
        train(optimizer, params, [1])
        assert optimizer.state[params[0]]["step"] == int(step) + 1
        assert optimizer.state[params[0]]["step"].dtype == torch.float32


# --- steps that are refused, or that start in an unusual way ------------------------------------


def set_betas(optimizer, param):
    optimizer.param_groups[1]["betas"] = (0.9, 1.5)


def set_nan_weight_decay(optimizer, param):
    optimizer.param_groups[1]["weight_decay"] = float("nan")


def set_double_gradient(optimizer, param):
    param.grad = None
    param.grad_dtype = None
    param.grad = torch.ones(3, dtype=torch.float64, device=param.device)


def set_sparse_gradient(optimizer, param):
    param.grad = torch.ones(3, device=param.device).to_sparse()


def set_negative_limit(optimizer, param):
    optimizer.max_grad_norm = -1.0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (set_betas, "Invalid beta parameter at index 1: 1.5"),
        (set_nan_weight_decay, "Invalid weight_decay value: nan"),
        (set_double_gradient, r"got float64.* \(parameter 1 of group 1, torch.float32 of shape"),
        (set_sparse_gradient, "Adam does not support sparse gradients, please consider SparseAdam"),
        (set_negative_limit, "max_grad_norm: expected None or at least 0"),
    ],
)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_step_refused_for_its_second_group_writes_nothing(device, spoil, words, clip):
    for steps_before in (0, 1):
        params = [Parameter(torch.ones(3, device=device)) for _ in range(3)]
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        optimizer = ampfuse.AdamW(groups, max_grad_norm=clip)
        feed(params[::2], 0)  # the first parameter of the second group has no gradient
        for _ in range(steps_before):
            optimizer.step()
        before, states = clones(params), state_values(optimizer)
        spoil(optimizer, params[2])

        with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
            optimizer.step()

        assert_same_bits(params, before)
        assert_same_state(optimizer, states)
        assert len(optimizer.state) == 2 * steps_before


def test_refused_first_step_of_a_single_group_leaves_no_state(device):
    param = Parameter(torch.ones(3, device=device, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    param.grad.data = torch.ones(3, device=device, dtype=torch.float64)
    optimizer = ampfuse.AdamW([param])
    with pytest.raises(TypeError, match="got float64"):
        optimizer.step()
    assert not optimizer.state


def test_first_step_during_graph_capture_is_refused(device, monkeypatch):
    params = parameters(device)
    optimizer = ampfuse.AdamW(params)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="take one step before"):
        train(optimizer, params, [0])
    assert not optimizer.state


def test_parameters_created_in_inference_mode_are_stepped(device):
    with torch.inference_mode():
        param = Parameter(torch.ones(2, dtype=torch.bfloat16, device=device))
        param.grad = torch.ones_like(param)
        optimizer = ampfuse.AdamW([param], lr=0.25, weight_decay=0.0)
        optimizer.step()
    assert param.tolist() == [0.75, 0.75]
