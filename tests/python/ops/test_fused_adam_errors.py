"""Lists, dtypes, shapes and options that fused_adam refuses, and no tensor changes.

Arguments that every op over lists refuses are in test_list_errors.py.
"""

import pytest
import torch
from adam_reference import LISTS, valid_arguments
from ampfuse.ops import fused_adam
from reference import assert_call_refused

COLUMNS = [name for name in LISTS if name != "state_steps"]


def with_tensor(device, name, tensor):
    """Return valid arguments, except for the second tensor of a list."""
    arguments = valid_arguments(device)
    arguments[name][1] = tensor
    return arguments


def without_masters(device, dtype):
    """Return valid arguments for a dtype without masters."""
    arguments = valid_arguments(device) | {"masters": []}
    of_moments = torch.float64 if dtype == torch.float64 else torch.float32
    for name in COLUMNS[:-1]:
        wanted = dtype if name in ("params", "grads") else of_moments
        arguments[name] = [x.to(wanted) for x in arguments[name]]
    return arguments


def assert_refused(arguments, error, message):
    assert_call_refused(fused_adam, arguments, error, f"fused_adam: {message}")


@pytest.mark.parametrize("name", LISTS[1:])
def test_list_of_wrong_length_is_refused(device, name):
    message = f"{name}: expected 3 tensors, one for each of params, got"
    for count in (2, 6):
        arguments = valid_arguments(device)
        arguments[name] = (arguments[name] * 2)[:count]

        assert_refused(arguments, ValueError, f"{message} {count}")


@pytest.mark.parametrize(("amsgrad", "expected", "got"), [(False, 0, 3), (True, 3, 0)])
def test_max_exp_avg_sqs_without_amsgrad_or_the_reverse_are_refused(device, amsgrad, expected, got):
    arguments = valid_arguments(device) | {"amsgrad": amsgrad}
    arguments["max_exp_avg_sqs"] = arguments["max_exp_avg_sqs"][:got]
    message = f"max_exp_avg_sqs: expected {expected} tensors.*, got {got}"

    assert_refused(arguments, ValueError, message)


@pytest.mark.parametrize("name", COLUMNS[1:-1])
def test_float64_beside_other_dtypes_is_refused(device, name):
    for param, other in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        arguments = without_masters(device, param)
        arguments[name][1] = torch.ones(3, dtype=other, device=device)

        assert_refused(arguments, TypeError, rf"{name}\[1\]: expected .*, got {str(other)[6:]}")


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("exp_avg_sqs", torch.bfloat16, r"dtype float32 as exp_avgs\[1\]"),
        ("max_exp_avg_sqs", torch.bfloat16, r"dtype float32 as exp_avgs\[1\]"),
        *((name, torch.float16, "float32 or bfloat16") for name in LISTS[2:5]),
        *(("masters", dtype, "float32, or int16") for dtype in (torch.bfloat16, torch.float64)),
        *(("state_steps", dtype, "dtype float32") for dtype in (torch.int64, torch.float64)),
    ],
)
def test_dtype_that_a_list_does_not_support_is_refused(device, name, dtype, expected):
    shape = () if name == "state_steps" else (3,)
    arguments = with_tensor(device, name, torch.ones(shape, dtype=dtype, device=device))

    assert_refused(arguments, TypeError, rf"{name}\[1\]: expected {expected}.*, got")


@pytest.mark.parametrize(
    ("param", "master", "expected"),
    [
        *(
            (param, master, "no master, since the parameter is not 16-bit")
            for param in (torch.float32, torch.float64)
            for master in (torch.float32, torch.int16)
        ),
        (torch.float16, torch.int16, "float32"),
    ],
)
def test_masters_that_do_not_fit_the_param_dtype_are_refused(device, param, master, expected):
    masters = [torch.ones(3, dtype=master, device=device) for _ in range(3)]
    arguments = without_masters(device, param) | {"masters": masters}

    assert_refused(
        arguments, TypeError, rf"masters\[0\]: expected {expected}, got {str(master)[6:]}"
    )


@pytest.mark.parametrize("name", LISTS[1:])
def test_wrong_shape_is_refused(device, name):
    is_count = name == "state_steps"
    expected = "a tensor with one element" if is_count else r"shape \[3\] as params\[1\]"
    for shape in ((0,), (3,)) if is_count else ((4,), (3, 1), (1, 3), (), (0,)):
        dtype = valid_arguments(device)[name][1].dtype
        arguments = with_tensor(device, name, torch.ones(shape, dtype=dtype, device=device))

        assert_refused(arguments, ValueError, rf"{name}\[1\]: expected {expected}.*, got")


def test_gradient_that_overlaps_itself_is_accepted_if_it_is_only_read(device):
    expanded = torch.full((1,), 6.0, dtype=torch.bfloat16, device=device).expand(3)
    arguments = with_tensor(device, "grads", expanded) | {"write_back_grads": False}

    fused_adam(**arguments)

    assert torch.equal(arguments["masters"][1], arguments["masters"][0])


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["max_norm"], "total_norm and max_norm: expected both or neither"),
        (["total_norm", "grad_norm"], "total_norm and max_norm: expected both or neither"),
        (["total_norm", "max_norm"], "grad_norm: expected none without total_norm"),
    ],
)
def test_incomplete_arguments_for_the_norm_are_refused(device, missing, message):
    assert_refused(valid_arguments(device) | dict.fromkeys(missing), ValueError, message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("beta1", "beta2") for value in (-0.1, 1.0, 2.0)),
        ("eps", -1e-8),
        *((name, float("nan")) for name in ("beta1", "beta2", "eps", "weight_decay")),
    ],
)
def test_option_out_of_range_is_refused(device, name, value):
    arguments = valid_arguments(device) | {name: value}

    assert_refused(arguments, ValueError, rf"{name}: expected .*, got ")
