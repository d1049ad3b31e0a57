"""Eager calls lend tensor lists to the operators: nobody may notice, and nothing may be kept."""

import contextlib
import gc
import sys
import threading
import time
import weakref
from typing import ClassVar

import pytest
import torch
from ampfuse import _C, ops
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

COUNT = 100  # short lists are counted


def tensors(count=COUNT):
    return [torch.full((4,), float(i + 1)) for i in range(count)]


def lent(name, *args, **kwargs):
    return _C.EagerOp(f"ampfuse::{name}", "")(*args, **kwargs)


def test_results_are_the_dispatchers():
    ours = lent("multi_tensor_norm", tensors(), 2.0, None)

    assert isinstance(ours, tuple)
    for x, expected in zip(ours, torch.ops.ampfuse.multi_tensor_norm(tensors(), 2.0), strict=True):
        assert torch.equal(x, expected)
    assert lent("multi_tensor_clip", tensors(), torch.tensor(9.0), 1.0) is None


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_and_tuples_are_written(kind):
    lists = kind(tensors())

    assert lent("multi_tensor_clip", lists, torch.tensor(2.0), 1.0) is None

    torch.testing.assert_close(lists[2], torch.full((4,), 1.5), rtol=1e-5, atol=0)
    assert [x._version for x in lists] == [1] * COUNT


def references(xs):
    return [(sys.getrefcount(x), x._use_count()) for x in xs]


def test_no_reference_is_left_or_lost():
    xs = tensors()
    before = references(xs)

    lent("multi_tensor_clip", xs, torch.tensor(2.0), 1.0)
    assert references(xs) == before

    with pytest.raises(TypeError, match="total_norm: expected dtype"):
        lent("multi_tensor_clip", xs, torch.tensor(2), 1.0)
    assert references(xs) == before


UNUSUAL = {
    "conjugates": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "negatives": lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
    "zeros": lambda: torch._efficientzerotensor((4,)),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("count", [2, COUNT])
def test_tensors_that_torch_resolves_on_the_way_are_counted(make, count):
    xs = [make() for _ in range(count)]
    before = [x._use_count() for x in xs]

    for _ in range(3):
        ops.multi_tensor_norm(xs)
        with contextlib.suppress(RuntimeError):  # torch does not write through all of them
            ops.multi_tensor_clip(xs, torch.tensor(2.0), 1.0)
    gc.collect()

    assert [x._use_count() for x in xs] == before


def test_the_list_may_change_while_it_is_looked_at():
    op, good = _C.EagerOp("ampfuse::multi_tensor_norm", ""), tensors()
    xs, had = list(good), gc.get_threshold()
    watching = False

    def spoil(phase, info):
        if watching and phase == "start":
            xs[:] = ["no tensor"] * COUNT

    gc.callbacks.append(spoil)
    gc.set_threshold(1)
    try:
        for _ in range(200):
            xs[:] = good
            watching = True
            result = op(xs, 2.0, None)
            watching = False
            assert result is NotImplemented or len(result) == 5
    finally:
        gc.callbacks.remove(spoil)
        gc.set_threshold(*had)


def test_tensors_die_after_a_call_as_before_it():
    xs = tensors()
    ghosts = [weakref.ref(x) for x in xs]

    lent("multi_tensor_norm", xs, 2.0, None)
    del xs
    gc.collect()

    assert [ghost() for ghost in ghosts] == [None] * COUNT


def test_a_profiler_may_remember_the_arguments():
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profile:
        ops.multi_tensor_clip(tensors(), torch.tensor(2.0), 1.0)
    gc.collect()

    assert "ampfuse::multi_tensor_clip" in {event.key for event in profile.key_averages()}


def test_the_list_may_be_cleared_meanwhile():
    xs = [torch.ones(2**22) for _ in range(8)]
    running = threading.Event()

    def clear():
        running.wait()
        time.sleep(0.002)
        xs.clear()

    thread = threading.Thread(target=clear)
    thread.start()
    running.set()
    total = ops.multi_tensor_norm(xs, 1.0).total_norm
    thread.join()

    assert total.item() in (2**25, 0)  # 0: it was cleared before


def test_tensors_that_are_only_read_may_be_listed_twice_and_lists_may_be_empty():
    x = torch.ones(4)

    assert ops.multi_tensor_norm([x, x]).total_norm == 8**0.5
    assert ops.multi_tensor_norm([]).total_norm == 0


@pytest.mark.parametrize("number", [2, 2.0])
def test_integers_are_numbers_too(number):
    assert lent("multi_tensor_norm", [torch.tensor([3.0, 4.0])], number, None)[0] == 5


@pytest.mark.parametrize(
    "args",
    [
        ([torch.ones(2)],),  # a default is left out
        ([torch.ones(2)], 2.0, 3.0),
        ([torch.ones(2)], True),
        ([torch.ones(2)], 10**400),
        ([torch.ones(2)], torch.tensor(2.0)),
        ([torch.ones(2)], None),
        ([torch.ones(2), None], 2.0),
        ([1.0], 2.0),
        (iter([torch.ones(2)]), 2.0),
        (torch.ones(2, 2), 2.0),
    ],
)
def test_what_is_not_plain_is_left_to_torch(args):
    dtype = () if len(args) == 1 else (None,)
    assert lent("multi_tensor_norm", *args, *dtype) is NotImplemented


def test_keywords_go_by_name():
    xs, half = tensors(1), torch.tensor(0.5)
    by_name = {"inv_scale": half, "found_inf": torch.zeros(())}

    assert lent("multi_tensor_unscale", xs, **by_name) is None
    assert lent("multi_tensor_unscale", xs, scale=half, found_inf=half) is NotImplemented

    assert torch.equal(xs[0], torch.full((4,), 0.5))


class Watched(torch.Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_see_the_call():
    Watched.seen.clear()

    ops.multi_tensor_norm([torch.ones(4).as_subclass(Watched)])

    assert any("multi_tensor_norm" in name for name in Watched.seen)


def test_function_modes_see_the_call():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    xs = tensors()
    with Mode():
        ops.multi_tensor_norm(xs)

    assert any("multi_tensor_norm" in name for name in seen)


def test_dispatch_modes_see_the_call():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    xs = tensors()
    with Mode():
        ops.multi_tensor_norm(xs)

    assert seen == [torch.ops.ampfuse.multi_tensor_norm.default]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces_contain_the_call():
    def norm(x):
        return ops.multi_tensor_norm([x, x]).total_norm

    traced = torch.jit.trace(norm, torch.ones(4))

    assert traced(torch.full((8,), 2.0)) == 8


def test_parameters_are_plain_tensors():
    xs = [torch.nn.Parameter(x) for x in tensors()]

    with torch.no_grad():
        assert lent("multi_tensor_clip", xs, torch.tensor(2.0), 1.0) is None
    with pytest.raises(RuntimeError, match=r"tensors\[0\].*requires grad.*torch.no_grad"):
        lent("multi_tensor_clip", xs, torch.tensor(2.0), 1.0)
