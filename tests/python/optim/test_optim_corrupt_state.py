"""Damaged state dicts: a load takes over all of one or raises and changes nothing."""

import copy
import random
from collections.abc import Sequence

import ampfuse
import numpy
import pytest
import torch
from optim_models import assert_same_bits, clones, feed, parameters, train, trained
from torch.nn import Parameter

CONFIGURATIONS = {
    "float32": (torch.float32, {}),
    "float32 amsgrad": (torch.float32, {"amsgrad": True}),
    "masters": (torch.bfloat16, {}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder"}),
    "bfloat16 moments": (torch.float16, {"state_dtype": torch.bfloat16}),
    "no masters": (torch.bfloat16, {"master_weights": False, "amsgrad": True}),
}
EVERY_CONFIGURATION = pytest.mark.parametrize(
    ("dtype", "options"), CONFIGURATIONS.values(), ids=list(CONFIGURATIONS)
)


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


def picture(optimizer):
    """Return everything of an optimizer that loading may change."""
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = [dict(optimizer.state.get(param, {})) for param in params]
    tensors = [(state, {name: id(value) for name, value in state.items()}) for state in state]
    values = [clones(v for v in s.values() if isinstance(v, torch.Tensor)) for s in state]
    return copy.deepcopy(groups), tensors, values, clones(params)


def assert_unchanged(optimizer, before):
    groups, tensors, values, params = picture(optimizer)
    assert groups == before[0]
    assert [ids for _, ids in tensors] == [ids for _, ids in before[1]]
    for now, then in zip(values, before[2], strict=True):
        assert_same_bits(now, then)
    assert_same_bits(params, before[3])


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


@EVERY_CONFIGURATION
@pytest.mark.parametrize("kind", JUNK)
@pytest.mark.parametrize(
    "name", ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param", "whole state"]
)
def test_damaged_state_entry_is_refused_before_anything_is_loaded(dtype, options, kind, name):
    params = parameters(torch.device("cpu"), dtype)
    optimizer = trained(lambda p: ampfuse.AdamW(p, **options), params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    last = max(saved["state"])
    if name == "whole state":
        put(saved["state"], last, JUNK[kind] and (lambda _: JUNK[kind](torch.ones(2, 3))))
    elif name in saved["state"][last]:
        put(saved["state"][last], name, JUNK[kind])
    else:
        pytest.skip("these have none")
    train(optimizer, params, range(2, 4))

    error = load_damaged(optimizer, params, saved)

    may_be_missing = ("max_exp_avg_sq", "master_param", "whole state")
    if kind == "nothing":
        assert (error is None) == (name in may_be_missing)
    elif kind == "NaN":
        assert (error is None) == (name not in ("step", "whole state"))
    elif name == "step" and kind in ("a number", "integers", "bools"):
        assert error is None
    else:
        assert error is not None
        assert "loaded state dict" in str(error)


@pytest.mark.parametrize("saved_by", [ampfuse.AdamW, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, "state: expected a dict, got NoneType"),
        ([1.0], "state: expected a dict, got list"),
        ({0: 5}, "parameter 0: expected a dict, got int"),
    ],
)
def test_state_that_is_not_a_dict_is_refused_with_its_type(saved_by, state, words):
    params = parameters(torch.device("cpu"), torch.bfloat16)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    saved = saved_by(params).state_dict() | {"state": state}

    error = load_damaged(optimizer, params, saved)

    assert isinstance(error, TypeError)
    assert f"loaded state dict: {words}" in str(error)


@pytest.mark.parametrize("value", ["0.9", None, [0.9], {"a": 1}, numpy.ones(3), torch.ones(2)])
@pytest.mark.parametrize(
    "name",
    [
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "maximize",
        "decoupled_weight_decay",
        "max_grad_norm",
        "write_back_grads",
    ],
)
def test_damaged_group_option_is_refused_before_anything_is_loaded(name, value):
    params = parameters(torch.device("cpu"), torch.bfloat16)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, range(2, 4))
    saved["param_groups"][0][name] = value

    error = load_damaged(optimizer, params, saved)

    is_fine = name == "max_grad_norm" and value is None
    assert (error is None) == is_fine
    assert is_fine or name in str(error)


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
def test_group_that_lacks_an_option_is_refused_before_anything_is_loaded(name):
    params = parameters(torch.device("cpu"), torch.bfloat16)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, range(2, 4))
    del saved["param_groups"][0][name]

    error = load_damaged(optimizer, params, saved)

    assert isinstance(error, KeyError)
    assert f"group 0 lacks {name}: expected lr, betas, eps and weight_decay" in str(error)


class ListConfig(Sequence):
    """A sequence that is no `list`, as some configuration libraries have."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.mark.parametrize("betas", [[0.9, 0.95], ListConfig(0.9, 0.95), numpy.array([0.9, 0.95])])
@pytest.mark.parametrize("flag", [True, 1, numpy.bool_(True)])
def test_list_like_betas_and_bool_like_flags_are_accepted_and_saved(betas, flag, tmp_path):
    params, others = (parameters(torch.device("cpu"), torch.bfloat16) for _ in range(2))

    optimizer = trained(lambda p: ampfuse.AdamW(p, betas=betas, amsgrad=flag), params, range(3))

    plain = trained(lambda p: ampfuse.AdamW(p, betas=(0.9, 0.95), amsgrad=True), others, range(3))
    assert_same_bits(params, others)
    assert optimizer.param_groups[0]["amsgrad"] is True
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    plain.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))


@pytest.mark.parametrize("step", [-5.0, torch.nan, torch.inf])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_negative_or_non_finite_step_counter_is_refused(step, as_tensor):
    params = parameters(torch.device("cpu"))
    optimizer = trained(ampfuse.AdamW, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = torch.tensor(float(step)) if as_tensor else step

    error = load_damaged(optimizer, params, saved)

    assert "step of parameter 0: expected a finite number, at least 0" in str(error)


def test_programs_own_state_entry_may_change_type_while_graphs_hold_the_state():
    params = parameters(torch.device("cpu"))
    optimizer = trained(ampfuse.AdamW, params, range(2))
    optimizer._is_in_graphs = True
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in (torch.ones(3), 3):
        saved["state"][0]["note"] = entry

        optimizer.load_state_dict(saved)

        kept = optimizer.state[params[0]]["note"]
        assert type(kept) is type(entry)
        assert torch.equal(torch.as_tensor(kept), torch.as_tensor(entry))


def test_masters_are_synced_although_a_loaded_state_belongs_to_no_parameter():
    params = parameters(torch.device("cpu"), torch.bfloat16)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][77] = saved["state"][0]
    optimizer.load_state_dict(saved)

    optimizer.sync_masters_from_model()

    assert_same_bits(optimizer.master_params(), [param.float() for param in params])


@EVERY_CONFIGURATION
@pytest.mark.parametrize("in_graphs", [False, True])
def test_randomly_damaged_state_dict_loads_completely_or_not_at_all(dtype, options, in_graphs):
    """Load 170 dictionaries in each case; the values of an accepted one stay for the next load."""
    rng = random.Random(0)
    params = parameters(torch.device("cpu"), dtype)
    optimizer = trained(lambda p: ampfuse.AdamW(p, **options), params, range(2))
    optimizer._is_in_graphs = in_graphs
    good = copy.deepcopy(optimizer.state_dict())
    refused = 0
    for _ in range(170):
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
    params = parameters(torch.device("cpu"), torch.bfloat16)
    saved = copy.deepcopy(trained(ampfuse.AdamW, params, range(2)).state_dict())
    saved["state"][4]["exp_avg"] = None
    others = parameters(torch.device("cpu"), torch.bfloat16)
    optimizer = ampfuse.AdamW(others)

    with pytest.raises(TypeError, match="exp_avg of parameter 4: expected a tensor, got NoneType"):
        optimizer.load_state_dict(saved)

    assert not optimizer.state
    feed(others, 0)
    optimizer.step()
    fresh = parameters(torch.device("cpu"), torch.bfloat16)
    trained(ampfuse.AdamW, fresh, range(1))
    assert_same_bits(others, fresh)


def test_state_of_sgd_is_refused_with_the_missing_and_found_entries():
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    sgd = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    sgd.step()
    saved = sgd.state_dict()
    saved["param_groups"][0] |= {"betas": (0.9, 0.999), "eps": 1e-8}

    with pytest.raises(KeyError, match=r"exp_avg and exp_avg_sq, got .*momentum_buffer"):
        ampfuse.AdamW([param]).load_state_dict(saved)


def test_step_counter_of_another_type_is_converted_at_the_next_step(device):
    param = Parameter(torch.ones(3, device=device))
    optimizer = ampfuse.AdamW([param])
    for step in (torch.tensor(5, dtype=torch.int64), 7, torch.tensor(9.0, dtype=torch.float64)):
        param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.state[param]["step"] = step
        optimizer.step()
        assert optimizer.state[param]["step"] == int(step) + 1
        assert optimizer.state[param]["step"].dtype == torch.float32


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
@pytest.mark.parametrize("value", [2.0, [1.0]])
def test_grad_scale_or_found_inf_that_is_not_a_tensor_is_refused_by_name(name, value):
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = ampfuse.AdamW([param])
    setattr(optimizer, name, value)

    with pytest.raises(TypeError, match=f"{name}: expected None or a tensor, got"):
        optimizer.step()


def test_step_with_remainders_is_refused_after_a_cast_to_fp16():
    model = torch.nn.Linear(3, 3, dtype=torch.bfloat16)
    optimizer = ampfuse.AdamW(model.parameters(), master_weights="remainder")
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    model.half()

    with pytest.raises(ValueError, match="parameter 0 of group 0 is float16, and only bfloat16"):
        optimizer.step()
