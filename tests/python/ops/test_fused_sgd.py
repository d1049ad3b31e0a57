"""fused_sgd: values, masters, momentum and counters, in eager and compiled code, and errors.

What it shares with fused_adam is tested there: adoption of written parameters, threads, norms.
"""

import pytest
import torch
from adam_reference import (
    BFLOAT16_WITH_MASTERS,
    BFLOAT16_WITH_REMAINDERS,
    EVERY_COMBINATION,
    EVERY_KIND,
    HALF_WITH_MASTERS,
    KINDS,
    Dtypes,
    with_masters,
)
from ampfuse.ops import fused_sgd, multi_tensor_norm
from reference import SIZES, same_bits, scalar
from sgd_reference import LISTS, SETTINGS, assert_takes_exact_step, sgd_lists, step

MOMENTUM = SETTINGS[4]  # momentum alone


def bits(lists):
    return [x.clone() for column in lists.columns() for x in column]


def assert_same(lists, others):
    assert all(map(same_bits, bits(lists), bits(others)))


@pytest.mark.vectorised
@EVERY_COMBINATION
def test_first_and_later_steps_match_the_formulae(device, dtypes):
    for setting in SETTINGS if dtypes in KINDS else SETTINGS[1::5]:
        inputs = {"momentum": setting["momentum"], "maximize": setting["maximize"]}
        for steps in (0, 5):
            lists = sgd_lists([(), 33, (9, 7), 1025], device, dtypes, steps=steps, **inputs)
            assert_takes_exact_step(lists, grad_scale=scalar(3.0, device), **setting)


@pytest.mark.sanitizer
@pytest.mark.vectorised
@EVERY_KIND
def test_step_is_exact_at_sizes_around_registers_blocks_and_chunks(device, dtypes):
    assert_takes_exact_step(sgd_lists([*SIZES, (0, 5)], device, dtypes, steps=2), **MOMENTUM)


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_equal_those_of_torchs_loop(dtype):
    for setting in SETTINGS:
        dtypes = Dtypes(dtype, dtype, dtype)
        lists = sgd_lists([33, (9, 7)], "cpu", dtypes, momentum=setting["momentum"])
        params = [torch.nn.Parameter(x.clone()) for x in lists.params]
        theirs = torch.optim.SGD(params, lr=1e-2, foreach=False, **setting)
        for _ in range(3):
            for param, grad in zip(params, lists.grads, strict=True):
                param.grad = grad.clone()
            theirs.step()
            step(lists, 1e-2, **setting)
        assert all(map(same_bits, lists.params, params))


def test_elements_are_matched_by_index_in_any_layout(device):
    lists = sgd_lists([(5, 7)] * 3, device, BFLOAT16_WITH_MASTERS, steps=1)
    others = lists.clone()
    others.grads[0] = others.grads[0].t().contiguous().t()
    others.momentum_buffers[1] = torch.stack([others.momentum_buffers[1]] * 2, -1)[..., 0]
    others.params[2] = others.params[2].t().contiguous().t()

    step(lists, **MOMENTUM)
    step(others, **MOMENTUM)

    assert_same(lists, others)


@pytest.mark.parametrize("dtypes", [HALF_WITH_MASTERS, BFLOAT16_WITH_REMAINDERS], ids=str)
def test_masters_step_as_float32_parameters_do(device, dtypes):
    plain = sgd_lists([257, 1025], device, Dtypes(grad=dtypes.grad), steps=0)
    lists = with_masters(plain, dtypes)
    for _ in range(3):
        step(plain, **MOMENTUM)
        step(lists, **MOMENTUM)

    assert all(map(same_bits, lists.stepped(), plain.params))
    assert all(map(same_bits, lists.momentum_buffers, plain.momentum_buffers))


def test_skipped_steps_change_nothing_and_the_next_one_starts_the_momentum(device):
    lists, others = (sgd_lists([33], device, HALF_WITH_MASTERS) for _ in range(2))
    lists.momentum_buffers[0].fill_(float("nan"))
    before = lists.clone()
    for signals in ({"found_inf": 1.0}, {"found_inf": 2.0}, {"grad_scale": 0.0}):
        step(lists, **MOMENTUM, **{name: scalar(x, device) for name, x in signals.items()})
    assert_same(lists, before)

    step(lists, **MOMENTUM)
    step(others, **MOMENTUM)

    assert_same(lists, others)


def test_gradients_are_clipped_and_written_back(device):
    lists, others = (sgd_lists([33, 257], device) for _ in range(2))
    norm = multi_tensor_norm(lists.grads).total_norm
    grad_norm = scalar(0.0, device)
    factor = (1 / (norm.double() / 4 + 1e-6) / 4).float()
    for grad in others.grads:
        grad.mul_(factor)

    step(
        lists,
        **MOMENTUM,
        grad_scale=scalar(4.0, device),
        total_norm=norm,
        max_norm=1.0,
        grad_norm=grad_norm,
        write_back_grads=True,
    )
    step(others, **MOMENTUM)

    assert_same(lists, others)
    assert grad_norm.item() == norm.item() / 4


def test_nan_and_infinity_spread_and_subnormals_survive(device):
    lists = sgd_lists([4], device, momentum=0)
    lists.params[0].copy_(torch.tensor([1.0, 1.0, 1e-45, 2.0]))
    lists.grads[0].copy_(torch.tensor([float("nan"), float("-inf"), 0.0, 3e38]))

    step(lists, 1.0, **SETTINGS[0])

    assert lists.params[0].isnan().tolist() == [True, False, False, False]
    assert lists.params[0][1:3].tolist() == [float("inf"), torch.tensor(1e-45).item()]


def clipped_step(columns, lr, grad_scale, grad_norm):
    norm = multi_tensor_norm(columns[1])
    fused_sgd(
        *columns,
        lr=lr,
        **MOMENTUM,
        grad_scale=grad_scale,
        found_inf=norm.found_inf,
        total_norm=norm.total_norm,
        max_norm=0.5,
        grad_norm=grad_norm,
        write_back_grads=True,
    )


def test_compiled_step_gives_the_bits_of_the_eager_one(device):
    compiled = torch.compile(clipped_step, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for steps in (0, 2, 3):  # other rates and counts, the same graph
            ours, theirs = (
                sgd_lists([33, (9, 8)], device, HALF_WITH_MASTERS, steps=steps) for _ in range(2)
            )
            lr = torch.tensor(1e-3 * (1 + steps), device=device)
            for take, lists in ((compiled, ours), (clipped_step, theirs)):
                take(lists.columns(), lr, scalar(4.0, device), scalar(0.0, device))
            assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["grads", "momentum_buffers", "state_steps", "masters"])
def test_list_of_wrong_length_is_refused(device, name):
    lists = sgd_lists([3, 3], device, HALF_WITH_MASTERS)
    getattr(lists, name).pop()
    with pytest.raises(ValueError, match=rf"^fused_sgd: {name}: expected 2 tensors"):
        step(lists, **MOMENTUM)


def test_momentum_needs_buffers_and_counters_and_these_need_momentum(device):
    lists = sgd_lists([3], device)
    with pytest.raises(ValueError, match=r"fused_sgd: momentum_buffers: expected 0 tensors, got 1"):
        step(lists, **SETTINGS[0])
    lists.momentum_buffers = []
    with pytest.raises(ValueError, match=r"momentum_buffers: expected 1 tensors, one for each"):
        step(lists, **MOMENTUM)
    lists.state_steps = []
    lists.momentum_buffers = [torch.zeros(3, device=device)]
    with pytest.raises(ValueError, match=r"state_steps: expected 1 tensors, one for each"):
        step(lists, **MOMENTUM)
    lists.momentum_buffers, lists.state_steps = [], [torch.zeros((), device=device)]
    with pytest.raises(ValueError, match=r"fused_sgd: state_steps: expected 0 tensors, got 1"):
        step(lists, **SETTINGS[0])


@pytest.mark.parametrize("name", LISTS)
def test_wrong_dtype_or_shape_is_refused_and_nothing_is_written(device, name):
    for spoil in (torch.Tensor.long, lambda x: x[None].expand(2, *x.shape).clone()):
        lists = sgd_lists([3, 3], device, BFLOAT16_WITH_MASTERS)
        column = getattr(lists, name)
        column[1] = spoil(column[1])
        before = lists.clone()
        with pytest.raises((TypeError, ValueError), match=r"^fused_sgd: \w+\[1\]: expected"):
            step(lists, **MOMENTUM)
        assert_same(lists, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("momentum", -0.1),
        ("momentum", float("inf")),
        *((name, float("nan")) for name in ("momentum", "dampening", "weight_decay")),
    ],
)
def test_option_out_of_range_is_refused(device, name, value):
    with pytest.raises(ValueError, match=rf"^fused_sgd: {name}: expected"):
        step(sgd_lists([3], device), **{**MOMENTUM, name: value})
