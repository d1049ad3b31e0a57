"""A loss scale whose inverse is not a finite float32 makes the step an overflow."""

import ampfuse
import pytest
import torch
from scaler_languages import EVERY_LANGUAGE
from torch.nn import Parameter


def overflow(scaler, optimizer, param, times):
    for _ in range(times):
        scaler.scale(torch.ones((), device=param.device))
        param.grad = torch.full_like(param, torch.inf)
        scaler.step(optimizer)
        scaler.update()


@EVERY_LANGUAGE
def test_parameters_survive_144_overflows_in_a_row(device, language):
    """The scale backs off from 2^16 to 2^-128; the next gradients are finite."""
    param = Parameter(torch.ones(3, device=device))
    optimizer, scaler = language.adamw([param], lr=0.1), language.scaler(device)

    overflow(scaler, optimizer, param, 144)
    assert scaler.get_scale() == 2.0**-128
    scaler.scale(torch.ones((), device=device))
    param.grad = torch.ones_like(param)
    scaler.step(optimizer)
    scaler.update()

    assert scaler.was_skipped()
    assert torch.equal(param.detach(), torch.ones_like(param))


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-128])
def test_a_step_with_torchs_scaler_is_skipped_if_the_scale_is_too_small(device, scale):
    """torch's scaler reports no overflow here, since it checks gradients alone."""
    param = Parameter(torch.ones(3, device=device))
    optimizer = ampfuse.AdamW([param], lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=scale)
    scaler.scale(torch.ones((), device=device))
    param.grad = torch.zeros_like(param)

    scaler.step(optimizer)

    assert torch.equal(param.detach(), torch.ones_like(param))


@pytest.mark.parametrize("fused", [None, True])
def test_a_patched_program_survives_144_overflows_in_a_row(device, fused):
    with ampfuse.patched():
        param = Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler(device.type)
        overflow(scaler, optimizer, param, 144)
        scaler.scale(torch.ones((), device=device))
        param.grad = torch.ones_like(param)
        scaler.step(optimizer)
        scaler.update()

    assert torch.equal(param.detach(), torch.ones_like(param))
