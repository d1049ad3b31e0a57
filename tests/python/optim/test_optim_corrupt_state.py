"""Damaged state dicts: a load takes over all of one or raises and changes nothing."""

import copy
import random

import ampfuse
import numpy
import pytest
import torch
from optim_models import EVERY_KIND, KINDS, assert_same_bits, clones, parameters, train, trained
from torch.nn import Parameter

CPU = torch.device("cpu")


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


# Each function makes a damaged entry from a good one; for some entries the result is still valid.
# If the function is None, the entry is deleted.
JUNK = {
    "None": lambda value: None,
    "a string": lambda value: "0.9",
    "a list": lambda value: [1.0, 2.0],
    "a dict": lambda value: {"a": 1},
    "a number": lambda value: 3.5,
    "a bool": lambda value: True,
    "an array": lambda value: numpy.ones(3),
    "another shape": lambda value: torch.ones(7, 3),
    "no elements": lambda value: torch.ones(0),
    "a meta tensor": lambda value: torch.as_tensor(value).to("meta"),
    "a sparse tensor": lambda value: torch.ones(33, 5).to_sparse(),
    "integers": lambda value: torch.ones_like(torch.as_tensor(value), dtype=torch.int64),
    "bools": lambda value: torch.ones_like(torch.as_tensor(value), dtype=torch.bool),
    "complex numbers": lambda value: torch.as_tensor(value).to(torch.complex64),
    "quantized numbers": lambda value: torch.quantize_per_tensor(
        torch.as_tensor(value).float(), 0.1, 0, torch.quint8
    ),
    "freed memory": lambda value: freed(torch.as_tensor(value)),
    "a nested tensor": lambda value: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "NaN": lambda value: torch.full_like(torch.as_tensor(value, dtype=torch.float32), torch.nan),
    "nothing": None,
}
# All junk damages the state of one kind of optimizer. In the others the same checks meet entries of
# other names and dtypes, so three do: a wrong type, a wrong tensor and a missing entry.
DAMAGES = [
    (kind, junk)
    for kind in KINDS
    for junk in (JUNK if kind == "bf16" else ("None", "another shape", "nothing"))
]


def picture(optimizer):
    """Return everything of an optimizer that loading may change."""
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [dict(optimizer.state.get(param, {})) for param in params]
    objects = [{name: id(value) for name, value in state.items()} for state in states]
    tensors = [value for s in states for value in s.values() if isinstance(value, torch.Tensor)]
    # The states keep their tensors alive, so that no new tensor gets the id of one of them.
    return copy.deepcopy(groups), objects, clones([*tensors, *params]), states


def assert_unchanged(optimizer, before):
    groups, objects, values, _ = picture(optimizer)
    assert groups == before[0]
    assert objects == before[1]
    assert_same_bits(values, before[2])


def put(container, name, junk):
    if junk is None:
        del container[name]
    else:
        container[name] = junk(container[name])


def load_damaged(optimizer, params, saved):
    """Load and take a step. If loading raises, check that it changed nothing; return the error."""
    before = picture(optimizer)
    try:
        optimizer.load_state_dict(saved)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        assert_unchanged(optimizer, before)
        return error
    train(optimizer, params, [7])
    return None


def trained_and_saved(dtype=torch.bfloat16, **options):
    """Return parameters, their optimizer, and its state dict before two steps at another rate."""
    params = parameters(CPU, dtype)
    optimizer = trained(ampfuse.AdamW, params, range(2), **options)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    train(optimizer, params, range(2, 4))
    return params, optimizer, saved


def is_still_valid(name, junk):
    if junk == "nothing":
        return name in ("max_exp_avg_sq", "master_param", "ema_param", "whole state")
    if junk == "NaN":
        return name not in ("step", "whole state")
    return name == "step" and junk in ("a number", "integers", "bools")


@pytest.mark.parametrize(("kind", "junk"), DAMAGES)
def test_damaged_state_entry_is_refused_before_anything_is_loaded(kind, junk):
    dtype, options = KINDS[kind]
    params, optimizer, good = trained_and_saved(dtype, **options)
    last = max(good["state"])
    for name in (*good["state"][last], "whole state"):
        saved = copy.deepcopy(good)
        if name == "whole state":
            put(saved["state"], last, JUNK[junk] and (lambda _: JUNK[junk](torch.ones(2, 3))))
        else:
            put(saved["state"][last], name, JUNK[junk])

        error = load_damaged(optimizer, params, saved)

        assert (error is None) == is_still_valid(name, junk), f"{name}: {error}"
        if error is not None:
            is_of_state = name == "whole state" or junk == "nothing"
            where = f"parameter {last}" if is_of_state else f"{name} of parameter {last}"
            assert f"loaded state dict: {where}: expected" in str(error)
        if junk == "another shape" and name not in ("step", "whole state"):
            shape = "(1,)" if name.endswith("_units") else "(2, 3)"
            assert f"expected shape {shape}, got (7, 3)" in str(error)


@pytest.mark.parametrize("saved_by", [ampfuse.AdamW, torch.optim.AdamW])
def test_state_that_is_not_a_dict_is_refused_with_its_type(saved_by):
    params, optimizer, _ = trained_and_saved()
    for state, words in (
        (None, "state: expected a dict, got NoneType"),
        ([1.0], "state: expected a dict, got list"),
        ({0: 5}, "parameter 0: expected a dict, got int"),
    ):
        error = load_damaged(optimizer, params, saved_by(params).state_dict() | {"state": state})
        assert isinstance(error, TypeError)
        assert f"loaded state dict: {words}" in str(error)


def test_state_of_another_model_is_refused():
    params, optimizer, _ = trained_and_saved()
    for groups, words in (
        (2, "different number of parameter groups"),
        (1, "doesn't match the size of optimizer's"),
    ):
        other = ampfuse.AdamW([{"params": [torch.ones(3)]} for _ in range(groups)])
        assert words in str(load_damaged(optimizer, params, other.state_dict()))
    train(optimizer, params, [4])


def test_bare_remainders_are_refused_as_masters():
    params, optimizer, saved = trained_and_saved(master_weights="remainder")
    saved["state"][0]["master_param"] = optimizer.state[params[0]]["master_param"].clone()
    error = load_damaged(optimizer, params, saved)
    assert "master_param of parameter 0: expected a floating-point tensor" in str(error)


@pytest.mark.parametrize(
    "name",
    [
        *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
        *("max_grad_norm", "write_back_grads"),
    ],
)
def test_damaged_group_option_is_refused_before_anything_is_loaded(name):
    params, optimizer, saved = trained_and_saved()
    for value in ("0.9", None, [0.9], {"a": 1}, numpy.ones(3), torch.ones(2)):
        saved["param_groups"][0][name] = value
        error = load_damaged(optimizer, params, copy.deepcopy(saved))
        is_fine = name == "max_grad_norm" and value is None
        assert (error is None) == is_fine, f"{value}: {error}"
        assert is_fine or name in str(error)


def test_group_that_lacks_options_is_refused_and_a_complete_one_loads_afterwards():
    params, optimizer, good = trained_and_saved()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)  # which loading writes in place
    for names in (("lr",), ("betas",), ("eps",), ("weight_decay",), ("betas", "eps")):
        saved = copy.deepcopy(good)
        for name in names:
            del saved["param_groups"][0][name]
        error = load_damaged(optimizer, params, saved)
        assert isinstance(error, KeyError)
        expected = f"group 0 lacks {' and '.join(names)}: expected lr, betas, eps and weight_decay"
        assert expected in str(error)
    assert load_damaged(optimizer, params, good) is None


def test_negative_or_non_finite_step_counter_is_refused():
    params, optimizer, saved = trained_and_saved()
    for step in (-5.0, torch.nan, torch.inf):
        for value in (step, torch.tensor(step)):
            saved["state"][0]["step"] = value
            error = load_damaged(optimizer, params, saved)
            assert "step of parameter 0: expected a finite number, at least 0" in str(error)


def test_programs_own_state_entry_may_change_type_while_graphs_hold_the_state():
    params, optimizer, saved = trained_and_saved()
    optimizer._is_in_graphs = True
    for entry in (torch.ones(3), 3):
        saved["state"][0]["note"] = entry
        optimizer.load_state_dict(saved)
        kept = optimizer.state[params[0]]["note"]
        assert type(kept) is type(entry)
        assert torch.equal(torch.as_tensor(kept), torch.as_tensor(entry))


def test_masters_are_synced_although_a_loaded_state_belongs_to_no_parameter():
    params, optimizer, saved = trained_and_saved()
    saved["state"][77] = saved["state"][0]
    optimizer.load_state_dict(saved)
    params[0].detach().fill_(3.0)
    optimizer.sync_masters_from_model()
    assert (next(optimizer.master_params()) == 3.0).all()


@EVERY_KIND
def test_randomly_damaged_state_dict_loads_completely_or_not_at_all(dtype, options):
    """Load 200 dictionaries; the values of an accepted one stay for the next load."""
    rng = random.Random(0)
    params, optimizer, good = trained_and_saved(dtype, **options)
    refused = 0
    for number in range(200):
        optimizer._is_in_graphs = number % 2 == 1  # values are copied to the present tensors
        saved = {
            "state": {key: dict(state) for key, state in good["state"].items()},
            "param_groups": [dict(group) for group in good["param_groups"]],
        }
        for _ in range(rng.randint(1, 3)):
            key = rng.choice(list(saved["state"]))
            containers = [saved["state"], saved["param_groups"][0]]
            if isinstance(saved["state"][key], dict):
                containers += [saved["state"][key]] * 3
            container = rng.choice(containers)
            if not container:
                continue
            name = rng.choice(list(container))
            junk = rng.choice(list(JUNK.values()))
            try:
                put(container, name, junk)
            except (TypeError, ValueError, RuntimeError):
                continue  # this junk cannot be made from this value
        refused += load_damaged(optimizer, params, saved) is not None
    assert refused > 50
    optimizer.load_state_dict(good)
    train(optimizer, params, range(3))


class CountedList(list):
    """A list that counts how often it is iterated over."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_time_of_loading_grows_linearly_with_the_number_of_parameters():
    times = []
    for count in (2, 20):
        params = CountedList(Parameter(torch.ones(1)) for _ in range(count))
        optimizer = trained(ampfuse.AdamW, params, range(1))
        optimizer.param_groups[0]["params"] = params
        params.times = 0
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        times.append(params.times)
    assert times[0] == times[1]


def test_refused_load_leaves_a_new_optimizer_without_state():
    *_, saved = trained_and_saved()
    saved["state"][4]["exp_avg"] = None
    params = parameters(CPU, torch.bfloat16)
    optimizer = ampfuse.AdamW(params)
    error = load_damaged(optimizer, params, saved)
    assert "exp_avg of parameter 4: expected a tensor, got NoneType" in str(error)
    assert not optimizer.state


def test_state_of_sgd_is_refused_with_the_missing_and_found_entries():
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    sgd = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    sgd.step()
    saved = sgd.state_dict()
    saved["param_groups"][0] |= {"betas": (0.9, 0.999), "eps": 1e-8}
    with pytest.raises(KeyError, match=r"exp_avg and exp_avg_sq, got .*momentum_buffer"):
        ampfuse.AdamW([param]).load_state_dict(saved)
