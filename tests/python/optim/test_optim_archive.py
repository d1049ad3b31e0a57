"""Optimizer files shared with C++ programs: training continues in the other language."""

from collections.abc import Callable, Iterable
from pathlib import Path

import ampfuse
import pytest
import torch
from ampfuse import load_cpp_optimizer_state, save_cpp_optimizer_state
from optim_models import (
    assert_same_bits,
    assert_same_state,
    copies,
    parameters,
    state_values,
    trained,
)
from packaging_tools import ROOT, environment, run
from torch import Tensor
from torch.nn import Parameter

Program = Callable[[Path, int, int], None]


def round_trip(state_dict: dict, folder: Path) -> dict:
    save_cpp_optimizer_state(state_dict, folder / "optimizer.pt")
    return load_cpp_optimizer_state(folder / "optimizer.pt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "state_dtype": torch.bfloat16}])
def test_optimizer_state_survives_a_cpp_file_bit_by_bit(device, dtype, options, tmp_path):
    params = parameters(device, dtype)
    optimizer = trained(lambda params: ampfuse.AdamW(params, **options), params, range(3))
    others = copies(params)
    loaded = ampfuse.AdamW(others, **options)

    loaded.load_state_dict(round_trip(optimizer.state_dict(), tmp_path))

    assert_same_state(loaded, state_values(optimizer))


def test_loaded_state_is_on_the_cpu_whatever_the_default_device_is(tmp_path):
    optimizer = trained(ampfuse.AdamW, parameters(torch.device("cpu")), range(2))

    with torch.device("meta"):
        loaded = round_trip(optimizer.state_dict(), tmp_path)

    states = loaded["state"].values()
    assert {tensor.device.type for state in states for tensor in state.values()} == {"cpu"}


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


def test_state_of_torchs_optimizer_survives_a_cpp_file(tmp_path):
    params = parameters(torch.device("cpu"))
    theirs = trained(torch.optim.AdamW, params, range(3))
    others = copies(params)
    loaded = torch.optim.AdamW(others)

    loaded.load_state_dict(round_trip(theirs.state_dict(), tmp_path))

    assert_same_state(loaded, state_values(theirs))
    loaded.step()


# --- with a C++ program -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpp_program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Build optim_exchange, which takes steps first … last, from and to files in a folder."""
    source, build = ROOT / "tests" / "cpp" / "optim_exchange", tmp_path_factory.mktemp("build")
    prefix = f"-DCMAKE_PREFIX_PATH={ampfuse.cmake_prefix_path}"
    run("cmake", "-S", source, "-B", build, "-G", "Ninja", prefix)
    run("cmake", "--build", build)
    program = build / "optim_exchange"
    return lambda folder, first, last: run(
        program, folder, str(first), str(last), env=environment()
    )


def numbers(size: int, step: int) -> Tensor:
    """Return the same numbers as `numbers` in the C++ program."""
    return ((torch.arange(size) * 37 + step * 11) % 101 - 50).double() / 64


def python_program(folder: Path, first: int, last: int) -> None:
    """Take steps first … last as the C++ program does, from and to files in the folder."""
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


def results(folder: Path) -> Iterable[Tensor]:
    """Return all parameters and state tensors that are saved in the folder."""
    saved = load_cpp_optimizer_state(folder / "optimizer.pt")
    state = [tensor for of_param in saved["state"].values() for tensor in of_param.values()]
    return [*torch.load(folder / "params.pt"), *state]


@pytest.mark.slow
@pytest.mark.parametrize("changes", ["C++ to Python", "Python to C++"])
def test_training_continues_in_the_other_language_bit_by_bit(cpp_program, changes, tmp_path):
    programs = [cpp_program, python_program]
    begin, go_on = programs if changes == "C++ to Python" else programs[::-1]
    stayed, changed = tmp_path / "stayed", tmp_path / "changed"
    for folder, second in ((stayed, begin), (changed, go_on)):
        folder.mkdir()
        begin(folder, 1, 5)
        second(folder, 6, 10)

    assert_same_bits(results(changed), results(stayed))
    unset = {"max_grad_norm": None, "write_back_grads": False}  # only C++ writes these
    options = [
        [
            unset | group
            for group in load_cpp_optimizer_state(folder / "optimizer.pt")["param_groups"]
        ]
        for folder in (stayed, changed)
    ]
    assert options[0] == options[1]
    steps = load_cpp_optimizer_state(changed / "optimizer.pt")["state"]
    assert [state["step"].item() for state in steps.values()] == [10, 10, 10]


@pytest.mark.slow
def test_state_saved_by_torchs_cpp_optimizer_is_read(cpp_program, tmp_path):
    cpp_program(tmp_path, 1, 1)
    params = [Parameter(param.detach()) for param in torch.load(tmp_path / "params.pt")]
    for param in params:
        param.grad = numbers(param.numel(), 1).to(param.dtype)
    optimizer = torch.optim.AdamW(params, lr=0.25, amsgrad=True)
    optimizer.step()

    read = load_cpp_optimizer_state(tmp_path / "torch_optimizer.pt")

    torch.testing.assert_close(read["state"], optimizer.state_dict()["state"])
    (group,) = read["param_groups"]
    assert group.items() <= optimizer.state_dict()["param_groups"][0].items()
