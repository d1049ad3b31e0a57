"""Scaled training takes the steps of training without a scale, except those that overflow.

A run is compared with its control, which has a disabled scaler of torch, so never scales or skips,
and omits batches that overflow in the run. Scales are powers of two, so scaling rounds nothing.
Most scenarios are those of PyTorch's own tests of GradScaler.
"""

import pickle
from functools import partial
from math import inf, nan

import ampfuse
import pytest
import torch
from optim_models import CLASSES, assert_same_bits
from scaler_languages import EVERY_LANGUAGE, LANGUAGES, step_by
from torch.nn import Linear, Parameter, Sequential, Tanh
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW

MAX_NORM = 0.1  # less than the norm of all gradients in these tests
# With its usual eps, 1e-8, Adam does not notice gradients that are wrong by a factor.
ADAM = {"lr": 0.1, "eps": 0.1}
OF_TORCH = [(SGD, {"lr": 0.1, "momentum": 0.9}), (AdamW, ADAM)]
OPTIMIZERS = {
    f"{cls.__name__} {how}": partial(cls, **options, foreach=how == "foreach", fused=how == "fused")
    for cls, options in OF_TORCH
    for how in ("for loop", "foreach", "fused")
} | {f"ampfuse.{cls.__name__}": partial(cls, **ADAM) for cls in CLASSES}
OPTIMIZERS["ampfuse.SGD"] = partial(ampfuse.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS["ampfuse.AdamW, clipping"] = partial(ampfuse.AdamW, **ADAM, max_grad_norm=MAX_NORM)
# The scaler reads the flag, torch's kernel does, ours does.
THREE_WAYS = ["SGD foreach", "AdamW fused", "ampfuse.AdamW"]


def model(device):
    torch.manual_seed(0)
    return Sequential(Linear(8, 8), Tanh(), Linear(8, 3)).to(device)


def data(device, count):
    torch.manual_seed(1)
    return [batch.split([8, 3], dim=1) for batch in torch.randn(count, 4, 8 + 3).to(device)]


def loss_of(network, inputs, target):
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        return mse_loss(network(inputs), target)


def plainly(scaler, network, *batch):
    scaler.scale(loss_of(network, *batch)).backward()


def penalized(scaler, network, *batch):
    loss, params = loss_of(network, *batch), list(network.parameters())
    grads = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)
    norms = torch.stack([(grad / scaler.get_scale()).norm() for grad in grads])
    scaler.scale(loss + norms.norm()).backward()


def accumulated(scaler, network, *batch):
    for inputs, target in zip(*(part.chunk(2) for part in batch), strict=True):
        plainly(scaler, network, inputs, target)


def clip_scaled(scaler, optimizer, params):
    max_norm = MAX_NORM * scaler.get_scale()
    assert torch.nn.utils.clip_grad_norm_(params, max_norm) > max_norm


def clip_unscaled(clip_grad_norm_, scaler, optimizer, params):
    scaler.unscale_(optimizer)
    assert clip_grad_norm_(params, MAX_NORM) > MAX_NORM


# How gradients are computed, how they are clipped, and the tolerance between run and control.
RECIPES = {
    "plain": (plainly, None, 0.0),
    "penalty": (penalized, None, 0.0),
    "accumulation": (accumulated, None, 0.0),
    # clip_grad_norm_ adds 1e-6: at most 1e-5 of a norm above 0.1, but less of a scaled norm.
    "clip scaled": (plainly, clip_scaled, 1e-5),
    "clip": (plainly, partial(clip_unscaled, torch.nn.utils.clip_grad_norm_), 0.0),
    # ampfuse may add up the squares for a norm in another order.
    "clip by ampfuse": (plainly, partial(clip_unscaled, ampfuse.clip_grad_norm_), 1e-6),
}


def train(recipe, scaler, network, optimizer, batches, overflows=()):
    backward, clip, _ = RECIPES[recipe]
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        backward(scaler, network, *batch)
        if number in overflows:
            network[-1].weight.grad[-1, -1] = inf
        if clip is not None:
            clip(scaler, optimizer, network.parameters())
        step_by(scaler, optimizer)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *((name, "plain") for name in OPTIMIZERS),
        *((name, recipe) for name in THREE_WAYS for recipe in RECIPES if recipe != "plain"),
    ],
)
@pytest.mark.filterwarnings("error::FutureWarning")
def test_run_with_an_overflow_and_a_pickled_scaler_matches_the_control(device, name, recipe):
    networks, batches = [model(device), model(device)], data(device, 7)
    optimizer, of_control = (OPTIMIZERS[name](network.parameters()) for network in networks)
    scaler = ampfuse.GradScaler(device.type, 128.0, growth_interval=2)
    unscaled = torch.amp.GradScaler(device.type, enabled=False)

    train(recipe, scaler, networks[0], optimizer, batches[:3])
    scaler = pickle.loads(pickle.dumps(scaler))
    train(recipe, scaler, networks[0], optimizer, batches[3:], overflows={1})
    train(recipe, unscaled, networks[1], of_control, batches[:4] + batches[5:])

    # The scale grew after the second, fourth and seventh batch, and backed off at the fifth.
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (512.0, 0)
    # torch's SGD kernel fuses multiplications and additions differently when it unscales.
    is_joined = device.type == "cuda" and isinstance(optimizer, torch.optim.SGD)
    tolerance = max(RECIPES[recipe][-1], 1e-6 * is_joined)
    for param, expected in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(param, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", THREE_WAYS)
def test_gradients_that_become_non_finite_after_unscale_are_applied(device, name):
    for value in (inf, nan):
        param = Parameter(torch.ones(2, device=device))
        scaler, optimizer = ampfuse.GradScaler(device.type, 4.0), OPTIMIZERS[name]([param])
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        param.grad[1] = value
        step_by(scaler, optimizer)
        assert param.isfinite().tolist() == [True, False], value
        assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("broken", [{0}, {1}, {0, 1}])
def test_only_optimizers_that_overflow_are_skipped_and_the_scale_halves(device, broken):
    def run(scaler):
        models = [model(device), model(device)]
        params = [list(network.parameters()) for network in models]
        optimizers = [SGD(params[0], lr=0.1), ampfuse.AdamW(params[1], lr=0.1)]
        for number, (inputs, target) in enumerate(data(device, 4)):
            one, other = (network(inputs) for network in models)
            scaler.scale(mse_loss(2 * one + 3 * other, target)).backward(retain_graph=True)
            scaler.scale(mse_loss(3 * one - 5 * other, target)).backward()
            for index in broken if number == 2 else ():
                params[index][0].grad[3, 3] = inf
            scaler.unscale_(optimizers[0])  # step() unscales for the other optimizer
            for index, optimizer in enumerate(optimizers):
                if scaler.is_enabled() or number != 2 or index not in broken:
                    scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        return params[0] + params[1]

    scaler = ampfuse.GradScaler(device.type, 128.0)
    assert_same_bits(run(scaler), run(torch.amp.GradScaler(device.type, enabled=False)))
    assert scaler.get_scale() == 64.0


PYTHON, CPP = LANGUAGES["Python"], LANGUAGES["C++"]
OPTIONS = {"growth_interval": 3, "hysteresis": 2, "min_scale": 8.0, "history": 20}


@pytest.mark.parametrize(
    ("optimizer", "limit"), [("sgd", {}), ("adamw", {}), ("adamw", {"max_grad_norm": 0.1})]
)
def test_training_in_python_and_cpp_has_the_same_bits(device, optimizer, limit):
    for recipe in ("plain", "clip by ampfuse"):
        outcomes, states = [], []
        for language in (PYTHON, CPP):
            network, scaler = model(device), language.scaler(device, 64.0, **OPTIONS)
            params = list(network.parameters())
            ours = getattr(language, optimizer)(params, lr=0.1, **limit)
            train(recipe, scaler, network, ours, data(device, 12), overflows={3, 4, 10})
            outcomes.append([*params, torch.tensor(scaler.history())])
            states.append(scaler.state_dict())
        assert_same_bits(*outcomes)
        assert states[0] == states[1]


def trained_in_turns(device, turns):
    """Train for five steps in each turn, with a scaler that continues from the one before."""
    network, batches, before = model(device), data(device, 5 * len(turns)), None
    for number, (language, make_scaler) in enumerate(turns):
        scaler = make_scaler()
        if before is not None:
            scaler.load_state_dict(before.state_dict())
        optimizer = language.sgd(list(network.parameters()), lr=0.1)
        train("plain", scaler, network, optimizer, batches[5 * number :][:5], overflows={3})
        before = scaler
    return list(network.parameters()), scaler.state_dict()


@pytest.mark.parametrize("languages", [(PYTHON, CPP), (CPP, PYTHON)], ids=["to C++", "to Python"])
def test_training_continues_in_the_other_language_and_back(device, languages):
    one, other = ((each, partial(each.scaler, device, 64.0, **OPTIONS)) for each in languages)
    expected_params, expected_state = trained_in_turns(device, [one, one, one])
    params, state = trained_in_turns(device, [one, other, one])
    assert_same_bits(params, expected_params)
    assert state == expected_state


@EVERY_LANGUAGE
def test_training_continues_with_torchs_scaler_and_back(language, device):
    torchs = PYTHON, partial(torch.amp.GradScaler, device.type, 64.0, growth_interval=3)
    ours = language, partial(language.scaler, device, 64.0, growth_interval=3)
    expected_params, expected_state = trained_in_turns(device, [torchs, torchs, torchs])
    for turns in ([torchs, ours, torchs], [ours, torchs, ours]):
        params, state = trained_in_turns(device, turns)
        assert_same_bits(params, expected_params)
        assert state.items() >= expected_state.items()


def overflow_144_times_and_step(scaler, optimizer, param):
    """Let the scale back off from 2¹⁶ to 2⁻¹²⁸, whose inverse is no finite float32."""
    for gradient in [inf] * 144 + [1.0]:
        scale = scaler.get_scale()
        scaler.scale(torch.ones((), device=param.device))
        param.grad = torch.full_like(param, gradient)
        step_by(scaler, optimizer)
    assert scale == 2.0**-128


@pytest.fixture
def new_memory_is_nan():
    torch.use_deterministic_algorithms(True)  # fills the memory of torch.empty_like, too
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("is_unscaled", [False, True])
def test_first_steps_of_fused_sgd_may_overflow(device, is_unscaled, new_memory_is_nan):
    param, other = (Parameter(torch.ones(4, device=device)) for _ in range(2))
    optimizer = SGD([param], lr=0.1, momentum=0.9, fused=True)
    expected = SGD([other], lr=0.1, momentum=0.9)
    scaler = ampfuse.GradScaler(device.type)
    for factor in (inf, nan, 1.0, inf, 2.0):
        optimizer.zero_grad()
        scaler.scale(factor * param.sum()).backward()
        if is_unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert scaler.was_skipped() == (factor not in (1.0, 2.0))
        scaler.update()
        if not scaler.was_skipped():
            other.grad = torch.full_like(other, factor)
            expected.step()
        assert_same_bits(param.detach(), other.detach())


@EVERY_LANGUAGE
def test_parameters_survive_144_overflows_in_a_row(device, language):
    param = Parameter(torch.ones(3, device=device))
    optimizer, scaler = language.adamw([param], lr=0.1), language.scaler(device)
    overflow_144_times_and_step(scaler, optimizer, param)
    assert scaler.was_skipped()
    assert torch.equal(param.detach(), torch.ones_like(param))


@pytest.mark.parametrize("fused", [None, True])
def test_a_patched_program_survives_144_overflows_in_a_row(device, fused):
    param = Parameter(torch.ones(3, device=device))
    with ampfuse.patched():
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=fused)
        overflow_144_times_and_step(torch.amp.GradScaler(device.type), optimizer, param)
    assert torch.equal(param.detach(), torch.ones_like(param))


def test_a_step_with_torchs_scaler_is_skipped_if_the_scale_is_too_small(device):
    """torch's scaler reports no overflow here, since it checks gradients alone."""
    for scale in (0.0, 2.0**-149, 2.0**-128):
        param = Parameter(torch.ones(3, device=device))
        scaler = torch.amp.GradScaler(device.type, init_scale=scale)
        scaler.scale(torch.ones((), device=device))
        param.grad = torch.zeros_like(param)
        scaler.step(ampfuse.AdamW([param], lr=0.1))
        assert torch.equal(param.detach(), torch.ones_like(param)), scale
