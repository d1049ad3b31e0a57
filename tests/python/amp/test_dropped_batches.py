"""A batch that is dropped after its gradients were unscaled, without an update of the scaler."""

import ampfuse
import pytest
import torch
from scaler_languages import EVERY_LANGUAGE, ready
from torch.nn import Parameter

pytestmark = pytest.mark.filterwarnings("error")

COMPUTED_AGAIN = "gradients were computed again since they were unscaled"


def backward(param, scaler):
    param.grad = None
    scaler.scale(param.sum()).backward()


@EVERY_LANGUAGE
def test_a_scaler_that_loads_a_state_unscales_the_next_gradients(device, language):
    param, optimizer, scaler = ready(language, device)
    scaler.unscale_(optimizer)
    scaler.load_state_dict(scaler.state_dict())
    backward(param, scaler)
    scaler.step(optimizer)
    assert param.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("make", [torch.optim.SGD, ampfuse.SGD])
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_were_computed_again_are_warned_of(device, make, clips):
    param = Parameter(torch.ones(2, device=device))
    optimizer, scaler = make([param], lr=0.5), ampfuse.GradScaler(device.type, 4.0)
    backward(param, scaler)
    scaler.clip_grad_norm_(optimizer, 1.0)
    backward(param, scaler)
    with pytest.warns(UserWarning, match=COMPUTED_AGAIN):
        scaler.clip_grad_norm_(optimizer, 1.0) if clips else scaler.step(optimizer)
    if clips:
        scaler.step(optimizer)  # the warning is given once


@EVERY_LANGUAGE
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_scaled_gradients_that_are_added_to_unscaled_ones_are_warned_of(
    device, language, clips, resets
):
    param, optimizer, scaler = ready(language, device)
    scaler.clip_grad_norm_(optimizer, 1.0) if clips else scaler.unscale_(optimizer)
    if resets:
        param.grad.zero_()
    scaler.scale(param.sum()).backward()
    with pytest.warns(UserWarning, match="Unscale or clip once, after the last micro-batch"):
        scaler.step(optimizer)


def test_clipping_after_the_loss_of_another_optimizer_was_scaled_is_not_warned_of(device):
    params = [Parameter(torch.ones(2, device=device)) for _ in range(2)]
    optimizers = [ampfuse.SGD([param], lr=0.5) for param in params]
    scaler = ampfuse.GradScaler(device.type, 4.0)
    for _ in range(8):
        for param, optimizer in zip(params, optimizers, strict=True):
            backward(param, scaler)
            scaler.unscale_(optimizer)
        for param in params:
            torch.nn.utils.clip_grad_norm_(param, 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def test_a_step_that_failed_is_repeated_without_a_warning_but_not_with_other_gradients(device):
    param = Parameter(torch.ones(2, device=device))
    optimizer, scaler = torch.optim.SGD([param], lr=0.5), ampfuse.GradScaler(device.type, 4.0)

    def fail(*_):
        raise OSError("it fails")

    backward(param, scaler)
    failing = optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="it fails"):
        scaler.step(optimizer)
    failing.remove()
    scaler.step(optimizer)
    assert param.tolist() == [0.5, 0.5]
    scaler.update()

    backward(param, scaler)
    failing = optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="it fails"):
        scaler.step(optimizer)
    failing.remove()
    backward(param, scaler)
    with pytest.warns(UserWarning, match=COMPUTED_AGAIN):
        scaler.step(optimizer)


@EVERY_LANGUAGE
def test_a_load_between_unscaling_or_stepping_and_the_next_call_changes_nothing(device, language):
    param, optimizer, scaler = ready(language, device)
    scaler.unscale_(optimizer)
    scaler.load_state_dict(scaler.state_dict())
    scaler.step(optimizer)
    assert param.tolist() == [0.5, 0.5]
    scaler.load_state_dict(scaler.state_dict())
    scaler.update()


def test_other_losses_and_replaced_gradients_give_no_warning(device):
    params = [Parameter(torch.ones(2, device=device)) for _ in range(2)]
    first, second = (torch.optim.SGD([param], lr=0.5) for param in params)
    scaler = ampfuse.GradScaler(device.type, 4.0)
    for _ in range(3):
        backward(params[0], scaler)
        scaler.unscale_(first)
        params[0].grad = params[0].grad.clamp(max=0.25)
        backward(params[1], scaler)  # also scales another loss
        scaler.step(second)
        scaler.step(first)
        scaler.update()
