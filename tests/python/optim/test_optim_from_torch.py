"""Checkpoints that torch's class has loaded and saved: it keeps masters but does not step them."""

import copy

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits, copies, feed, parameters, train, trained

WITH_MASTERS = pytest.mark.parametrize(
    ("dtype", "master_weights"),
    [(torch.float16, True), (torch.bfloat16, True), (torch.bfloat16, "remainder")],
)


@WITH_MASTERS
def test_stale_masters_saved_by_torch_do_not_overwrite_the_parameters(
    device, dtype, master_weights
):
    params = parameters(device, dtype)
    ours = trained(lambda p: ampfuse.AdamW(p, master_weights=master_weights), params, range(2))
    theirs = torch.optim.AdamW(params, lr=0.25)
    theirs.load_state_dict(ours.state_dict())
    train(theirs, params, range(2, 5))
    stepped = [param.detach().clone() for param in params]

    ours.load_state_dict(theirs.state_dict())
    ours.param_groups[0].update(lr=0.0)
    feed(params, 5)
    ours.step()

    assert_same_bits(params, stepped)
    assert_same_bits(ours.master_params(), [param.float() for param in stepped])
    assert not {"foreach", "fused", "capturable"} & ours.param_groups[0].keys()


@WITH_MASTERS
def test_float32_parameters_are_not_set_to_stale_masters_saved_by_torch(
    device, dtype, master_weights
):
    narrow = parameters(device, dtype)
    saved = trained(lambda p: ampfuse.AdamW(p, master_weights=master_weights), narrow, range(2))
    wide = copies(narrow, torch.float32)
    theirs = torch.optim.AdamW(wide, lr=0.25)
    theirs.load_state_dict(saved.state_dict())
    train(theirs, wide, range(2, 4))
    stepped = [param.detach().clone() for param in wide]

    ampfuse.AdamW(wide).load_state_dict(theirs.state_dict())

    assert_same_bits(wide, stepped)


def test_loading_writes_the_learning_rate_into_the_groups_own_tensor(device):
    lr = torch.tensor(1e-3, device=device)
    optimizer = ampfuse.AdamW(parameters(device), lr=lr)

    for saved in (0.5, torch.tensor(0.25, device=device)):
        state = copy.deepcopy(ampfuse.AdamW(parameters(device), lr=saved).state_dict())
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] is lr
        assert lr.item() == float(saved)


def test_loading_replaces_a_learning_rate_that_is_a_number(device):
    optimizer = ampfuse.AdamW(parameters(device), lr=0.5)
    saved = ampfuse.AdamW(parameters(device), lr=torch.tensor(0.25, device=device)).state_dict()

    optimizer.load_state_dict(saved)

    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_step_does_not_depend_on_torchs_default_dtype_and_device(
    device, default_dtype, dtype, clip
):
    def stepped():
        params = [torch.nn.Parameter(torch.ones(3, dtype=torch.float32, device=device))] * 1
        params.append(torch.nn.Parameter(torch.ones(2, dtype=torch.float32, device=device)))
        groups = [{"params": [param]} for param in params]
        optimizer = ampfuse.AdamW(groups, max_grad_norm=clip)
        for _ in range(2):
            for param in params:
                param.grad = torch.full_like(param, 2.0)
            with torch.device("meta"):
                optimizer.step()
        return params

    expected = stepped()
    default_dtype(dtype)

    assert_same_bits(stepped(), expected)
