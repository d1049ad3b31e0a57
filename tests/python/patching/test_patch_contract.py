"""Patched optimizers behave as programs expect of torch's, and as fused only with fused=True."""

import copy
import math
import pickle

import ampfuse
import pytest
import torch

OVERFLOWS = (1, 2, 4)  # indices of the steps, of six, whose gradients are infinite


def train(device, optimizer_class=None, watch=None, steps=6, **options):
    """Run a training program; return a list of all values that it observes."""
    optimizer_class = optimizer_class or torch.optim.AdamW
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = optimizer_class([param], lr=1e-2, **options)
    scaler = torch.amp.GradScaler(device.type)
    told = []
    if watch:
        watch(optimizer, told)
    for number in range(steps):
        optimizer.zero_grad()
        scaler.scale((param * param).sum()).backward()
        if number in OVERFLOWS:
            param.grad[0] = float("inf")
        scaler.step(optimizer)
        told.append(("grad", *param.grad.tolist()))
        scaler.update()
        told.append(("scale", scaler.get_scale()))
    told.append(("param", *param.tolist()))
    return told


def pre_hook(optimizer, told):
    optimizer.register_step_pre_hook(
        lambda o, *_: told.append(("pre", *o.param_groups[0]["params"][0].grad.tolist()))
    )


def post_hook(optimizer, told):
    optimizer.register_step_post_hook(lambda *_: told.append(("post",)))


def clip_in_a_hook(optimizer, told):
    params = optimizer.param_groups[0]["params"]
    optimizer.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_norm_(params, 0.5) and None
    )


def wrap_step(optimizer, told):
    """Wrap `step` as accelerate does to detect skipped steps."""
    step = optimizer.step
    optimizer.step = lambda *args, **kwargs: (told.append(("step",)), step(*args, **kwargs))[1]


def schedule(optimizer, told):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.register_step_post_hook(lambda *_: told.append(("lr", *scheduler.get_last_lr())))


WATCHES = {
    "nobody": None,
    "before": pre_hook,
    "after": post_hook,
    "clipping": clip_in_a_hook,
    "wrapped": wrap_step,
    "scheduled": schedule,
}


@pytest.mark.parametrize("watch", WATCHES.values(), ids=list(WATCHES))
@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"fused": False}, {"fused": True}], ids=str
)
def test_programs_observe_the_same_values_when_patched(device, watch, options):
    plain = train(device, watch=watch, **options)
    with ampfuse.patched():
        ours = train(device, watch=watch, **options)
    assert len(ours) == len(plain)
    for mine, torchs in zip(ours, plain, strict=True):
        assert mine[0] == torchs[0]
        assert mine[1:] == pytest.approx(torchs[1:], rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("fused", [None, False, True])
def test_patched_optimizer_unscales_gradients_itself_only_with_fused(device, fused):
    with ampfuse.patched():
        optimizer = torch.optim.AdamW(
            [torch.nn.Parameter(torch.ones(3, device=device))], fused=fused
        )
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert one._step_supports_amp_scaling is bool(fused)
    assert ampfuse.AdamW(optimizer.param_groups[0]["params"])._step_supports_amp_scaling


def test_fp16_gradients_are_refused_as_in_torch(device):
    messages = []
    for patch in (False, True):
        param = torch.nn.Parameter(torch.ones(3, device=device, dtype=torch.float16))
        with ampfuse.patched(*(() if patch else ("clip_grad_norm",))):
            optimizer, scaler = torch.optim.AdamW([param]), torch.amp.GradScaler(device.type)
            scaler.scale(param.float().sum()).backward()
            with pytest.raises(ValueError, match="FP16") as refusal:
                scaler.step(optimizer)
        messages.append(str(refusal.value))
    assert messages[1].startswith(messages[0])


def test_scaler_step_without_gradients_raises_torchs_error(device):
    with ampfuse.patched():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, device=device))])
        scaler = torch.amp.GradScaler(device.type)
        scaler.scale(torch.ones((), device=device))
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(optimizer)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_defaults_groups_and_repr_equal_those_of_torch(name):
    torchs = getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(3))], capturable=True)
    with ampfuse.patched():
        ours = getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(3))], capturable=True)
    assert torchs.defaults == ours.defaults
    groups = [dict(optimizer.param_groups[0], params=None) for optimizer in (torchs, ours)]
    assert groups[0] == groups[1]
    assert repr(ours) == repr(torchs)
    again = type(ours)([torch.nn.Parameter(torch.ones(3))], 0.5, fused=False, foreach=True)
    assert again.param_groups[0]["foreach"] is True
    assert type(ours).__name__ == name


def test_patched_optimizer_uses_the_programs_own_group_dictionary(device):
    group = {"params": iter([torch.nn.Parameter(torch.ones(3, device=device))]), "lr": 1e-3}
    with ampfuse.patched():
        optimizer = torch.optim.AdamW([group])
        assert optimizer.param_groups[0] is group
        group["lr"] = 0.5
        optimizer.add_param_group({"params": iter([torch.nn.Parameter(torch.ones(2))])})
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 1]


def test_refused_group_gains_no_options_of_ampfuse():
    group = {"params": [torch.nn.Parameter(torch.ones(3))], "betas": (0.5, 0.5), "eps": -1.0}
    with ampfuse.patched(), pytest.raises(ValueError, match="epsilon"):
        torch.optim.AdamW([group], eps=-1.0)
    assert not group.keys() & {"state_dtype", "master_weights"}


@pytest.mark.needs_cuda
def test_patched_step_does_not_sync_the_host_if_nobody_can_notice(waits_are_errors):
    param = torch.nn.Parameter(torch.ones(3, device="cuda"))
    with ampfuse.patched():
        optimizer, scaler = torch.optim.AdamW([param]), torch.amp.GradScaler("cuda")
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale((param * param).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if number == 0:
                torch.cuda.synchronize()
                waits_are_errors()


@pytest.mark.parametrize("name", ["cuda", "cpu"])
@pytest.mark.filterwarnings("ignore:.*GradScaler.* is deprecated")
def test_deprecated_scaler_names_take_their_positional_arguments(name):
    with ampfuse.patched():
        scaler = getattr(torch, name).amp.GradScaler(4.0, 3.0)
    again = type(scaler)(8.0, 2.0, 0.5, 2000, False)
    assert isinstance(scaler, getattr(torch, name).amp.GradScaler)
    assert not again.is_enabled()
    if scaler.is_enabled():  # a CUDA scaler is disabled on a machine without a GPU
        assert scaler.get_growth_factor() == copy.deepcopy(scaler).get_growth_factor() == 3.0


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("is_patched", [False, True], ids=["torch", "patched"])
def test_skipped_first_step_leaves_no_state_and_is_not_counted(device, is_patched):
    if is_patched:
        ampfuse.patch()
    model = torch.nn.Linear(3, 1, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler(device)
    infinite = torch.full((1, 3), math.inf, device=device)
    for inputs, has_stepped in ((infinite, False), (infinite.clamp(max=1), True)):
        optimizer.zero_grad()
        scaler.scale(model(inputs).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert bool(optimizer.state) == bool(optimizer.state_dict()["state"]) == has_stepped
        assert getattr(schedule.optimizer, "_opt_called", False) == has_stepped
    ampfuse.unpatch()
