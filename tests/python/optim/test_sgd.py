"""ampfuse.SGD steps like torch's for-loop SGD; momentum starts at the first step that is taken."""

import math

import ampfuse
import pytest
import torch
from optim_models import (
    FORMS,
    assert_same_bits,
    assert_same_state,
    clones,
    copies,
    feed,
    overwrite,
    parameters,
    state_values,
    train,
    trained,
)
from torch.nn import Parameter
from torch.optim.lr_scheduler import OneCycleLR

MOMENTA = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampened": {"momentum": 0.9, "dampening": 0.25},
    "nesterov": {"momentum": 0.9, "nesterov": True},
}
EVERY_MOMENTUM = pytest.mark.parametrize("momentum", MOMENTA.values(), ids=MOMENTA)


def tiny_parameters(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator) for size in ((5, 3), (), (33,))]
    return [Parameter(value.to(device, dtype)) for value in values]


def tiny_gradients(params, step):
    """Set gradients of normally distributed numbers, of which the first is 0."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param)
        param.grad.view(-1)[0] *= step % 2


@EVERY_MOMENTUM
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_follow_torchs_for_loop_with_all_options(device, momentum, dtype):
    for weight_decay in (0, 0.1):
        for maximize in (False, True):
            options = {"lr": 0.1, "weight_decay": weight_decay, "maximize": maximize, **momentum}
            ours, theirs = (tiny_parameters(device, dtype) for _ in range(2))
            optimizer = ampfuse.SGD(ours, **options)
            reference = torch.optim.SGD(theirs, foreach=False, **options)
            for step in range(10):
                for stepped, params in ((optimizer, ours), (reference, theirs)):
                    tiny_gradients(params, step)
                    stepped.step()
            # On a CPU both round in the same places. Elsewhere each of ten steps rounds numbers up
            # to about 30 a few times.
            bound = 0 if device.type == "cpu" else 30 * torch.finfo(dtype).eps * 4
            torch.testing.assert_close(ours, theirs, rtol=10 * bound, atol=bound)
            for param, other in zip(ours, theirs, strict=True):
                state = optimizer.state.get(param, {})
                expected = reference.state.get(other, {})
                assert state.keys() - {"step"} == expected.keys()
                for name, value in expected.items():
                    torch.testing.assert_close(state[name], value, rtol=10 * bound, atol=bound)


@pytest.mark.parametrize("momentum", [MOMENTA["plain"], MOMENTA["dampened"], MOMENTA["nesterov"]])
def test_a_thousand_steps_with_overflows_at_the_start_end_where_torchs_do(device, momentum):
    targets = torch.linspace(0.1, 3, 300, device=device)
    ours, theirs = (Parameter(torch.zeros(300, device=device)) for _ in range(2))
    options = {"lr": 0.05, "weight_decay": 0.1, **momentum}
    optimizer = ampfuse.SGD([ours], **options)
    reference = torch.optim.SGD([theirs], foreach=False, **options)
    scaler = ampfuse.GradScaler(device.type, 2.0**10, growth_interval=50)
    for step in range(1000):
        scale = scaler.scale(torch.ones((), device=device))
        ours.grad = (ours.detach() - targets) * scale
        overflows = step in (0, 1, 6)
        if overflows:
            ours.grad[7] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.was_skipped() == overflows
        if not overflows:
            theirs.grad = theirs.detach() - targets
            reference.step()
    if momentum:
        assert optimizer.state[ours]["step"] == 997
    # Both have converged to targets / 1.1, so the roundings of earlier steps have faded. On a CPU
    # both round in the same places.
    last_bit = torch.nextafter(theirs.detach(), theirs.new_tensor(math.inf)) - theirs.detach()
    bound = 0 if device.type == "cpu" else 1
    assert ((ours - theirs).abs() <= bound * last_bit).all()


@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9, "dampening": 0.25}], ids=str)
@pytest.mark.parametrize(("dtype", "master_weights"), FORMS)
def test_masters_equal_a_float32_model_bit_by_bit(device, momentum, dtype, master_weights):
    options = {"lr": 1e-3, "weight_decay": 0.1, **momentum}
    narrow = parameters(device, dtype)
    wide = copies(narrow, torch.float32)
    optimizer = trained(ampfuse.SGD, narrow, range(20), master_weights=master_weights, **options)
    trained(ampfuse.SGD, wide, range(20), **options)
    assert_same_bits(optimizer.master_params(), wide)
    if master_weights is True:
        assert_same_bits(narrow, [param.to(dtype) for param in wide])


@EVERY_MOMENTUM
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_run_that_begins_with_overflows_has_the_state_of_one_without(device, momentum, dtype):
    runs = []
    for overflows in (3, 0):
        params = parameters(device, dtype)
        optimizer = ampfuse.SGD(params, lr=1e-3, **momentum)
        for _ in range(overflows):
            feed(params, 5)
            optimizer.found_inf = torch.ones((), device=device)
            optimizer.step()
        optimizer.found_inf = None
        train(optimizer, params, range(3))
        runs.append((params, optimizer))
    (params, optimizer), (others, other) = runs
    assert_same_bits(params, others)
    assert_same_state(optimizer, state_values(other))


STATES = {
    "float32": (torch.float32, {}, set()),
    "float32, momentum": (torch.float32, {"momentum": 0.9}, {"step", "momentum_buffer"}),
    "masters": (torch.bfloat16, {}, {"master_param"}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder"}, {"master_param"}),
    "no masters": (torch.float16, {"master_weights": False}, set()),
    "everything": (
        torch.float16,
        {"momentum": 0.9},
        {"step", "momentum_buffer", "master_param"},
    ),
}


@pytest.mark.parametrize(("dtype", "options", "entries"), STATES.values(), ids=STATES)
def test_state_has_only_what_the_options_need(device, dtype, options, entries):
    params = parameters(device, dtype)
    optimizer = trained(ampfuse.SGD, params, range(2), max_grad_norm=1.0, **options)
    assert len(optimizer.state) == (len(params) if entries else 0)
    for state in optimizer.state.values():
        assert state.keys() == entries
        if "momentum_buffer" in entries:
            assert state["momentum_buffer"].dtype == torch.float32


def test_momentum_in_bfloat16_is_the_rounded_buffer(device):
    params, others = (parameters(device) for _ in range(2))
    optimizer = trained(ampfuse.SGD, params, [0], momentum=0.9, momentum_dtype=torch.bfloat16)
    exact = trained(ampfuse.SGD, others, [0], momentum=0.9)
    for state, expected in zip(state_values(optimizer), state_values(exact), strict=True):
        assert_same_bits([state["momentum_buffer"]], [expected["momentum_buffer"].bfloat16()])


def test_steps_without_momentum_do_not_start_a_momentum_whose_first_step_was_skipped(device):
    params = parameters(device, torch.bfloat16)
    optimizer = ampfuse.SGD(params, 0.1, momentum=0.9, dampening=0.5)
    optimizer.found_inf = torch.ones((), device=device)
    train(optimizer, params, [0])
    optimizer.found_inf = None
    for momentum, step in ((0, 1), (0, 2), (0.9, 3)):
        optimizer.param_groups[0]["momentum"] = momentum
        train(optimizer, params, [step])
    for param in params:
        buffer = optimizer.state[param]["momentum_buffer"]
        torch.testing.assert_close(buffer, param.grad.float(), rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_that_is_turned_on_or_deleted_starts_with_the_next_gradient(device, momentum):
    params = parameters(device, torch.bfloat16)
    optimizer = trained(ampfuse.SGD, params, range(3), momentum=momentum, dampening=0.5)
    for param in params if momentum else ():
        del optimizer.state[param]["momentum_buffer"]
    optimizer.param_groups[0]["momentum"] = 0.9
    train(optimizer, params, [3])
    for param in params:
        state = optimizer.state[param]
        assert state["step"] == 1
        torch.testing.assert_close(state["momentum_buffer"], param.grad.float(), rtol=0, atol=0)


def test_group_without_momentum_may_have_the_flag_nesterov_as_in_torch(device):
    ours, theirs = (parameters(device) for _ in range(2))
    for cls, params in ((ampfuse.SGD, ours), (torch.optim.SGD, theirs)):
        groups = [{"params": params[:2]}, {"params": params[2:], "momentum": 0}]
        train(cls(groups, lr=0.5, momentum=0.5, nesterov=True), params, range(2))
    torch.testing.assert_close(ours, theirs)


def test_schedulers_cycle_momentum_as_with_torch(device):
    ours, theirs = (tiny_parameters(device) for _ in range(2))
    for cls, params in ((ampfuse.SGD, ours), (torch.optim.SGD, theirs)):
        optimizer = cls(params, lr=0.1, momentum=0.9)
        scheduler = OneCycleLR(optimizer, max_lr=0.5, total_steps=8)
        for step in range(8):
            tiny_gradients(params, step)
            optimizer.step()
            if step < 7:
                scheduler.step()
        assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.95)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_complex_parameters_step_as_in_torch(device):
    values = torch.tensor([3 + 4j, 1 - 2j], device=device)
    ours, theirs = Parameter(values.clone()), Parameter(values.clone())
    optimizer = ampfuse.SGD([ours], lr=0.1, momentum=0.9)
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for step in range(3):
        for stepped, param in ((optimizer, ours), (reference, theirs)):
            param.grad = torch.tensor([1 - 1j, step + 2j], device=device)
            stepped.step()
    torch.testing.assert_close(ours, theirs)
    assert optimizer.state[ours]["momentum_buffer"].dtype == torch.complex64


def test_step_clips_and_writes_back_as_adamw_does(device):
    params = [Parameter(torch.zeros(2, device=device))]
    optimizer = ampfuse.SGD(params, lr=1.0, max_grad_norm=1.0, write_back_grads=True)
    params[0].grad = torch.tensor([6.0, 8.0], device=device)
    optimizer.grad_scale = torch.tensor(2.0, device=device)
    optimizer.step()
    expected = torch.tensor([0.6, 0.8], device=device)
    torch.testing.assert_close(params[0].grad, expected)
    torch.testing.assert_close(params[0].detach(), -expected)
    assert optimizer.grad_norm == 5


def test_value_written_into_a_parameter_survives_the_next_step(device):
    params = parameters(device, torch.bfloat16)
    optimizer = trained(ampfuse.SGD, params, range(2), lr=0.0)
    values = [torch.full_like(value, 3.0) for value in clones(params)]
    overwrite(params, values)
    with pytest.warns(UserWarning, match="sync_masters_from_model"):
        train(optimizer, params, [2])
    assert_same_bits(params, values)
    assert_same_bits(optimizer.master_params(), [value.float() for value in values])


REFUSED = [
    ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ({"momentum": -0.1}, "Invalid momentum value: -0.1"),
    ({"momentum": math.nan}, "Invalid momentum value: nan"),
    ({"weight_decay": -1}, "Invalid weight_decay value: -1"),
    ({"dampening": math.nan}, "dampening: expected a number, got NaN"),
    ({"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
    (
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        "Nesterov momentum requires a momentum and zero dampening",
    ),
    (
        {"momentum_dtype": torch.float16},
        'momentum_dtype: expected torch.float32, torch.bfloat16 or "8bit", got float16',
    ),
    ({"max_grad_norm": -1.0}, "max_grad_norm: expected None or at least 0, got -1.0"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ampfuse.SGD([torch.zeros(2)], **options)


MISTAKEN = [
    ({"momentum": "0.9"}, "momentum: expected a number, got str '0.9'"),
    ({"dampening": None}, "dampening: expected a number, got NoneType None"),
    ({"nesterov": "yes"}, "nesterov: expected a bool, got str 'yes'"),
    ({"fused": True}, "SGD: unexpected keyword argument 'fused'; the step is always fused"),
    ({"state_dtype": torch.bfloat16}, "unexpected keyword argument 'state_dtype'"),
]


@pytest.mark.parametrize(("options", "words"), MISTAKEN)
def test_options_of_a_wrong_type_or_name_are_refused(options, words):
    with pytest.raises(TypeError, match=words):
        ampfuse.SGD([torch.zeros(2)], **options)


def test_sparse_gradients_are_refused_by_name():
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="SGD does not support sparse gradients; use torch"):
        ampfuse.SGD([param]).step()


def test_sgd_is_an_instance_of_torchs_class_and_not_of_adam():
    optimizer = ampfuse.SGD([torch.zeros(2)])
    assert isinstance(optimizer, torch.optim.SGD)
    assert not isinstance(optimizer, torch.optim.Adam)


def test_momentum_that_the_program_puts_into_the_state_counts_as_set(device):
    ours, theirs = parameters(device), parameters(device)
    optimizer, reference = (
        ampfuse.SGD(ours, 0.1, momentum=0.9),
        torch.optim.SGD(theirs, 0.1, momentum=0.9),
    )
    for one, params in ((optimizer, ours), (reference, theirs)):
        for param in params:
            one.state[param]["momentum_buffer"] = torch.full_like(param, 10.0)
        train(one, params, [0])
    torch.testing.assert_close(ours, theirs)


def test_dtype_of_moments_by_the_name_of_another_optimizer_is_refused(device):
    group = {"params": parameters(device), "state_dtype": torch.bfloat16}
    with pytest.raises(TypeError, match="SGD: state_dtype: expected momentum_dtype"):
        ampfuse.SGD([group], 0.1, momentum=0.9)
