"""Arguments, groups, methods and states of torch.optim's patched Adam, AdamW and SGD."""

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS
from torch.nn import Parameter

# Derived classes stay torch's while these are patched.
NAMES = ("Adam", "AdamW", "SGD")
TORCHS = {name: type(name, (getattr(torch.optim, name),), {}) for name in NAMES}
EACH = pytest.mark.parametrize("name", NAMES)
USAGE = PARTS["optimizers"].usage

pytestmark = pytest.mark.usefixtures("patched")


def parameter(device="cpu"):
    return Parameter(torch.tensor([1.0, 2.0, 3.0], device=device))


def step(optimizer, grad=1.0):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, grad)
    optimizer.step()


# --- constructors and groups --------------------------------------------------------------------


OF_SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.3, "nesterov": True}


@EACH
def test_positional_arguments_have_torchs_order(name):
    values = {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.3, "amsgrad": True}
    values = OF_SGD if name == "SGD" else values
    (group,) = getattr(torch.optim, name)([parameter()], *values.values()).param_groups
    assert {key: group[key] for key in values} == values


@EACH
def test_parameters_are_accepted_in_every_form_that_torch_accepts(name):
    cls = getattr(torch.optim, name)
    a, b = parameter(), parameter()
    ways = [
        iter([a, b]),
        [{"params": iter([a])}, {"params": b, "lr": 0.5}],
        iter([{"params": [a]}, {"params": [b]}]),
        iter([("a", a), ("b", b)]),
        [{"params": [("a", a)]}, {"params": [("b", b)]}],
    ]
    for params in ways:
        optimizer = cls(params)
        assert isinstance(optimizer, getattr(ampfuse, name))
        assert [p for group in optimizer.param_groups for p in group["params"]] == [a, b]


@EACH
def test_defaults_and_groups_equal_those_of_torch(name):
    ours, torchs = getattr(torch.optim, name)([parameter()]), TORCHS[name]([parameter()])
    assert torchs.defaults == ours.defaults
    groups = [dict(optimizer.param_groups[0], params=None) for optimizer in (torchs, ours)]
    assert groups[0] == groups[1]


def test_optimizer_may_be_made_from_the_options_of_another():
    first = torch.optim.Adam([parameter()], lr=0.5, fused=True)
    options = {name: value for name, value in first.param_groups[0].items() if name != "params"}
    for made in (
        torch.optim.Adam([parameter()], **first.defaults),
        torch.optim.Adam([parameter()], **options),
        torch.optim.Adam([{"params": [parameter()], **options}]),
    ):
        assert isinstance(made, ampfuse.Adam)
        assert made.param_groups[0]["lr"] == 0.5
        assert made.param_groups[0]["fused"] is True
        step(made)
    ampfuse.unpatch()
    assert torch.optim.Adam([parameter()], **first.defaults).defaults == first.defaults


def test_patched_optimizer_uses_the_programs_own_group_dictionary(device):
    group = {"params": iter([parameter(device)]), "lr": 1e-3}
    optimizer = torch.optim.AdamW([group])
    assert optimizer.param_groups[0] is group
    group["lr"] = 0.5
    optimizer.add_param_group({"params": iter([parameter()])})
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 1]


@EACH
def test_added_group_with_differentiable_is_refused(name):
    optimizer = getattr(torch.optim, name)([parameter()])
    with pytest.raises(ValueError, match="differentiable=True"):
        optimizer.add_param_group({"params": [parameter()], "differentiable": True})
    assert len(optimizer.param_groups) == 1


@EACH
def test_constructor_errors_equal_those_of_torch(name):
    param = parameter()
    of_ampfuse = ("master_weights", "max_grad_norm", "process_group")
    refused = [
        {"lr": -1.0},
        {"weight_decay": -1.0},
        {"fused": True, "foreach": True},
        *({option: None} for option in of_ampfuse),
    ]
    if name == "SGD":
        refused += [{"nesterov": True}, {"momentum": -1.0}, {"betas": (0.5, 0.9)}]
    else:
        refused += [{"betas": (2.0, 0.9)}, {"betas": (0, 0.9)}, {"momentum": None}]
        refused.append({"lr": torch.tensor(0.1), "foreach": True})
    params = [[], torch.ones(2), 5, [{"params": {param}}]]
    cases = [((), {}), *(((given,), {}) for given in params)]
    for arguments, options in [*cases, *((([param],), options) for options in refused)]:
        errors = []
        for cls in (TORCHS[name], getattr(torch.optim, name)):
            with pytest.raises(Exception, match=r".") as error:
                cls(*arguments, **options)
            errors.append((error.type, str(error.value)))
        assert errors[0] == errors[1]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@EACH
def test_unsupported_optimizer_is_left_to_torch_and_the_reason_logged_once(name, caplog):
    cls = getattr(torch.optim, name)
    tensor = torch.tensor([0.9])
    param = parameter()
    for _ in range(2):
        cases = {
            "differentiable=True": cls([parameter()], differentiable=True),
            "parameters on meta": cls([Parameter(torch.ones(2, device="meta"))]),
            "a parameter that is in a group twice": cls([param, param]),
        }
        if name == "SGD":
            cases["weight_decay: expected a number"] = cls([parameter()], weight_decay=tensor)
        else:
            betas = {"betas": (tensor, tensor), "foreach": False}
            cases["betas: expected two floats"] = cls([parameter()], **betas)
    for optimizer in cases.values():
        assert type(optimizer) is cls
    for reason in cases:
        messages = [r.getMessage() for r in caplog.records if reason in r.getMessage()]
        assert len(messages) == 1
        assert messages[0].startswith(f"torch.optim.{name} is left to torch: {reason}")
    assert list(USAGE.fallbacks.values()) == [2] * len(cases)


def test_class_derived_by_the_program_is_reported_as_left_to_torch(caplog):
    class Mine(torch.optim.AdamW): ...

    class MyScaler(torch.amp.GradScaler): ...

    assert not isinstance(Mine([parameter()]), ampfuse.AdamW)
    assert USAGE.fallbacks == {"it derives from torch's class": 1}
    assert not isinstance(MyScaler("cpu"), ampfuse.GradScaler)
    messages = [record.getMessage() for record in caplog.records]
    assert [text.partition(" is left")[0].rpartition(".")[2] for text in messages] == [
        "Mine",
        "MyScaler",
    ]


def test_class_whose_constructor_the_program_has_replaced_is_reported(monkeypatch, caplog):
    ampfuse.unpatch()
    init = torch.optim.AdamW.__init__
    monkeypatch.setattr(
        torch.optim.AdamW, "__init__", lambda self, *args, **options: init(self, *args, **options)
    )
    with ampfuse.patched("optimizers"):
        assert not isinstance(torch.optim.AdamW([parameter()]), ampfuse.AdamW)
    assert "the program has put another __init__ into the class" in caplog.text


def test_text_of_a_patched_optimizer_is_torchs():
    ours, torchs = torch.optim.AdamW([parameter()]), TORCHS["AdamW"]([parameter()])
    assert repr(ours) == repr(torchs)


def test_patched_scaler_refuses_ampfuses_own_options():
    with pytest.raises(TypeError, match="min_scale"):
        torch.amp.GradScaler("cpu", min_scale=1.0)


@EACH
def test_patched_optimizer_inside_zero_refuses_limits(monkeypatch, name):
    monkeypatch.setattr("ampfuse.optim.fused.is_called_from", lambda _: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    optimizer = getattr(torch.optim, name)([{"params": [parameter()], "max_grad_norm": 1.0}])
    with pytest.raises(ValueError, match="in a ZeroRedundancyOptimizer each rank"):
        step(optimizer)


# --- states -------------------------------------------------------------------------------------


def first_moment(optimizer):
    (state,) = optimizer.state.values()
    return state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"][0].item()


@EACH
def test_state_dicts_are_exchanged_with_torchs_optimizers(name):
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)([parameter()], **options)
    reference = TORCHS[name]([parameter()], **options)
    for grad in (1.0, 2.0, 3.0):
        step(optimizer, 10 * grad)
        step(reference, grad)
    expected = first_moment(reference)
    optimizer.load_state_dict(reference.state_dict())
    fresh = TORCHS[name]([parameter()], **options)
    fresh.load_state_dict(optimizer.state_dict())
    assert first_moment(optimizer) == first_moment(fresh) == expected
