"""ampfuse.Adam and AdamW step like torch's, 16-bit parameters with masters like float32 ones."""

from itertools import chain

import ampfuse
import pytest
import torch
from optim_models import (
    BOTH_AND_TORCHS,
    DTYPES_16_BIT,
    FORMS,
    assert_near,
    assert_same_bits,
    assert_same_state,
    copies,
    feed,
    parameters,
    state_values,
    train,
    trained,
)
from reference import heavy_tailed
from torch.nn import Parameter

OPTIONS = {
    "defaults": {},
    "weight decay": {"weight_decay": 0.1},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "large steps, short memory": {"lr": 1.0, "betas": (0.1, 0.25), "eps": 1e-3},
    "no momentum": {"betas": (0.0, 0.999)},
    "everything": {
        "lr": 0.01,
        "betas": (0.8, 0.99),
        "eps": 1e-6,
        "weight_decay": 0.3,
        "amsgrad": True,
        "maximize": True,
    },
}


@pytest.mark.vectorised
@BOTH_AND_TORCHS
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_float32_model_follows_torch(device, cls, of_torch, options):
    ours = parameters(device)
    theirs = copies(ours)

    optimizer = trained(cls, ours, range(20), **options)
    of_torch = trained(of_torch, theirs, range(20), fused=True, **options)

    assert_near(ours, theirs, steps=20, lr=options.get("lr", 1e-3))
    for param, other in zip(ours, theirs, strict=True):
        state, expected = optimizer.state[param], of_torch.state[other]
        assert state.keys() == expected.keys()
        assert state["step"].item() == 20
        # Each of twenty steps rounds a few times. The error is relative to the largest gradients,
        # about 1e4, which may cancel in the sum.
        torch.testing.assert_close(state["exp_avg"], expected["exp_avg"], rtol=0, atol=0.02)
        # torch's CUDA kernel uses 1 − 0.999f for 1 − 0.999, a relative error of 1.3e-5.
        rtol = 1e-5 if device.type == "cpu" else 2e-5
        torch.testing.assert_close(state["exp_avg_sq"], expected["exp_avg_sq"], rtol=rtol, atol=0)


@pytest.mark.vectorised
@pytest.mark.parametrize(
    ("cls", "name"),  # the classes differ in weight decay
    [
        *((ampfuse.AdamW, name) for name in OPTIONS),
        *((ampfuse.Adam, name) for name in ("weight decay", "everything")),
    ],
)
@pytest.mark.parametrize(("dtype", "master_weights"), FORMS)
def test_masters_equal_a_float32_model_bit_by_bit(device, cls, name, dtype, master_weights):
    options = OPTIONS[name]
    narrow = parameters(device, dtype)
    wide = copies(narrow, torch.float32)

    optimizer = trained(cls, narrow, range(20), master_weights=master_weights, **options)
    trained(cls, wide, range(20), **options)

    assert_same_bits(optimizer.master_params(), wide)
    for param, exact in zip(narrow, wide, strict=True):
        nearest = exact.detach().to(dtype).double()
        if master_weights == "remainder":  # a tie is not always rounded to even
            assert torch.equal((param - exact.double()).abs(), (nearest - exact.double()).abs())
        else:
            assert torch.equal(param.double(), nearest)


def test_float32_and_float64_models_have_no_masters(device):
    for dtype in (torch.float32, torch.float64):
        params = parameters(device, dtype)
        optimizer = trained(ampfuse.AdamW, params, range(1), master_weights=True)
        assert all("master_param" not in state for state in state_values(optimizer))
        assert list(map(id, optimizer.master_params())) == list(map(id, params))


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_parameters_without_masters_are_rounded_after_each_step(device, dtype):
    params = parameters(device, dtype)
    rounded = copies(params, torch.float32)
    optimizer = ampfuse.AdamW(params, lr=0.1, master_weights=False)
    reference = torch.optim.AdamW(rounded, lr=0.1)

    for step in range(5):
        train(optimizer, params, [step])
        train(reference, rounded, [step])
        for param in rounded:
            param.detach().copy_(param.detach().to(dtype))

    assert all("master_param" not in state for state in state_values(optimizer))
    for param, other in zip(params, rounded, strict=True):
        # Once the two round to different neighbours, they stay one last bit apart.
        last_bit = torch.finfo(dtype).eps
        torch.testing.assert_close(param.float(), other, rtol=5 * last_bit, atol=1e-6)


@pytest.mark.parametrize("master_weights", ["auto", True, "remainder", False])
def test_updates_too_small_for_bfloat16_add_up_only_with_masters(device, master_weights):
    param = Parameter(torch.ones(3, dtype=torch.bfloat16, device=device))
    optimizer = ampfuse.Adam([param], lr=1e-4, master_weights=master_weights)
    for _ in range(200):  # 0.02 in all; a step is 1/20 of 2⁻⁹, which is half the last bit below 1
        param.grad = torch.ones_like(param)
        optimizer.step()
    expected = 1.0 if master_weights is False else 0.98046875  # the bfloat16 nearest to 0.98
    assert param.tolist() == [expected] * 3


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES_16_BIT])
def test_bfloat16_moments_keep_parameters_near_those_of_float32_moments(device, dtype):
    rough, fine = parameters(device, dtype), parameters(device, dtype)

    optimizer = trained(ampfuse.AdamW, rough, range(20), state_dtype=torch.bfloat16, amsgrad=True)
    reference = trained(ampfuse.AdamW, fine, range(20), amsgrad=True)

    for state in state_values(optimizer):
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        assert [state[name].dtype for name in names] == [torch.bfloat16] * 3
        assert state["step"].dtype == torch.float32
    masters = zip(optimizer.master_params(), reference.master_params(), strict=True)
    for master, other in masters:
        # Each of twenty steps moves a master by at most 10·lr, with a relative error of a few 2⁻⁸.
        torch.testing.assert_close(master, other, rtol=1e-6, atol=20 * 10 * 1e-3 * 4 * 2.0**-8)


def test_second_moments_of_fp16_parameters_do_not_underflow(device):
    narrow = Parameter(torch.ones(64, dtype=torch.float16, device=device))
    wide = Parameter(torch.ones(64, device=device))
    optimizers = [ampfuse.AdamW([narrow], master_weights=False), ampfuse.AdamW([wide])]
    for param, optimizer in zip((narrow, wide), optimizers, strict=True):
        param.grad = torch.full_like(param, 2.0**-17)  # its square, 2⁻³⁴, underflows in fp16
        optimizer.step()
    assert optimizers[0].state[narrow]["exp_avg_sq"].min() > 0
    assert_same_state(optimizers[0], state_values(optimizers[1]))


@pytest.mark.vectorised
@BOTH_AND_TORCHS
def test_float64_model_follows_torch_in_double_precision(device, cls, of_torch):
    ours = parameters(device, torch.float64)
    theirs = copies(ours)
    optimizer = trained(cls, ours, range(20))
    trained(of_torch, theirs, range(20))
    assert {state["exp_avg"].dtype for state in state_values(optimizer)} == {torch.float64}
    for param, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-13, atol=1e-13)


# The kernels are compiled for each pair of dtypes.
@pytest.mark.vectorised
@pytest.mark.parametrize("grad_dtype", [*DTYPES_16_BIT, torch.float32])
@pytest.mark.parametrize("dtype", [*DTYPES_16_BIT, torch.float32])
def test_gradients_may_have_another_dtype_than_their_parameters(device, dtype, grad_dtype):
    params, others = parameters(device, dtype), parameters(device, dtype)
    optimizer, reference = ampfuse.AdamW(params), ampfuse.AdamW(others)
    feed(others, step=0)
    for param, other in zip(params, others, strict=True):
        param.grad_dtype = grad_dtype
        param.grad = other.grad.to(grad_dtype)
    optimizer.step()
    reference.step()
    assert_same_bits(params, others)


def test_groups_and_dtypes_step_as_each_does_alone(device):
    """The first group mixes dtypes; each of the others has options of its own."""
    mixed = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    options = [
        *({} for _ in mixed),
        *OPTIONS.values(),
        {"state_dtype": torch.bfloat16, "master_weights": "remainder"},
        {"master_weights": False},
    ]
    dtypes = mixed + [torch.bfloat16] * (len(options) - len(mixed))
    models = [parameters(device, dtype, seed) for seed, dtype in enumerate(dtypes)]
    alone = [copies(params) for params in models]
    others = [ampfuse.Adam(params, **given) for params, given in zip(alone, options, strict=True)]
    groups = [{"params": params, **given} for params, given in zip(models, options, strict=True)]
    optimizer = ampfuse.Adam([{"params": list(chain(*models[:4]))}, *groups[4:]])

    for step in range(3):
        for params, copied, other in zip(models, alone, others, strict=True):
            feed(params, step)
            train(other, copied, [step])
        optimizer.step()

    assert_same_bits(chain(*models), chain(*alone))
    assert_same_state(optimizer, [state for other in others for state in state_values(other)])


def test_gradients_may_appear_vanish_and_move(device):
    ours = parameters(device)
    theirs = copies(ours)
    optimizers = [ampfuse.AdamW(ours), torch.optim.AdamW(theirs, fused=True)]
    present = [[], [0, 2], [0, 1, 2, 3, 4], [1], [], [0, 2, 4], [0, 2, 4], [1, 2, 3]]

    for step, with_gradient in enumerate(present):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            feed(params, step)  # allocates new gradients at each step
            for i in set(range(5)) - set(with_gradient):
                params[i].grad = None
            optimizer.step()

    assert_near(ours, theirs, steps=len(present))
    for param, other in zip(ours, theirs, strict=True):
        assert optimizers[0].state[param]["step"] == optimizers[1].state[other]["step"]


def test_gradient_may_have_another_memory_format_than_its_parameter(device):
    image = heavy_tailed((2, 5, 3, 7), torch.float32, device)
    param = Parameter(image.to(memory_format=torch.channels_last))
    other = Parameter(image.clone())
    param.grad = heavy_tailed((2, 5, 3, 7), torch.float32, device, seed=1)
    other.grad = param.grad.clone()
    optimizer = ampfuse.AdamW([param, other])
    optimizer.step()
    assert_same_bits([param.contiguous()], [other])
    assert param.is_contiguous(memory_format=torch.channels_last)
    assert optimizer.state[param]["exp_avg"].stride() == param.stride()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_complex_parameters_follow_torch(device, max_grad_norm):
    ours = [Parameter(heavy_tailed((7, 3), torch.complex64, device) / 1024)]
    theirs = copies(ours)
    optimizer = ampfuse.AdamW(ours, max_grad_norm=max_grad_norm)
    reference = torch.optim.AdamW(theirs)

    for step in range(5):
        for param in (*ours, *theirs):
            param.grad = heavy_tailed((7, 3), torch.complex64, device, seed=step)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs, max_grad_norm)
        optimizer.step()
        reference.step()

    assert_near(ours, theirs, steps=5)
