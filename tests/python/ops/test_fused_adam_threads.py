"""fused_adam with several threads, which share long tensors and inspect thousands of small ones."""

import pytest
import torch
from adam_reference import (
    BFLOAT16_WITH_REMAINDERS,
    EVERY_KIND,
    AdamLists,
    Dtypes,
    adam_lists,
    assert_same_lists,
    assert_step,
    exact_step,
    step,
)
from reference import LONG_AND_SHORT

COUNT = 3000
SINGLE = Dtypes()


def thousands(device, dtypes=SINGLE):
    """Return lists of tensors of shape (2, 3) with separate memory, after one step."""
    one = adam_lists([(COUNT, 2, 3)], device, dtypes, steps=1)
    one.state_steps = [torch.ones(COUNT, device=device)]
    return AdamLists(
        *([x.clone() for column in columns for x in column] for columns in one.columns())
    )


@pytest.fixture(params=[1, 3])
def threads(request, set_threads):
    set_threads(request.param)


@EVERY_KIND
def test_bits_do_not_depend_on_the_number_of_threads(set_threads, dtypes):
    cpu = torch.device("cpu")
    alone, *shared = (
        adam_lists(LONG_AND_SHORT, cpu, dtypes, amsgrad=True, steps=2) for _ in range(3)
    )
    set_threads(1)
    step(alone, amsgrad=True)
    for threads, lists in zip((2, 3), shared, strict=True):
        set_threads(threads)
        step(lists, amsgrad=True)
        assert_same_lists(lists, alone)


def test_each_tensor_is_stepped_by_its_own_counter(device, threads):
    lists = thousands(device)
    for index, counter in enumerate(lists.state_steps):
        counter.fill_(index // 7)

    some = lists.only(*range(0, COUNT, 3))
    exact = exact_step(some)

    step(lists)

    assert_step(some, exact)
    assert [x.item() for x in lists.state_steps] == [index // 7 + 1 for index in range(COUNT)]


@pytest.mark.parametrize("dtypes", [SINGLE, BFLOAT16_WITH_REMAINDERS], ids=str)
def test_lazy_clones_and_strided_tensors_step_as_ordinary_ones(device, threads, dtypes):
    expected = thousands(device, dtypes)
    originals = expected.clone()
    lists = AdamLists(*(list(column) for column in originals.columns()))
    for column in lists.columns():
        for index in range(5, len(column), 50):
            column[index] = torch._lazy_clone(column[index])
        for index in range(7, len(column), 50):
            x = column[index]
            column[index] = x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x

    step(lists)
    step(expected)

    assert_same_lists(lists, expected)


def test_lazy_clone_in_another_list_steps_as_a_real_clone():
    def stepped(clone):
        numbers = torch.arange(1.0, 21.0)
        other = clone(numbers)
        lists = AdamLists(
            params=[numbers[:10], torch.ones(10)],
            grads=[torch.ones(10), numbers[10:]],
            exp_avgs=[other[10:], torch.zeros(10)],
            exp_avg_sqs=[torch.ones(10), torch.ones(10)],
            max_exp_avg_sqs=[],
            state_steps=[torch.zeros(()), torch.zeros(())],
            masters=[],
        )
        step(lists, lr=0.25)
        return lists

    assert_same_lists(stepped(torch._lazy_clone), stepped(torch.clone))


def askew(x):
    """Copy `x` to an address that is no multiple of its element size."""
    raw = bytearray(x.numel() * x.element_size() + 1)
    copy = torch.frombuffer(raw, dtype=x.dtype, count=x.numel(), offset=1).view(x.shape)
    assert copy.data_ptr() % x.element_size() != 0
    return copy.copy_(x)


@EVERY_KIND
def test_misaligned_elements_step_as_aligned_ones(dtypes):
    expected = adam_lists([33, 8193], torch.device("cpu"), dtypes, steps=1)
    crooked = AdamLists(*([askew(x) for x in column] for column in expected.columns()))

    step(crooked)
    step(expected)

    assert_same_lists(crooked, expected)


def test_error_names_the_first_bad_tensor_and_none_is_stepped(device, threads):
    lists = thousands(device)
    before = lists.clone()
    wrong = [COUNT - 1, 2 * COUNT // 3, COUNT // 2 + 1, 1234]
    for index in wrong:
        lists.grads[index] = torch.ones(3, device=device)

    for _ in range(20):
        with pytest.raises(ValueError, match=r"grads\[1234\]: expected shape \[2, 3\]"):
            step(lists)

    for index in wrong:
        lists.grads[index] = before.grads[index]
    assert_same_lists(lists, before)
    assert {x._version for x in lists.params} == {0}


def test_parameter_listed_twice_is_refused(device, threads):
    lists = thousands(device)
    lists.params[2500] = lists.params[17].view(2, 3)
    before = lists.clone()

    with pytest.raises(ValueError, match=r"params\[2500\]: expected distinct.*params\[17\] again"):
        step(lists)

    assert_same_lists(lists, before)
