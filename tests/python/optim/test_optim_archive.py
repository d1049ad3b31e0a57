"""Optimizer files shared with C++ programs: training continues in the other language."""

import ampfuse
import ampfuse_cpp
import pytest
import torch
from ampfuse import load_cpp_optimizer_state, save_cpp_optimizer_state
from optim_models import (
    DTYPES_16_BIT,
    assert_same_bits,
    assert_same_state,
    copies,
    parameters,
    state_values,
    train,
    trained,
)
from torch.nn import Parameter


def round_trip(state_dict, folder):
    save_cpp_optimizer_state(state_dict, folder / "optimizer.pt")
    return load_cpp_optimizer_state(folder / "optimizer.pt")


@pytest.mark.parametrize(
    ("cls", "dtype", "options"),
    [
        *((ampfuse.AdamW, dtype, {}) for dtype in (torch.float32, *DTYPES_16_BIT, torch.float64)),
        (ampfuse.AdamW, torch.bfloat16, {"amsgrad": True, "state_dtype": torch.bfloat16}),
        (torch.optim.AdamW, torch.float32, {"amsgrad": True}),
    ],
)
def test_optimizer_state_survives_a_cpp_file_bit_by_bit(device, cls, dtype, options, tmp_path):
    params = parameters(device, dtype)
    optimizer = trained(cls, params, range(3), **options)
    others = copies(params)
    other = cls(others, **options)
    with torch.device("meta"):
        loaded = round_trip(optimizer.state_dict(), tmp_path)
    states = loaded["state"].values()
    assert {tensor.device.type for state in states for tensor in state.values()} == {"cpu"}
    other.load_state_dict(loaded)
    assert_same_state(other, state_values(optimizer))
    train(other, others, [3])


def test_group_options_survive_a_cpp_file(tmp_path):
    given = {
        "lr": 0.5,
        "betas": (0.25, 0.125),
        "eps": 1e-3,
        "weight_decay": 0.0625,
        "amsgrad": True,
        "maximize": True,
        "decoupled_weight_decay": True,
        "max_grad_norm": 2.0,
        "write_back_grads": True,
    }
    groups = [{"params": [torch.zeros(1)], **given}, {"params": [torch.zeros(2)]}]
    optimizer = ampfuse.Adam(groups, lr=torch.tensor(0.75), weight_decay=0)

    first, second = round_trip(optimizer.state_dict(), tmp_path)["param_groups"]

    assert first == {"params": [0], **given}
    assert (second["lr"], second["weight_decay"]) == (0.75, 0)
    assert "max_grad_norm" not in second


def test_parameters_never_stepped_have_no_state_in_a_cpp_file(tmp_path):
    params = [Parameter(torch.zeros(2)), Parameter(torch.zeros(3))]
    params[1].grad = torch.ones(3)
    optimizer = ampfuse.AdamW(params)
    optimizer.step()
    assert round_trip(optimizer.state_dict(), tmp_path)["state"].keys() == {1}


# --- with training in C++ -------------------------------------------------------------------------


def numbers(size, step):
    """Return the same numbers as `numbers` in C++."""
    return ((torch.arange(size) * 37 + step * 11) % 101 - 50).double() / 64


def take_steps(folder, first, last):
    """Take steps first … last as ampfuse_cpp.take_steps does, from and to files in the folder."""
    if first == 1:
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
        params = [Parameter(numbers(1000, 0).to(dtype)) for dtype in dtypes]
    else:
        params = [Parameter(param.detach()) for param in torch.load(folder / "params.pt")]
    of_group = {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "amsgrad": False,
        "max_grad_norm": 0.5,
        "master_weights": "remainder",
    }
    groups = [{"params": params[:2]}, {"params": params[2:], **of_group}]
    optimizer = ampfuse.AdamW(groups, lr=1e-2, amsgrad=True, max_grad_norm=1.0)
    if first > 1:
        optimizer.load_state_dict(load_cpp_optimizer_state(folder / "optimizer.pt"))
    for step in range(first, last + 1):
        for param in params:
            param.grad = numbers(param.numel(), step).to(param.dtype)
        optimizer.step()
    torch.save(tuple(param.detach() for param in params), folder / "params.pt")
    save_cpp_optimizer_state(optimizer.state_dict(), folder / "optimizer.pt")


def results(folder):
    """Return all parameters and state tensors that are saved in the folder."""
    saved = load_cpp_optimizer_state(folder / "optimizer.pt")
    state = [tensor for of_param in saved["state"].values() for tensor in of_param.values()]
    return [*torch.load(folder / "params.pt"), *state]


def take_steps_in_cpp(folder, first, last):
    ampfuse_cpp.take_steps(str(folder), first, last)


@pytest.mark.parametrize("changes", ["C++ to Python", "Python to C++"])
def test_training_continues_in_the_other_language_bit_by_bit(changes, tmp_path):
    languages = [take_steps_in_cpp, take_steps]
    begin, go_on = languages if changes == "C++ to Python" else languages[::-1]
    stayed, changed = tmp_path / "stayed", tmp_path / "changed"
    for folder, second in ((stayed, begin), (changed, go_on)):
        folder.mkdir()
        begin(folder, 1, 5)
        second(folder, 6, 10)

    assert_same_bits(results(changed), results(stayed))
    unset = {"max_grad_norm": None, "write_back_grads": False}  # only C++ writes these
    saved = [load_cpp_optimizer_state(folder / "optimizer.pt") for folder in (stayed, changed)]
    options = [[unset | group for group in one["param_groups"]] for one in saved]
    assert options[0] == options[1]
    assert [state["step"].item() for state in saved[1]["state"].values()] == [10, 10, 10]


def test_state_saved_by_torchs_cpp_optimizer_is_read(tmp_path):
    take_steps_in_cpp(tmp_path, 1, 1)
    params = [Parameter(param.detach()) for param in torch.load(tmp_path / "params.pt")]
    for param in params:
        param.grad = numbers(param.numel(), 1).to(param.dtype)
    optimizer = torch.optim.AdamW(params, lr=0.25, amsgrad=True)
    optimizer.step()
    read = load_cpp_optimizer_state(tmp_path / "torch_optimizer.pt")
    torch.testing.assert_close(read["state"], optimizer.state_dict()["state"])
    (group,) = read["param_groups"]
    assert group.items() <= optimizer.state_dict()["param_groups"][0].items()
