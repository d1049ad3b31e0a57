"""fused_adam: parameters, moments, masters and counters after a step or a skipped step."""

import itertools
import math

import pytest
import torch
from adam_reference import (
    BFLOAT16_WITH_MASTERS,
    BFLOAT16_WITH_REMAINDERS,
    COMBINATIONS,
    EVERY_COMBINATION,
    EVERY_KIND,
    EVERY_MASTER,
    KINDS,
    Dtypes,
    adam_lists,
    assert_same_lists,
    assert_step,
    assert_takes_exact_step,
    concatenated,
    exact_step,
    renew_gradients,
    split,
    step,
    with_masters,
)
from reference import SIZES, random_bits, same_bits, scalar

EVERY_16_BIT_DTYPE = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


# Code for amsgrad is compiled for each combination of dtypes. The other two options are numbers in
# it, so all eight cases are taken for each kind of parameters and masters only.
SETTINGS = list(itertools.product((False, True), repeat=3))


@pytest.mark.vectorised
@EVERY_COMBINATION
def test_first_and_later_steps_match_the_formulae(device, dtypes):
    for amsgrad, maximize, decoupled in SETTINGS if dtypes in KINDS else SETTINGS[1::5]:
        inputs = {"amsgrad": amsgrad, "maximize": maximize}
        options = {**inputs, "decoupled_weight_decay": decoupled}
        shapes = [(), 33, (9, 7), 1025]
        lists, later = (adam_lists(shapes, device, dtypes, steps=t, **inputs) for t in (0, 5))
        for seed in range(1, 4):
            assert_takes_exact_step(lists, **options)
            renew_gradients(lists, seed)
        assert_takes_exact_step(later, **options)


@pytest.mark.sanitizer
@pytest.mark.vectorised
@EVERY_KIND
def test_step_is_exact_at_sizes_around_registers_blocks_and_chunks(device, dtypes):
    sizes = [*SIZES, 1023, 1024, 1025]  # the CPU converts blocks of 256: also after several
    lists = adam_lists(sizes, device, dtypes, amsgrad=True, steps=10)

    assert_takes_exact_step(lists, amsgrad=True)


@pytest.mark.parametrize("has_masters", [False, True], ids=["without masters", "with masters"])
def test_tensors_of_all_dtypes_in_one_call_step_as_in_separate_calls(device, has_masters):
    kinds = [dtypes for dtypes in COMBINATIONS if (dtypes.master is not None) == has_masters]
    parts = [adam_lists([257, 8193], device, dtypes, steps=2) for dtypes in kinds]
    together = concatenated(*parts).clone()
    for part in parts:
        step(part)

    step(together)

    assert_same_lists(together, concatenated(*parts))


@EVERY_KIND
def test_empty_tensors_count_steps_and_do_not_affect_their_neighbours(device, dtypes):
    for shapes in ([0, 33, (0, 5), (3, 0), 257, 0], [0, (3, 0)]):
        assert_takes_exact_step(adam_lists(shapes, device, dtypes))


@pytest.mark.vectorised
@EVERY_KIND
def test_tensors_of_one_call_may_have_taken_different_numbers_of_steps(device, dtypes):
    parts = [
        adam_lists([257, 33], device, dtypes, steps=steps, seed=seed)
        for seed, steps in enumerate((0, 7, 0, 1, 1_000_000, 7))
    ]

    assert_takes_exact_step(concatenated(*parts))


@EVERY_KIND
def test_learning_rate_may_be_float32_or_float64(device, dtypes):
    for dtype in (torch.float32, torch.float64):
        for shape in ((), (1,)):
            lists = adam_lists([257], device, dtypes, steps=2)
            lr = torch.full(shape, 1e-3, dtype=dtype, device=device)
            exact = exact_step(lists, lr.item())

            step(lists, lr)

            assert_step(lists, exact)


@EVERY_KIND
def test_learning_rate_zero_changes_only_moments(device, dtypes):
    for decoupled in (True, False):
        lists = adam_lists([257, 8193], device, dtypes, steps=2)
        before = lists.clone()

        assert_takes_exact_step(lists, lr=0.0, decoupled_weight_decay=decoupled)

        assert all(map(same_bits, lists.params + lists.masters, before.params + before.masters))
        assert not torch.equal(lists.exp_avgs[0], before.exp_avgs[0])


@pytest.mark.vectorised
@EVERY_KIND
def test_step_is_exact_with_small_betas_and_any_eps(device, dtypes):
    for beta1, beta2 in [(0.0, 0.999), (0.9, 0.0), (0.0, 0.0), (0.1, 0.25), (0.5, 0.5)]:
        lists = adam_lists([257], device, dtypes, steps=2)
        assert_takes_exact_step(lists, beta1=beta1, beta2=beta2)
    for eps in (0.0, 1.0, 1e3):  # it is added outside the square root
        assert_takes_exact_step(adam_lists([257], device, dtypes, steps=2), eps=eps)


def test_eps_zero_with_zero_gradients_gives_nan_as_in_torch(device):
    for lr in (1e-3, 0.0):
        parameter = torch.nn.Parameter(torch.ones(33, device=device))
        parameter.grad = torch.zeros(33, device=device)
        torch.optim.AdamW([parameter], lr=lr, eps=0.0).step()
        lists = adam_lists([33], device)
        lists.grads[0].zero_()

        step(lists, lr, eps=0.0)

        assert parameter.isnan().all()
        assert lists.params[0].isnan().all()
        assert lists.exp_avgs[0].count_nonzero() == lists.exp_avg_sqs[0].count_nonzero() == 0


def test_beta_zero_stores_the_gradient_and_its_square_as_moments(device):
    lists = adam_lists([257], device, steps=2)

    step(lists, beta1=0.0, beta2=0.0)

    assert same_bits(lists.exp_avgs[0], lists.grads[0])
    assert same_bits(lists.exp_avg_sqs[0], lists.grads[0].square())


@EVERY_16_BIT_DTYPE
def test_parameter_is_its_master_rounded_to_nearest(device, dtype):
    lists = adam_lists([33, 8193], device, Dtypes(dtype, dtype, master=torch.float32))

    for _ in range(3):
        step(lists)
        for param, master in zip(lists.params, lists.masters, strict=True):
            assert same_bits(param, master.to(dtype))


@EVERY_16_BIT_DTYPE
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
            assert all(map(same_bits, (param, remainder), split(master)))


@pytest.mark.vectorised
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


@EVERY_KIND
def test_nonzero_flag_leaves_every_bit_and_counter_unchanged(device, dtypes):
    lists = adam_lists([33, 0, 8193], device, dtypes, amsgrad=True, steps=4)
    for column in lists.columns()[:5]:
        column[0] = random_bits(33, column[0].dtype, device)
    before = lists.clone()
    signals = {"grad_scale": scalar(4.0, device), "total_norm": scalar(12.0, device)}

    for flag in (1.0, 2.0, 3.0, -1.0, 1e-45, math.inf, math.nan):
        signals |= {"found_inf": scalar(flag, device), "grad_norm": scalar(-1.0, device)}
        step(lists, amsgrad=True, write_back_grads=True, max_norm=1.0, **signals)

        assert_same_lists(lists, before)
        assert signals["grad_norm"].item() == 3.0  # written although the step is skipped


@EVERY_KIND
def test_step_after_a_skipped_first_step_counts_as_the_first(device, dtypes):
    for no_overflow in (0.0, -0.0):
        lists = adam_lists([33, 8193], device, dtypes)
        unskipped = lists.clone()
        lists.grads[0].fill_(math.inf)
        step(lists, found_inf=scalar(1.0, device))
        lists.grads[0].copy_(unskipped.grads[0])

        step(lists, found_inf=scalar(no_overflow, device))
        step(unskipped)

        assert [count.item() for count in lists.state_steps] == [1, 1]
        assert_same_lists(lists, unskipped)
