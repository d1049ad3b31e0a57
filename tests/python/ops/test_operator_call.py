"""`_C.OperatorCall` calls operators as torch.ops does; the functions of `ampfuse.ops` use it."""

import numpy as np
import pytest
import torch
from ampfuse import _C
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

NORM = torch.ops.ampfuse.multi_tensor_norm.default
ADAM = torch.ops.ampfuse.fused_adam.default
UPDATE = torch.ops.ampfuse.update_scale.default


def adam_arguments():
    param, grad, first, second = (torch.full((3,), x) for x in (1.0, 0.5, 0.25, 0.125))
    numbers = {"beta1": 0.9, "beta2": 1 / 3, "weight_decay": 0.1, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": True, "decoupled_weight_decay": False}
    lists = ([param], [grad], [first], [second], [], [torch.tensor(4.0)], ())
    return lists, {"lr": torch.tensor(0.1), **numbers, **flags, "grad_scale": torch.tensor(2.0)}


def scale_arguments():
    tensors = (torch.tensor(8.0), torch.tensor(1, dtype=torch.int32), torch.tensor([2, 0, 5]))
    policy = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
    options = {"hysteresis": 2, "hysteresis_refill": "clean_step", "min_scale": None}
    return (*tensors, [torch.tensor(0.0)]), {**policy, **options}


def flat(arguments):
    lists = (one if isinstance(one, list | tuple) else [one] for one in arguments)
    return [tensor for one in lists for tensor in one]


@pytest.mark.parametrize(("op", "make"), [(ADAM, adam_arguments), (UPDATE, scale_arguments)])
def test_operator_writes_what_it_writes_by_torch_ops(op, make):
    (ours, options), (torchs, _) = make(), make()
    assert _C.OperatorCall(op)(*ours, **options) is None
    op(*torchs, **options)
    before = flat(make()[0])
    assert any(not torch.equal(x, y) for x, y in zip(flat(ours), before, strict=True))
    for x, y in zip(flat(ours), flat(torchs), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    "option",
    [{"growth_interval": 2**70}, {"growth_interval": -(2**70)}, {"hysteresis_refill": "\udc80"}],
)
def test_numbers_and_texts_that_c_lacks_raise_what_torch_ops_raises(option):
    args, options = scale_arguments()
    with pytest.raises(Exception) as torchs:  # noqa: PT011 (compared below)
        UPDATE(*args, **{**options, **option})
    with pytest.raises(torchs.type) as ours:
        _C.OperatorCall(UPDATE)(*args, **{**options, **option})
    assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}, {"ord": 1.0, "dtype": None}])
def test_operator_returns_the_tensors_that_it_returns_by_torch_ops(options):
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor(float("nan"))]
    ours, torchs = _C.OperatorCall(NORM)(tensors, **options), NORM(tensors, **options)
    assert isinstance(ours, tuple)
    for x, y in zip(ours, torchs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((), {}),
        (([torch.ones(1)], 2.0, 3.0), {}),
        (([torch.ones(1)],), {"orb": 2.0}),
        (([torch.ones(1)], 2.0), {"ord": 2.0}),
        (([torch.ones(1), 3.0],), {}),
        ((torch.ones(1),), {"dtype": "float64"}),
        ((None,), {}),
        (([torch.ones(1)], "2"), {}),
        (([torch.ones(1)], 2**70), {}),
    ],
)
def test_arguments_that_do_not_fit_raise_what_torch_ops_raises(args, options):
    with pytest.raises(Exception) as torchs:  # noqa: PT011 (compared below)
        NORM(*args, **options)
    with pytest.raises(torchs.type) as ours:
        _C.OperatorCall(NORM)(*args, **options)
    assert str(ours.value) == str(torchs.value)


def test_numbers_of_other_types_are_converted_as_by_torch_ops():
    tensors = [torch.tensor([3.0, -4.0])]
    for order in (1, True, np.float64(1.0), torch.tensor(1.0)):
        assert _C.OperatorCall(NORM)(tensors, order)[0] == 7.0


class Overriding(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function in (NORM, torch.ops.ampfuse.multi_tensor_norm)
        return "overridden"


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return "by a mode"


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is NORM
        return tuple(torch.tensor(i) for i in range(5))


def test_subclasses_and_modes_see_the_call():
    call, tensors = _C.OperatorCall(NORM), [torch.ones(1)]
    assert call([torch.ones(1).as_subclass(Overriding)]) == "overridden"
    with FunctionMode():
        assert call(tensors) == "by a mode"
    with DispatchMode():
        results = call(tensors)
    assert [int(result) for result in results] == [0, 1, 2, 3, 4]


def test_errors_of_the_operator_keep_their_type():
    with pytest.raises(ValueError, match="ord: expected 1, 2 or inf, got 3"):
        _C.OperatorCall(NORM)([torch.ones(1)], 3.0)
