"""`ampfuse.Mastered` trains 16-bit parameters by float32 masters with any optimizer of torch."""

from functools import partial

import ampfuse
import pytest
import torch
from ampfuse import Mastered
from mastered_runs import (
    BF16,
    MAX_NORM,
    SCALE,
    assert_all_same,
    feed,
    made,
    made_with_optimizer,
    train,
)
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

MAKERS = {
    "Muon": partial(torch.optim.Muon, lr=0.02),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9),
    "NAdam": torch.optim.NAdam,
    "Adagrad": torch.optim.Adagrad,
}
EVERY_OPTIMIZER = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def clipped_reference(optimizer, params, steps):
    """Train by a plain optimizer as a scaler and `max_grad_norm` would, without step 3."""
    for step in steps:
        if step == 3:
            continue
        feed(params, step)
        ampfuse.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()


@EVERY_OPTIMIZER
def test_float32_parameters_train_as_with_the_optimizer_alone(device, make):
    ours, theirs = made(device), made(device)
    train(Mastered(make, ours), ours, range(6))
    train(make(theirs), theirs, range(6))
    assert_all_same(ours, theirs)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("scaler", [ampfuse.GradScaler, torch.amp.GradScaler])
def test_masters_train_as_float32_parameters_with_the_same_gradients(device, make, scaler):
    ours, theirs = made(device, BF16), made(device)
    optimizer = Mastered(make, ours, max_grad_norm=MAX_NORM)
    train(optimizer, ours, range(6), scaler(device.type, init_scale=SCALE))
    clipped_reference(make(theirs), theirs, range(6))
    assert_all_same(optimizer.master_params(), theirs)
    assert_all_same(ours, [one.to(BF16) for one in theirs])


@pytest.mark.parametrize("way", ["in step", "unscale_", "no scaler"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_gradients_stay_as_they_were_and_their_norm_is_known(device, dtype, way):
    params = made(device, dtype)
    optimizer = Mastered(torch.optim.NAdam, params, max_grad_norm=MAX_NORM)
    assert optimizer.grad_norm is None
    scaler = ampfuse.GradScaler(device.type, init_scale=4.0, allow_fp16_grads=True)
    scaler.scale(torch.zeros((), device=device))
    feed(params, 0, 1.0 if way == "no scaler" else 4.0)
    if way == "unscale_":
        scaler.unscale_(optimizer)
    grads = [param.grad for param in params]
    values = [grad.clone() for grad in grads]
    optimizer.step() if way == "no scaler" else scaler.step(optimizer)
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    assert_all_same(grads, values)
    assert all(
        master.grad is None or dtype == torch.float32 for master in optimizer.master_params()
    )
    feed(params, 0)
    expected = ampfuse.get_total_norm([param.grad.float() for param in params])
    torch.testing.assert_close(optimizer.grad_norm, expected)


@pytest.mark.parametrize("flag", ["found_inf", "scale without an inverse"])
def test_skipped_step_does_not_call_the_inner_optimizer(device, flag):
    params = made(device, BF16)
    optimizer = Mastered(torch.optim.NAdam, params)
    optimizer.inner.register_step_pre_hook(lambda *_: pytest.fail("the step was not skipped"))
    feed(params, 0)
    number = partial(torch.tensor, dtype=torch.float32, device=device)
    optimizer.grad_scale = number(1.0 if flag == "found_inf" else 2.0**-130)
    optimizer.found_inf = number(1.0 if flag == "found_inf" else 0.0)
    optimizer.step()
    assert_all_same(params, made(device, BF16))
    del optimizer.found_inf  # nobody has looked for overflow
    optimizer.grad_scale = number(1.0)
    params[1].grad[0] = torch.nan
    optimizer.step()
    assert_all_same(params, made(device, BF16))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_step_without_a_scaler_waits_for_nothing(dtype, monkeypatch):
    params = made("cpu", dtype)
    optimizer = Mastered(torch.optim.RMSprop, params, max_grad_norm=MAX_NORM)
    feed(params, 0)
    for name in ("item", "tolist", "cpu", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host waits"))
    optimizer.step()


# --- groups ---------------------------------------------------------------------------------------

SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=8),
}


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
def test_groups_have_options_that_schedulers_and_programs_change(device, schedule):
    runs = []
    for make, dtype in ((partial(Mastered, torch.optim.NAdam), BF16), (torch.optim.NAdam, None)):
        params = made(device, dtype or torch.float32)
        optimizer = make([{"params": params[:1], "lr": 0.1}, {"params": params[1:], "eps": 0.1}])
        scheduler = schedule(optimizer)
        for step in range(6):
            train(optimizer, params, [step])
            scheduler.step()
            if step == 3:
                optimizer.param_groups[1]["weight_decay"] = 0.1
        runs.append((optimizer, params))
    (ours, _), (theirs, params) = runs
    assert_all_same(ours.master_params(), params)
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        names = group.keys() - {"params"}
        assert {name: group[name] for name in names} == {name: other[name] for name in names}
        assert group.keys() == other.keys()


def test_options_that_the_inner_optimizer_changes_are_not_reset(device):
    params = made(device, BF16)
    optimizer = Mastered(torch.optim.RMSprop, params)
    for mode, lr in (("train", 0.5), ("eval", 0.25)):
        optimizer.inner.param_groups[0]["mode"] = mode
        optimizer.param_groups[0]["lr"] = lr
        train(optimizer, params, [0])
        for groups in (optimizer.param_groups, optimizer.inner.param_groups):
            assert (groups[0]["mode"], groups[0]["lr"]) == (mode, lr)


def test_group_is_added_to_both_or_to_none(device, monkeypatch):
    ours, theirs = made(device, BF16), made(device)
    optimizer = Mastered(torch.optim.Muon, ours[:1])
    reference = torch.optim.Muon(theirs[:1])
    with monkeypatch.context() as patch:
        patch.setattr(optimizer.inner, "add_param_group", lambda _: {}["refused"])
        with pytest.raises(KeyError, match="refused"):
            optimizer.add_param_group({"params": ours[1:]})
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 1
    optimizer.add_param_group({"params": ours[1:], "lr": 0.5})
    reference.add_param_group({"params": theirs[1:], "lr": 0.5})
    train(optimizer, ours, range(3))
    train(reference, theirs, range(3))
    assert_all_same(optimizer.master_params(), theirs)


def test_names_of_parameters_are_passed_on(device):
    params = made(device, BF16)
    optimizer = Mastered(torch.optim.NAdam, list(zip("ab", params, strict=True)))
    assert optimizer.inner.param_groups[0]["param_names"] == ["a", "b"]
    train(optimizer, params, [0])
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["a", "b"]


def test_closure_computes_loss_and_gradients_first(device):
    params = made(device, BF16)
    optimizer = Mastered(torch.optim.RMSprop, params)

    def closure():
        loss = sum(param.float().square().sum() for param in params)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert params[0].grad is not None
    assert (params[0] != made(device, BF16)[0]).any()


def test_compiled_step_breaks_the_graph_and_trains_the_same(fresh_compiler):
    runs = []
    for compiles in (False, True):
        optimizer, params = made_with_optimizer(BF16)

        def step(optimizer=optimizer, params=params):
            loss = sum(param.float().square().sum() for param in params)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        run = torch.compile(step, backend="eager") if compiles else step
        for _ in range(3):
            run()
        runs.append(params)
    assert_all_same(*runs)


def test_muon_moves_nearly_all_weights_in_bfloat16_with_masters():
    """With torch alone, most weights of size 0.01 are so large that each step is rounded away."""
    torch.manual_seed(0)
    start = (torch.randn(128, 128) * 0.01).to(BF16)
    never_moved = {}
    for name in ("torch", "Mastered"):
        param = Parameter(start.clone())
        make = partial(torch.optim.Muon, lr=1e-4, weight_decay=0.0)
        optimizer = make([param]) if name == "torch" else Mastered(make, [param])
        (watched,) = [param] if name == "torch" else optimizer.master_params()
        has_moved = torch.zeros(128, 128, dtype=torch.bool)
        for step in range(20):
            before = watched.detach().clone()
            train(optimizer, [param], [step])
            has_moved |= before != watched
        never_moved[name] = 1 - has_moved.float().mean().item()
    assert never_moved["torch"] > 0.5
    assert never_moved["Mastered"] <= 0.01
