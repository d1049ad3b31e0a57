"""Learning rates in tensors that groups share or that belong to the caller."""

import copy

import ampfuse
import pytest
import torch


def pair(cls, lr, device):
    first, second = (torch.nn.Parameter(torch.ones(2, device=device)) for _ in range(2))
    return cls([{"params": [first]}, {"params": [second]}], lr=lr)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("cls", [ampfuse.AdamW, torch.optim.AdamW])
def test_different_rates_load_into_groups_that_shared_one_rate_tensor(device, cls):
    saved = pair(cls, torch.tensor(1e-3), device)
    saved.param_groups[0]["lr"] = torch.tensor(0.5)
    loaded = pair(cls, torch.tensor(0.25), device)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert rates(loaded) == pytest.approx([0.5, 1e-3])
    loaded.param_groups[0]["lr"].fill_(0.125)
    assert rates(loaded) == pytest.approx([0.125, 1e-3])


def test_equal_rates_load_into_the_rate_tensor_that_groups_share(device):
    """Check that the groups keep the tensor object, since a graph may read it."""
    rate = torch.tensor(0.25, device=device)
    loaded = pair(ampfuse.AdamW, rate, device)
    before = loaded.state_dict()
    loaded.load_state_dict(pair(ampfuse.AdamW, 0.5, device).state_dict())
    assert all(group["lr"] is rate for group in loaded.param_groups)
    assert rate == 0.5
    assert [group["lr"].item() for group in before["param_groups"]] == [0.25, 0.25]


def test_fraction_loads_into_groups_with_an_integer_rate_tensor(device):
    loaded = pair(ampfuse.AdamW, torch.tensor(1), device)
    loaded.load_state_dict(pair(ampfuse.AdamW, 0.5, device).state_dict())
    assert rates(loaded) == [0.5, 0.5]


@pytest.mark.parametrize("default", [torch.float32, torch.float16])
def test_loaded_rate_keeps_all_digits_in_a_float64_tensor(device, default):
    rate = torch.tensor(0.25, dtype=torch.float64, device=device)
    loaded, saved = (pair(ampfuse.AdamW, lr, device) for lr in (rate, 3e-5))
    torch.set_default_dtype(default)
    try:
        loaded.load_state_dict(saved.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    assert rate.item() == 3e-5


def test_rate_of_one_element_loads_into_a_scalar(device):
    saved = pair(ampfuse.AdamW, torch.tensor([0.5]), device)
    loaded = pair(ampfuse.AdamW, torch.tensor(0.25), device)
    loaded.load_state_dict(saved.state_dict())
    assert rates(loaded) == [0.5, 0.5]
    assert loaded.param_groups[0]["lr"].shape == ()
