"""Training with torch.optim.Adam, AdamW and SGD while they are patched."""

import copy
import math
import pickle

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS
from scaler_languages import step_by
from torch.nn import Parameter

# Derived classes stay torch's while these are patched.
NAMES = ("Adam", "AdamW", "SGD")
TORCHS = {name: type(name, (getattr(torch.optim, name),), {}) for name in NAMES}
EACH = pytest.mark.parametrize("name", NAMES)
OF_ADAM = pytest.mark.parametrize("name", ["Adam", "AdamW"])
USAGE = PARTS["optimizers"].usage
OVERFLOWS = (1, 2, 4)  # indices of the steps, of six, whose gradients are infinite

pytestmark = pytest.mark.usefixtures("patched")


def parameter(device="cpu", dtype=torch.float32):
    return Parameter(torch.tensor([1.0, 2.0, 3.0], device=device, dtype=dtype))


def parameters(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), ()]
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [Parameter(tensor) for tensor in made]


def step(optimizer, number=None):
    """Step with gradients of ones, or with random ones from a seed."""
    generator = torch.Generator().manual_seed(number or 0)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
            if number is not None:
                p.grad.copy_(torch.randn(p.shape, generator=generator))
    optimizer.step()


@OF_ADAM
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({}, torch.float64),
        ({"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.3}, torch.float32),
        ({"amsgrad": True, "maximize": True, "foreach": True}, torch.float32),
        ({"capturable": False, "fused": False, "foreach": False}, torch.float32),
    ],
    ids=str,
)
def test_patched_optimizers_step_like_torchs(device, name, options, dtype):
    params, others = parameters(device, dtype), parameters(device, dtype)
    optimizer = getattr(torch.optim, name)(params, **options)
    reference = TORCHS[name](others, **options)
    assert isinstance(optimizer, getattr(ampfuse, name))
    for number in range(5):
        step(optimizer, number)
        step(reference, number)
    for p, other in zip(params, others, strict=True):
        torch.testing.assert_close(p, other, rtol=2e-6, atol=1e-7)
    assert USAGE.uses == 5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5, "maximize": True, "foreach": True},
        {"momentum": 0.9, "fused": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_patched_sgd_steps_like_torchs(device, options, dtype):
    params, others = parameters(device, dtype), parameters(device, dtype)
    optimizer = torch.optim.SGD(params, lr=0.1, **options)
    reference = TORCHS["SGD"](others, lr=0.1, **options)
    assert isinstance(optimizer, ampfuse.SGD)
    for number in range(5):
        step(optimizer, number)
        step(reference, number)
    for p, other in zip(params, others, strict=True):
        if device.type == "cpu" and "fused" not in options:  # torch's kernels round otherwise
            assert torch.equal(p, other)
        torch.testing.assert_close(p, other, rtol=2e-6, atol=1e-7)
    assert USAGE.uses == 5
    assert bool(optimizer.state) == ("momentum" in options)


def train(device, watch, name="AdamW", **options):
    """Run a training program; return a list of all values that it observes."""
    param = Parameter(torch.ones(3, device=device))
    optimizer = getattr(torch.optim, name)([param], lr=1e-2, **options)
    scaler = torch.amp.GradScaler(device.type)
    told = []
    watch(optimizer, told)
    for number in range(6):
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


def nobody(optimizer, told):
    pass


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


WATCHES = [nobody, pre_hook, post_hook, clip_in_a_hook, wrap_step, schedule]


@pytest.mark.parametrize(
    ("watch", "options"),
    [
        *((watch, {}) for watch in WATCHES),
        *((watch, {"fused": True}) for watch in WATCHES),  # such a step unscales gradients itself
        *((nobody, options) for options in ({"foreach": True}, {"fused": False})),
        *((watch, {"name": "SGD"}) for watch in (nobody, schedule)),
        (nobody, {"name": "SGD", "momentum": 0.9}),
        (pre_hook, {"name": "SGD", "momentum": 0.9, "fused": True}),
    ],
)
def test_programs_observe_the_same_values_when_patched(device, watch, options):
    ours = train(device, watch, **options)
    ampfuse.unpatch()
    plain = train(device, watch, **options)
    assert len(ours) == len(plain)
    for mine, torchs in zip(ours, plain, strict=True):
        assert mine[0] == torchs[0]
        assert mine[1:] == pytest.approx(torchs[1:], rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("fused", [None, False, True])
def test_patched_optimizer_unscales_gradients_itself_only_with_fused(device, fused):
    optimizer = torch.optim.AdamW([parameter(device)], fused=fused)
    ampfuse.unpatch()
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert one._step_supports_amp_scaling is bool(fused)
    assert ampfuse.AdamW(optimizer.param_groups[0]["params"])._step_supports_amp_scaling


def test_fp16_gradients_are_refused_as_in_torch(device):
    messages = []
    for _ in range(2):
        param = parameter(device, torch.float16)
        optimizer, scaler = torch.optim.AdamW([param]), torch.amp.GradScaler(device.type)
        scaler.scale(param.float().sum()).backward()
        with pytest.raises(ValueError, match="FP16") as refusal:
            scaler.step(optimizer)
        messages.append(str(refusal.value))
        ampfuse.unpatch()
    assert messages[0].startswith(messages[1])


def test_scaler_step_without_gradients_raises_torchs_error(device):
    optimizer, scaler = torch.optim.AdamW([parameter(device)]), torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones((), device=device))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


def train_plainly(params, optimizer, scaler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        step_by(scaler, optimizer, sum(p.sum() for p in params))


@pytest.mark.needs_cuda
@EACH
def test_patched_step_does_not_sync_the_host_if_nobody_can_notice(waits_are_errors, name):
    param = parameter("cuda")
    optimizer, scaler = getattr(torch.optim, name)([param]), torch.amp.GradScaler("cuda")
    train_plainly([param], optimizer, scaler, 1)
    torch.cuda.synchronize()
    waits_are_errors()
    train_plainly([param], optimizer, scaler, 2)


@pytest.mark.parametrize(
    ("name", "options", "avoided"),
    [
        # torch's scaler reads its flag in each of four steps, ours in the first one
        ("AdamW", {}, 3),
        ("SGD", {}, 3),
        ("SGD", {"momentum": 0.9}, 3),
        ("AdamW", {"fused": True}, 0),  # torch's scaler does not read it either
    ],
    ids=str,
)
def test_host_waits_that_only_torch_needs_are_counted_on_a_gpu(
    device, name, options, avoided, monkeypatch
):
    params = parameters(device)
    optimizer = getattr(torch.optim, name)(params, **options)
    scaler = ampfuse.GradScaler(device)
    train_plainly(params, optimizer, scaler, 4)
    assert USAGE.waits_avoided == (avoided if device.type == "cuda" else 0)
    USAGE.waits_avoided = 0
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # so that CPUs count, too
    train_plainly(params, optimizer, scaler, 3)
    assert USAGE.waits_avoided == min(avoided, 3)


def test_steps_without_a_scaler_avoid_no_host_waits(device, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    step(torch.optim.AdamW(parameters(device)))
    assert USAGE.waits_avoided == 0


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("name", "momentum"), [("AdamW", 0), ("SGD", 0.9), ("SGD", 0)])
def test_skipped_first_step_leaves_no_state_and_is_not_counted(device, name, momentum):
    model = torch.nn.Linear(3, 1, device=device)
    options = {"momentum": momentum} if momentum else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    has_state = name == "AdamW" or momentum != 0
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler(device)
    infinite = torch.full((1, 3), math.inf, device=device)
    for inputs, has_stepped in ((infinite, False), (infinite.clamp(max=1), True)):
        optimizer.zero_grad()
        step_by(scaler, optimizer, model(inputs).sum())
        saved = optimizer.state_dict()["state"]
        assert bool(optimizer.state) == bool(saved) == (has_stepped and has_state)
        assert getattr(schedule.optimizer, "_opt_called", False) == has_stepped


def test_16_bit_parameters_have_no_masters_and_moments_of_their_own_dtype(device):
    bf16, fp16 = torch.bfloat16, torch.float16
    for dtypes in ((bf16,), (bf16, torch.float32), (fp16, torch.float64)):
        params = [parameter(device, dtype) for dtype in dtypes]
        optimizer = torch.optim.AdamW(params)
        step(optimizer)
        for p in params:
            moments = torch.float32 if p.dtype == fp16 else p.dtype
            assert "master_param" not in optimizer.state[p]
            assert optimizer.state[p]["exp_avg"].dtype == moments


@OF_ADAM
def test_moments_have_the_dtype_of_the_groups_current_parameters(device, name):
    """Replace a group's parameters, for example by wider ones, as torch allows."""
    narrow, wide = parameter(device, torch.bfloat16), parameter(device)
    optimizer = getattr(torch.optim, name)([narrow])
    optimizer.param_groups[0]["params"] = [narrow, wide]
    again = getattr(torch.optim, name)([{**optimizer.param_groups[0], "params": [wide]}])
    for one in (optimizer, again):
        step(one)
        for param in one.param_groups[0]["params"]:
            assert one.state[param]["exp_avg"].dtype == param.dtype


@EACH
def test_group_appended_to_param_groups_is_stepped(device, name):
    optimizer = getattr(torch.optim, name)([parameter(device)], lr=0.5)
    late = parameter(device)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [late]})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(optimizer)
    assert late.tolist() == optimizer.param_groups[0]["params"][0].tolist() != [1.0, 2.0, 3.0]


@OF_ADAM
@pytest.mark.parametrize("in_tensor", [False, True])
def test_learning_rate_may_become_negative(device, name, in_tensor):
    lr = torch.tensor(1.0, device=device) if in_tensor else 1.0
    param = parameter(device)
    optimizer = getattr(torch.optim, name)([param], lr=lr, capturable=in_tensor and param.is_cuda)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 - number / 2)
    seen = []
    for _ in range(5):
        step(optimizer)
        schedule.step()
        seen.append(param[0].item())
    assert float(optimizer.param_groups[0]["lr"]) == -1.5
    assert seen[4] > seen[3]  # the negative rate steps uphill


@EACH
def test_weight_decay_may_become_negative(device, name):
    optimizer = getattr(torch.optim, name)([parameter(device)], weight_decay=0.1)
    (group,) = optimizer.param_groups
    (param,) = group["params"]
    twin = parameter(device)
    written_out = TORCHS[name]([twin], weight_decay=0.1)
    for _ in range(4):
        group["weight_decay"] -= 0.05
        written_out.param_groups[0]["weight_decay"] -= 0.05
        step(optimizer)
        step(written_out)
    assert group["weight_decay"] < 0
    assert param.tolist() == pytest.approx(twin.tolist(), rel=1e-6)
