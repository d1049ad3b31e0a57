"""Arguments that the multi-tensor ops refuse: the error names them, and no tensor changes."""

import pytest
import torch
from ampfuse import ops

CALLS = {
    "multi_tensor_norm": lambda a: ops.multi_tensor_norm(a["tensors"], a["ord"]),
    "multi_tensor_unscale": lambda a: ops.multi_tensor_unscale(
        a["tensors"], a["found_inf"], a["inv_scale"]
    ),
    "multi_tensor_unscale_norm": lambda a: ops.multi_tensor_unscale_norm(
        a["tensors"], a["found_inf"], a["inv_scale"], a["ord"]
    ),
    "multi_tensor_clip": lambda a: ops.multi_tensor_clip(
        a["tensors"], a["total_norm"], a["max_norm"]
    ),
}
MUTATING = ["multi_tensor_unscale", "multi_tensor_unscale_norm", "multi_tensor_clip"]
UNSCALING = ["multi_tensor_unscale", "multi_tensor_unscale_norm"]
EVERY_OP = pytest.mark.parametrize("op", CALLS)
EVERY_MUTATING_OP = pytest.mark.parametrize("op", MUTATING)


def good(device):
    """Return arguments that every op accepts and every mutating op changes."""
    return {
        "tensors": [torch.full((3,), 4.0, device=device) for _ in range(4)],
        "found_inf": torch.zeros((), device=device),
        "inv_scale": torch.tensor(0.5, device=device),
        "total_norm": torch.tensor(5.0, device=device),
        "max_norm": 1.0,
        "ord": 2.0,
    }


def with_tensor(device, index, tensor):
    """Return valid arguments, except for one tensor of the list."""
    arguments = good(device)
    arguments["tensors"][index] = tensor
    return arguments


def readable(arguments):
    """Return the tensors whose values and versions can be read."""
    candidates = [*arguments["tensors"], *arguments.values()]
    tensors = [x for x in candidates if isinstance(x, torch.Tensor)]
    return [x for x in tensors if x.layout == torch.strided and x.device.type != "meta"]


def assert_refused(op, arguments, error, message):
    """Check that a call raises exactly this error and changes no value and no version."""
    tensors = readable(arguments)
    before = [(x.detach().clone(), x._version) for x in tensors]

    with pytest.raises(error, match=message) as raised:
        CALLS[op](arguments)

    assert raised.type is error
    for tensor, (values, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values)
        assert tensor._version == version


@EVERY_OP
def test_valid_arguments_are_accepted(device, op):
    CALLS[op](good(device))


@EVERY_OP
@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int64, "int64"), (torch.bool, "bool"), (torch.uint8, "uint8")]
)
def test_dtype_without_a_kernel_is_refused(device, op, dtype, name):
    tensor = torch.ones(3, dtype=dtype, device=device)

    assert_refused(
        op, with_tensor(device, 2, tensor), TypeError, rf"{op}: tensors\[2\]: .* got {name}"
    )


@EVERY_OP
def test_tensor_on_another_device_is_refused(device, op):
    elsewhere = torch.ones(3, device="meta")

    assert_refused(
        op,
        with_tensor(device, 2, elsewhere),
        ValueError,
        rf"{op}: tensors\[2\]: expected device {device.type}.* got meta",
    )


@pytest.mark.needs_cuda
@EVERY_OP
def test_cpu_tensor_among_cuda_tensors_is_refused(op):
    arguments = with_tensor(torch.device("cuda"), 2, torch.ones(3))

    assert_refused(op, arguments, ValueError, rf"{op}: tensors\[2\]: .* got cpu")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@EVERY_OP
@pytest.mark.parametrize("layout", ["Sparse", "SparseCsr"])
def test_sparse_tensor_is_refused(device, op, layout):
    dense = torch.eye(3, device=device)
    sparse = {"Sparse": dense.to_sparse, "SparseCsr": dense.to_sparse_csr}[layout]()

    assert_refused(
        op,
        with_tensor(device, 1, sparse),
        ValueError,
        rf"{op}: tensors\[1\]: expected a strided tensor, got layout {layout}",
    )


@EVERY_OP
@pytest.mark.parametrize(("item", "kind"), [(None, "NoneType"), (2.5, "float")])
def test_list_item_that_is_no_tensor_is_refused(device, op, item, kind):
    arguments = with_tensor(device, 1, item)

    assert_refused(op, arguments, TypeError, rf"{op}: tensors\[1\]: expected a Tensor, got {kind}")


@EVERY_MUTATING_OP
def test_tensor_that_overlaps_itself_is_refused(device, op):
    expanded = torch.ones(1, device=device).expand(3)

    assert_refused(
        op, with_tensor(device, 1, expanded), ValueError, rf"{op}: tensors\[1\]: more than one"
    )


@pytest.mark.parametrize("op", ["multi_tensor_norm", "multi_tensor_unscale_norm"])
@pytest.mark.parametrize("ord", [3.0, 0.0, -1.0, float("-inf"), float("nan")])
def test_order_without_a_kernel_is_refused(device, op, ord):
    arguments = good(device) | {"ord": ord}

    assert_refused(op, arguments, ValueError, rf"{op}: ord: expected 1, 2 or inf, got ")


SCALARS = [
    *((op, name) for op in UNSCALING for name in ("found_inf", "inv_scale")),
    ("multi_tensor_clip", "total_norm"),
]


@pytest.mark.parametrize(("op", "name"), SCALARS)
def test_scalar_that_is_no_tensor_is_refused(device, op, name):
    assert_refused(
        op,
        good(device) | {name: 0.5},
        TypeError,
        f"{op}: {name}: expected a Tensor, got float",
    )


@EVERY_OP
def test_tensor_in_place_of_a_list_is_refused(device, op):
    tensor = torch.ones(2, device=device)

    assert_refused(
        op,
        good(device) | {"tensors": tensor},
        TypeError,
        f"{op}: tensors: expected a list of tensors, got a Tensor",
    )


@pytest.mark.parametrize(("op", "name"), SCALARS)
@pytest.mark.parametrize("shape", [(2,), (0,), (1, 3)])
def test_scalar_with_other_than_one_element_is_refused(device, op, name, shape):
    arguments = good(device) | {name: torch.ones(shape, device=device)}

    assert_refused(op, arguments, ValueError, rf"{op}: {name}: .*one element, got shape")


@pytest.mark.parametrize(
    ("op", "name", "dtype"),
    [
        *(
            (op, name, dtype)
            for op, name in SCALARS
            for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.complex64)
        ),
        *((op, name, torch.float64) for op, name in SCALARS if op != "multi_tensor_clip"),
    ],
)
def test_scalar_of_wrong_dtype_is_refused(device, op, name, dtype):
    arguments = good(device) | {name: torch.ones((), dtype=dtype, device=device)}

    assert_refused(op, arguments, TypeError, rf"{op}: {name}: expected dtype float32.*, got ")


@pytest.mark.parametrize(("op", "name"), SCALARS)
def test_scalar_on_another_device_is_refused(device, op, name):
    arguments = good(device) | {name: torch.ones((), device="meta")}

    assert_refused(
        op, arguments, ValueError, rf"{op}: {name}: expected device {device.type}.* got meta"
    )


@pytest.mark.needs_cuda
@pytest.mark.parametrize(("op", "name"), SCALARS)
def test_scalar_on_the_cpu_for_cuda_tensors_is_refused(op, name):
    arguments = good(torch.device("cuda")) | {name: torch.ones(())}

    assert_refused(op, arguments, ValueError, rf"{op}: {name}: expected device cuda.* got cpu")


@pytest.mark.parametrize(("op", "name"), SCALARS)
def test_sparse_scalar_is_refused(device, op, name):
    arguments = good(device) | {name: torch.ones(1, device=device).to_sparse()}

    assert_refused(op, arguments, ValueError, rf"{op}: {name}: expected a strided tensor")


@EVERY_MUTATING_OP
@pytest.mark.parametrize("flip", [torch.conj, lambda x: x.conj().imag])
def test_lazy_conjugates_are_refused_with_the_error_of_torch(device, op, flip):
    lazy = flip(torch.ones(3, dtype=torch.complex64, device=device))
    message = "fallback doesn't currently support mutable TensorLists"
    with pytest.raises(RuntimeError, match=message):
        torch._foreach_mul_([lazy], 0.5)

    assert_refused(op, with_tensor(device, 1, lazy), RuntimeError, message)
