"""clip_grad_norm_ and clip_grads_with_norm_ with 16-bit, double, complex and mixed dtypes."""

import ampfuse
import pytest
import torch
from reference import assert_norm, gradients, parameters_with_gradients, real_parts


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
    before = [grad.clone() for grad in gradients(parameters)]

    norm = ampfuse.clip_grad_norm_(parameters, 1.0)

    assert_norm(norm, before, 2.0)
    for grad, old in zip(gradients(parameters), before, strict=True):
        # Rounding the factor and the product costs half a last bit each; a subnormal product may
        # be off by one step between subnormal numbers.
        info = torch.finfo(grad.dtype)
        expected = real_parts(old).double() / (norm.item() + 1e-6)
        torch.testing.assert_close(
            real_parts(grad).double(),
            expected,
            rtol=info.eps,
            atol=info.smallest_normal * info.eps,
        )


@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_total_norm_may_have_another_dtype_than_the_gradients(device, norm_dtype):
    parameters = parameters_with_gradients(device)
    before = [grad.clone() for grad in gradients(parameters)]

    ampfuse.clip_grads_with_norm_(
        parameters, 1.5, torch.tensor(7.0, dtype=norm_dtype, device=device)
    )

    for grad, old in zip(gradients(parameters), before, strict=True):
        expected = (old.double() * 1.5 / (7 + 1e-6)).float()
        # 7 is exact in all of these dtypes. Rounding the factor, the product and the expected
        # value costs half a last bit each.
        torch.testing.assert_close(grad, expected, rtol=2 * torch.finfo(grad.dtype).eps, atol=0)
