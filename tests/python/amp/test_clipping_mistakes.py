"""Clipping of gradients that are still scaled, which torch lets pass, gives a warning."""

import ampfuse
import pytest
import torch
from scaled_training import EVERY_SGD, Training
from torch import nn


@EVERY_SGD
@pytest.mark.parametrize("way", ["in the step", "unscale_", "logs the scale"])
def test_clipping_of_scaled_gradients_by_torch_is_noticed_by_the_third_step(device, make, way):
    training = Training(device, make)

    def run():
        for _ in range(6):
            training.scaler.scale(training.loss()).backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            if way == "unscale_":
                training.scaler.unscale_(training.optimizer)
            training.scaler.step(training.optimizer)
            before = training.scaler.get_scale() if way == "logs the scale" else None
            training.scaler.update()
            assert before is None or before == training.scaler.get_scale()

    with pytest.warns(UserWarning, match="norm of the gradients was 1 in each") as caught:
        run()
    assert len(caught) == 1
    assert training.scaler.mistakes() == [str(caught[0].message)]


@pytest.mark.parametrize("limit", [0.5, float("inf")])
def test_clipping_in_addition_to_another_limit_of_the_optimizer_is_noticed(device, limit):
    training = Training(device, ampfuse.SGD)
    training.optimizer.max_grad_norm = limit

    def run():
        for _ in range(6):
            training.scaler.scale(training.loss()).backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 5.0)
            training.step()

    with pytest.warns(UserWarning, match="norm of the gradients was 5 in each") as caught:
        run()
    assert len(caught) == 1


@EVERY_SGD
@pytest.mark.parametrize("limit", [0.5, 1.0])
def test_clipping_of_scaled_bfloat16_gradients_by_torch_is_noticed(device, make, limit):
    training = Training(device, make)
    training.model.bfloat16()
    inputs = torch.randn(32, 8, device=device, dtype=torch.bfloat16)

    def run():
        for _ in range(6):
            training.optimizer.zero_grad()
            training.scaler.scale(training.model(inputs).float().square().mean()).backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), limit)
            training.step()

    with pytest.warns(UserWarning, match=f"norm of the gradients was {limit:g} in each") as caught:
        run()
    assert len(caught) == 1


@EVERY_SGD
def test_clipping_before_unscale_is_noticed_if_the_optimizer_steps_by_itself(device, make):
    training = Training(device, make)

    def run():
        for _ in range(6):
            training.scaler.scale(training.loss()).backward()
            ampfuse.clip_grad_norm_(training.model.parameters(), 1.0)
            training.scaler.unscale_(training.optimizer)
            training.optimizer.step()
            training.scaler.update()

    with pytest.warns(UserWarning, match="clipped to max_norm=1 while they were still") as caught:
        run()
    assert len(caught) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_norms_that_hardly_change_give_no_warning(device, dtype):
    """Multiplied by the scale, they are 9.0045 in the first step."""
    param = nn.Parameter(torch.ones(8, device=device, dtype=dtype))
    optimizer, scaler = torch.optim.SGD([param], lr=1e-6), ampfuse.GradScaler(device.type)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale((param.float() * (4.8577e-5 + 1e-10 * step)).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        scaler.step(optimizer)
        scaler.update()


def test_clipping_before_the_limits_of_two_optimizers_is_noticed_in_spite_of_overflows(device):
    params = [nn.Parameter(torch.ones(8, device=device)) for _ in range(2)]
    limits = (1.0, 0.5)
    optimizers = [
        ampfuse.SGD([param], lr=0.1, max_grad_norm=limit)
        for param, limit in zip(params, limits, strict=True)
    ]
    scaler = ampfuse.GradScaler(device.type)

    def run():
        for step in range(6):
            factor = float("inf") if step == 1 else 1.0 + step
            scaler.scale(sum(factor * param.square().sum() for param in params)).backward()
            for param, limit, optimizer in zip(params, limits, optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_([param], limit)
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()

    with pytest.warns(UserWarning, match="the optimizer's max_grad_norm=1 clips them"):
        run()
