"""Arguments that fused_adam refuses: the error names the argument, and no tensor changes.

Errors of autograd are in test_fused_adam_compile.py.
"""

import pytest
import torch
from adam_reference import OPTIONS
from ampfuse.ops import fused_adam

LISTS = ["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps", "masters"]
COLUMNS = [name for name in LISTS if name != "state_steps"]
SCALARS = ["lr", "found_inf", "grad_scale", "total_norm", "grad_norm"]
EVERY_LIST = pytest.mark.parametrize("name", LISTS)
EVERY_SCALAR = pytest.mark.parametrize("name", SCALARS)

DTYPES = {"params": torch.bfloat16, "grads": torch.bfloat16}  # other lists are float32


def good(device):
    """Return valid arguments, with which a step changes every tensor that it may write."""

    def column(name):
        return [torch.full((3,), 6.0, dtype=DTYPES.get(name), device=device) for _ in range(3)]

    lists = {name: column(name) for name in LISTS}
    lists["state_steps"] = [torch.tensor(4.0, device=device) for _ in range(3)]
    scalars = {name: torch.tensor(0.5, device=device) for name in SCALARS}
    scalars["found_inf"] = torch.zeros((), device=device)
    options = OPTIONS | {"amsgrad": True, "write_back_grads": True, "max_norm": 0.25}
    return lists | scalars | options


def with_tensor(device, name, tensor):
    """Return valid arguments, except for the second tensor of a list."""
    arguments = good(device)
    arguments[name][1] = tensor
    return arguments


def without_masters(device, dtype, **tensors):
    """Return valid arguments for a dtype without masters, except for `tensors` at index 1."""
    arguments = good(device) | {"masters": []}
    of_moments = torch.float64 if dtype == torch.float64 else torch.float32
    for name in COLUMNS[:-1]:
        wanted = dtype if name in DTYPES else of_moments
        arguments[name] = [x.to(wanted) for x in arguments[name]]
        if name in tensors:
            arguments[name][1] = tensors[name]
    return arguments


def readable(arguments):
    """Return the tensors whose values and versions can be read."""
    lists = [x for value in arguments.values() if isinstance(value, list) for x in value]
    tensors = [x for x in (*lists, *arguments.values()) if isinstance(x, torch.Tensor)]
    return [x for x in tensors if x.layout == torch.strided and x.device.type != "meta"]


def assert_refused(arguments, error, message):
    """Check that a call raises exactly this error and changes no value and no version."""
    tensors = readable(arguments)
    before = [(x.detach().clone(), x._version) for x in tensors]

    with pytest.raises(error, match=f"fused_adam: {message}") as raised:
        fused_adam(**arguments)

    assert raised.type is error
    for tensor, (values, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values)
        assert tensor._version == version


def test_valid_arguments_are_accepted_and_every_list_is_written(device):
    arguments = good(device)
    before = {name: [x.clone() for x in arguments[name]] for name in LISTS}

    fused_adam(**arguments)

    for name in LISTS:
        assert not any(map(torch.equal, arguments[name], before[name])), name
    assert arguments["grad_norm"].item() == 1.0


@pytest.mark.parametrize("change", ["shorter", "longer"])
@pytest.mark.parametrize("name", LISTS[1:])
def test_list_of_wrong_length_is_refused(device, name, change):
    arguments = good(device)
    arguments[name] = arguments[name] * 2 if change == "longer" else arguments[name][:2]

    assert_refused(
        arguments, ValueError, f"{name}: expected 3 tensors, one for each of params, got"
    )


@pytest.mark.parametrize(("amsgrad", "expected", "got"), [(False, 0, 3), (True, 3, 0)])
def test_max_exp_avg_sqs_without_amsgrad_or_the_reverse_are_refused(device, amsgrad, expected, got):
    arguments = good(device) | {"amsgrad": amsgrad}
    arguments["max_exp_avg_sqs"] = arguments["max_exp_avg_sqs"][:got]

    assert_refused(
        arguments,
        ValueError,
        f"max_exp_avg_sqs: expected {expected} tensors.*, got {got}",
    )


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.int64, "int64"), (torch.bool, "bool"), (torch.complex64, "complex64")],
)
@EVERY_LIST
def test_dtype_without_a_kernel_is_refused(device, name, dtype, kind):
    shape = () if name == "state_steps" else (3,)
    tensor = torch.ones(shape, dtype=dtype, device=device)

    assert_refused(
        with_tensor(device, name, tensor),
        TypeError,
        rf"{name}\[1\]: expected .*, got {kind}",
    )


@pytest.mark.parametrize("name", ["grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"])
@pytest.mark.parametrize(("param", "other"), [("float32", "float64"), ("float64", "float32")])
def test_float64_beside_other_dtypes_is_refused(device, name, param, other):
    dtypes = {"float32": torch.float32, "float64": torch.float64}
    odd = torch.ones(3, dtype=dtypes[other], device=device)

    assert_refused(
        without_masters(device, dtypes[param], **{name: odd}),
        TypeError,
        rf"{name}\[1\]: expected .*, got {other}",
    )


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
    tensor = torch.ones(shape, dtype=dtype, device=device)

    assert_refused(
        with_tensor(device, name, tensor), TypeError, rf"{name}\[1\]: expected {expected}.*, got"
    )


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

    assert_refused(
        without_masters(device, param) | {"masters": masters},
        TypeError,
        rf"masters\[0\]: expected {expected}, got {str(master)[6:]}",
    )


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        *(
            (name, shape, r"shape \[3\] as params\[1\]")
            for name in COLUMNS[1:]
            for shape in [(4,), (3, 1), (1, 3), (), (0,)]
        ),
        *(("state_steps", shape, "a tensor with one element") for shape in [(0,), (3,)]),
    ],
)
def test_wrong_shape_is_refused(device, name, shape, expected):
    tensor = torch.ones(shape, dtype=DTYPES.get(name), device=device)

    assert_refused(
        with_tensor(device, name, tensor), ValueError, rf"{name}\[1\]: expected {expected}.*, got"
    )


@EVERY_LIST
def test_tensor_on_another_device_is_refused(device, name):
    like = good(device)[name][1]

    assert_refused(
        with_tensor(device, name, like.to("meta")),
        ValueError,
        rf"{name}\[1\]: expected device {device.type}.* got meta",
    )


@pytest.mark.needs_cuda
@EVERY_LIST
def test_cpu_tensor_among_cuda_tensors_is_refused(name):
    device = torch.device("cuda")
    like = good(device)[name][1]

    assert_refused(
        with_tensor(device, name, like.cpu()),
        ValueError,
        rf"{name}\[1\]: expected device cuda.* got cpu",
    )


@EVERY_LIST
def test_sparse_tensor_is_refused(device, name):
    sparse = good(device)[name][1].reshape(-1).to_sparse()

    assert_refused(
        with_tensor(device, name, sparse),
        ValueError,
        rf"{name}\[1\]: expected a strided tensor, got layout Sparse",
    )


@pytest.mark.parametrize(("item", "kind"), [(None, "NoneType"), (2.5, "float")])
@EVERY_LIST
def test_list_item_that_is_no_tensor_is_refused(device, name, item, kind):
    assert_refused(
        with_tensor(device, name, item), TypeError, rf"{name}\[1\]: expected a Tensor, got {kind}"
    )


@EVERY_LIST
def test_tensor_in_place_of_a_list_is_refused(device, name):
    assert_refused(
        good(device) | {name: torch.ones(3, device=device)},
        TypeError,
        f"{name}: expected a list of tensors, got a Tensor",
    )


@pytest.mark.parametrize("name", COLUMNS)
def test_tensor_that_overlaps_itself_is_refused(device, name):
    expanded = torch.ones(1, dtype=DTYPES.get(name), device=device).expand(3)

    assert_refused(
        with_tensor(device, name, expanded),
        ValueError,
        rf"{name}\[1\]: more than one element refers to the same memory",
    )


def test_gradient_that_overlaps_itself_is_accepted_if_it_is_only_read(device):
    expanded = torch.full((1,), 6.0, dtype=torch.bfloat16, device=device).expand(3)
    arguments = with_tensor(device, "grads", expanded) | {"write_back_grads": False}

    fused_adam(**arguments)

    assert torch.equal(arguments["masters"][1], arguments["masters"][0])


def test_parameter_listed_twice_is_refused(device):
    arguments = good(device)
    arguments["params"][2] = arguments["params"][0]

    assert_refused(
        arguments, ValueError, r"params\[2\]: expected distinct tensors, got params\[0\] again"
    )


@EVERY_SCALAR
def test_scalar_that_is_no_tensor_is_refused(device, name):
    assert_refused(good(device) | {name: 0.5}, TypeError, f"{name}: expected a Tensor, got float")


@EVERY_SCALAR
@pytest.mark.parametrize("shape", [(2,), (0,), (1, 3)])
def test_scalar_with_other_than_one_element_is_refused(device, name, shape):
    assert_refused(
        good(device) | {name: torch.ones(shape, device=device)},
        ValueError,
        rf"{name}: .*one element, got shape",
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in SCALARS for dtype in (torch.float16, torch.int64)),
        *((name, torch.float64) for name in ("found_inf", "grad_scale", "grad_norm")),
    ],
)
def test_scalar_of_wrong_dtype_is_refused(device, name, dtype):
    assert_refused(
        good(device) | {name: torch.ones((), dtype=dtype, device=device)},
        TypeError,
        rf"{name}: expected dtype float32.*, got ",
    )


@EVERY_SCALAR
def test_scalar_on_another_device_is_refused(device, name):
    assert_refused(
        good(device) | {name: torch.ones((), device="meta")},
        ValueError,
        rf"{name}: expected device {device.type}.*, that of params\[0\], got meta",
    )


@EVERY_SCALAR
def test_sparse_scalar_is_refused(device, name):
    assert_refused(
        good(device) | {name: torch.ones(1, device=device).to_sparse()},
        ValueError,
        rf"{name}: expected a strided tensor",
    )


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["max_norm"], "total_norm and max_norm: expected both or neither"),
        (["total_norm", "grad_norm"], "total_norm and max_norm: expected both or neither"),
        (["total_norm", "max_norm"], "grad_norm: expected none without total_norm"),
    ],
)
def test_incomplete_arguments_for_the_norm_are_refused(device, missing, message):
    arguments = good(device) | dict.fromkeys(missing)

    assert_refused(arguments, ValueError, message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("beta1", "beta2") for value in (-0.1, 1.0, 2.0)),
        ("eps", -1e-8),
        *((name, float("nan")) for name in ("beta1", "beta2", "eps", "weight_decay")),
    ],
)
def test_option_out_of_range_is_refused(device, name, value):
    assert_refused(good(device) | {name: value}, ValueError, rf"{name}: expected .*, got ")
