"""clip_grad_norm_, get_total_norm and clip_grads_with_norm_ give the results of torch.nn.utils."""

import inspect
import math

import ampfuse
import pytest
import torch
from optim_models import clones
from reference import (
    assert_norm,
    gradients,
    heavy_tailed,
    parameters_with_gradients,
    real_parts,
    same_bits,
)
from torch.nn import Parameter

CPU = torch.device("cpu")

# torch sums thousands of numbers in float32, so its norm of order 1 is off in the sixth digit.
# test_multi_tensor_norm.py compares ampfuse with float64.
TOLERANCE = {"rtol": 1e-5, "atol": 0.0}

# Arguments of clip_grad_norm_, changed one at a time. A norm_type that is a string means the
# number. ampfuse leaves orders other than 1, 2 and inf to torch's own code, which reads `foreach`.
CALLS = [
    *({"norm_type": norm_type} for norm_type in (1, 2, 2.0, math.inf, "inf", 3, 0, "-inf")),
    *({"max_norm": max_norm} for max_norm in (1e-2, 1e9)),
    *({"foreach": foreach, "norm_type": order} for foreach in (True, False) for order in (2, 3)),
    {"error_if_nonfinite": True},
]


def assert_same_gradients(parameters, others):
    for parameter, other in zip(parameters, others, strict=True):
        if other.grad is None:
            assert parameter.grad is None
            continue
        grad = parameter.grad.to(other.device)
        torch.testing.assert_close(grad, other.grad, equal_nan=True, **TOLERANCE)
        assert grad.requires_grad == other.grad.requires_grad


def parameter_with(grad):
    parameter = Parameter(torch.zeros_like(grad, memory_format=torch.contiguous_format))
    parameter.grad = grad
    return parameter


@pytest.mark.parametrize("name", ["clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_"])
def test_signature_matches_that_of_torch(name):
    ours, theirs = (
        inspect.signature(getattr(module, name)).parameters.values()
        for module in (ampfuse, torch.nn.utils)
    )
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]


@pytest.mark.vectorised
@pytest.mark.parametrize("options", CALLS, ids=str)
def test_norms_and_gradients_are_those_of_torch(device, options):
    ours, theirs = parameters_with_gradients(device), parameters_with_gradients(device)
    options = {"max_norm": 1, **options}

    norm = ampfuse.clip_grad_norm_(ours, **options)
    expected = torch.nn.utils.clip_grad_norm_(theirs, **options)
    torch.testing.assert_close(norm, expected, **TOLERANCE)
    assert_same_gradients(ours, theirs)

    max_norm = options.pop("max_norm")
    norm = ampfuse.get_total_norm(gradients(ours), **options)
    expected = torch.nn.utils.get_total_norm(gradients(theirs), **options)
    torch.testing.assert_close(norm, expected, **TOLERANCE)

    total_norm, foreach = torch.tensor(7.0, device=device), options.get("foreach")
    assert ampfuse.clip_grads_with_norm_(ours, max_norm, total_norm, foreach) is None
    torch.nn.utils.clip_grads_with_norm_(theirs, max_norm, total_norm, foreach)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize(
    "given",
    [lambda tensors: tensors[0], lambda tensors: (tensor for tensor in tensors)],
    ids=["tensor", "generator"],
)
def test_single_tensor_and_generator_are_accepted_as_lists(device, given):
    ours, theirs = parameters_with_gradients(device), parameters_with_gradients(device)
    norm = ampfuse.clip_grad_norm_(given(ours), 1.0)
    ampfuse.clip_grads_with_norm_(given(ours), 0.5, norm)
    expected = torch.nn.utils.clip_grad_norm_(given(theirs), 1.0)
    torch.nn.utils.clip_grads_with_norm_(given(theirs), 0.5, expected)
    torch.testing.assert_close(norm, expected, **TOLERANCE)
    assert_same_gradients(ours, theirs)
    norm = ampfuse.get_total_norm(given(gradients(ours)))
    expected = torch.nn.utils.get_total_norm(given(gradients(theirs)))
    torch.testing.assert_close(norm, expected, **TOLERANCE)


@pytest.mark.parametrize("module", [ampfuse, torch.nn.utils], ids=["ampfuse", "torch"])
def test_empty_generator_warning_points_at_the_callers_file(module):
    with pytest.warns(UserWarning, match="`parameters` is an empty generator") as caught:
        norm = module.clip_grad_norm_((p for p in []), 1.0)
    assert norm.item() == 0
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("parameters", [[], [Parameter(torch.ones(3))]])
@pytest.mark.parametrize("norm_type", [2.0, 3.0])
def test_norm_of_no_gradients_is_zero(parameters, norm_type):
    norm = ampfuse.clip_grad_norm_(parameters, 1.0, norm_type)
    ampfuse.clip_grads_with_norm_(parameters, 1.0, torch.tensor(5.0))
    expected = torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm_type)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0)
    assert ampfuse.get_total_norm([], norm_type).item() == 0


def without_some_gradients(device):
    parameters = parameters_with_gradients(device)
    parameters[1].grad = None
    return parameters


def with_one_listed_twice(device):
    """It is counted and scaled twice."""
    parameters = parameters_with_gradients(device)
    return [*parameters, parameters[0]]


def that_share_a_gradient(device):
    grad = heavy_tailed(33, torch.float32, device)
    return [parameter_with(grad), parameter_with(grad)]


def with_an_autograd_graph(device):
    parameter = heavy_tailed(33, torch.float32, device).requires_grad_()
    (parameter**3).sum().backward(create_graph=True)
    return [parameter]


def with_gaps_in_memory(device):
    return [parameter_with(heavy_tailed((33, 8), torch.float32, device)[:, ::2])]


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(
    "make",
    [
        without_some_gradients,
        with_one_listed_twice,
        that_share_a_gradient,
        with_an_autograd_graph,
        with_gaps_in_memory,
    ],
    ids=lambda make: make.__name__,
)
def test_unusual_parameters_are_clipped_as_in_torch(device, make):
    # On a GPU, torch's foreach kernels race if a list names a tensor twice: use the CPU.
    ours, theirs = make(device), make(CPU)
    norm = ampfuse.clip_grad_norm_(ours, 1.0)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(norm.cpu(), expected, **TOLERANCE)
    assert not norm.requires_grad
    assert_same_gradients(ours, theirs)


def test_gradients_within_the_limit_keep_every_bit(device):
    parameters = parameters_with_gradients(device)
    before = clones(gradients(parameters))
    ampfuse.clip_grad_norm_(parameters, 1e9)
    assert all(map(same_bits, gradients(parameters), before))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf, 3.0])  # the last one is torch's code
def test_nonfinite_norm_raises_on_request_and_scales_as_in_torch_otherwise(device, norm_type):
    message = f"The total norm of order {norm_type} for .* is non-finite, so it cannot be clipped"
    for bad in (math.nan, math.inf, -math.inf):
        ours, theirs = parameters_with_gradients(device), parameters_with_gradients(device)
        ours[2].grad[8192] = theirs[2].grad[8192] = bad
        before = clones(gradients(ours))

        with pytest.raises(RuntimeError, match=message):
            ampfuse.clip_grad_norm_(ours, 1.0, norm_type, error_if_nonfinite=True)
        with pytest.raises(RuntimeError, match=message):
            ampfuse.get_total_norm(gradients(ours), norm_type, error_if_nonfinite=True)
        assert all(map(same_bits, gradients(ours), before))

        norm = ampfuse.clip_grad_norm_(ours, 1.0, norm_type, error_if_nonfinite=False)
        expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type, error_if_nonfinite=False)
        torch.testing.assert_close(norm, expected, equal_nan=True)
        assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("name", ["get_total_norm", "clip_grads_with_norm_", "clip_grad_norm_"])
def test_torch_fallback_works_while_torchs_names_are_bound_to_ampfuse(name, monkeypatch):
    """Check that ampfuse calls torch's original functions, not itself through the bound names."""
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(module, name, getattr(ampfuse, name), raising=False)
    param = parameter_with(torch.tensor([3.0, 4.0]))
    expected = pytest.approx(91 ** (1 / 3))
    assert ampfuse.get_total_norm([param.grad], 3.0).item() == expected
    assert ampfuse.clip_grad_norm_([param], 1.0, norm_type=3.0).item() == expected


@pytest.mark.vectorised
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float16,) * 4,
        (torch.bfloat16,) * 4,
        (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float64, torch.float32, torch.complex64),
        (torch.complex128, torch.float32, torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_norm_of_16_bit_and_mixed_gradients_is_not_rounded_to_16_bits(device, dtypes):
    parameters = parameters_with_gradients(device, dtypes)
    before = clones(gradients(parameters))
    norm = ampfuse.clip_grad_norm_(parameters, 1.0)
    assert_norm(norm, before, 2.0)
    for grad, old in zip(gradients(parameters), before, strict=True):
        # Rounding the factor and the product costs half a last bit each; a subnormal product may
        # be off by one step between subnormal numbers.
        info = torch.finfo(grad.dtype)
        expected = real_parts(old).double() / (norm.item() + 1e-6)
        atol = info.smallest_normal * info.eps
        torch.testing.assert_close(real_parts(grad).double(), expected, rtol=info.eps, atol=atol)


@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_total_norm_may_have_another_dtype_than_the_gradients(device, norm_dtype):
    parameters = parameters_with_gradients(device)
    before = clones(gradients(parameters))
    total_norm = torch.tensor(7.0, dtype=norm_dtype, device=device)  # exact in all these dtypes
    ampfuse.clip_grads_with_norm_(parameters, 1.5, total_norm)
    for grad, old in zip(gradients(parameters), before, strict=True):
        expected = (old.double() * 1.5 / (7 + 1e-6)).float()
        # Rounding the factor, the product and the expected value costs half a last bit each.
        torch.testing.assert_close(grad, expected, rtol=2 * torch.finfo(grad.dtype).eps, atol=0)


def test_total_norm_is_finite_when_squares_overflow_and_torch_returns_inf(device):
    for dtype, value in ((torch.float64, 1e200), (torch.float32, 1e30)):
        tensors = [torch.full((2,), value, dtype=dtype, device=device) for _ in range(2)]
        assert ampfuse.get_total_norm(tensors).item() == pytest.approx(2 * value, rel=1e-6)
        assert torch.nn.utils.get_total_norm(tensors).isinf()


def test_dtypes_without_a_norm_are_refused(device):
    ones = torch.ones(3, device=device)
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(TypeError, match=r"tensors\[1\]: expected a tensor of dtype float16, b"):
            ampfuse.get_total_norm([ones, ones.to(dtype)])
    with pytest.raises(TypeError, match="total_norm: expected dtype"):
        ampfuse.clip_grads_with_norm_([parameter_with(ones)], 1.0, ones[0] * 1j)


# --- tensors that are refused or left to torch --------------------------------------------------


class Tagged(torch.Tensor):
    """A tensor subclass that overrides no operation."""


def test_tensor_subclasses_are_left_to_torch(device):
    def clipped(clip):
        grad = heavy_tailed(33, torch.float32, device).as_subclass(Tagged)
        parameter = torch.zeros(33, device=device).as_subclass(Tagged)
        parameter.grad = grad
        return clip([parameter], 1.0), grad

    norm, grad = clipped(ampfuse.clip_grad_norm_)

    expected, expected_grad = clipped(torch.nn.utils.clip_grad_norm_)
    assert type(norm) is type(expected) is Tagged
    assert torch.equal(norm, expected)
    assert torch.equal(grad, expected_grad)


def test_expanded_gradient_is_refused_before_anything_is_written(device):
    good = parameter_with(torch.full((3,), 4.0, device=device))
    expanded = parameter_with(torch.ones(1, device=device).expand(3))
    elsewhere = parameter_with(torch.ones(1, device="meta").expand(3))
    with pytest.raises(ValueError, match=r"parameters\[2\].grad: more than one element"):
        ampfuse.clip_grad_norm_([good, Parameter(torch.zeros(1)), expanded], 1.0)
    with pytest.raises(ValueError, match=r"parameters\[1\].grad: more than one element"):
        ampfuse.clip_grads_with_norm_([good, elsewhere], 1.0, torch.tensor(8.0, device=device))
    assert good.grad.tolist() == [4.0] * 3


def test_sparse_gradients_are_clipped_if_torch_has_their_norm_and_refused_otherwise(device):
    ours, theirs = (torch.nn.Embedding(4, 2, sparse=True, device=device) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    for embedding in (ours, theirs):
        embedding(torch.tensor([1, 3], device=device)).sum().backward()

    try:
        expected = torch.nn.utils.clip_grad_norm_([theirs.weight], 1.0)
    except NotImplementedError:  # torch 2.11 has no norm of sparse tensors
        with pytest.raises(ValueError, match=r"parameters\[0\].grad: expected a strided tensor"):
            ampfuse.clip_grad_norm_([ours.weight], 1.0)
    else:
        assert torch.equal(ampfuse.clip_grad_norm_([ours.weight], 1.0), expected)

    for module, embedding in ((ampfuse, ours), (torch.nn.utils, theirs)):
        module.clip_grads_with_norm_([embedding.weight], 1.0, torch.tensor(4.0, device=device))
    ours, theirs = ours.weight.grad.to_dense(), theirs.weight.grad.to_dense()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_gradients_on_two_devices_are_clipped_as_in_torch(norm_type):
    def clipped(clip):
        parameters = [
            parameter_with(heavy_tailed(33, torch.float32, torch.device(device), seed))
            for seed, device in enumerate(["cuda", "cpu", "cuda"])
        ]
        return clip(parameters, 1.0, norm_type), parameters

    norm, parameters = clipped(ampfuse.clip_grad_norm_)

    expected, others = clipped(torch.nn.utils.clip_grad_norm_)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for parameter, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=2e-6, atol=0)
