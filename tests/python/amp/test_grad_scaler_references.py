"""A scaler keeps no references to a model that would keep it from being moved or cast."""

import ampfuse
import pytest
import torch


@pytest.mark.parametrize("clips", [False, True])
def test_a_model_may_be_cast_by_swapping_its_parameters_after_a_step(device, clips):
    """Torch casts and moves DTensors so. It refuses tensors to which there are weak references."""
    network = torch.nn.Linear(3, 2).to(device)
    scaler = ampfuse.GradScaler(device.type, 1.0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scaler.scale(network(torch.full((2, 3), float("inf"), device=device)).sum()).backward()
    if clips:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        network.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)

    assert network.weight.dtype == torch.float64
    assert scaler.overflow_report(network) == ["weight"]
