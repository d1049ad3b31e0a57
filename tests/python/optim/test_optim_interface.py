"""The interface that ampfuse.Adam and AdamW share with torch's, and the options they refuse."""

import re

import ampfuse
import pytest
import torch
from optim_models import BOTH, CLASSES, assert_same_bits, clones, feed, parameters, train
from torch.nn import Parameter

REFUSED = [
    ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ({"lr": float("nan")}, "Invalid learning rate: nan"),
    ({"lr": torch.tensor(-1.0)}, "Invalid learning rate: -1.0"),
    ({"lr": torch.tensor([1.0, 2.0])}, "Tensor lr must be 1-element"),
    ({"betas": (1.0, 0.5)}, "Invalid beta parameter at index 0: 1.0"),
    ({"betas": (0.5, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
    ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
    ({"weight_decay": -1}, "Invalid weight_decay value: -1"),
]
REFUSED_OF_OURS = [
    ({"betas": (torch.tensor(0.9), 0.5)}, "betas: expected two floats, got a Tensor"),
    (
        {"master_weights": "fp32"},
        'master_weights: expected "auto", True, False or "remainder", got',
    ),
    ({"master_weights": None}, "got None"),
    ({"state_dtype": torch.float16}, "state_dtype: expected torch.float32 or torch.bfloat16, got"),
    ({"max_grad_norm": -1.0}, "max_grad_norm: expected None or at least 0, got -1.0"),
    ({"max_grad_norm": float("nan")}, "max_grad_norm: expected None or at least 0, got nan"),
]


@BOTH
@pytest.mark.parametrize(("options", "words"), [*REFUSED, *REFUSED_OF_OURS])
def test_invalid_options_are_refused(device, cls, options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        cls(parameters(device), **options)


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_torch_refuses_invalid_options_in_the_same_words(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        torch.optim.Adam(parameters(torch.device("cpu")), **options)


@BOTH
@pytest.mark.parametrize(("options", "words"), [*REFUSED, *REFUSED_OF_OURS])
def test_group_with_invalid_options_is_refused_and_not_added(device, cls, options, words):
    params = parameters(device)
    optimizer = cls(params)
    group = {"params": [Parameter(torch.ones(3, device=device))], **options}

    with pytest.raises(ValueError, match=re.escape(words)):
        optimizer.add_param_group(group)

    assert [group["params"] for group in optimizer.param_groups] == [params]
    feed(params, step=0)
    optimizer.step()


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


@BOTH
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_sparse_gradients_are_refused_and_nothing_is_written(
    device, cls, steps_before, max_grad_norm
):
    params = [Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer = cls(params, max_grad_norm=max_grad_norm)
    train(optimizer, params, range(steps_before))
    before = clones(params)
    params[0].grad = torch.ones_like(params[0])
    params[1].grad = torch.ones_like(params[1]).to_sparse()

    with pytest.raises(
        RuntimeError, match="Adam does not support sparse gradients, please consider SparseAdam"
    ):
        optimizer.step()

    assert_same_bits(params, before)


@BOTH
def test_added_group_is_stepped_from_then_on(device, cls):
    first, second = parameters(device), parameters(device, torch.bfloat16, seed=9)
    before = clones(second)
    optimizer = cls(first, lr=0.1)
    for step in range(2):
        feed([*first, *second], step)
        optimizer.step()
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
    feed(list(model.parameters()), step=0)
    optimizer.step()


@BOTH
def test_step_hooks_run_once_before_and_once_after_a_step(device, cls):
    params = parameters(device)
    before = clones(params)
    optimizer = cls(params, lr=1.0)
    calls = []
    optimizer.register_step_pre_hook(
        lambda *_: calls.append(("pre", torch.equal(params[0], before[0])))
    )
    optimizer.register_step_post_hook(
        lambda *_: calls.append(("post", torch.equal(params[0], before[0])))
    )

    feed(params, step=0)
    optimizer.step()

    assert calls == [("pre", True), ("post", False)]


def test_closure_is_called_once_with_grad_enabled_and_its_loss_is_returned(device):
    param = Parameter(torch.ones(3, device=device))
    optimizer = ampfuse.AdamW([param])
    losses = []

    def closure():
        optimizer.zero_grad()
        losses.append((param * param).sum())
        losses[-1].backward()
        return losses[-1]

    returned = optimizer.step(closure)

    assert len(losses) == 1
    assert returned is losses[0]
    assert (param < 1).all()
    assert optimizer.step() is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_zeroes_or_drops_gradients(device, set_to_none):
    params = parameters(device, torch.bfloat16)
    optimizer = ampfuse.AdamW(params)
    feed(params, step=0)
    optimizer.step()

    optimizer.zero_grad(set_to_none=set_to_none)

    if set_to_none:
        assert [param.grad for param in params] == [None] * len(params)
    else:
        assert sum(param.grad.count_nonzero() for param in params) == 0


@BOTH
def test_repr_names_the_class_and_shows_each_groups_options(device, cls):
    optimizer = cls(parameters(device), lr=0.25, master_weights=True)
    optimizer.add_param_group({"params": parameters(device), "max_grad_norm": 3.0})

    text = repr(optimizer)

    assert text.startswith(f"{cls.__name__} (\nParameter Group 0\n")
    for line in ("lr: 0.25", "master_weights: True", "Parameter Group 1", "max_grad_norm: 3.0"):
        assert line in text


def test_defaults_match_torchs_except_for_implementation_options(device):
    for ours, of_torch in zip(CLASSES, (torch.optim.Adam, torch.optim.AdamW), strict=True):
        defaults = of_torch(parameters(device)).defaults
        kept = ours(parameters(device)).defaults

        of_implementation = {"foreach", "capturable", "differentiable", "fused"}
        assert defaults.items() - {(name, defaults[name]) for name in of_implementation} <= {
            *kept.items()
        }


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
    params = [torch.nn.Parameter(torch.ones(4, device=device).bfloat16()) for _ in range(3)]
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
    half = torch.nn.Parameter(torch.ones(4).half())
    with pytest.raises(ValueError, match="is float16, and only bfloat16 has a remainder"):
        ampfuse.AdamW([{"params": [half], "foreach": None, "master_weights": "remainder"}])


@pytest.mark.parametrize("limit", [torch.tensor(1.0), torch.ones(2), "1"], ids=["0", "1", "word"])
def test_max_grad_norm_that_is_not_a_number_is_refused_everywhere(limit):
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = ampfuse.AdamW([param], max_grad_norm=1.0)
    told = pytest.raises(TypeError, match=r"max_grad_norm: .* or a number, got (T|s)")
    with told:
        ampfuse.AdamW([param], max_grad_norm=limit)
    with told:
        ampfuse.AdamW([{"params": [param], "max_grad_norm": limit}])
    optimizer.max_grad_norm = limit
    with told:
        optimizer.step()
    optimizer.max_grad_norm = 1.0
    optimizer.param_groups[0]["max_grad_norm"] = limit
    with told:
        optimizer.step()


class Scheduled(ampfuse.AdamW):
    """An optimizer whose `max_grad_norm` is a computed property."""

    @property
    def max_grad_norm(self):
        return self.factor * 1e-12

    @max_grad_norm.setter
    def max_grad_norm(self, limit):
        self.factor = limit or 1.0


def test_derived_class_may_compute_max_grad_norm_in_a_property():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = Scheduled([param], eps=1e-4)
    param.grad = torch.ones(4)
    optimizer.step()
    assert param.tolist() == pytest.approx([1 - 1e-5] * 4, abs=1e-6)


def test_valid_checkpoint_loads_after_an_invalid_one_was_refused():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = ampfuse.AdamW([param], lr=torch.tensor(0.1))
    right = optimizer.state_dict()
    param.grad = torch.ones(4)
    with pytest.raises(KeyError, match="group 0 lacks betas and eps"):
        optimizer.load_state_dict(torch.optim.SGD([param]).state_dict())
    optimizer.load_state_dict(right)
    optimizer.step()
    assert param[0].item() < 1
