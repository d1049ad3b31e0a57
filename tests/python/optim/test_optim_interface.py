"""The interface that ampfuse.Adam and AdamW share with torch's, and the options they refuse."""

import re
import warnings
from collections import UserList

import ampfuse
import numpy
import pytest
import torch
from optim_models import (
    CLASSES,
    assert_same_bits,
    clones,
    default_dtype,
    parameters,
    train,
    trained,
)
from torch.nn import Parameter

# The options that torch has, too, are refused in its words (see test_optim_torch_suite.py).
REFUSED = [
    ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ({"lr": float("nan")}, "Invalid learning rate: nan"),
    ({"lr": torch.tensor(-1.0)}, "Invalid learning rate: -1.0"),
    ({"lr": torch.tensor([1.0, 2.0])}, "Tensor lr must be 1-element"),
    ({"betas": (1.0, 0.5)}, "Invalid beta parameter at index 0: 1.0"),
    ({"betas": (0.5, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
    ({"betas": (torch.tensor(0.9), 0.5)}, "betas: expected two floats, got a Tensor"),
    ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
    ({"weight_decay": -1}, "Invalid weight_decay value: -1"),
    *(
        (
            {"master_weights": given},
            f'expected "auto", True, False, "remainder" or "stochastic", got {given!r}',
        )
        for given in ("fp32", None, 0, 1)
    ),
    (
        {"state_dtype": torch.float16},
        'state_dtype: expected torch.float32, torch.bfloat16 or "8bit", got',
    ),
    ({"max_grad_norm": -1.0}, "max_grad_norm: expected None or at least 0, got -1.0"),
    ({"max_grad_norm": float("nan")}, "max_grad_norm: expected None or at least 0, got nan"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_invalid_options_are_refused_for_an_optimizer_and_for_a_group(device, options, words):
    params = parameters(device)
    for cls in CLASSES:
        with pytest.raises(ValueError, match=re.escape(words)):
            cls(params, **options)
    optimizer = ampfuse.AdamW(params)
    group = {"params": [Parameter(torch.ones(3, device=device))], **options}
    with pytest.raises(ValueError, match=re.escape(words)):
        optimizer.add_param_group(group)
    assert [group["params"] for group in optimizer.param_groups] == [params]
    train(optimizer, params, [0])


def test_bfloat16_moments_that_cannot_shrink_are_warned_of_at_construction():
    words = r"state_dtype=torch.bfloat16 with betas=\(0.9, 0.999\): .* betas=\(0.9, 0.95\)"
    params = parameters(torch.device("cpu"))
    with pytest.warns(UserWarning, match=words) as told:
        ampfuse.AdamW(params, state_dtype=torch.bfloat16)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ampfuse.AdamW(params)
        optimizer = ampfuse.AdamW(params, betas=(0.9, 0.995), state_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=words):
        optimizer.add_param_group({"params": torch.zeros(1), "betas": (0.9, 0.999)})


def test_adamw_group_with_decoupled_weight_decay_off_is_refused():
    with pytest.raises(ValueError, match="decoupled_weight_decay: expected True"):
        ampfuse.AdamW([{"params": [torch.zeros(2)], "decoupled_weight_decay": False}])


@pytest.mark.parametrize(
    ("betas", "flag"),
    [
        ([0.9, 0.95], True),
        (UserList([0.9, 0.95]), 1),
        (numpy.array([0.9, 0.95]), numpy.bool_(True)),
    ],
)
def test_list_like_betas_and_bool_like_flags_are_accepted_and_saved(betas, flag, tmp_path):
    params, others = (parameters(torch.device("cpu"), torch.bfloat16) for _ in range(2))
    optimizer = trained(ampfuse.AdamW, params, range(3), betas=betas, amsgrad=flag)
    plain = trained(ampfuse.AdamW, others, range(3), betas=(0.9, 0.95), amsgrad=True)
    assert_same_bits(params, others)
    assert optimizer.param_groups[0]["amsgrad"] is True
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    plain.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))


def test_refusal_of_fp16_remainders_names_the_parameter_and_group(device):
    good = parameters(device, torch.bfloat16)
    bad = [
        Parameter(torch.ones(3, dtype=dtype, device=device))
        for dtype in (torch.bfloat16, torch.float16)
    ]
    words = "master_weights='remainder': parameter 1 of group {} is float16"

    with pytest.raises(ValueError, match=words.format(0)):
        ampfuse.AdamW(bad, master_weights="remainder")
    optimizer = ampfuse.AdamW(good, master_weights="remainder")
    with pytest.raises(ValueError, match=words.format(1)):
        optimizer.add_param_group({"params": bad})

    assert len(optimizer.param_groups) == 1


def test_options_after_amsgrad_are_keyword_only(device):
    with pytest.raises(TypeError, match="positional arguments"):
        ampfuse.AdamW(parameters(device), 1e-3, (0.9, 0.999), 1e-8, 0.0, False, False)


def test_added_group_is_stepped_from_then_on(device):
    first, second = parameters(device), parameters(device, torch.bfloat16, seed=9)
    before = clones(second)
    optimizer = ampfuse.AdamW(first, lr=0.1)
    train(optimizer, [*first, *second], range(2))
    assert_same_bits(second, before)
    optimizer.add_param_group({"params": second, "lr": 0.5, "max_grad_norm": 3.0})
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert optimizer.state[first[0]]["step"] == 3
    assert optimizer.state[second[0]]["step"] == 1
    assert not torch.equal(second[0], before[0])


def test_named_parameters_keep_their_names(device):
    model = torch.nn.Linear(3, 2, device=device)
    optimizer = ampfuse.AdamW(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    train(optimizer, list(model.parameters()), [0])


def test_step_hooks_run_once_before_and_once_after_a_step(device):
    params = parameters(device)
    before = clones(params)
    optimizer = ampfuse.AdamW(params, lr=1.0)
    calls = []

    def note(name):
        return lambda *_: calls.append((name, torch.equal(params[0], before[0])))

    optimizer.register_step_pre_hook(note("pre"))
    optimizer.register_step_post_hook(note("post"))

    train(optimizer, params, [0])

    assert calls == [("pre", True), ("post", False)]


def test_closure_is_called_once_with_grad_enabled_and_its_loss_is_returned(device):
    param = Parameter(torch.ones(3, device=device))
    optimizer = ampfuse.AdamW([param])
    losses = []

    def closure():
        losses.append((param * param).sum())
        losses[-1].backward()
        return losses[-1]

    returned = optimizer.step(closure)
    assert len(losses) == 1
    assert returned is losses[0]
    assert (param < 1).all()
    assert optimizer.step() is None


@pytest.mark.parametrize("make", [ampfuse.AdamW, ampfuse.SGD])
def test_closure_of_a_step_with_a_scaler_is_passed_by_position(device, make):
    param = Parameter(torch.ones(3, device=device))
    optimizer, scaler = make([param], lr=0.5), ampfuse.GradScaler(device.type)
    scaler.scale(param.sum()).backward()
    assert scaler.step(optimizer, lambda: 7.0) == 7.0
    assert (param < 1).all()


def test_learning_rate_that_became_nan_is_refused_before_a_step(device):
    param = Parameter(torch.ones(3, device=device))
    param.grad = torch.ones_like(param)
    optimizer = ampfuse.SGD([param], lr=0.5)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        optimizer.step()
    assert param.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_zeroes_or_drops_gradients(device, set_to_none):
    params = parameters(device, torch.bfloat16)
    optimizer = trained(ampfuse.AdamW, params, [0])
    optimizer.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert [param.grad for param in params] == [None] * len(params)
    else:
        assert sum(param.grad.count_nonzero() for param in params) == 0


def test_repr_names_the_class_and_shows_each_groups_options(device):
    for cls in CLASSES:
        optimizer = cls(parameters(device), lr=0.25, master_weights=True)
        optimizer.add_param_group({"params": parameters(device), "max_grad_norm": 3.0})
        text = repr(optimizer)
        assert text.startswith(f"{cls.__name__} (\nParameter Group 0\n")
        for line in ("lr: 0.25", "master_weights: True", "Parameter Group 1", "max_grad_norm: 3.0"):
            assert line in text


def test_defaults_match_torchs_except_for_implementation_options(device):
    for ours, of_torch in zip(CLASSES, (torch.optim.Adam, torch.optim.AdamW), strict=True):
        expected = of_torch(parameters(device)).defaults
        for name in ("foreach", "capturable", "differentiable", "fused"):
            del expected[name]
        assert ours(parameters(device)).defaults.items() >= expected.items()


def test_step_leaves_parameters_and_state_outside_the_autograd_graph(device):
    param = Parameter(torch.ones(3, dtype=torch.bfloat16, device=device))
    optimizer = ampfuse.AdamW([param], max_grad_norm=1.0)
    param.grad = torch.ones_like(param)
    with torch.enable_grad():
        optimizer.step()
    assert param.is_leaf
    assert param.requires_grad
    assert not any(value.requires_grad for value in optimizer.state[param].values())
    assert not optimizer.grad_norm.requires_grad


def test_groups_with_options_of_torch_keep_the_options_of_ampfuse(device):
    """Groups may choose one of torch's implementations, or come from an optimizer of torch."""
    params = [Parameter(torch.ones(4, device=device).bfloat16()) for _ in range(3)]
    of_torch = torch.optim.AdamW([params[2]], lr=1e-4)
    optimizer = ampfuse.AdamW(
        [
            {"params": [params[0]], "foreach": False},
            {"params": [params[1]], "foreach": None, "max_grad_norm": 1, "write_back_grads": True},
            *of_torch.param_groups,
        ],
        lr=1e-4,
    )
    for number in range(100):
        for param in params:
            param.grad = torch.full_like(param, 100.0)
        optimizer.step()
        optimizer.param_groups[0]["foreach"] = number % 2 == 0
    for param in params:
        assert param[0].item() == pytest.approx(0.99, abs=2**-8)
        assert optimizer.state[param]["master_param"].dtype == torch.float32
    assert params[1].grad.tolist() == pytest.approx([0.5] * 4)
    half = Parameter(torch.ones(4).half())
    with pytest.raises(ValueError, match="is float16, and only bfloat16 has a remainder"):
        ampfuse.AdamW([{"params": [half], "foreach": None, "master_weights": "remainder"}])


@pytest.mark.parametrize("limit", [torch.tensor(1.0), torch.ones(2), "1"], ids=["0", "1", "word"])
def test_max_grad_norm_that_is_not_a_number_is_refused_everywhere(limit):
    param = Parameter(torch.ones(4))
    optimizer = ampfuse.AdamW([param], max_grad_norm=1.0)
    refused = pytest.raises(TypeError, match=r"max_grad_norm: .* or a number, got (T|s)")
    with refused:
        ampfuse.AdamW([param], max_grad_norm=limit)
    with refused:
        ampfuse.AdamW([{"params": [param], "max_grad_norm": limit}])
    optimizer.param_groups[0]["max_grad_norm"] = limit
    with refused:
        optimizer.step()
    del optimizer.param_groups[0]["max_grad_norm"]
    optimizer.max_grad_norm = limit
    with refused:
        optimizer.step()


@pytest.mark.parametrize(("name", "value"), [("grad_scale", 2.0), ("found_inf", [1.0])])
def test_grad_scale_or_found_inf_that_is_not_a_tensor_is_refused_by_name(name, value):
    params = [Parameter(torch.ones(3))]
    optimizer = ampfuse.AdamW(params)
    setattr(optimizer, name, value)
    with pytest.raises(TypeError, match=f"{name}: expected None or a tensor, got"):
        train(optimizer, params, [0])


class Scheduled(ampfuse.AdamW):
    """An optimizer whose `max_grad_norm` is a computed property."""

    @property
    def max_grad_norm(self):
        return self.factor * 1e-12

    @max_grad_norm.setter
    def max_grad_norm(self, limit):
        self.factor = limit or 1.0


def test_derived_class_may_compute_max_grad_norm_in_a_property():
    param = Parameter(torch.ones(4))
    optimizer = Scheduled([param], eps=1e-4)
    param.grad = torch.ones(4)
    optimizer.step()
    assert param.tolist() == pytest.approx([1 - 1e-5] * 4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_step_does_not_depend_on_torchs_default_dtype_and_device(device, dtype, clip):
    def stepped():
        params = [Parameter(torch.ones(n, dtype=torch.float32, device=device)) for n in (3, 2)]
        optimizer = ampfuse.AdamW([{"params": [param]} for param in params], max_grad_norm=clip)
        for param in params:
            param.grad = torch.full_like(param, 2.0)
        for _ in range(2):
            with torch.device("meta"):
                optimizer.step()
        return params

    expected = stepped()
    with default_dtype(dtype):
        assert_same_bits(stepped(), expected)


def test_option_that_replaces_another_of_the_same_value_is_noticed(device):
    param = Parameter(torch.ones(3, device=device, dtype=torch.bfloat16))
    optimizer = ampfuse.AdamW([{"params": [param], "write_back_grads": True}], master_weights=False)
    for name in ("write_back_grads", "master_weights"):
        (group,) = optimizer.param_groups
        group.pop("write_back_grads", None)
        group[name] = True
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert "master_param" in optimizer.state[param]


def test_betas_that_are_changed_in_a_list_are_checked():
    param = Parameter(torch.ones(3))
    optimizer = ampfuse.AdamW([param])
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[0]["betas"][0] = 2.0
    with pytest.raises(ValueError, match=r"Invalid beta parameter at index 0: 2\.0"):
        optimizer.step()
