"""Masters in checkpoints: those of other forms, of torch's classes, or without any."""

import copy

import ampfuse
import pytest
import torch
from optim_models import (
    DTYPES_16_BIT,
    FORMS,
    assert_same_bits,
    assert_same_state,
    clones,
    copies,
    overwrite,
    parameters,
    state_values,
    train,
    trained,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("saved_form", "form"),
    [
        *((form, form) for form in FORMS),
        *((form, (torch.float32, True)) for form in FORMS),  # float32 parameters have no masters
        (FORMS[1], FORMS[2]),
        (FORMS[2], FORMS[1]),
    ],
)
def test_run_continues_with_all_bits_of_its_masters_in_each_form(device, saved_form, form):
    def run(form, seed, steps):
        dtype, master_weights = form
        params = parameters(device, dtype, seed)
        return params, trained(ampfuse.AdamW, params, range(steps), master_weights=master_weights)

    params, saved = run(saved_form, seed=0, steps=3)
    others, optimizer = run(form, seed=9, steps=1)

    overwrite(others, params)  # the model is loaded, too
    optimizer.load_state_dict(saved.state_dict())

    assert_same_bits(optimizer.master_params(), saved.master_params())
    train(saved, params, range(3, 6))
    train(optimizer, others, range(3, 6))
    assert_same_bits(optimizer.master_params(), saved.master_params())
    dtypes = {(torch.float32, True): None, FORMS[2]: torch.int16}
    expected = dtypes.get(form, torch.float32)
    for state in optimizer.state.values():
        assert getattr(state.get("master_param"), "dtype", None) == expected
    if form == saved_form:
        assert_same_bits(others, params)
        assert_same_state(optimizer, state_values(saved))


@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_masters_missing_from_a_checkpoint_are_created_at_the_next_step(device, dtype):
    saved = trained(torch.optim.AdamW, parameters(device, dtype), range(2)).state_dict()
    params = parameters(device, dtype)
    optimizer = trained(ampfuse.AdamW, params, range(1))
    wide = copies(params, torch.float32)
    exact = ampfuse.AdamW(wide)

    optimizer.load_state_dict(saved)
    exact.load_state_dict(saved)
    assert all("master_param" not in state for state in optimizer.state.values())
    assert "master_param" not in optimizer.state_dict()["state"][0]
    train(optimizer, params, range(2, 4))
    train(exact, wide, range(2, 4))

    assert_same_bits(optimizer.master_params(), wide)
    assert optimizer.state[params[0]]["step"] == 4


@pytest.mark.parametrize("master_weights", [True, "remainder"])
@pytest.mark.parametrize("model_first", [True, False])
def test_loading_a_checkpoint_of_torch_rewrites_masters_in_place(
    device, master_weights, model_first, fresh_compiler
):
    dtype = torch.bfloat16
    saved_params = parameters(device, dtype)
    saved = trained(torch.optim.AdamW, saved_params, range(2)).state_dict()
    params = parameters(device, dtype, seed=9)
    optimizer = trained(ampfuse.AdamW, params, range(1), master_weights=master_weights)
    torch.compile(optimizer.step, backend="eager")()  # from now on a graph writes the masters, too
    fresh_params = copies(saved_params)
    other = ampfuse.AdamW(fresh_params, master_weights=master_weights)
    other.load_state_dict(saved)
    masters = [optimizer.state[param]["master_param"] for param in params]

    if model_first:
        overwrite(params, saved_params)
    optimizer.load_state_dict(saved)
    if model_first:  # masters must be right now, since a captured graph may take the next step
        fresh = [param.float() for param in saved_params]
        remainders = [torch.zeros_like(master) for master in masters]
        assert_same_bits(masters, remainders if master_weights == "remainder" else fresh)
    else:
        overwrite(params, saved_params)
    train(optimizer, params, range(2, 4))
    train(other, fresh_params, range(2, 4))

    assert all(
        optimizer.state[p]["master_param"] is x for p, x in zip(params, masters, strict=True)
    )
    assert_same_bits(params, fresh_params)
    assert_same_bits(optimizer.master_params(), other.master_params())


def test_loaded_masters_are_dropped_if_none_are_wanted(device):
    params = parameters(device, torch.bfloat16)
    saved = trained(ampfuse.AdamW, params, range(2)).state_dict()
    for dtype in (torch.bfloat16, torch.float32):
        optimizer = ampfuse.AdamW(parameters(device, dtype), master_weights=False)
        optimizer.load_state_dict(saved)
        assert all("master_param" not in state for state in optimizer.state.values())


@pytest.mark.parametrize(
    ("dtype", "master_weights", "cls"),
    [
        (torch.float16, True, torch.optim.AdamW),
        (torch.bfloat16, True, torch.optim.RAdam),
        (torch.bfloat16, "remainder", torch.optim.AdamW),
    ],
)
@pytest.mark.parametrize("is_cast", [False, True], ids=["", "cast to float32"])
def test_stale_masters_saved_by_torch_do_not_overwrite_the_parameters(
    device, dtype, master_weights, cls, is_cast
):
    """Classes of torch keep masters that they have loaded, but do not step them."""
    params = parameters(device, dtype)
    ours = trained(ampfuse.AdamW, params, range(2), master_weights=master_weights)
    saved = ours.state_dict()
    if is_cast:
        params = copies(params, torch.float32)
        ours = ampfuse.AdamW(params)
    theirs = cls(params)
    theirs.load_state_dict(saved)
    theirs.param_groups[0]["lr"] = 0.25
    train(theirs, params, range(2, 5))
    stepped = clones(params)

    ours.load_state_dict(theirs.state_dict())
    assert_same_bits(params, stepped)
    ours.param_groups[0].update(lr=0.0)
    train(ours, params, [5])

    assert_same_bits(params, stepped)
    assert_same_bits(ours.master_params(), [param.float() for param in stepped])
    assert not {"foreach", "fused", "capturable"} & ours.param_groups[0].keys()


@pytest.mark.parametrize("options", [{}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("how", ["loaded", "copied"])
def test_masters_survive_repeated_checkpoints_and_copies(device, options, how):
    """Load or copy repeatedly: torch adds an option to the defaults of such an optimizer."""
    param = Parameter(torch.ones(4, device=device).bfloat16())
    optimizer = ampfuse.AdamW([{"params": [param], **options}], lr=1e-4, weight_decay=0.0)
    for _ in range(5):
        param.grad = torch.ones_like(param)
        optimizer.step()
        if how == "copied":
            optimizer = copy.deepcopy(optimizer)
            (param,) = optimizer.param_groups[0]["params"]
        saved = optimizer.state_dict()
        fresh = Parameter(param.detach().clone())
        optimizer = ampfuse.AdamW([{"params": [fresh], **options}], lr=1e-4, weight_decay=0.0)
        optimizer.load_state_dict(saved)
        param = fresh
    assert optimizer.state[param]["master_param"].tolist() == pytest.approx(
        [1 - 5e-4] * 4, abs=1e-6
    )


def test_optimizer_made_from_torchs_groups_leaves_those_unchanged():
    param = Parameter(torch.ones(4).bfloat16())
    param.grad = torch.ones_like(param)
    others = torch.optim.AdamW([param], lr=0.1)
    others.load_state_dict(ampfuse.AdamW([param], lr=0.1).state_dict())
    others.step()
    optimizer = ampfuse.AdamW(others.param_groups, lr=0.1)
    assert "foreach" not in optimizer.param_groups[0]
    optimizer.load_state_dict(others.state_dict())
    for stepped in (optimizer, others):
        stepped.step()
    assert others.param_groups[0]["foreach"] is None


@pytest.mark.parametrize("is_flat", [False, True])
def test_gathered_checkpoint_loads_if_a_group_was_given_an_option_of_torch(is_flat):
    model = torch.nn.Linear(3, 2)
    optimizer = ampfuse.AdamW([{"params": list(model.parameters()), "foreach": False}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert "foreach" not in optimizer.param_groups[0]
