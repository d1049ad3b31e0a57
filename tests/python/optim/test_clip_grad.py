"""clip_grad_norm_, get_total_norm and clip_grads_with_norm_ give the results of torch.nn.utils."""

import inspect
import math

import ampfuse
import pytest
import torch
from reference import gradients, heavy_tailed, parameters_with_gradients, same_bits

# Values of norm_type that torch and ampfuse accept; a string means the number. ampfuse leaves the
# last three to torch's own code.
NORM_TYPES = [1, 2, 2.0, math.inf, "inf", 3, 0, "-inf"]

# torch sums thousands of numbers in float32, so its norm of order 1 is off in the sixth digit.
# test_multi_tensor_norm.py compares ampfuse with float64.
TOLERANCE = {"rtol": 1e-5, "atol": 0.0}


def assert_same_gradients(parameters, others):
    for parameter, other in zip(parameters, others, strict=True):
        grad = parameter.grad.to(other.device)
        torch.testing.assert_close(grad, other.grad, equal_nan=True, **TOLERANCE)


def clip_both(device, *args, **kwargs):
    """Clip equal gradients with ampfuse and with torch; return both lists and both norms."""
    ours, theirs = parameters_with_gradients(device), parameters_with_gradients(device)
    norm = ampfuse.clip_grad_norm_(ours, *args, **kwargs)
    expected = torch.nn.utils.clip_grad_norm_(theirs, *args, **kwargs)
    return ours, theirs, norm, expected


@pytest.mark.parametrize("name", ["clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_"])
def test_signature_matches_that_of_torch(name):
    ours, theirs = (
        inspect.signature(getattr(module, name)) for module in (ampfuse, torch.nn.utils)
    )

    assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
        (p.name, p.default, p.kind) for p in theirs.parameters.values()
    ]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [1e-2, 1, 1e9])
def test_clip_grad_norm_gives_the_norm_and_gradients_of_torch(device, norm_type, max_norm):
    ours, theirs, norm, expected = clip_both(device, max_norm, norm_type)

    torch.testing.assert_close(norm, expected, **TOLERANCE)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_get_total_norm_matches_torch(device, norm_type):
    grads = gradients(parameters_with_gradients(device))

    norm = ampfuse.get_total_norm(grads, norm_type)

    expected = torch.nn.utils.get_total_norm(grads, norm_type)
    torch.testing.assert_close(norm, expected, **TOLERANCE)


@pytest.mark.parametrize("max_norm", [1e-2, 1, 1e9])
def test_clip_grads_with_norm_matches_torch(device, max_norm):
    ours, theirs = parameters_with_gradients(device), parameters_with_gradients(device)
    total_norm = torch.tensor(7.0, device=device)

    assert ampfuse.clip_grads_with_norm_(ours, max_norm, total_norm) is None

    torch.nn.utils.clip_grads_with_norm_(theirs, max_norm, total_norm)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 3.0])
def test_results_match_torch_for_every_value_of_foreach(device, foreach, norm_type):
    ours, theirs, norm, expected = clip_both(device, 1.0, norm_type, foreach=foreach)
    again = ampfuse.get_total_norm(gradients(ours), norm_type, foreach=foreach)
    ampfuse.clip_grads_with_norm_(ours, 0.5, again, foreach=foreach)
    torch.nn.utils.clip_grads_with_norm_(theirs, 0.5, again, foreach=foreach)

    torch.testing.assert_close(norm, expected, **TOLERANCE)
    assert_same_gradients(ours, theirs)


def test_single_tensor_is_accepted_as_a_list_of_one(device):
    ours, theirs = parameters_with_gradients(device)[0], parameters_with_gradients(device)[0]

    norm = ampfuse.clip_grad_norm_(ours, 1.0)
    ampfuse.clip_grads_with_norm_(ours, 0.5, norm)

    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.nn.utils.clip_grads_with_norm_(theirs, 0.5, expected)
    torch.testing.assert_close(norm, expected, **TOLERANCE)
    torch.testing.assert_close(ours.grad, theirs.grad, **TOLERANCE)
    torch.testing.assert_close(
        ampfuse.get_total_norm(ours.grad), torch.linalg.vector_norm(ours.grad), **TOLERANCE
    )


def test_generators_are_accepted_as_lists(device):
    ours, theirs = parameters_with_gradients(device), parameters_with_gradients(device)

    norm = ampfuse.clip_grad_norm_((p for p in ours), 1.0)
    ampfuse.clip_grads_with_norm_((p for p in ours), 0.5, norm)

    expected = torch.nn.utils.clip_grad_norm_((p for p in theirs), 1.0)
    torch.nn.utils.clip_grads_with_norm_((p for p in theirs), 0.5, expected)
    torch.testing.assert_close(norm, expected, **TOLERANCE)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("module", [ampfuse, torch.nn.utils], ids=["ampfuse", "torch"])
def test_empty_generator_warning_points_at_the_callers_file(module):
    with pytest.warns(UserWarning, match="`parameters` is an empty generator") as caught:
        norm = module.clip_grad_norm_((p for p in []), 1.0)

    assert norm.item() == 0
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("parameters", [[], [torch.nn.Parameter(torch.ones(3))]])
@pytest.mark.parametrize("norm_type", [2.0, 3.0])
def test_norm_of_no_gradients_is_zero(parameters, norm_type):
    norm = ampfuse.clip_grad_norm_(parameters, 1.0, norm_type)
    ampfuse.clip_grads_with_norm_(parameters, 1.0, torch.tensor(5.0))

    expected = torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm_type)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0)
    assert ampfuse.get_total_norm([], norm_type).item() == 0


def test_parameters_without_gradients_are_ignored(device):
    ours, theirs = parameters_with_gradients(device), parameters_with_gradients(device)
    ours[1].grad = theirs[1].grad = None

    norm = ampfuse.clip_grad_norm_(ours, 1.0)

    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(norm, expected, **TOLERANCE)
    assert ours[1].grad is None
    assert_same_gradients(ours[2:], theirs[2:])


# On a GPU, torch's foreach kernels race if a list names a tensor twice, so the reference runs here.
CPU = torch.device("cpu")


def test_parameter_listed_twice_is_counted_and_scaled_twice_as_in_torch(device):
    ours, theirs = parameters_with_gradients(device), parameters_with_gradients(CPU)

    norm = ampfuse.clip_grad_norm_([*ours, ours[0]], 1.0)

    expected = torch.nn.utils.clip_grad_norm_([*theirs, theirs[0]], 1.0)
    torch.testing.assert_close(norm.cpu(), expected, **TOLERANCE)
    assert_same_gradients(ours, theirs)


def test_parameters_that_share_a_gradient_are_clipped_as_in_torch(device):
    def clipped(clip, device):
        grad = heavy_tailed(33, torch.float32, device)
        parameters = [torch.nn.Parameter(torch.zeros(33, device=device)) for _ in range(2)]
        parameters[0].grad = parameters[1].grad = grad
        return clip(parameters, 1.0).cpu(), grad.cpu()

    norm, grad = clipped(ampfuse.clip_grad_norm_, device)

    expected, expected_grad = clipped(torch.nn.utils.clip_grad_norm_, CPU)
    torch.testing.assert_close(norm, expected, **TOLERANCE)
    torch.testing.assert_close(grad, expected_grad, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_with_an_autograd_graph_are_clipped_as_in_torch(device):
    def clipped(clip):
        parameter = heavy_tailed(33, torch.float32, device).requires_grad_()
        (parameter**3).sum().backward(create_graph=True)
        return clip([parameter], 1.0), parameter.grad

    norm, grad = clipped(ampfuse.clip_grad_norm_)

    expected, expected_grad = clipped(torch.nn.utils.clip_grad_norm_)
    torch.testing.assert_close(norm, expected, **TOLERANCE)
    torch.testing.assert_close(grad, expected_grad, **TOLERANCE)
    assert grad.requires_grad == expected_grad.requires_grad
    assert not norm.requires_grad


def test_non_contiguous_gradients_are_clipped_as_in_torch(device):
    ours, theirs = (torch.nn.Parameter(torch.zeros(33, 4, device=device)) for _ in "ab")
    for parameter in (ours, theirs):
        parameter.grad = heavy_tailed((33, 8), torch.float32, device)[:, ::2]

    norm = ampfuse.clip_grad_norm_([ours], 1.0)

    expected = torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    torch.testing.assert_close(norm, expected, **TOLERANCE)
    torch.testing.assert_close(ours.grad, theirs.grad, **TOLERANCE)


def test_gradients_within_the_limit_keep_every_bit(device):
    parameters = parameters_with_gradients(device)
    before = [grad.clone() for grad in gradients(parameters)]

    ampfuse.clip_grad_norm_(parameters, 1e9)

    assert all(map(same_bits, gradients(parameters), before))


def test_finite_norm_does_not_raise_with_error_if_nonfinite(device):
    ours, theirs, norm, expected = clip_both(device, 1.0, error_if_nonfinite=True)

    torch.testing.assert_close(norm, expected, **TOLERANCE)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("name", ["get_total_norm", "clip_grads_with_norm_", "clip_grad_norm_"])
def test_torch_fallback_works_while_torchs_names_are_bound_to_ampfuse(name, monkeypatch):
    """Check that ampfuse calls torch's original functions, not itself through the bound names."""
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(module, name, getattr(ampfuse, name), raising=False)
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])

    assert ampfuse.get_total_norm([param.grad], 3.0).item() == pytest.approx(91 ** (1 / 3))
    assert ampfuse.clip_grad_norm_([param], 1.0, norm_type=3.0).item() == pytest.approx(
        91 ** (1 / 3)
    )
