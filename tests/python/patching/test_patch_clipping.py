"""torch.nn.utils.clip_grad_norm_ while it is patched."""

import pytest
import torch
from ampfuse.patching import PARTS
from torch.nn import Parameter
from torch.testing import assert_close

torchs_clip = torch.nn.utils.clip_grad_norm_

pytestmark = pytest.mark.usefixtures("patched")


def with_gradients(device, *dtypes):
    params = [Parameter(torch.zeros(4, device=device, dtype=dtype)) for dtype in dtypes]
    for number, param in enumerate(params, start=2):
        param.grad = torch.full_like(param, number)
    return params


def test_patched_clipping_is_served_by_ampfuse_and_matches_torch(device):
    mine, others = (with_gradients(device, *[torch.float32] * 3) for _ in range(2))
    norm = torch.nn.utils.clip_grad_norm_(mine, 1.0)
    assert_close(norm, torchs_clip(others, 1.0))
    assert_close([param.grad for param in mine], [param.grad for param in others])
    largest = max(param.grad.abs().max().item() for param in mine)
    norm = torch.nn.utils.clip_grad_norm_(iter(mine), 9.0, "inf")
    assert norm.item() == pytest.approx(largest)
    assert PARTS["clip_grad_norm"].usage.uses == 2


def test_empty_generator_warns_and_non_finite_norm_raises_as_in_torch():
    with pytest.warns(UserWarning, match="empty generator"):
        torch.nn.utils.clip_grad_norm_((p for p in ()), 1.0)
    p = Parameter(torch.ones(1))
    p.grad = torch.tensor([float("inf")])
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)


def test_error_of_clipping_or_of_a_scaler_is_torchs_alone():
    p = Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    for call in (
        lambda: torch.nn.utils.clip_grad_norm_([p], "one"),
        lambda: torch.amp.GradScaler("cpu", min_scale=1.0),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        assert error.value.__context__ is None


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16,),
        (torch.float16,),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.complex64,),
        (),
    ],
    ids=str,
)
def test_norm_has_torchs_dtype(device, dtypes):
    for form in (list, iter, *([lambda params: params[0]] if dtypes else [])):
        expected = torchs_clip(form(with_gradients(device, *dtypes)), 1.0)
        norm = torch.nn.utils.clip_grad_norm_(form(with_gradients(device, *dtypes)), 1.0)
        assert norm.dtype == expected.dtype, form
        assert_close(norm, expected, rtol=2**-8, atol=0)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_has_torchs_dtype_in_compiled_programs(device, dtype):
    (param,) = with_gradients(device, dtype)

    @torch.compile(backend="eager", fullgraph=True)
    def clip():
        return torch.nn.utils.clip_grad_norm_([param], 1.0)

    norm = clip()
    assert norm.dtype == dtype
    assert norm.item() == 4.0  # of four elements 2
