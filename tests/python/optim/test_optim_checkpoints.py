"""Masters in checkpoints that are reloaded, copied, loaded into torch's classes or gathered."""

import copy

import ampfuse
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


@pytest.mark.parametrize("options", [{}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("how", ["loaded", "copied"])
def test_masters_survive_repeated_checkpoints_and_copies(device, options, how):
    """Load or copy repeatedly: torch adds an option to the defaults of such an optimizer."""
    param = torch.nn.Parameter(torch.ones(4, device=device).bfloat16())
    optimizer = ampfuse.AdamW([{"params": [param], **options}], lr=1e-4, weight_decay=0.0)
    for _ in range(5):
        param.grad = torch.ones_like(param)
        optimizer.step()
        if how == "copied":
            optimizer = copy.deepcopy(optimizer)
            (param,) = optimizer.param_groups[0]["params"]
        saved = optimizer.state_dict()
        fresh = torch.nn.Parameter(param.detach().clone())
        optimizer = ampfuse.AdamW([{"params": [fresh], **options}], lr=1e-4, weight_decay=0.0)
        optimizer.load_state_dict(saved)
        param = fresh
    assert optimizer.state[param]["master_param"].tolist() == pytest.approx(
        [1 - 5e-4] * 4, abs=1e-6
    )


def test_parameters_trained_by_another_optimizer_keep_their_values(device):
    """Check that a stale master is not used: torch's classes load masters but do not step them."""
    param = torch.nn.Parameter(torch.ones(4, device=device).bfloat16())
    optimizer = ampfuse.AdamW([param], lr=1e-6)
    param.grad = torch.ones_like(param)
    optimizer.step()
    other = torch.optim.RAdam([param], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    other.param_groups[0]["lr"] = 0.1
    for _ in range(3):
        other.step()
    trained = param.detach().clone()
    optimizer.load_state_dict(other.state_dict())
    optimizer.param_groups[0]["lr"] = 1e-6
    optimizer.step()
    assert not torch.equal(trained, torch.ones_like(trained))
    assert torch.equal(param, trained)


def test_optimizer_made_from_torchs_groups_leaves_those_unchanged():
    param = torch.nn.Parameter(torch.ones(4).bfloat16())
    param.grad = torch.ones_like(param)
    others = torch.optim.AdamW([param], lr=0.1)
    others.load_state_dict(ampfuse.AdamW([param], lr=0.1).state_dict())
    others.step()
    optimizer = ampfuse.AdamW(others.param_groups, lr=0.1)
    assert "foreach" not in optimizer.param_groups[0]
    optimizer.load_state_dict(others.state_dict())
    for stepped in (optimizer, others):
        stepped.step()
    assert others.param_groups[0]["foreach"] is None


@pytest.mark.parametrize("is_flat", [False, True])
def test_gathered_checkpoint_loads_if_a_group_was_given_an_option_of_torch(is_flat):
    model = torch.nn.Linear(3, 2)
    optimizer = ampfuse.AdamW([{"params": list(model.parameters()), "foreach": False}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert "foreach" not in optimizer.param_groups[0]
