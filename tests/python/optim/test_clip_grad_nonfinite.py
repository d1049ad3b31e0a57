"""clip_grad_norm_ and get_total_norm when the norm is NaN or infinite."""

import math

import ampfuse
import pytest
import torch
from reference import gradients, parameters_with_gradients, same_bits


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf, 3.0])
def test_nonfinite_norm_raises_with_error_if_nonfinite_and_gradients_stay(device, bad, norm_type):
    parameters = parameters_with_gradients(device)
    parameters[2].grad[8192] = bad
    before = [grad.clone() for grad in gradients(parameters)]

    message = f"The total norm of order {norm_type} for .* is non-finite, so it cannot be clipped"
    with pytest.raises(RuntimeError, match=message):
        ampfuse.clip_grad_norm_(parameters, 1.0, norm_type, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=message):
        ampfuse.get_total_norm(gradients(parameters), norm_type, error_if_nonfinite=True)

    assert all(map(same_bits, gradients(parameters), before))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf, 3.0])
def test_nonfinite_norm_scales_as_in_torch_without_error_if_nonfinite(device, bad, norm_type):
    ours, theirs = parameters_with_gradients(device), parameters_with_gradients(device)
    ours[2].grad[8192] = theirs[2].grad[8192] = bad

    norm = ampfuse.clip_grad_norm_(ours, 1.0, norm_type, error_if_nonfinite=False)

    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type, error_if_nonfinite=False)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for grad, expected_grad in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(grad, expected_grad, equal_nan=True)
