"""fused_adam: parameters, moments, masters and counters after a step or a skipped step."""

import math

import pytest
import torch
from adam_reference import (
    BFLOAT16_WITH_MASTERS,
    BFLOAT16_WITH_REMAINDERS,
    COMBINATIONS,
    EVERY_COMBINATION,
    EVERY_MASTER,
    OPTIONS,
    SOME_COMBINATIONS,
    Dtypes,
    adam_lists,
    assert_step,
    concatenated,
    exact_step,
    renew_gradients,
    split,
    with_masters,
)
from ampfuse.ops import fused_adam
from reference import SIZES, random_bits, same_bits


def scalar(value, device, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, device=device)


def step(lists, lr=1e-3, **options):
    """Take one step with OPTIONS, which `options` override."""
    rate = lr if isinstance(lr, torch.Tensor) else torch.tensor(lr, dtype=torch.float64)
    fused_adam(*lists.columns(), lr=rate, **OPTIONS | options)


def assert_takes_exact_step(lists, lr=1e-3, **options):
    """Take a step, and compare it with the step of the formulae from the same numbers."""
    exact = exact_step(lists, lr, **OPTIONS | options)
    counts = [count.item() for count in lists.state_steps]

    step(lists, lr, **options)

    assert_step(lists, exact)
    assert [count.item() for count in lists.state_steps] == [count + 1 for count in counts]


def assert_same_lists(a, b):
    for ours, theirs in zip(a.tensors(), b.tensors(), strict=True):
        assert same_or_short(ours, theirs)


def same_or_short(a, b):
    """Return True if all bits agree. Remainders (int16) are compared as integers."""
    return torch.equal(a, b) if a.dtype == torch.int16 else same_bits(a, b)


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["plain", "amsgrad"])
@EVERY_COMBINATION
def test_first_and_later_steps_match_the_formulae(device, dtypes, amsgrad, maximize, decoupled):
    shapes = [(), 33, (9, 7), 1025]
    options = {
        "amsgrad": amsgrad,
        "maximize": maximize,
        "decoupled_weight_decay": decoupled,
    }
    lists = adam_lists(shapes, device, dtypes, amsgrad=amsgrad, maximize=maximize)
    for seed in range(1, 4):
        assert_takes_exact_step(lists, **options)
        renew_gradients(lists, seed)


@pytest.mark.sanitizer
@SOME_COMBINATIONS
def test_step_is_exact_at_sizes_around_registers_blocks_and_chunks(device, dtypes):
    sizes = [*SIZES, 1023, 1024, 1025]  # the CPU converts 16-bit numbers in blocks of 1024
    lists = adam_lists(sizes, device, dtypes, amsgrad=True, steps=10)

    assert_takes_exact_step(lists, amsgrad=True)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@SOME_COMBINATIONS
def test_step_of_a_single_element_is_exact(device, dtypes, shape):
    assert_takes_exact_step(adam_lists([shape], device, dtypes, steps=3))


@pytest.mark.parametrize("has_masters", [False, True], ids=["without masters", "with masters"])
def test_tensors_of_all_dtypes_in_one_call_step_as_in_separate_calls(device, has_masters):
    kinds = [dtypes for dtypes in COMBINATIONS if (dtypes.master is not None) == has_masters]
    parts = [adam_lists([257, 8193], device, dtypes, steps=2) for dtypes in kinds]
    together = concatenated(*parts).clone()
    for part in parts:
        step(part)

    step(together)

    assert_same_lists(together, concatenated(*parts))


def test_empty_list_is_accepted(device):
    fused_adam([], [], [], [], [], [], lr=scalar(1e-3, device), **OPTIONS)


@SOME_COMBINATIONS
def test_empty_tensors_count_steps_and_do_not_affect_their_neighbours(device, dtypes):
    shapes = [0, 33, (0, 5), (3, 0), 257, 0]
    lists = adam_lists(shapes, device, dtypes)

    assert_takes_exact_step(lists)


def test_list_of_empty_tensors_counts_steps(device):
    lists = adam_lists([0, (3, 0)], device)

    step(lists)

    assert [count.item() for count in lists.state_steps] == [1, 1]


@SOME_COMBINATIONS
def test_tensors_of_one_call_may_have_taken_different_numbers_of_steps(device, dtypes):
    parts = [
        adam_lists([257, 33], device, dtypes, steps=steps, seed=seed)
        for seed, steps in enumerate((0, 7, 0, 1, 1_000_000, 7))
    ]

    assert_takes_exact_step(concatenated(*parts))


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_close_to_those_of_torch(device, dtype, amsgrad, decoupled):
    lists = adam_lists([33, 8193], device, Dtypes(dtype, dtype, dtype), amsgrad=amsgrad)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = [torch.nn.Parameter(param.clone()) for param in lists.params]
    optimizer = kind(theirs, lr=1e-3, weight_decay=0.05, amsgrad=amsgrad, foreach=False)
    for _ in range(5):
        for parameter, grad in zip(theirs, lists.grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()

        step(lists, amsgrad=amsgrad, decoupled_weight_decay=decoupled)

    # Each side rounds ten times per step; only the roundings of p itself count in full.
    for param, parameter in zip(lists.params, theirs, strict=True):
        torch.testing.assert_close(param, parameter.data, rtol=50 * torch.finfo(dtype).eps, atol=0)


@SOME_COMBINATIONS
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_learning_rate_may_be_float32_or_float64(device, dtypes, dtype, shape):
    lists = adam_lists([257], device, dtypes, steps=2)
    lr = torch.full(shape, 1e-3, dtype=dtype, device=device)
    exact = exact_step(lists, lr.item(), **OPTIONS)

    step(lists, lr)

    assert_step(lists, exact)


@pytest.mark.needs_cuda
def test_learning_rate_may_stay_on_the_host():
    lists = adam_lists([257], torch.device("cuda"), steps=2)

    assert_takes_exact_step(lists)


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@SOME_COMBINATIONS
def test_learning_rate_zero_changes_only_moments(device, dtypes, decoupled):
    lists = adam_lists([257, 8193], device, dtypes, steps=2)
    before = lists.clone()

    assert_takes_exact_step(lists, lr=0.0, decoupled_weight_decay=decoupled)

    assert all(map(same_bits, lists.params, before.params))
    assert all(map(same_or_short, lists.masters, before.masters))
    assert not torch.equal(lists.exp_avgs[0], before.exp_avgs[0])


@pytest.mark.parametrize("eps", [0.0, 1.0, 1e3])
@SOME_COMBINATIONS
def test_eps_is_added_outside_the_square_root(device, dtypes, eps):
    assert_takes_exact_step(adam_lists([257], device, dtypes, steps=2), eps=eps)


@pytest.mark.parametrize("lr", [1e-3, 0.0])
def test_eps_zero_with_zero_gradients_gives_nan_as_in_torch(device, lr):
    parameter = torch.nn.Parameter(torch.ones(33, device=device))
    parameter.grad = torch.zeros(33, device=device)
    torch.optim.AdamW([parameter], lr=lr, eps=0.0).step()
    lists = adam_lists([33], device)
    lists.grads[0].zero_()

    step(lists, lr, eps=0.0)

    assert parameter.isnan().all()
    assert lists.params[0].isnan().all()
    assert lists.exp_avgs[0].count_nonzero() == lists.exp_avg_sqs[0].count_nonzero() == 0


@pytest.mark.parametrize(
    ("beta1", "beta2"), [(0.0, 0.999), (0.9, 0.0), (0.0, 0.0), (0.1, 0.25), (0.5, 0.5)]
)
@SOME_COMBINATIONS
def test_step_is_exact_with_small_betas(device, dtypes, beta1, beta2):
    lists = adam_lists([257], device, dtypes, steps=2)

    assert_takes_exact_step(lists, beta1=beta1, beta2=beta2)


def test_beta_zero_stores_the_gradient_and_its_square_as_moments(device):
    lists = adam_lists([257], device, steps=2)

    step(lists, beta1=0.0, beta2=0.0)

    assert same_bits(lists.exp_avgs[0], lists.grads[0])
    assert same_bits(lists.exp_avg_sqs[0], lists.grads[0].square())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameter_is_its_master_rounded_to_nearest(device, dtype):
    lists = adam_lists([33, 8193], device, Dtypes(dtype, dtype, master=torch.float32))

    for _ in range(3):
        step(lists)
        for param, master in zip(lists.params, lists.masters, strict=True):
            assert same_bits(param, master.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameter_that_has_a_master_is_not_read(device, dtype):
    lists = adam_lists([8193], device, Dtypes(dtype, dtype, master=torch.float32))
    scrambled = lists.clone()
    scrambled.params[0].copy_(random_bits(8193, dtype, device))

    step(lists)
    step(scrambled)

    assert_same_lists(scrambled, lists)


def test_parameter_and_remainder_are_the_halves_of_the_master(device):
    lists = adam_lists([33, 8193], device, BFLOAT16_WITH_REMAINDERS)

    for _ in range(3):
        step(lists)
        for param, remainder, master in zip(
            lists.params, lists.masters, lists.stepped(), strict=True
        ):
            upper, lower = split(master)
            assert same_bits(param, upper)
            assert torch.equal(remainder, lower)


@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
@EVERY_MASTER
def test_masters_step_as_float32_parameters_do(device, dtypes, moment):
    wide = adam_lists([257, 8193], device, Dtypes(grad=torch.float16, moment=moment))
    narrow = with_masters(wide, dtypes)
    for seed in range(20):
        for lists in (wide, narrow):
            renew_gradients(lists, seed)
            step(lists, lr=0.1, decoupled_weight_decay=seed % 2 == 0)

    assert all(map(same_bits, narrow.stepped(), wide.params))
    assert all(map(same_bits, narrow.exp_avgs, wide.exp_avgs))
    assert all(map(same_bits, narrow.exp_avg_sqs, wide.exp_avg_sqs))


def test_tiny_updates_add_up_in_masters_and_are_lost_without_them(device):
    def after(dtypes):
        lists = adam_lists([33], device, dtypes)
        lists.params[0].fill_(1.0)
        for master in lists.masters:
            master.fill_(1.0 if master.dtype == torch.float32 else 0)
        lists.grads[0].fill_(1.0)
        for _ in range(100):
            step(lists, lr=1e-4, weight_decay=0.0)
        return lists.params[0].float()

    assert (after(Dtypes(torch.bfloat16, torch.bfloat16)) == 1.0).all()
    for dtypes in (BFLOAT16_WITH_MASTERS, BFLOAT16_WITH_REMAINDERS):
        # 100 steps of lr = 1e-4 give 0.99, rounded to bfloat16.
        assert (after(dtypes) == 0.98828125).all()


@pytest.mark.parametrize("flag", [1.0, 2.0, 3.0, -1.0, 1e-45, math.inf, math.nan])
@SOME_COMBINATIONS
def test_nonzero_flag_leaves_every_bit_and_counter_unchanged(device, dtypes, flag):
    lists = adam_lists([33, 0, 8193], device, dtypes, amsgrad=True, steps=4)
    for column in lists.columns()[:5]:
        column[0] = random_bits(33, column[0].dtype, device)
    before = lists.clone()
    grad_norm = scalar(-1.0, device)

    step(
        lists,
        amsgrad=True,
        write_back_grads=True,
        found_inf=scalar(flag, device),
        grad_scale=scalar(4.0, device),
        total_norm=scalar(12.0, device),
        max_norm=1.0,
        grad_norm=grad_norm,
    )

    assert_same_lists(lists, before)
    assert grad_norm.item() == 3.0  # written although the step is skipped


@pytest.mark.parametrize("flag", [0.0, -0.0])
def test_flag_of_zero_skips_no_step(device, flag):
    lists = adam_lists([257], device)
    unflagged = lists.clone()

    step(lists, found_inf=scalar(flag, device))
    step(unflagged)

    assert_same_lists(lists, unflagged)


@SOME_COMBINATIONS
def test_step_after_a_skipped_first_step_counts_as_the_first(device, dtypes):
    lists = adam_lists([33, 8193], device, dtypes)
    unskipped = lists.clone()
    good = [grad.clone() for grad in lists.grads]
    lists.grads[0].fill_(math.inf)
    step(lists, found_inf=scalar(1.0, device))
    lists.grads[0].copy_(good[0])

    step(lists, found_inf=scalar(0.0, device))
    step(unskipped)

    assert [count.item() for count in lists.state_steps] == [1, 1]
    assert_same_lists(lists, unskipped)
