"""Arguments, groups, methods and states of torch.optim.Adam and AdamW while they are patched."""

from unittest import mock

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS
from torch.nn import Parameter

TORCHS = {name: getattr(torch.optim, name) for name in ("Adam", "AdamW")}
BOTH = pytest.mark.parametrize("name", TORCHS)
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


@BOTH
def test_positional_arguments_have_torchs_order(name):
    values = {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.3, "amsgrad": True}
    (group,) = getattr(torch.optim, name)([parameter()], *values.values()).param_groups
    assert {key: group[key] for key in values} == values


@BOTH
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


@BOTH
def test_defaults_groups_and_repr_equal_those_of_torch(name):
    ours = getattr(torch.optim, name)([parameter()], capturable=True)
    torchs = TORCHS[name]([parameter()], capturable=True)
    assert torchs.defaults == ours.defaults
    groups = [dict(optimizer.param_groups[0], params=None) for optimizer in (torchs, ours)]
    assert groups[0] == groups[1]
    assert repr(ours) == repr(torchs)
    again = type(ours)([parameter()], 0.5, fused=False, foreach=True)
    assert again.param_groups[0]["foreach"] is True
    assert type(ours).__name__ == name


def test_optimizer_may_be_made_from_the_options_of_another():
    first = torch.optim.Adam([parameter()], lr=0.5, fused=True)
    options = {name: value for name, value in first.param_groups[0].items() if name != "params"}
    for made in (
        type(first)([parameter()], **first.defaults),
        torch.optim.Adam([parameter()], **first.defaults),
        torch.optim.Adam([parameter()], **options),
        torch.optim.Adam([{"params": [parameter()], **options}]),
    ):
        assert isinstance(made, ampfuse.Adam)
        assert made.param_groups[0]["lr"] == 0.5
        assert made.param_groups[0]["fused"] is True
        step(made)
    others = {"differentiable": True, "fused": None}
    left = torch.optim.Adam([parameter()], **first.defaults | others)
    assert not isinstance(left, ampfuse.Adam)

    class Mine(torch.optim.Adam): ...

    assert Mine([parameter()], **first.defaults).defaults == first.defaults
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


def test_refused_groups_are_left_as_torch_leaves_them():
    left = []
    for cls in (torch.optim.AdamW, TORCHS["AdamW"]):
        param = parameter()
        groups = [{"params": [param], "betas": (0.5, 0.5)}, {"params": [param]}]
        with pytest.raises(ValueError, match="more than one parameter group"):
            cls(groups)
        left.append([list(group) for group in groups])  # the names, in their order
    assert left[0] == left[1]


@BOTH
def test_added_group_with_differentiable_is_refused(name):
    optimizer = getattr(torch.optim, name)([parameter()])
    with pytest.raises(ValueError, match="differentiable=True"):
        optimizer.add_param_group({"params": [parameter()], "differentiable": True})
    assert len(optimizer.param_groups) == 1


@BOTH
def test_constructor_errors_equal_those_of_torch(name):
    param = parameter()
    of_ampfuse = ("master_weights", "max_grad_norm", "process_group")
    refused = [
        {"lr": -1.0},
        {"betas": (2.0, 0.9)},
        {"betas": (0, 0.9)},
        {"fused": True, "foreach": True},
        {"lr": torch.tensor(0.1), "foreach": True},
        *({option: None} for option in ("momentum", *of_ampfuse)),
    ]
    params = [[], torch.ones(2), 5, [{"params": {param}}]]
    cases = [((), {}), *(((given,), {}) for given in params)]
    for arguments, options in [*cases, *((([param],), options) for options in refused)]:
        errors = []
        for cls in (TORCHS[name], getattr(torch.optim, name)):
            with pytest.raises(Exception, match=r".") as error:
                cls(*arguments, **options)
            errors.append((error.type, str(error.value)))
        assert errors[0] == errors[1]
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_grad_norm'"):
        type(getattr(torch.optim, name)([param]))([param], max_grad_norm=1.0)


@BOTH
def test_unsupported_optimizer_is_left_to_torch_and_the_reason_logged_once(name, caplog):
    cls, torchs = getattr(torch.optim, name), TORCHS[name]
    beta = torch.tensor(0.9)
    for _ in range(2):
        cases = {
            "differentiable=True": cls([parameter()], differentiable=True),
            "parameters on meta": cls([Parameter(torch.ones(2, device="meta"))]),
            "betas that are not floats": cls([parameter()], betas=(beta, beta), foreach=False),
        }
    for optimizer in cases.values():
        assert type(optimizer) is torchs
    for reason in cases:
        told = [r.getMessage() for r in caplog.records if reason in r.getMessage()]
        assert told == [f"torch.optim.{name} is left to torch: {reason}"]
    assert USAGE.fallbacks == dict.fromkeys(cases, 2)


# --- methods ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_methods_that_a_program_assigns_to_torchs_classes_are_called(name):
    cls = getattr(torch.optim, name)
    before = cls.step
    with mock.patch.object(cls, "step", return_value="mine"):
        assert getattr(torch.optim, name)([parameter()]).step() == "mine"
        assert cls.step is not before
    assert cls.step is before
    optimizer = getattr(torch.optim, name)([parameter()])
    assert isinstance(optimizer, ampfuse.Adam) == (name != "SGD")
    step(optimizer)
    assert optimizer.param_groups[0]["params"][0][0].item() < 1


@pytest.mark.parametrize("name", ["__init__", "step", "__setstate__", "zero_grad"])
def test_torchs_class_works_after_a_program_replaced_and_restored_methods(monkeypatch, name):
    before = {cls: dict(vars(cls)) for cls in torch.optim.AdamW.__mro__}
    cls = torch.optim.AdamW
    function = getattr(cls, name)
    cls([parameter()])
    for times in (1, 2):
        with monkeypatch.context() as patch:
            for _ in range(times):
                patch.setattr(cls, name, lambda *_, **__: None)
    with mock.patch.object(cls, name), mock.patch.object(cls, name):
        assert getattr(cls, name) is not function
    ampfuse.unpatch()
    optimizer = torch.optim.AdamW([parameter()])
    assert optimizer.defaults["weight_decay"] == 0.01
    assert optimizer.defaults["decoupled_weight_decay"] is True
    for cls, had in before.items():
        assert vars(cls).keys() - {"step"} == had.keys() - {"step"}
    step(optimizer)


def test_init_assigned_by_a_program_is_called_with_the_given_arguments():
    seen = []
    original = torch.optim.AdamW.__init__

    def init(self, params, lr=1e-3, **options):
        params = list(params)
        seen.append(len(params[0]))
        original(self, params, lr * 10, **options)

    with mock.patch.object(torch.optim.AdamW, "__init__", init):
        optimizer = torch.optim.AdamW([parameter()], 0.1)
    assert seen == [3]
    assert optimizer.defaults["lr"] == 1.0
    with mock.patch.object(torch.amp.GradScaler, "__init__", return_value=None):
        torch.amp.GradScaler("anything")


def test_making_an_optimizer_makes_exactly_one(monkeypatch):
    made = []
    original = torch.optim.Optimizer.__init__

    def init(self, params, defaults):
        original(self, params, defaults)
        made.append([len(param) for param in self.param_groups[0]["params"]])

    monkeypatch.setattr(torch.optim.Optimizer, "__init__", init)
    torch.optim.Adam([parameter()])
    assert made == [[3]]


def test_undone_changes_to_torchs_classes_leave_none_of_their_effects(monkeypatch):
    scalers_own = {name for name in dir(torch.amp.GradScaler) if not name.startswith("__")}
    with monkeypatch.context() as patch:
        patch.setattr(torch.amp.GradScaler, "_maybe_opt_step", lambda *_: "mine")
        assert torch.amp.GradScaler("cpu")._maybe_opt_step(None, None) == "mine"
    names = {name for name in dir(torch.amp.GradScaler) if not name.startswith("__")}
    assert names == scalers_own
    torch.optim.Adam.mark = 3
    assert torch.optim.Adam([parameter()]).mark == 3
    del torch.optim.Adam.mark
    assert not hasattr(torch.optim.Adam, "mark")
    assert isinstance(torch.optim.Adam([parameter()]), ampfuse.Adam)
    with mock.patch.object(torch.amp.GradScaler, "update", return_value="mine"):
        assert torch.amp.GradScaler("cpu").update() == "mine"
    assert isinstance(torch.amp.GradScaler("cpu"), ampfuse.GradScaler)


def test_class_derived_by_the_program_is_reported_as_left_to_torch():
    class Mine(torch.optim.AdamW): ...

    assert not isinstance(Mine([parameter()]), ampfuse.AdamW)
    assert USAGE.fallbacks == {"it derives from torch's class": 1}


# --- states -------------------------------------------------------------------------------------


def first_moment(optimizer):
    (state,) = optimizer.state.values()
    return state["exp_avg"][0].item()


@BOTH
def test_state_dicts_are_exchanged_with_torchs_optimizers(name):
    optimizer, reference = getattr(torch.optim, name)([parameter()]), TORCHS[name]([parameter()])
    for grad in (1.0, 2.0, 3.0):
        step(optimizer, 10 * grad)
        step(reference, grad)
    expected = first_moment(reference)
    optimizer.load_state_dict(reference.state_dict())
    fresh = TORCHS[name]([parameter()])
    fresh.load_state_dict(optimizer.state_dict())
    assert first_moment(optimizer) == first_moment(fresh) == expected
