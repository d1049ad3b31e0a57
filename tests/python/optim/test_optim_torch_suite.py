"""PyTorch's own option sets and scenarios for Adam and AdamW, run against ampfuse's classes.

`torch.testing._internal.common_optimizers` provides the option sets for every device (torch does
not implement all options on all devices), the invalid options and the schedulers. These are left
out:

- `capturable` is dropped from the sets that have it. ampfuse has one implementation, which counts
  steps on the device, so the option has no effect. The reference is torch's result without
  `capturable`, which torch refuses on the CPU.
- Tensor betas are refused (see DEVIATIONS), since betas are numbers that do not change in training.
- `foreach`, `fused` and `differentiable` are not accepted. They choose between implementations, and
  ampfuse has only one. A differentiable step would have to keep the values that it overwrites.

A step keeps the values of gradients but raises their version counters, since the op can write
gradients on request.
"""

import copy
import inspect
from itertools import pairwise

import pytest
import torch
from optim_models import CLASSES, assert_same_bits, clones, copies, state_values
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInput,
    optim_db,
)

OURS = {cls.__name__: cls for cls in CLASSES}
INFOS = {info.name: info for info in optim_db if info.name in OURS}
BOTH = pytest.mark.parametrize("name", OURS)

# torch's error messages, and those of ampfuse for the same options where they differ.
DEVIATIONS = {
    "betas must be either both floats or both Tensors": "betas: expected two floats, got a Tensor",
}
NOT_ACCEPTED = {"foreach", "fused", "differentiable"}


def option_sets(name: str, dtype: torch.dtype) -> list[OptimizerInput]:
    """Return the option sets of all devices without duplicates."""
    sets = {}
    for device in ("cpu", "cuda", "mps"):
        for given in INFOS[name].optim_inputs_func(device, dtype):
            given.kwargs.pop("capturable", None)
            sets.setdefault(str(given.kwargs), given)
    return list(sets.values())


def expressible(given: OptimizerInput) -> bool:
    return not isinstance(given.kwargs.get("betas", (0.0,))[0], torch.Tensor)


def cases(*dtypes: torch.dtype) -> list:
    """Return cases of class name, dtype and options. Tests must copy options that they change."""
    return [
        pytest.param(name, dtype, given.kwargs, id=f"{name}-{str(dtype)[6:]}-{given.desc}")
        for name in OURS
        for dtype in dtypes
        for given in option_sets(name, dtype)
        if expressible(given)
    ]


EVERY_CASE = pytest.mark.parametrize(
    ("name", "dtype", "options"),
    cases(torch.float64, torch.float32, torch.bfloat16, torch.float16),
)
EVERY_OPTION_SET = pytest.mark.parametrize(("name", "dtype", "options"), cases(torch.float32))


def model(device, dtype=torch.float32):
    """Return the parameters of a model, and a function that computes their gradients."""
    torch.manual_seed(1)
    layers = [
        layer
        for sizes in pairwise((3, 5, 5, 1))
        for layer in (torch.nn.Linear(*sizes), torch.nn.Sigmoid())
    ]
    made = torch.nn.Sequential(*layers).to(device, dtype)
    batch = torch.rand(4, 3).to(device, dtype)

    def backward():
        made.zero_grad()
        made(batch).float().sum().backward()

    return list(made.parameters()), backward


def steps(optimizer, backward, count=7):
    for _ in range(count):
        backward()
        optimizer.step()


def test_torch_has_nine_option_sets_and_only_tensor_betas_are_left_out():
    for name in OURS:
        sets = option_sets(name, torch.float32)
        left_out = [given for given in sets if not expressible(given)]
        assert {type(given.kwargs["betas"][0]) for given in left_out} == {torch.Tensor}
        assert (len(sets), len(left_out)) == (9, 2)
        for given in left_out:
            with pytest.raises(ValueError, match="betas: expected two floats, got a Tensor"):
                OURS[name](model("cpu")[0], **given.kwargs)


@EVERY_CASE
def test_steps_match_torchs_single_tensor_implementation(device, name, dtype, options):
    params, backward = model(device, dtype)
    others, backward_others = model(device, dtype)

    ours = OURS[name](params, master_weights=False, **options)
    theirs = INFOS[name].optim_cls(others, foreach=False, fused=False, **options)
    steps(ours, backward)
    steps(theirs, backward_others)

    # Both take the same steps but round differently. In 16-bit models torch rounds every
    # intermediate result and the moments; ampfuse rounds only the parameters. If the learning rate
    # is a float32 tensor, torch rounds 1 − lr·weight_decay and the step size to float32, at each of
    # seven steps here; ampfuse computes them in float64.
    single = isinstance(options.get("lr"), torch.Tensor)
    double = 7 * 2.0**-24 if single else 1e-12
    tolerance = {
        torch.float64: {"rtol": double, "atol": double},
        torch.float32: {"rtol": 1e-5, "atol": 1e-6},
        torch.bfloat16: {"rtol": 0.05, "atol": 0.02},
        torch.float16: {"rtol": 0.01, "atol": 0.005},
    }[dtype]
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, **tolerance)
        for key, expected in theirs.state[other].items():
            value = ours.state[param][key]
            # torch's single-tensor implementation counts steps on the CPU.
            value = value.to(expected.device)
            torch.testing.assert_close(value, expected, check_dtype=False, **tolerance)


@EVERY_OPTION_SET
def test_loss_moves_in_the_right_direction_with_torchs_schedulers(device, name, dtype, options):
    for schedulers in INFOS[name].scheduler_inputs:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(10, 5, device=device))
        bias = torch.nn.Parameter(torch.randn(10, device=device))
        inputs = torch.randn(5, device=device)
        groups = [{"params": [weight]}, {"params": bias, "lr": 0.01}]
        optimizer = OURS[name](groups, **copy.deepcopy(options))
        made = [make(optimizer) for make in schedulers]

        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (weight.mv(inputs) + bias).square().sum()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            for scheduler in made:
                wants_loss = "metrics" in inspect.signature(scheduler.step).parameters
                scheduler.step(*([losses[-1]] if wants_loss else []))

        assert (losses[-1] < losses[0]) is not options.get("maximize", False)


@EVERY_OPTION_SET
def test_step_is_a_noop_for_zero_gradients(device, name, dtype, options):
    params, _ = model(device)
    before = clones(params)
    optimizer = OURS[name](params, **{**options, "weight_decay": 0.0})
    for param in params:
        param.grad = torch.zeros_like(param)

    optimizer.step()

    assert_same_bits(params, before)


@EVERY_OPTION_SET
def test_step_is_a_noop_without_gradients(device, name, dtype, options):
    params, _ = model(device)
    before = clones(params)
    optimizer = OURS[name](params, **options)

    optimizer.step()

    assert_same_bits(params, before)


@EVERY_OPTION_SET
def test_step_with_clipping_does_not_write_gradients(device, name, dtype, options):
    params, backward = model(device)
    optimizer = OURS[name](params, max_grad_norm=1e-3, **options)

    for _ in range(3):
        backward()
        grads = [param.grad for param in params]
        before = clones(grads)
        optimizer.step()
        assert_same_bits(grads, before)
        assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))


@EVERY_OPTION_SET
@pytest.mark.parametrize("scale", [None, 2.0])
def test_step_is_skipped_when_found_inf_is_set(device, name, dtype, options, scale):
    params, backward = model(device)
    optimizer = OURS[name](params, **options)
    steps(optimizer, backward, 2)
    before, states = clones(params), state_values(optimizer)

    optimizer.found_inf = torch.ones((), device=device)
    optimizer.grad_scale = None if scale is None else torch.tensor(scale, device=device)
    steps(optimizer, backward, 2)

    assert_same_bits(params, before)
    for state, old in zip(state_values(optimizer), states, strict=True):
        assert_same_bits(state.values(), old.values())


@EVERY_OPTION_SET
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_learning_rate_may_be_a_one_element_tensor_of_any_shape(
    device, name, dtype, options, shape
):
    params, backward = model(device)
    others, backward_others = model(device)
    lr = float(options.get("lr", 1e-3))
    options = {**options, "lr": torch.full(shape, lr, dtype=torch.float64)}

    steps(OURS[name](params, **options), backward)
    steps(OURS[name](others, **{**options, "lr": lr}), backward_others)

    assert_same_bits(params, others)


@EVERY_OPTION_SET
def test_run_continued_from_a_state_dict_gives_the_same_bits(device, name, dtype, options):
    params, backward = model(device)
    optimizer = OURS[name](params, **options)
    steps(optimizer, backward, 3)
    saved_params, saved = clones(params), optimizer.state_dict()

    others, backward_others = model(device)
    for other, value in zip(others, saved_params, strict=True):
        other.detach().copy_(value)
    continued = OURS[name](others, **options)
    continued.load_state_dict(saved)
    steps(optimizer, backward)
    steps(continued, backward_others)

    assert_same_bits(params, others)


@EVERY_OPTION_SET
def test_state_dict_is_unchanged_by_a_file_loaded_with_weights_only(
    device, name, dtype, options, tmp_path
):
    params, backward = model(device)
    optimizer = OURS[name](params, **options)
    steps(optimizer, backward, 2)
    other = OURS[name](copies(params), **options)

    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))

    saved, loaded = optimizer.state_dict(), other.state_dict()
    assert loaded["param_groups"][0].items() >= saved["param_groups"][0].items()
    for state, expected in zip(loaded["state"].values(), saved["state"].values(), strict=True):
        assert state.keys() == expected.keys()
        assert_same_bits(state.values(), expected.values())


@BOTH
@pytest.mark.parametrize("kind", [int, float])
def test_step_counter_that_is_a_number_is_loaded_as_a_tensor(device, name, kind):
    params, backward = model(device)
    optimizer = OURS[name](params)
    steps(optimizer, backward, 3)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = kind(state["step"].item())

    other = OURS[name](copies(params))
    other.load_state_dict(saved)

    for state in other.state.values():
        assert (state["step"].item(), state["step"].dtype) == (3, torch.float32)


@BOTH
def test_options_missing_from_an_older_state_dict_get_their_defaults(device, name):
    params, backward = model(device)
    optimizer = OURS[name](params)
    steps(optimizer, backward, 2)
    saved = optimizer.state_dict()
    expected = {key: saved["param_groups"][0][key] for key in ("maximize", "amsgrad")}
    newer = set(saved["param_groups"][0]) - {"lr", "betas", "eps", "weight_decay", "params"}
    for key in newer:
        del saved["param_groups"][0][key]

    optimizer.load_state_dict(saved)
    steps(optimizer, backward, 2)

    assert optimizer.param_groups[0].items() >= expected.items()
    assert newer <= optimizer.param_groups[0].keys()


@BOTH
def test_state_on_the_host_is_loaded_to_the_device_of_the_parameters(device, name):
    params, backward = model(device, torch.bfloat16)
    optimizer = OURS[name](params)
    steps(optimizer, backward, 2)
    saved = optimizer.state_dict()
    saved["state"] = {
        key: {part: value.cpu().clone() for part, value in state.items()}
        for key, state in saved["state"].items()
    }

    other = OURS[name](copies(params))
    other.load_state_dict(saved)

    for state in other.state.values():
        assert {value.device for value in state.values()} == {params[0].device}


@BOTH
def test_deepcopy_has_the_same_public_attribute_names(device, name):
    params, backward = model(device)
    optimizer = OURS[name](params, max_grad_norm=1.0)
    steps(optimizer, backward, 1)

    names, copied = (
        {name for name in vars(x) if not name.startswith("_")}
        for x in (optimizer, copy.deepcopy(optimizer))
    )
    assert copied == names


@BOTH
def test_invalid_options_are_refused_with_torchs_errors(device, name):
    errors: list[ErrorOptimizerInput] = INFOS[name].optim_error_inputs_func("cpu", torch.float32)
    assert len(errors) >= 12
    for error in errors:
        given = error.optimizer_error_input
        words = DEVIATIONS.get(error.error_regex, error.error_regex)
        if NOT_ACCEPTED & given.kwargs.keys():
            kind, words = TypeError, "unexpected keyword argument"
        else:
            kind = error.error_type
        assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        params = model("cpu")[0] if given.params is None else given.params
        expected = pytest.warns if issubclass(kind, Warning) else pytest.raises
        with expected(kind, match=words):
            OURS[name](params, **given.kwargs)
