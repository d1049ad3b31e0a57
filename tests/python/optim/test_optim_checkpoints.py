"""Masters in checkpoints that go through several hands: ours, copies, torch's, gathered ones."""

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
def test_masters_outlive_any_number_of_checkpoints(device, options, how):
    """Torch's class puts an option of its own among the defaults of what is loaded or copied."""
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


def test_what_others_have_trained_since_stays(device):
    """Of torch's classes that keep a master which they were given, but do not step it."""
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


def test_groups_of_another_optimizer_stay_as_they_are():
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
def test_gathered_checkpoints_are_loaded_where_a_group_had_options_of_torchs(is_flat):
    model = torch.nn.Linear(3, 2)
    optimizer = ampfuse.AdamW([{"params": list(model.parameters()), "foreach": False}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert "foreach" not in optimizer.param_groups[0]
