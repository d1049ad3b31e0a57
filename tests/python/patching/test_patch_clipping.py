"""torch.nn.utils.clip_grad_norm_ while it is patched."""

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS
from torch.testing import assert_close


@pytest.fixture(autouse=True)
def patched():
    PARTS["clip_grad_norm"].usage.forget()
    with ampfuse.patched():
        yield


def test_patched_clipping_is_served_by_ampfuse_and_matches_torch(device):
    def gradients():
        made = [torch.nn.Parameter(torch.zeros(4, device=device)) for _ in range(3)]
        for number, p in enumerate(made):
            p.grad = torch.full((4,), float(number), device=device)
        return made

    mine, others = gradients(), gradients()
    norm = torch.nn.utils.clip_grad_norm_(mine, 1.0)
    expected = torch.nn.utils.get_total_norm([p.grad for p in others])
    torch.nn.utils.clip_grads_with_norm_(others, 1.0, expected)
    assert_close(norm, expected)
    for p, other in zip(mine, others, strict=True):
        assert_close(p.grad, other.grad)
    assert torch.nn.utils.clip_grad_norm_(iter(mine), 9.0, "inf").item() == pytest.approx(
        max(p.grad.abs().max().item() for p in mine)
    )
    assert PARTS["clip_grad_norm"].usage.uses == 2


def test_norm_includes_writes_through_data_after_unscaling():
    """Write through `.data` as old programs do, which leaves version counters unchanged."""
    p = torch.nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([p], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", 4.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(sgd)
    p.grad.data.mul_(3)
    norm = torch.nn.utils.clip_grad_norm_([p], 100.0)
    assert norm.item() == pytest.approx(3 * 2**0.5)


def test_empty_generator_warns_and_non_finite_norm_raises_as_in_torch():
    with pytest.warns(UserWarning, match="empty generator"):
        torch.nn.utils.clip_grad_norm_((p for p in ()), 1.0)
    p = torch.nn.Parameter(torch.ones(1))
    p.grad = torch.tensor([float("inf")])
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
