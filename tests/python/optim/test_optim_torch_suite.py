"""PyTorch's own option sets and scenarios for Adam, AdamW and SGD, run against ampfuse's classes.

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
from ampfuse import SGD, AdamW
from optim_models import (
    CLASSES,
    assert_same_bits,
    clones,
    copies,
)
from torch.optim.lr_scheduler import OneCycleLR
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

OURS = {cls.__name__: cls for cls in (*CLASSES, SGD)}
INFOS = {info.name: info for info in optim_db if info.name in OURS}

# torch's error messages, and those of ampfuse for the same options where they differ.
DEVIATIONS = {
    "betas must be either both floats or both Tensors": "betas: expected two floats, got a Tensor",
}
NOT_ACCEPTED = {"foreach", "fused", "differentiable"}


def option_sets(name, dtype=torch.float32):
    """Return the option sets of all devices without duplicates."""
    sets = {}
    for device in ("cpu", "cuda", "mps"):
        for given in INFOS[name].optim_inputs_func(device, dtype):
            given.kwargs.pop("capturable", None)
            sets.setdefault(str(given.kwargs), given)
    return list(sets.values())


def is_expressible(given):
    return not isinstance(given.kwargs.get("betas", (0.0,))[0], torch.Tensor)


# Tests must copy options that they change.
CASES = [
    pytest.param(name, dtype, given.kwargs, id=f"{name}-{str(dtype)[6:]}-{given.desc}")
    for name in OURS
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for given in filter(is_expressible, option_sets(name, dtype))
]
# The two classes differ in weight decay alone, so one of them does where no values are compared.
SETS = list(filter(is_expressible, option_sets("AdamW")))
EVERY_OPTION_SET = pytest.mark.parametrize(
    "options", [given.kwargs for given in SETS], ids=[given.desc for given in SETS]
)


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


def stepped(device, count, dtype=torch.float32, **options):
    """Return the parameters of a model and an AdamW of them that has taken some steps."""
    params, backward = model(device, dtype)
    optimizer = AdamW(params, **options)
    steps(optimizer, backward, count)
    return params, optimizer, backward


def test_torch_has_nine_option_sets_of_adam_and_only_tensor_betas_are_left_out():
    for name in ("Adam", "AdamW"):
        sets = option_sets(name)
        left_out = [given for given in sets if not is_expressible(given)]
        assert {type(given.kwargs["betas"][0]) for given in left_out} == {torch.Tensor}
        assert (len(sets), len(left_out)) == (9, 2)
        for given in left_out:
            with pytest.raises(ValueError, match="betas: expected two floats, got a Tensor"):
                OURS[name](model("cpu")[0], **given.kwargs)


@pytest.mark.parametrize(("name", "dtype", "options"), CASES)
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
def test_losses_follow_those_of_torch_with_its_schedulers(device, options):
    # OneCycleLR also changes betas.
    one_cycle = [lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=30)]
    for schedulers in [*INFOS["AdamW"].scheduler_inputs, one_cycle]:
        losses = []
        for cls in (AdamW, torch.optim.AdamW):
            torch.manual_seed(0)
            weight = torch.nn.Parameter(torch.randn(10, 5, device=device))
            bias = torch.nn.Parameter(torch.randn(10, device=device))
            inputs = torch.randn(5, device=device)
            groups = [{"params": [weight]}, {"params": bias, "lr": 0.01}]
            optimizer = cls(groups, **copy.deepcopy(options))
            made = [make(optimizer) for make in schedulers]
            losses.append([])
            for _ in range(20):
                optimizer.zero_grad()
                loss = (weight.mv(inputs) + bias).square().sum()
                loss.backward()
                losses[-1].append(loss.item())
                optimizer.step()
                for scheduler in made:
                    wants_loss = "metrics" in inspect.signature(scheduler.step).parameters
                    scheduler.step(*([loss.item()] if wants_loss else []))

        ours, theirs = losses
        assert (ours[-1] < ours[0]) is not options.get("maximize", False)
        assert ours == pytest.approx(theirs, rel=1e-5)


@EVERY_OPTION_SET
def test_step_is_a_noop_for_zero_gradients_and_without_gradients(device, options):
    params, _ = model(device)
    before = clones(params)
    optimizer = AdamW(params, **options)
    optimizer.step()
    assert_same_bits(params, before)
    assert len(optimizer.state) == 0
    for param in params:
        param.grad = torch.zeros_like(param)
    AdamW(params, **{**options, "weight_decay": 0.0}).step()
    assert_same_bits(params, before)


@EVERY_OPTION_SET
def test_learning_rate_may_be_a_one_element_tensor_of_any_shape(device, options):
    lr = float(options.get("lr", 1e-3))
    expected, *_ = stepped(device, 7, **{**options, "lr": lr})
    for shape in ((), (1,), (1, 1)):
        rate = torch.full(shape, lr, dtype=torch.float64)
        params, *_ = stepped(device, 7, **{**options, "lr": rate})
        assert_same_bits(params, expected)


COUNTERS = [3, 3.0, torch.tensor(3), torch.tensor(3.0, dtype=torch.float64)]


@pytest.mark.parametrize("counter", COUNTERS, ids=repr)
def test_state_on_the_host_is_loaded_as_tensors_on_the_device_of_the_parameters(device, counter):
    params, optimizer, _ = stepped(device, 3, torch.bfloat16)
    saved = optimizer.state_dict()
    saved["state"] = {
        key: {name: value.cpu().clone() for name, value in state.items()} | {"step": counter}
        for key, state in saved["state"].items()
    }

    other = AdamW(copies(params))
    other.load_state_dict(saved)

    for state in other.state.values():
        assert {value.device for value in state.values()} == {params[0].device}
        assert (state["step"].item(), state["step"].dtype) == (3, torch.float32)


def test_options_missing_from_an_older_state_dict_get_their_defaults(device):
    _, optimizer, backward = stepped(device, 2)
    saved = optimizer.state_dict()
    expected = {key: saved["param_groups"][0][key] for key in ("maximize", "amsgrad")}
    newer = set(saved["param_groups"][0]) - {"lr", "betas", "eps", "weight_decay", "params"}
    for key in newer:
        del saved["param_groups"][0][key]
    optimizer.load_state_dict(saved)
    steps(optimizer, backward, 2)
    assert optimizer.param_groups[0].items() >= expected.items()
    assert newer <= optimizer.param_groups[0].keys()


@pytest.mark.parametrize("name", OURS)
def test_invalid_options_are_refused_with_torchs_errors(name):
    errors = INFOS[name].optim_error_inputs_func("cpu", torch.float32)
    assert len(errors) >= (7 if name == "SGD" else 12)
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
