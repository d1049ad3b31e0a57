"""fused_adam gives the same bits for any memory layout, neighbours and number of threads."""

import pytest
import torch
from adam_reference import (
    BFLOAT16_WITH_REMAINDERS,
    COMBINATIONS,
    HALF_WITH_MASTERS,
    OPTIONS,
    SOME_COMBINATIONS,
    AdamLists,
    Dtypes,
    adam_lists,
    concatenated,
)
from ampfuse.ops import fused_adam

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


def step(lists, lr=1e-3, **options):
    rate = torch.tensor(lr, dtype=torch.float64)
    fused_adam(*lists.columns(), lr=rate, **OPTIONS | {"amsgrad": True} | options)


def assert_same_lists(a, b):
    for ours, theirs in zip(a.tensors(), b.tensors(), strict=True):
        assert torch.equal(ours, theirs)  # these lists have no NaN


def assert_rest_of_storage_is_untouched(tensor):
    storage = tensor.new_empty(0).set_(tensor.untyped_storage())
    between = torch.ones_like(storage, dtype=torch.bool)
    between.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    assert (storage[between] == 77).all()


@pytest.mark.parametrize("of_others", LAYOUTS)
@pytest.mark.parametrize("of_params", LAYOUTS)
@pytest.mark.parametrize("dtypes", [Dtypes(), BFLOAT16_WITH_REMAINDERS], ids=str)
def test_elements_are_matched_by_index_in_any_layout(device, dtypes, of_params, of_others):
    contiguous = adam_lists([SHAPE, SHAPE], device, dtypes, amsgrad=True, steps=2)
    lists = laid_out(contiguous, of_params, of_others)
    strides = [tensor.stride() for tensor in lists.tensors()]

    for view in (contiguous, lists):
        step(view, write_back_grads=True, grad_scale=torch.tensor(4.0, device=device))

    assert_same_lists(lists, contiguous)
    assert [tensor.stride() for tensor in lists.tensors()] == strides
    for column in (lists.params, lists.grads, lists.exp_avgs, lists.masters):
        for tensor in column:
            assert_rest_of_storage_is_untouched(tensor)


@pytest.mark.parametrize("odd_one", ["params", "grads", "exp_avgs", "exp_avg_sqs", "masters"])
@pytest.mark.parametrize("layout", ["channels_last", "every second column"])
def test_step_is_the_same_if_one_list_has_another_layout(device, odd_one, layout):
    contiguous = adam_lists([SHAPE], device, HALF_WITH_MASTERS, amsgrad=True, steps=2)
    lists = contiguous.clone()
    setattr(lists, odd_one, [LAYOUTS[layout](x) for x in getattr(lists, odd_one)])

    for view in (contiguous, lists):
        step(view)

    assert_same_lists(lists, contiguous)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_are_only_read_keep_their_bits(device, layout):
    lists = laid_out(adam_lists([SHAPE], device, amsgrad=True), "contiguous", layout)
    before = lists.clone()

    step(lists, grad_scale=torch.tensor(4.0, device=device))

    assert torch.equal(lists.grads[0], before.grads[0])
    assert not torch.equal(lists.params[0], before.params[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_skipped_step_writes_nothing(device, layout):
    lists = laid_out(adam_lists([SHAPE], device, amsgrad=True, steps=2), "transposed", layout)
    before = lists.clone()

    step(lists, write_back_grads=True, found_inf=torch.ones((), device=device))

    assert_same_lists(lists, before)


def further_in_its_storage(x, elements):
    flat = x.reshape(-1)
    return torch.cat([flat.new_ones(elements), flat])[elements:].view(x.shape)


@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("size", [1, 33, 8193])
@SOME_COMBINATIONS
def test_bits_do_not_depend_on_the_alignment(device, dtypes, size, shift):
    aligned = adam_lists([size], device, dtypes, amsgrad=True, steps=2)
    shifted = AdamLists(
        *(
            [further_in_its_storage(x, index * shift) for x in column]
            for index, column in enumerate(aligned.columns())
        )
    )

    step(aligned)
    step(shifted)

    assert_same_lists(shifted, aligned)


@SOME_COMBINATIONS
def test_lazy_clones_are_written_and_their_originals_are_not(device, dtypes):
    originals = adam_lists([257, 8193], device, dtypes, amsgrad=True, steps=2).clone()
    expected, before = originals.clone(), originals.clone()
    lazy = AdamLists(*([torch._lazy_clone(x) for x in column] for column in originals.columns()))

    step(lazy)
    step(expected)

    assert_same_lists(lazy, expected)
    assert_same_lists(originals, before)


def test_interleaved_views_of_one_storage_are_stepped_separately(device):
    apart = adam_lists([257] * 4, device, amsgrad=True, steps=2)
    storage = torch.stack(apart.params, dim=1)
    interleaved = apart.clone()
    interleaved.params = list(storage.unbind(dim=1))

    step(apart)
    step(interleaved)

    assert torch.equal(storage, torch.stack(apart.params, dim=1))


# Three threads get a share each: no thread is woken for less than 32768 elements. The cuts between
# shares depend on the number of threads. Small tensors are in between.
SHAPES = [65537, 1, 8193, 33, 257, 40_000, 8192, 0, 100_000]


@SOME_COMBINATIONS
@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(set_threads, dtypes, threads):
    alone = adam_lists(SHAPES, torch.device("cpu"), dtypes, amsgrad=True, steps=2)
    shared = alone.clone()

    set_threads(1)
    step(alone)
    set_threads(threads)
    step(shared)

    assert_same_lists(shared, alone)


@SOME_COMBINATIONS
def test_bits_of_a_tensor_do_not_depend_on_its_neighbours(device, dtypes):
    together = adam_lists(SHAPES, device, dtypes, amsgrad=True, steps=2)
    alone, backwards = together.clone(), together.clone()
    indices = range(len(SHAPES))

    step(together)
    for index in indices:
        step(alone.only(index))
    step(backwards.only(*reversed(indices)))

    assert_same_lists(alone, together)
    assert_same_lists(backwards, together)


def test_bits_of_a_tensor_do_not_depend_on_neighbours_of_other_dtypes(device):
    alone = adam_lists([8193, 33], device, amsgrad=True, steps=2)
    kinds = [dtypes for dtypes in COMBINATIONS if dtypes.master is None]
    neighbours = [adam_lists([257], device, dtypes, amsgrad=True, steps=5) for dtypes in kinds]
    among = concatenated(*neighbours[:9], alone.clone(), *neighbours[9:])

    step(alone)
    step(among)

    assert_same_lists(among.only(9, 10), alone)


@SOME_COMBINATIONS
def test_same_call_gives_the_same_bits_again(device, dtypes):
    first = adam_lists(SHAPES, device, dtypes, amsgrad=True, steps=2)
    again = [first.clone() for _ in range(3)]
    step(first)

    for lists in again:
        step(lists)
        assert_same_lists(lists, first)


def test_strided_parameter_listed_twice_is_refused(device):
    param = torch.zeros(6, device=device)[::2]
    columns = [[torch.ones(3, device=device) for _ in range(2)] for _ in range(3)]
    counters = [torch.zeros((), device=device) for _ in range(2)]

    with pytest.raises(
        ValueError, match=r"params\[1\]: expected distinct tensors, got params\[0\]"
    ):
        fused_adam(
            [param, param],
            *columns,
            [],
            counters,
            lr=torch.tensor(0.1),
            **OPTIONS | {"amsgrad": False},
        )

    assert param.tolist() == [0.0] * 3


def test_strides_of_dimensions_of_size_one_cause_no_copy(device):
    # autograd gives such strides to the weight of a 1×1 convolution if the input is channels_last.
    param = torch.zeros(8, 16, 1, 1, device=device)
    grad = torch.ones(8, 16, 1, 1, device=device).as_strided((8, 16, 1, 1), (16, 1, 16, 16))
    moments = [[torch.zeros_like(param)] for _ in range(2)]
    columns = ([param], [grad], *moments, [], [torch.zeros((), device=device)])

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fused_adam(*columns, lr=torch.tensor(0.25), **OPTIONS | {"amsgrad": False})

    assert "aten::copy_" not in {event.name for event in profile.events()}
    assert torch.all(param < 0)
