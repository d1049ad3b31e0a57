"""`ampfuse.Mastered` refuses what its step would ignore or do wrong, with a sentence."""

from collections import defaultdict

import pytest
import torch
from ampfuse import Mastered
from mastered_runs import BF16, assert_all_same, feed, made, train
from torch.nn import Parameter


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.LBFGS, "whose step needs no closure, got LBFGS"),
        (lambda groups: None, "a function that returns an optimizer, got None"),
        (lambda groups: torch.optim.RMSprop([Parameter(torch.ones(2))]), "that it got, in their"),
        (torch.optim.RMSprop([Parameter(torch.ones(2))]), "a function, for example lambda groups"),
    ],
    ids=["LBFGS", "nothing", "other parameters", "an optimizer"],
)
def test_other_optimizers_are_refused(make, message):
    with pytest.raises(TypeError, match=f"^make: expected .*{message}"):
        Mastered(make, made("cpu", BF16))


def test_arguments_in_the_other_order_are_refused():
    params = torch.nn.Linear(2, 2).parameters()
    with pytest.raises(TypeError, match=r"^make: expected a function, .*, got generator"):
        Mastered(params, torch.optim.RMSprop)


def test_invalid_limit_is_refused():
    with pytest.raises(ValueError, match="max_grad_norm: expected None or at least 0, got -1"):
        Mastered(torch.optim.RMSprop, made("cpu", BF16), max_grad_norm=-1.0)


@pytest.mark.parametrize("first", [torch.float32, BF16])
def test_model_that_was_cast_is_refused_before_anything_is_written(first):
    params = made("cpu", first)
    optimizer = Mastered(torch.optim.RMSprop, params)
    for param in params:
        param.data = param.data.to(torch.float32 if first == BF16 else BF16)
    feed(params, 0)
    with pytest.raises(TypeError, match=r"make the optimizer after|before the optimizer is made"):
        optimizer.step()
    assert_all_same(params, [param.to(params[0].dtype) for param in made("cpu")])
    assert not optimizer.inner.state


def cut_groups_in_two(groups):
    """Make an optimizer of the same parameters with a group for each."""
    params = [param for group in groups for param in group["params"]]
    return torch.optim.RMSprop([{"params": [param]} for param in params])


def test_inner_optimizer_with_other_groups_is_refused():
    with pytest.raises(TypeError, match="of the parameters that it got, in their groups and order"):
        Mastered(cut_groups_in_two, made("cpu", BF16))


def test_limit_that_was_set_below_zero_is_refused_by_the_step():
    params = made("cpu", BF16)
    optimizer = Mastered(torch.optim.RMSprop, params, max_grad_norm=1.0)
    optimizer.max_grad_norm = -1.0
    feed(params, 0)
    with pytest.raises(ValueError, match="max_grad_norm: expected None or at least 0, got -1"):
        optimizer.step()
    assert_all_same(params, made("cpu", BF16))


@pytest.mark.parametrize(("name", "value"), [("max_grad_norm", 1.0), ("master_weights", False)])
def test_options_of_the_fused_optimizers_are_refused_in_groups(name, value):
    message = f"{name}: expected no such option in a group of Mastered, got {value}: "
    params = made("cpu", BF16)
    with pytest.raises(ValueError, match=message):
        Mastered(torch.optim.RMSprop, [{"params": params, name: value}])
    optimizer = Mastered(torch.optim.RMSprop, params[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:], name: value})
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0][name] = value
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def test_option_that_the_inner_optimizer_has_itself_is_not_refused():
    class Clipping(torch.optim.RMSprop):
        def __init__(self, params, max_grad_norm=1.0):
            super().__init__(params)
            self.defaults["max_grad_norm"] = max_grad_norm
            for group in self.param_groups:
                group.setdefault("max_grad_norm", max_grad_norm)

    params = made("cpu", BF16)
    optimizer = Mastered(Clipping, [{"params": params, "max_grad_norm": 2.0}])
    feed(params, 0)
    optimizer.step()
    assert optimizer.inner.param_groups[0]["max_grad_norm"] == 2.0


def test_parameters_that_were_appended_to_a_group_are_refused():
    params = made("cpu", BF16)
    optimizer = Mastered(torch.optim.RMSprop, params[:1])
    optimizer.param_groups[0]["params"].append(params[1])
    feed(params, 0)
    message = r"groups of \[1\] parameters, .*, got \[2\]: add parameters by add_param_group"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    with pytest.raises(ValueError, match=message):
        optimizer.state_dict()


def test_float32_parameter_that_was_replaced_is_refused():
    params = made("cpu")
    optimizer = Mastered(torch.optim.RMSprop, params)
    optimizer.param_groups[0]["params"][0] = made("cpu")[0]
    with pytest.raises(TypeError, match="expected the parameters that it was made with"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_sparse_gradient_is_refused_by_name(dtype):
    param = Parameter(torch.ones(4, 3, dtype=dtype))
    param.grad = torch.ones(4, 3, dtype=dtype).to_sparse()
    message = r"dense gradients, got a sparse one of a parameter of shape \(4, 3\)"
    with pytest.raises(RuntimeError, match=message):
        Mastered(torch.optim.RMSprop, [param]).step()


def test_gradient_of_a_16_bit_parameter_that_was_frozen_is_refused():
    params = made("cpu", BF16)
    params[0].requires_grad_(False)
    optimizer = Mastered(torch.optim.RMSprop, params)
    train(optimizer, params[1:], [0])
    params[0].requires_grad_(True)
    feed(params, 1)
    with pytest.raises(TypeError, match="after the model is cast and unfrozen"):
        optimizer.step()


@pytest.mark.parametrize("state", [defaultdict(dict), {0: {}}])
def test_state_cannot_be_assigned(state):
    optimizer = Mastered(torch.optim.RMSprop, made("cpu", BF16))
    with pytest.raises(AttributeError, match=r"expected load_state_dict\(\) in place"):
        optimizer.state = state


@pytest.mark.parametrize("state", [None, [{}]])
def test_saved_state_that_is_no_dict_is_refused(state):
    optimizer = Mastered(torch.optim.RMSprop, made("cpu", BF16))
    with pytest.raises(TypeError, match="loaded state dict: state: expected a dict, got "):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
