"""ampfuse.GradScaler behaves like torch's: training, error messages, saved state."""

import copy
import pickle
from collections import defaultdict

import ampfuse
import pytest
import torch
from torch.nn import Parameter

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.5}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.5}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.5, "fused": True}),
    "ours": (ampfuse.AdamW, {"lr": 0.5}),
    "ours, clipping": (ampfuse.AdamW, {"lr": 0.5, "max_grad_norm": 1.0}),
}
EVERY_OPTIMIZER = pytest.mark.parametrize(
    ("cls", "options"), OPTIMIZERS.values(), ids=list(OPTIMIZERS)
)


def model(device, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)).to(device, dtype)


def data(device):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 8, generator=generator).to(device), torch.randn(4, 3).to(device) * 0)
        for _ in range(6)
    ]


def train(scaler, network, optimizer, batches, spoil=(), clip=None, unscale=False):
    """Run the loop of the torch.amp documentation; in the steps `spoil` a gradient is infinite."""
    for step, (inputs, target) in enumerate(batches):
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(network(inputs), target)
        scaler.scale(loss).backward()
        if step in spoil:
            network[1].weight.grad[0, 0] = float("inf")
        if unscale or clip is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


def same(parameters, others):
    return all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


@EVERY_OPTIMIZER
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_training_matches_torchs_scaler(device, cls, options, unscale, clip):
    networks = [model(device) for _ in range(2)]
    scalers = [
        scaler(device.type, init_scale=128.0, growth_interval=2)
        for scaler in (ampfuse.GradScaler, torch.amp.GradScaler)
    ]
    for network, scaler in zip(networks, scalers, strict=True):
        optimizer = cls(network.parameters(), **options)
        train(scaler, network, optimizer, data(device), {3}, clip, unscale)

    assert scalers[0].get_scale() == scalers[1].get_scale() == 256.0
    assert scalers[0]._get_growth_tracker() == scalers[1]._get_growth_tracker()
    for ours, theirs in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@EVERY_OPTIMIZER
def test_scaled_training_matches_unscaled_training(device, cls, options):
    networks = [model(device) for _ in range(2)]
    scalers = [ampfuse.GradScaler(device.type, 2.0**10, enabled=enabled) for enabled in (1, 0)]
    for network, scaler in zip(networks, scalers, strict=True):
        optimizer = cls(network.parameters(), **options)
        train(scaler, network, optimizer, data(device))

    for ours, theirs in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@EVERY_OPTIMIZER
def test_an_overflow_changes_the_scale_but_no_parameter(device, cls, options):
    network, scaler = model(device), ampfuse.GradScaler(device.type, 8.0)
    optimizer = cls(network.parameters(), **options)
    before = [param.detach().clone() for param in network.parameters()]

    train(scaler, network, optimizer, data(device)[:1], spoil={0})

    assert same(network.parameters(), before)
    assert scaler.get_scale() == 4.0
    assert scaler.was_skipped()


@pytest.mark.parametrize("optimizer_states", ["fresh", "used"])
def test_state_moves_to_torchs_scaler_and_back_between_steps(device, optimizer_states):
    def run(second):
        network = model(device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        first = torch.amp.GradScaler(device.type, 64.0, growth_interval=2)
        train(first, network, optimizer, data(device)[:3])
        if optimizer_states == "used":
            second.scale(torch.ones((), device=device))
        second.load_state_dict(first.state_dict())
        train(second, network, optimizer, data(device)[3:], spoil={1})
        third = torch.amp.GradScaler(device.type)
        third.load_state_dict(second.state_dict())
        return list(network.parameters()), third.state_dict()

    ours, our_state = run(ampfuse.GradScaler(device.type))
    theirs, their_state = run(torch.amp.GradScaler(device.type))

    assert same(ours, theirs)
    assert our_state == their_state


def test_state_has_torchs_keys_and_ours_with_plain_values(device):
    scaler = ampfuse.GradScaler(device.type, hysteresis=3, min_scale=2.0)

    state = scaler.state_dict()

    assert list(state)[:5] == list(torch.amp.GradScaler(device.type).state_dict())
    assert {type(value) for value in state.values()} <= {int, float, str, bool, type(None)}
    assert (state["hysteresis"], state["min_scale"], state["_hysteresis_tracker"]) == (3, 2.0, 3)


def test_loading_torchs_state_keeps_the_options_that_torch_lacks(device):
    scaler = ampfuse.GradScaler(device.type, hysteresis=3, min_scale=2.0)

    scaler.load_state_dict(torch.amp.GradScaler(device.type, 8.0).state_dict())

    assert scaler.get_scale() == 8.0
    assert scaler.state_dict()["hysteresis"] == 3


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copied_and_pickled_scalers_keep_their_state(device, used, copied):
    scaler = ampfuse.GradScaler(device.type, 3.0, 4.0, 0.25, 2, history=5, hysteresis=2)
    if used:
        network = model(device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        train(scaler, network, optimizer, data(device)[:1])

    other = copied(scaler)

    assert other.state_dict() == scaler.state_dict()
    assert other._init_growth_tracker == scaler._get_growth_tracker()
    assert isinstance(other._per_optimizer_states, defaultdict)
    assert other.scale(torch.ones((), device=device)).item() == scaler.get_scale()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copied_and_pickled_scalers_keep_the_history_and_the_last_step(device, copied):
    scaler = ampfuse.GradScaler(device.type, 4.0, history=3)
    param = torch.nn.Parameter(torch.zeros(2, device=device))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for gradient in (1.0, 2.0, 3.0, 4.0, float("inf")):
        scaler.scale(torch.ones((), device=device))
        param.grad = torch.full_like(param, gradient)
        scaler.step(optimizer)
        scaler.update()

    other = copied(scaler)

    assert other.was_skipped()
    assert len(other.history()) == 3
    assert other.history() == scaler.history()


def test_a_disabled_scaler_only_steps_the_optimizer(device):
    network, scaler = model(device), ampfuse.GradScaler(device.type, enabled=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    loss = network(torch.ones(1, 8, device=device)).sum()

    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, closure=lambda: 7.0) == 7.0
    scaler.update()
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1.0, {}, False)
    assert (scaler.was_skipped(), scaler.history(), scaler.overflow_report(network)) == (0, [], [])
    assert scaler.scale_tensor() == 1
    scaler.load_state_dict({})
    assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False


def quarter(device, **options):
    """Return a parameter whose gradient is scaled by 4, its optimizer, and the scaler."""
    param = Parameter(torch.ones(2, device=device))
    scaler = ampfuse.GradScaler(device.type, 4.0, **options)
    scaler.scale(param.sum()).backward()
    return param, torch.optim.SGD([param], lr=0.5), scaler


def test_calls_in_the_wrong_order_raise_torchs_errors(device):
    _, optimizer, scaler = quarter(device)

    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: None)
    with pytest.raises(AssertionError, match="may only be pickled"):
        pickle.dumps(scaler)


@pytest.mark.parametrize("name", ["unscale_", "step", "update", "_check_inf_per_device"])
def test_methods_raise_before_the_first_scale(device, name):
    scaler = ampfuse.GradScaler(device.type)
    optimizer = torch.optim.SGD([Parameter(torch.ones(1, device=device))], lr=0.1)

    with pytest.raises(AssertionError, match="_scale is None"):
        getattr(scaler, name)(*[optimizer][: name != "update"])


def test_optimizer_without_gradients_is_refused_unless_allowed(device):
    scaler = ampfuse.GradScaler(device.type)
    optimizer = torch.optim.SGD([Parameter(torch.ones(1, device=device))], lr=0.1)
    scaler.scale(torch.ones((), device=device))

    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()

    kinder = ampfuse.GradScaler(device.type, growth_interval=1, allow_no_grads=True)
    kinder.scale(torch.ones((), device=device))
    kinder.step(optimizer)
    kinder.update()
    assert kinder.get_scale() == 2.0**16


@pytest.mark.parametrize("new_scale", [8.0, 8, torch.tensor(8.0), torch.tensor([8.0])])
def test_scale_may_be_set(device, new_scale):
    _, optimizer, scaler = quarter(device)
    if isinstance(new_scale, torch.Tensor):
        new_scale = new_scale.to(device)
    scaler.step(optimizer)

    scaler.update(new_scale)

    assert scaler.get_scale() == 8.0
    assert not scaler._per_optimizer_states


def test_step_checks_gradients_and_computes_the_clip_norm_in_one_pass(device):
    """The pass that checks gradients also computes the norm that the optimizer clips by."""
    network, scaler = model(device), ampfuse.GradScaler(device.type)
    optimizer = ampfuse.AdamW(network.parameters(), max_grad_norm=1.0)
    train(scaler, network, optimizer, data(device)[:1])
    scaler.scale(network(data(device)[0][0]).sum()).backward()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaler.step(optimizer)

    names = [event.name for event in profile.events() if event.name.startswith("ampfuse::")]
    assert names == ["ampfuse::multi_tensor_unscale_norm", "ampfuse::fused_adam"]


@pytest.mark.parametrize("make", [ampfuse.CrossEntropyLoss, ampfuse.LinearCrossEntropyLoss])
def test_training_works_after_a_loss_was_evaluated_in_inference_mode(device, make):
    scaler = ampfuse.GradScaler(device.type, history=2)
    is_linear = make is ampfuse.LinearCrossEntropyLoss
    loss = (make(4, 3, scaler=scaler) if is_linear else make(scaler=scaler)).to(device)
    network, target = torch.nn.Linear(4, 4 if is_linear else 3).to(device), torch.tensor([1, 2])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    inputs, target = torch.ones(2, 4, device=device), target.to(device)

    with torch.inference_mode():
        loss(network(inputs), target)
    scaler.scale(loss(network(inputs), target)).backward()
    scaler.step(optimizer)
    scaler.update()

    assert not scaler.was_skipped()


def test_the_scale_tensor_may_be_created_early_and_twice(device):
    """Libraries call this method before they load a state, some of them twice."""
    scaler = ampfuse.GradScaler(device.type, 4.0)

    scaler._lazy_init_scale_growth_tracker(device.type)
    scale = scaler.scale_tensor()
    scaler.update(8.0)
    scaler._lazy_init_scale_growth_tracker(device)

    assert scaler.scale_tensor() is scale
    assert scaler.get_scale() == 8.0
