"""Uses of torch's optimizers besides steps: copied options, changed groups and methods, loads."""

import copy
from unittest import mock

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS

TORCHS = {name: getattr(torch.optim, name) for name in ("Adam", "AdamW")}
BOTH = pytest.mark.parametrize("name", ["Adam", "AdamW"])


def parameter(device="cpu"):
    return torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], device=device))


def step(optimizer, grad=1.0):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, grad)
    optimizer.step()


@pytest.fixture(params=[False, True], ids=["torch", "patched"], autouse=True)
def is_patched(request):
    """Run each test with torch's classes and with the patched ones."""
    PARTS["optimizers"].usage.forget()
    if not request.param:
        yield False
        return
    with ampfuse.patched():
        yield True


def assert_is(optimizer, is_patched, name):
    ours = getattr(ampfuse, name)
    assert isinstance(optimizer, ours) == is_patched


def test_optimizer_may_be_made_from_the_options_of_another(is_patched):
    first = torch.optim.Adam([parameter()], lr=0.5, fused=True)
    options = {name: value for name, value in first.param_groups[0].items() if name != "params"}
    for made in (
        type(first)([parameter()], **first.defaults),
        torch.optim.Adam([parameter()], **first.defaults),
        torch.optim.Adam([parameter()], **options),
        torch.optim.Adam([{"params": [parameter()], **options}]),
    ):
        assert_is(made, is_patched, "Adam")
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


@BOTH
def test_options_of_ampfuse_are_unknown_as_in_torch(name):
    for option in ("master_weights", "max_grad_norm", "process_group"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            getattr(torch.optim, name)([parameter()], **{option: None})
    optimizer = getattr(torch.optim, name)([parameter()])
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_grad_norm'"):
        type(optimizer)([parameter()], max_grad_norm=1.0)


@BOTH
def test_moments_have_the_dtype_of_the_groups_current_parameters(device, name):
    """Replace a group's parameters, for example by wider ones, as torch allows."""
    narrow = torch.nn.Parameter(torch.ones(3, device=device, dtype=torch.bfloat16))
    optimizer = getattr(torch.optim, name)([narrow])
    wide = parameter(device)
    optimizer.param_groups[0]["params"] = [narrow, wide]
    step(optimizer)
    dtypes = [optimizer.state[param]["exp_avg"].dtype for param in (narrow, wide)]
    assert dtypes == [torch.bfloat16, torch.float32]
    again = getattr(torch.optim, name)([{**optimizer.param_groups[0], "params": [wide]}])
    step(again)
    assert again.state[wide]["exp_avg"].dtype == torch.float32


@BOTH
def test_group_appended_to_param_groups_is_stepped(device, name):
    optimizer = getattr(torch.optim, name)([parameter(device)], lr=0.5)
    late = parameter(device)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [late]})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(optimizer)
    assert late.tolist() == optimizer.param_groups[0]["params"][0].tolist() != [1.0, 2.0, 3.0]


@BOTH
@pytest.mark.parametrize("in_tensor", [False, True])
def test_learning_rate_may_become_negative(device, name, in_tensor):
    lr = torch.tensor(1.0, device=device) if in_tensor else 1.0
    param = parameter(device)
    optimizer = getattr(torch.optim, name)([param], lr=lr, capturable=in_tensor and param.is_cuda)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 - number / 2)
    seen = []
    for _ in range(5):
        step(optimizer)
        schedule.step()
        seen.append(param[0].item())
    assert float(optimizer.param_groups[0]["lr"]) == -1.5
    assert seen[4] > seen[3]  # the negative rate steps uphill


@BOTH
def test_weight_decay_may_become_negative(device, name):
    optimizer = getattr(torch.optim, name)([parameter(device)], weight_decay=0.1)
    (group,) = optimizer.param_groups
    (param,) = group["params"]
    twin = parameter(device)
    written_out = TORCHS[name]([twin], weight_decay=0.1)
    for _ in range(4):
        group["weight_decay"] -= 0.05
        written_out.param_groups[0]["weight_decay"] -= 0.05
        step(optimizer)
        step(written_out)
    assert group["weight_decay"] < 0
    assert param.tolist() == pytest.approx(twin.tolist(), rel=1e-6)


def state_of(optimizer):
    (state,) = optimizer.state.values()
    return state["exp_avg"][0].item()


@BOTH
def test_state_dicts_keep_their_values_while_others_are_loaded(device, name):
    first, second = (getattr(torch.optim, name)([parameter(device)]) for _ in range(2))
    step(first, 1.0)
    step(second, 2.0)
    of_first, of_second = first.state_dict(), second.state_dict()
    first.load_state_dict(of_second)
    second.load_state_dict(of_first)
    assert [state_of(first), state_of(second)] == pytest.approx([0.2, 0.1])

    rates = [torch.tensor(rate, device=device) for rate in (0.5, 1.0)]
    one, two = (getattr(torch.optim, name)([parameter(device)], lr=rate) for rate in rates)
    before = one.state_dict()
    one.load_state_dict(two.state_dict())
    one.load_state_dict(before)
    assert float(one.param_groups[0]["lr"]) == 0.5

    old = first.state_dict()
    other = copy.deepcopy(old)
    other["state"][0]["exp_avg"].fill_(7.0)
    first.load_state_dict(other)
    first.load_state_dict(old)
    assert state_of(first) == pytest.approx(0.2)


@BOTH
@pytest.mark.parametrize("dtype", [None, torch.int64, torch.float64], ids=str)
def test_steps_are_counted_from_a_loaded_counter_of_any_type(name, dtype):
    number = 3 if dtype is None else torch.tensor(3, dtype=dtype)
    param = parameter()
    optimizer = getattr(torch.optim, name)([param], betas=(0.5, 0.5))
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = number
    optimizer.load_state_dict(saved)
    step(optimizer)
    assert float(optimizer.state[param]["step"]) == 4
    if dtype is not None:
        optimizer.state[param] = {**optimizer.state[param], "step": torch.tensor(7, dtype=dtype)}
        step(optimizer)
        assert float(optimizer.state[param]["step"]) == 8


@BOTH
def test_options_that_torch_refuses_are_refused_in_torchs_words(name):
    for options, words in (
        ({"fused": True, "foreach": True}, "cannot be `True` together"),
        ({"lr": torch.tensor(0.1), "foreach": True}, "lr as a Tensor is not supported"),
        ({"betas": (0, 0.9)}, "betas must be either both floats or both Tensors"),
        ({"betas": (2.0, 0.9)}, "Invalid beta parameter at index 0"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"momentum": 0.9}, "unexpected keyword argument 'momentum'"),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError), match=words):
            getattr(torch.optim, name)([parameter()], **options)


@BOTH
def test_added_group_with_differentiable_is_refused(name, is_patched):
    if not is_patched:
        pytest.skip("torch's takes it")
    optimizer = getattr(torch.optim, name)([parameter()])
    with pytest.raises(ValueError, match="differentiable=True"):
        optimizer.add_param_group({"params": [parameter()], "differentiable": True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_methods_that_a_program_assigns_to_torchs_classes_are_called(name):
    cls = getattr(torch.optim, name)
    before = cls.step
    with mock.patch.object(cls, "step", return_value="mine"):
        assert getattr(torch.optim, name)([parameter()]).step() == "mine"
        assert cls.step is not before
    assert cls.step is before
    optimizer = getattr(torch.optim, name)([parameter()])
    step(optimizer)
    assert optimizer.param_groups[0]["params"][0][0].item() < 1


@pytest.mark.parametrize("name", ["__init__", "step", "__setstate__", "zero_grad"])
@pytest.mark.parametrize("times", [1, 2])
def test_torchs_class_works_after_a_program_replaced_and_restored_methods(monkeypatch, name, times):
    before = {cls: dict(vars(cls)) for cls in torch.optim.AdamW.__mro__}
    cls = torch.optim.AdamW
    function = getattr(cls, name)
    cls([parameter()])
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


def test_private_scaler_methods_assigned_by_a_program_are_restored(monkeypatch, is_patched):
    names = {name for name in dir(torch.amp.GradScaler) if not name.startswith("__")}
    with monkeypatch.context() as patch:
        patch.setattr(torch.amp.GradScaler, "_maybe_opt_step", lambda *_: "mine")
        scaler = torch.amp.GradScaler("cpu")
        assert scaler._maybe_opt_step(None, None) == "mine"
    assert {name for name in dir(torch.amp.GradScaler) if not name.startswith("__")} == names
    assert isinstance(torch.amp.GradScaler("cpu"), ampfuse.GradScaler) == is_patched


def test_undone_changes_to_torchs_classes_leave_none_of_their_effects(monkeypatch, is_patched):
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", lambda _: "mine")
        assert torch.optim.AdamW([parameter()]).step() == "mine"
    assert_is(torch.optim.AdamW([parameter()]), is_patched, "AdamW")
    torch.optim.Adam.mark = 3
    assert torch.optim.Adam([parameter()]).mark == 3
    del torch.optim.Adam.mark
    assert not hasattr(torch.optim.Adam, "mark")
    assert_is(torch.optim.Adam([parameter()]), is_patched, "Adam")
    with mock.patch.object(torch.amp.GradScaler, "update", return_value="mine"):
        assert torch.amp.GradScaler("cpu").update() == "mine"
    assert isinstance(torch.amp.GradScaler("cpu"), ampfuse.GradScaler) == is_patched


def test_class_derived_by_the_program_is_reported_as_left_to_torch(is_patched):
    usage = PARTS["optimizers"].usage

    class Mine(torch.optim.AdamW): ...

    assert not isinstance(Mine([parameter()]), ampfuse.AdamW)
    told = {"it derives from torch's class": 1} if is_patched else {}
    assert dict(usage.fallbacks) == told


@BOTH
def test_loading_and_stepping_groups_of_sgd_raises_key_error(name):
    optimizer = getattr(torch.optim, name)([parameter()])

    def load_and_step():  # torch's class loads the groups and raises in step()
        optimizer.load_state_dict(torch.optim.SGD([parameter()]).state_dict())
        step(optimizer)

    with pytest.raises(KeyError, match="betas"):
        load_and_step()
