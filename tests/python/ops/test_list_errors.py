"""Arguments that the ops over lists refuse: the error names them, and no tensor changes.

Arguments that only fused_adam refuses are in test_fused_adam_errors.py.
"""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from adam_reference import LISTS as ADAM_LISTS
from adam_reference import SCALARS as ADAM_SCALARS
from adam_reference import valid_arguments
from ampfuse import ops
from reference import assert_call_refused, freed

pytestmark = [
    # torch itself warns when forward mode is first used
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state"),
]

UNSCALING = ["multi_tensor_unscale", "multi_tensor_unscale_norm"]
MUTATING = [*UNSCALING, "multi_tensor_clip"]
OF_ADAM = [("fused_adam", name) for name in ADAM_LISTS]
WRITTEN = [*((op, "tensors") for op in MUTATING), *OF_ADAM]
LISTS = [("multi_tensor_norm", "tensors"), *WRITTEN]
WRITTEN_SCALARS = [*((op, "found_inf") for op in UNSCALING), ("fused_adam", "grad_norm")]
SCALARS = [
    *((op, name) for op in UNSCALING for name in ("found_inf", "inv_scale")),
    ("multi_tensor_clip", "total_norm"),
    *(("fused_adam", name) for name in ADAM_SCALARS),
]
EVERY_OP = pytest.mark.parametrize("op", ["multi_tensor_norm", *MUTATING, "fused_adam"])
EVERY_LIST = pytest.mark.parametrize(("op", "name"), LISTS)
EVERY_WRITTEN_LIST = pytest.mark.parametrize(("op", "name"), WRITTEN)
EVERY_SCALAR = pytest.mark.parametrize(("op", "name"), SCALARS)


def good(op, device):
    """Return arguments that an op accepts, and with which it writes all that it may write."""
    if op == "fused_adam":
        return valid_arguments(device)
    number = {"found_inf": 0.0, "inv_scale": 0.5, "total_norm": 5.0}
    scalars = {name: torch.tensor(number[name], device=device) for of, name in SCALARS if of == op}
    options = {"max_norm": 1.0} if op == "multi_tensor_clip" else {}
    tensors = [torch.full((3,), 4.0, device=device) for _ in range(3)]
    return {"tensors": tensors} | scalars | options


def with_tensor(op, device, name, tensor):
    """Return valid arguments, except for the second tensor of a list."""
    arguments = good(op, device)
    arguments[name][1] = tensor
    return arguments


def assert_refused(op, arguments, error, message):
    assert_call_refused(getattr(ops, op), arguments, error, f"{op}: {message}")


@EVERY_OP
def test_valid_arguments_are_accepted_and_every_tensor_that_may_be_is_written(device, op):
    arguments = good(op, device)
    before = {name: [x.clone() for x in arguments[name]] for of, name in LISTS if of == op}

    getattr(ops, op)(**arguments)

    for name, tensors in before.items():
        for tensor, old in zip(arguments[name], tensors, strict=True):
            assert torch.equal(tensor, old) == (op == "multi_tensor_norm"), name


@EVERY_LIST
def test_tensor_of_wrong_kind_dtype_or_device_is_refused(device, op, name):
    right, dense = good(op, device)[name][1], torch.eye(3, device=device)
    dtypes = [torch.int64, torch.bool, torch.uint8]
    dtypes += [torch.complex64] if op == "fused_adam" else []
    wrong = [
        (None, TypeError, "expected a Tensor, got NoneType"),
        (2.5, TypeError, "expected a Tensor, got float"),
        *((right.to(x), TypeError, f"expected .*, got {str(x)[6:]}") for x in dtypes),
        (right.to("meta"), ValueError, f"expected device {device.type}.* got meta"),
        (dense.to_sparse(), ValueError, "expected a strided tensor, got layout Sparse"),
        (dense.to_sparse_csr(), ValueError, "expected a strided tensor, got layout SparseCsr"),
        (freed(right), ValueError, "its storage is empty"),
    ]
    for tensor, error, message in wrong:
        arguments = with_tensor(op, device, name, tensor)

        assert_refused(op, arguments, error, rf"{name}\[1\]: {message}")


@pytest.mark.needs_cuda
@EVERY_LIST
def test_cpu_tensor_among_cuda_tensors_is_refused(op, name):
    cuda = torch.device("cuda")
    arguments = with_tensor(op, cuda, name, good(op, cuda)[name][1].cpu())

    assert_refused(op, arguments, ValueError, rf"{name}\[1\]: expected device cuda.* got cpu")


@EVERY_LIST
def test_tensor_in_place_of_a_list_is_refused(device, op, name):
    arguments = good(op, device) | {name: torch.ones(3, device=device)}

    assert_refused(op, arguments, TypeError, f"{name}: expected a list of tensors, got a Tensor")


@pytest.mark.parametrize(("op", "name"), [pair for pair in WRITTEN if pair[1] != "state_steps"])
def test_tensor_that_overlaps_itself_is_refused(device, op, name):
    expanded = good(op, device)[name][1][:1].expand(3)
    message = rf"{name}\[1\]: more than one element refers to the same memory"

    assert_refused(op, with_tensor(op, device, name, expanded), ValueError, message)


@EVERY_WRITTEN_LIST
def test_tensor_that_requires_grad_is_refused(device, op, name):
    for is_leaf in (True, False):
        tensor = good(op, device)[name][1].requires_grad_()
        arguments = with_tensor(op, device, name, tensor if is_leaf else tensor * 1)
        kind = "a leaf Variable that requires" if is_leaf else "expected a tensor that does not"

        assert_refused(op, arguments, RuntimeError, rf"{name}\[1\]: {kind}")


@EVERY_WRITTEN_LIST
def test_tensor_with_a_forward_mode_tangent_is_refused(device, op, name):
    arguments = good(op, device)
    with forward_ad.dual_level():
        tensor = arguments[name][1]
        arguments[name][1] = forward_ad.make_dual(tensor, torch.ones_like(tensor))

        with pytest.raises(RuntimeError, match=rf"{op}: {name}\[1\]: .*without a forward"):
            getattr(ops, op)(**arguments)


@pytest.mark.parametrize("op", MUTATING)
@pytest.mark.parametrize("flip", [torch.conj, lambda x: x.conj().imag])
def test_lazy_conjugates_are_refused_with_the_error_of_torch(device, op, flip):
    lazy = flip(torch.ones(3, dtype=torch.complex64, device=device))
    message = "fallback doesn't currently support mutable TensorLists"
    with pytest.raises(RuntimeError, match=message):
        torch._foreach_mul_([lazy], 0.5)

    arguments = with_tensor(op, device, "tensors", lazy)
    assert_call_refused(getattr(ops, op), arguments, RuntimeError, message)


@pytest.mark.parametrize("op", ["multi_tensor_norm", "multi_tensor_unscale_norm"])
def test_order_without_a_kernel_is_refused(device, op):
    for ord in (3.0, 0.0, -1.0, float("-inf"), float("nan")):
        arguments = good(op, device) | {"ord": ord}

        assert_refused(op, arguments, ValueError, "ord: expected 1, 2 or inf, got ")


@EVERY_SCALAR
def test_scalar_of_wrong_kind_dtype_shape_or_device_is_refused(device, op, name):
    one = torch.ones((), device=device)
    dtypes = [torch.float16, torch.bfloat16, torch.int64, torch.complex64]
    dtypes += [] if name in ("total_norm", "lr") else [torch.float64]
    wrong = [
        (0.5, TypeError, "expected a Tensor, got float"),
        *((one.expand(x), ValueError, ".*one element, got shape") for x in [(2,), (0,), (1, 3)]),
        *((one.to(x), TypeError, "expected dtype float32.*, got ") for x in dtypes),
        (one.to("meta"), ValueError, rf"expected device {device.type}.*\w+\[0\], got meta"),
        (one.reshape(1).to_sparse(), ValueError, "expected a strided tensor"),
        (freed(one), ValueError, "its storage is empty"),
    ]
    for scalar, error, message in wrong:
        assert_refused(op, good(op, device) | {name: scalar}, error, f"{name}: {message}")


@pytest.mark.needs_cuda
@pytest.mark.parametrize(("op", "name"), [pair for pair in SCALARS if pair[1] != "lr"])
def test_scalar_on_the_cpu_for_cuda_tensors_is_refused(op, name):
    arguments = good(op, torch.device("cuda")) | {name: torch.ones(())}

    assert_refused(op, arguments, ValueError, f"{name}: expected device cuda.* got cpu")


@EVERY_SCALAR
def test_scalar_that_requires_grad_is_refused(device, op, name):
    arguments = good(op, device)
    arguments[name].requires_grad_()
    is_written = (op, name) in WRITTEN_SCALARS
    kind = "a leaf Variable that requires" if is_written else "expected a tensor that does not"

    assert_refused(op, arguments, RuntimeError, f"{name}: {kind} .*no_grad")


@EVERY_SCALAR
def test_scalar_with_a_forward_mode_tangent_is_refused(device, op, name):
    arguments = good(op, device)
    with forward_ad.dual_level():
        arguments[name] = forward_ad.make_dual(arguments[name], torch.ones((), device=device))

        with pytest.raises(RuntimeError, match=f"{op}: {name}: expected a tensor without a forw"):
            getattr(ops, op)(**arguments)
