"""fused_adam gives the same bits for any memory layout and any neighbours."""

import itertools

import pytest
import torch
from adam_reference import (
    BFLOAT16_WITH_REMAINDERS,
    EVERY_KIND,
    AdamLists,
    Dtypes,
    adam_lists,
    assert_same_lists,
    step,
)
from reference import LONG_AND_SHORT, memory_between

SHAPE = (4, 5, 3, 7)  # odd rows, so that they start at all alignments


def strided_copy(x, storage, view):
    """Copy `x` into a view of a larger storage. All other elements of the storage are 77."""
    moved = view(x.new_full(storage, 77))
    return moved.copy_(x)


# The same numbers in different memory layouts.
LAYOUTS = {
    "contiguous": torch.clone,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "permuted": lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "offset by one element": lambda x: strided_copy(
        x, (x.numel() + 2,), lambda storage: storage[1:-1].view(SHAPE)
    ),
    "every second column": lambda x: strided_copy(x, (4, 5, 3, 14), lambda s: s[..., 1::2]),
    "every second row": lambda x: strided_copy(x, (8, 5, 3, 7), lambda s: s[::2]),
}


def laid_out(lists, of_params, of_others):
    """Copy lists of tensors of SHAPE with these layouts; copy step counters unchanged."""
    layouts = [of_params, *[of_others] * 4, None, of_others]
    return AdamLists(
        *(
            [LAYOUTS[layout](x) if layout else x.clone() for x in column]
            for layout, column in zip(layouts, lists.columns(), strict=True)
        )
    )


@pytest.mark.parametrize("dtypes", [Dtypes(), BFLOAT16_WITH_REMAINDERS], ids=str)
def test_elements_are_matched_by_index_in_any_layout(device, dtypes):
    """The steps are one that only reads gradients, one that writes them, and a skipped one."""
    before = adam_lists([SHAPE, SHAPE], device, dtypes, amsgrad=True, steps=2)
    scale, flag = torch.tensor(4.0, device=device), torch.ones((), device=device)
    steps = [{}, {"write_back_grads": True}, {"write_back_grads": True, "found_inf": flag}]
    contiguous = [before]
    for options in steps:
        contiguous.append(contiguous[-1].clone())
        step(contiguous[-1], amsgrad=True, grad_scale=scale, **options)
    for layouts in itertools.product(LAYOUTS, repeat=2):
        lists = laid_out(before, *layouts)
        strides = [tensor.stride() for tensor in lists.tensors()]

        for options, expected in zip(steps, contiguous[1:], strict=True):
            step(lists, amsgrad=True, grad_scale=scale, **options)
            assert_same_lists(lists, expected)

        assert [tensor.stride() for tensor in lists.tensors()] == strides, layouts
        for tensor in lists.tensors():
            storage, between = memory_between(tensor)
            assert (storage[between] == 77).all(), layouts


def further_in_its_storage(x, elements):
    flat = x.reshape(-1)
    return torch.cat([flat.new_ones(elements), flat])[elements:].view(x.shape)


@pytest.mark.vectorised
@EVERY_KIND
def test_bits_do_not_depend_on_the_alignment(device, dtypes):
    for size in (1, 33, 8193):
        for shift in (1, 3):
            aligned = adam_lists([size], device, dtypes, amsgrad=True, steps=2)
            shifted = AdamLists(
                *(
                    [further_in_its_storage(x, index * shift) for x in column]
                    for index, column in enumerate(aligned.columns())
                )
            )

            step(aligned, amsgrad=True)
            step(shifted, amsgrad=True)

            assert_same_lists(shifted, aligned)


@EVERY_KIND
def test_lazy_clones_are_written_and_their_originals_are_not(device, dtypes):
    originals = adam_lists([257, 8193], device, dtypes, amsgrad=True, steps=2).clone()
    expected, before = originals.clone(), originals.clone()
    lazy = AdamLists(*([torch._lazy_clone(x) for x in column] for column in originals.columns()))

    step(lazy, amsgrad=True)
    step(expected, amsgrad=True)

    assert_same_lists(lazy, expected)
    assert_same_lists(originals, before)


@EVERY_KIND
def test_bits_of_a_tensor_do_not_depend_on_its_neighbours(device, dtypes):
    together = adam_lists(LONG_AND_SHORT, device, dtypes, amsgrad=True, steps=2)
    alone, backwards = together.clone(), together.clone()
    indices = range(len(LONG_AND_SHORT))

    step(together, amsgrad=True)
    for index in indices:
        step(alone.only(index), amsgrad=True)
    step(backwards.only(*reversed(indices)), amsgrad=True)

    assert_same_lists(alone, together)
    assert_same_lists(backwards, together)


def test_strides_of_dimensions_of_size_one_cause_no_copy(device):
    # autograd gives such strides to the weight of a 1×1 convolution if the input is channels_last.
    param = torch.zeros(8, 16, 1, 1, device=device)
    grad = torch.ones(8, 16, 1, 1, device=device).as_strided((8, 16, 1, 1), (16, 1, 16, 16))
    moments = [[torch.zeros_like(param)] for _ in range(2)]
    lists = AdamLists([param], [grad], *moments, [], [torch.zeros((), device=device)], [])

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(lists, lr=0.25)

    assert "aten::copy_" not in {event.name for event in profile.events()}
    assert torch.all(param < 0)
