"""The scenarios of PyTorch's own GradScaler tests, written anew for ampfuse.GradScaler.

A run is compared with its control, which has a disabled scaler of torch, so never scales or skips,
and omits batches that overflow in the run. Scales are powers of two, so scaling rounds nothing.
"""

import pickle
from functools import partial
from math import inf, nan

import ampfuse
import pytest
import torch
from optim_models import CLASSES, assert_same_bits, clones
from reference import gradients
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.nn import Linear, Parameter, Sequential, Tanh
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, AdamW

MAX_NORM = 0.1  # less than the norm of all gradients in these tests
# With its usual eps, 1e-8, Adam does not notice gradients that are wrong by a factor.
ADAM = {"lr": 0.1, "eps": 0.1}
OF_TORCH = [(SGD, {"lr": 0.1, "momentum": 0.9}), (Adam, ADAM), (AdamW, ADAM)]
OPTIMIZERS = {
    f"{cls.__name__} {how}": partial(cls, **options, foreach=how == "foreach", fused=how == "fused")
    for cls, options in OF_TORCH
    for how in ("for loop", "foreach", "fused")
} | {f"ampfuse.{cls.__name__}": partial(cls, **ADAM) for cls in CLASSES}
EVERY_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))


def model(device):
    torch.manual_seed(0)
    return Sequential(Linear(8, 8), Tanh(), Linear(8, 3)).to(device)


def data(device, count):
    torch.manual_seed(1)
    return [batch.split([8, 3], dim=1) for batch in torch.randn(count, 4, 8 + 3).to(device)]


def loss_of(network, inputs, target):
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        return mse_loss(network(inputs), target)


def clean_step(scaler, device):
    """Take a step without overflow on a new parameter; return the parameter's value after it."""
    param = Parameter(torch.ones(1, device=device))
    scaler.scale(param.sum()).backward()
    scaler.step(SGD([param], lr=0.5))
    scaler.update()
    return param.item()


def used(steps, device, *arguments, **options):
    """Return a scaler after `steps` clean steps; with None, its scale() was never called."""
    scaler = ampfuse.GradScaler(device.type, *arguments, **options)
    if steps is not None:
        scaler.scale(torch.ones(1, device=device))
        for _ in range(steps):
            clean_step(scaler, device)
    return scaler


def settings(scaler):
    names = ("scale", "growth_factor", "backoff_factor", "growth_interval")
    return *(getattr(scaler, f"get_{name}")() for name in names), scaler._get_growth_tracker()


@pytest.mark.parametrize("steps", [None, 0, 1])
@pytest.mark.parametrize("steps_of_other", [None, 0, 1])
def test_pickled_or_saved_scaler_continues_from_the_same_state(device, steps, steps_of_other):
    saved = used(steps, device, 2.0, 4.0, 0.25, 2)
    other = used(steps_of_other, device, 64.0, 8.0, 0.5, 7)
    tracker = steps or 0

    unpickled = pickle.loads(pickle.dumps(saved))
    other.load_state_dict(saved.state_dict())

    assert unpickled._per_optimizer_states.default_factory is _refresh_per_optimizer_state
    for scaler in (unpickled, other):
        assert settings(scaler) == settings(saved) == (2.0, 4.0, 0.25, 2, tracker)
        assert scaler._init_growth_tracker == tracker
        for _ in range(2):  # one growth interval: the scale grows once, the tracker ends as before
            clean_step(scaler, device)
        assert settings(scaler) == (8.0, 4.0, 0.25, 2, tracker)


@pytest.mark.parametrize("shape", [None, (), (1,)], ids=["float", "0-dim", "one element"])
def test_update_copies_the_new_scale_and_keeps_the_growth_tracker(device, shape):
    scaler = used(1, device, 4.0, growth_interval=2)
    new_scale = 32.0 if shape is None else torch.full(shape, 32.0, device=device)

    scaler.update(new_scale)
    new_scale *= 2

    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 1)
    clean_step(scaler, device)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (64.0, 0)


@pytest.mark.parametrize("wrong", [{"size": (2,)}, {"requires_grad": True}, {"device": "meta"}])
def test_update_refuses_an_invalid_tensor_with_torchs_error(device, wrong):
    scaler = used(1, device, 4.0)

    with pytest.raises(AssertionError, match="new_scale should be a float or a 1-element"):
        scaler.update(torch.ones(**{"size": (1,), "device": device, **wrong}))

    assert scaler.get_scale() == 4.0


# float32 ends at 3.4e38: 16 · 1e38 is beyond it; 16 · 1e37 is not, but 16² · 1e37 is.
@pytest.mark.parametrize(("init_scale", "last"), [(1e38, 1e38), (1e37, 1.6e38)])
def test_scale_stops_growing_before_it_is_infinite(device, init_scale, last):
    scaler = ampfuse.GradScaler(device.type, init_scale, growth_factor=16.0, growth_interval=1)

    for _ in range(3):
        # 1/1.6e38 is subnormal and rounds by up to 2⁻¹⁵⁰, 1.1e-7 of it. Two roundings follow.
        assert clean_step(scaler, device) == pytest.approx(0.5, rel=3e-7)

    assert scaler.get_scale() == pytest.approx(last, rel=2.0**-24)


def test_an_iterator_of_outputs_is_scaled_lazily_or_returned_if_disabled(device):
    scaler, one = ampfuse.GradScaler(device.type, 4.0), torch.ones((), device=device)
    outputs = iter([one, (one, [one]), 1.0])
    assert ampfuse.GradScaler(device.type, enabled=False).scale(outputs) is outputs

    lazy = scaler.scale(outputs)
    assert scaler._scale is None  # no output is scaled yet

    assert next(lazy) == 4
    assert next(lazy) == (4, [4])
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        next(lazy)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
# Dense, transposed and strided gradients of 33 × 5 elements: no vector width divides 165.
LAYOUTS = [lambda x: x[:33, :5].contiguous(), lambda x: x[:5, :33].t(), lambda x: x[:33, 1:15:3]]


def mixture(device):
    """Return parameters of all dtypes with gradients of all layouts, and these gradients / 4."""
    numbers = torch.arange(40 * 40).reshape(40, 40) % 255 - 127  # exact in bfloat16 up to ±256
    params = [Parameter(torch.zeros(33, 5, device=device).to(d)) for d in DTYPES for _ in LAYOUTS]
    for param, layout in zip(params, LAYOUTS * len(DTYPES), strict=True):
        param.grad = layout(numbers.to(param))
    return params, [grad / 4 for grad in gradients(params)]


def unscale(params, allow_fp16=True):
    """Divide gradients by 4, which rounds nothing, and return the overflow flag of the device."""
    device = params[0].device
    scaler, optimizer = ampfuse.GradScaler(device.type), SGD(params, lr=1.0)
    inv_scale, found_inf = (torch.tensor(value, device=device) for value in (0.25, 0.0))
    flags = scaler._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
    assert found_inf == 0  # the flag is set in the device's copy, not here
    return flags[device].item()


def test_gradients_are_unscaled_exactly_or_not_at_all_if_float16_is_refused(device):
    params, quarters = mixture(device)
    before = clones(gradients(params))

    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        unscale(params[::-1], allow_fp16=False)  # float16 gradients come last
    assert_same_bits(gradients(params), before)

    assert unscale(params) == 0.0
    assert_same_bits(gradients(params), quarters)


@pytest.mark.parametrize("value", [inf, nan])
@pytest.mark.parametrize("index", [(0, 0), (16, 2), (32, 4)], ids=["first", "middle", "last"])
@pytest.mark.parametrize("broken", range(len(DTYPES) * len(LAYOUTS)))
def test_a_non_finite_element_is_found_and_the_rest_is_unscaled(device, broken, index, value):
    params, quarters = mixture(device)
    grad = params[broken].grad
    grad[index] = complex(1.0, value) if grad.is_complex() else value

    assert unscale(params) == 1.0

    assert not grad[index].isfinite()
    grad[index] = quarters[broken][index]
    assert_same_bits(gradients(params), quarters)


def sparse(device, dtype, values):
    """Return a parameter of 3 elements; its sparse gradient has `values` at indices 0, 2 and 0."""
    param = Parameter(torch.zeros(3, dtype=dtype, device=device))
    indices = torch.tensor([[0, 2, 0][: len(values)]])
    param.grad = torch.sparse_coo_tensor(indices, values, (3,), dtype=dtype, device=device)
    return param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [[inf], [8.0, nan], [2.0, 8.0, -inf], [inf, 8.0, -inf]])
def test_non_finite_sparse_values_are_found(device, dtype, values):
    assert unscale([sparse(device, dtype, values), sparse(device, dtype, [2.0])]) == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_duplicates_are_unscaled_then_added_except_in_float16(device, dtype):
    largest = torch.finfo(dtype).max
    params = [sparse(device, dtype, values) for values in ([], [2, 8, 4], [largest, 8, largest])]

    assert unscale(params[:2]) == 0.0
    assert unscale(params[2:]) == (dtype == torch.float16)

    assert params[1].grad.to_dense().tolist() == [1.5, 0.0, 2.0]
    assert params[2].grad.to_dense()[0] == (inf if dtype == torch.float16 else largest / 2)


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


def train(recipe, scaler, network, optimizer, batches, overflow_at=None):
    backward, clip, _ = RECIPES[recipe]
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        backward(scaler, network, *batch)
        if number == overflow_at:
            network[-1].weight.grad[-1, -1] = inf
        if clip is not None:
            clip(scaler, optimizer, network.parameters())
        scaler.step(optimizer)
        scaler.update()


@EVERY_OPTIMIZER
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("error::FutureWarning")
def test_run_with_an_overflow_and_a_pickled_scaler_matches_the_control(device, make, recipe):
    networks, batches = [model(device), model(device)], data(device, 7)
    optimizer, of_control = (make(network.parameters()) for network in networks)
    scaler = ampfuse.GradScaler(device.type, 128.0, growth_interval=2)
    unscaled = torch.amp.GradScaler(device.type, enabled=False)

    train(recipe, scaler, networks[0], optimizer, batches[:3])
    scaler = pickle.loads(pickle.dumps(scaler))
    train(recipe, scaler, networks[0], optimizer, batches[3:], overflow_at=1)
    train(recipe, unscaled, networks[1], of_control, batches[:4] + batches[5:])

    # The scale grew after the second, fourth and seventh batch, and backed off at the fifth.
    assert settings(scaler) == (512.0, 2.0, 0.5, 2, 0)
    # torch's SGD kernel fuses multiplications and additions differently when it unscales.
    is_joined = device.type == "cuda" and isinstance(optimizer, torch.optim.SGD)
    tolerance = max(RECIPES[recipe][-1], 1e-6 * is_joined)
    for param, expected in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(param, expected, rtol=tolerance, atol=tolerance)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("value", [inf, nan])
def test_gradients_that_become_non_finite_after_unscale_are_applied(device, make, value):
    param, scaler = Parameter(torch.ones(2, device=device)), ampfuse.GradScaler(device.type, 4.0)
    optimizer = make([param])
    scaler.scale(param.sum()).backward()

    scaler.unscale_(optimizer)
    param.grad[1] = value
    scaler.step(optimizer)
    scaler.update()

    assert param.isfinite().tolist() == [True, False]
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


@pytest.mark.parametrize("grad", [1.0, inf])
def test_step_with_a_grad_scaler_argument_may_unscale_and_read_the_flags(device, grad):
    class Asking(SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            grad_scaler.unscale_(self)
            if not any(grad_scaler._found_inf_per_device(self).values()):
                super().step()

    param, scaler = Parameter(torch.ones(1, device=device)), ampfuse.GradScaler(device.type, 4.0)
    scaler.scale(grad * param.sum()).backward()

    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        scaler.step(Asking([param], lr=0.5))
    scaler.update()

    assert (param.item(), scaler.get_scale()) == ((0.5, 4.0) if grad == 1.0 else (1.0, 2.0))
