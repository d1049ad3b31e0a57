"""fused_adam in torch: opcheck, version counters, autograd, torch.compile(fullgraph=True)."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from adam_reference import (
    HALF_WITH_MASTERS,
    OPTIONS,
    WITH_MASTERS,
    AdamLists,
    Dtypes,
    adam_lists,
)
from ampfuse.ops import fused_adam, multi_tensor_norm
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import ReinplaceCounters

EVERY_KIND = pytest.mark.parametrize("dtypes", [Dtypes(), *WITH_MASTERS], ids=str)

# The overload that also writes the gradients declares it in its own schema.
EVERY_OVERLOAD = pytest.mark.parametrize("overload", ["default", "write_back_grads"])

LAYOUTS = {
    "contiguous": lambda x: x,
    "strided": lambda x: x[:, ::2],
    "empty": lambda x: x[:0],
}


def sample(dtypes, device, layout="contiguous"):
    """Return the lists of two parameters that a step changes, unless their layout is empty."""
    lists = adam_lists([(5, 7), (5, 7)], device, dtypes, amsgrad=True, steps=2)
    columns = lists.columns()
    cut = [
        column if column is lists.state_steps else list(map(LAYOUTS[layout], column))
        for column in columns
    ]
    return AdamLists(*cut)


def signals(device, seed=0):
    """Return scalars that differ from step to step."""
    return {
        "lr": torch.tensor(1e-3 * (1 + seed), device=device),
        "grad_scale": torch.tensor(4.0 + seed, device=device),
        "found_inf": torch.zeros((), device=device),
        "total_norm": torch.tensor(9.0 + seed, device=device),
        "max_norm": 1.0,
        "grad_norm": torch.zeros((), device=device),
    }


def options(**others):
    return OPTIONS | {"amsgrad": True, "write_back_grads": True} | others


@EVERY_OVERLOAD
@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY_KIND
def test_opcheck_passes_with_all_scalars(device, dtypes, layout, overload):
    columns = sample(dtypes, device, layout).columns()
    scalars = OPTIONS | {"amsgrad": True} | signals(device)

    torch.library.opcheck(getattr(torch.ops.ampfuse.fused_adam, overload), tuple(columns), scalars)


@EVERY_OVERLOAD
@EVERY_KIND
def test_opcheck_passes_with_only_the_learning_rate(device, dtypes, overload):
    columns = adam_lists([33], device, dtypes).columns()
    scalars = OPTIONS | {"lr": torch.tensor(1e-3, device=device)}

    torch.library.opcheck(getattr(torch.ops.ampfuse.fused_adam, overload), tuple(columns), scalars)


@EVERY_OVERLOAD
def test_opcheck_passes_for_empty_lists(overload):
    torch.library.opcheck(
        getattr(torch.ops.ampfuse.fused_adam, overload),
        ([],) * 7,
        OPTIONS | {"lr": torch.tensor(1e-3)},
    )


@pytest.mark.parametrize("write_back_grads", [False, True])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@EVERY_KIND
def test_version_of_every_written_tensor_rises_by_one(device, dtypes, found_inf, write_back_grads):
    # Only the device knows if the step is skipped, so versions rise in any case.
    lists = sample(dtypes, device)
    scalars = signals(device)
    scalars["found_inf"].fill_(found_inf)
    read = [x for name, x in scalars.items() if name not in ("grad_norm", "max_norm")]
    written = [scalars["grad_norm"], *lists.tensors()]
    if not write_back_grads:
        read += lists.grads
        written = [x for x in written if all(x is not grad for grad in lists.grads)]
    of_read, of_written = ([x._version for x in tensors] for tensors in (read, written))

    fused_adam(*lists.columns(), **options(write_back_grads=write_back_grads, **scalars))

    assert [x._version for x in read] == of_read
    assert [x._version for x in written] == [version + 1 for version in of_written]


def test_backward_through_a_parameter_saved_before_the_step_is_refused(device):
    weight = torch.ones(33, device=device, requires_grad=True)
    lists = adam_lists([33], device)
    loss = (weight * lists.params[0]).sum()

    fused_adam(*lists.columns(), lr=torch.tensor(1e-3, device=device), **OPTIONS)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["params", "grads", "exp_avgs", "state_steps", "masters"])
@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "result"])
def test_tensor_that_requires_grad_is_refused(device, name, is_leaf):
    lists = sample(HALF_WITH_MASTERS, device)
    column = getattr(lists, name)
    column[1] = column[1].requires_grad_() if is_leaf else column[1].requires_grad_() * 1
    before, versions = lists.clone(), [tensor._version for tensor in lists.tensors()]
    message = "a leaf Variable that requires grad" if is_leaf else "expected a tensor that does not"

    with pytest.raises(RuntimeError, match=rf"fused_adam: {name}\[1\]: {message}"):
        fused_adam(*lists.columns(), **options(**signals(device)))

    assert all(map(torch.equal, lists.tensors(), before.tensors()))
    assert [tensor._version for tensor in lists.tensors()] == versions


@pytest.mark.parametrize("name", ["lr", "grad_scale", "found_inf", "total_norm", "grad_norm"])
def test_scalar_that_requires_grad_is_refused(device, name):
    lists, scalars = sample(Dtypes(), device), signals(device)
    before = lists.clone()
    scalars[name].requires_grad_()

    with pytest.raises(RuntimeError, match=f"fused_adam: {name}: .*no_grad"):
        fused_adam(*lists.columns(), **options(**scalars))

    assert all(map(torch.equal, lists.tensors(), before.tensors()))


@EVERY_KIND
def test_parameters_that_require_grad_are_stepped_under_no_grad(device, dtypes):
    lists = sample(dtypes, device)
    expected = lists.clone()
    lists.params = [param.requires_grad_() for param in lists.params]

    fused_adam(*expected.columns(), **options(**signals(device)))
    with torch.no_grad():
        fused_adam(*lists.columns(), **options(**signals(device)))

    assert all(map(torch.equal, lists.tensors(), expected.tensors()))
    assert all(param.requires_grad and param.is_leaf for param in lists.params)


def test_parameter_with_a_forward_mode_tangent_is_refused(device):
    lists = sample(Dtypes(), device)
    with forward_ad.dual_level():
        lists.params[1] = forward_ad.make_dual(lists.params[1], torch.ones_like(lists.params[1]))

        with pytest.raises(RuntimeError, match=r"params\[1\]: .*forward"):
            fused_adam(*lists.columns(), **options(**signals(device)))


def test_inference_tensors_are_stepped(device):
    expected = sample(Dtypes(), device)
    fused_adam(*expected.columns(), **options(**signals(device)))
    with torch.inference_mode():
        lists = sample(Dtypes(), device).clone()
        fused_adam(*lists.columns(), **options(**signals(device)))

    assert all(map(torch.equal, lists.tensors(), expected.tensors()))


def test_meta_tensors_are_accepted(device):
    lists = AdamLists(*([x.to("meta") for x in c] for c in sample(Dtypes(), device).columns()))
    scalars = {
        name: x.to("meta") if isinstance(x, torch.Tensor) else x
        for name, x in signals(device).items()
    }

    assert fused_adam(*lists.columns(), **options(**scalars)) is None


def step(columns, lr, grad_scale, found_inf, grad_norm):
    fused_adam(
        *columns,
        lr=lr,
        grad_scale=grad_scale,
        found_inf=found_inf,
        **OPTIONS | {"amsgrad": True},
    )


def norm_then_step(columns, lr, grad_scale, found_inf, grad_norm):
    norm = multi_tensor_norm(columns[1])
    fused_adam(
        *columns,
        lr=lr,
        grad_scale=grad_scale,
        found_inf=norm.found_inf,
        total_norm=norm.total_norm,
        max_norm=0.5,
        grad_norm=grad_norm,
        write_back_grads=True,
        **OPTIONS | {"amsgrad": True},
    )


EVERY_STEP = pytest.mark.parametrize("take", [step, norm_then_step], ids=lambda f: f.__name__)


def arguments(dtypes, device, seed):
    """Return columns of three parameters, one of them strided, and scalars; `seed` sets values."""
    lists = adam_lists([33, (257, 2), (9, 8)], device, dtypes, amsgrad=True, steps=seed, seed=seed)
    for column in (lists.params, lists.grads):
        column[2] = column[2].t().contiguous().t()
    lr = torch.tensor(1e-3 * (1 + seed), device=device)
    scale = torch.tensor(4.0 + seed, device=device)
    flag = torch.tensor(float(seed == 3), device=device)
    return lists.columns(), lr, scale, flag, torch.zeros((), device=device)


def written(columns, lr, grad_scale, found_inf, grad_norm):
    return [x for column in columns for x in column] + [grad_norm]


@pytest.mark.usefixtures("missed_copies")
@EVERY_KIND
@EVERY_STEP
def test_compiled_step_gives_the_bits_of_the_eager_one_and_copies_nothing(device, take, dtypes):
    compiled = torch.compile(take, fullgraph=True)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (2, 3, 4):  # new rates, scales, step counts and flags, same graph
            ours, theirs = arguments(dtypes, device, seed), arguments(dtypes, device, seed)
            compiled(*ours)
            take(*theirs)
            assert all(map(torch.equal, written(*ours), written(*theirs)))

    assert ReinplaceCounters.get_total_missed() == 0
    assert ReinplaceCounters.get_total_missed_bytes() == 0


@pytest.mark.usefixtures("missed_copies")
@EVERY_STEP
def test_steps_of_one_list_share_a_graph(device, take):
    counter = CompileCounter()
    compiled = torch.compile(take, backend=counter, fullgraph=True)
    columns, lr, scale, flag, grad_norm = arguments(HALF_WITH_MASTERS, device, seed=2)
    for t in range(5):
        compiled(columns, lr.fill_(0.1 / (t + 1)), scale.fill_(2.0**t), flag, grad_norm)

    assert counter.frame_count == 1
    assert columns[5][0].item() == 7
