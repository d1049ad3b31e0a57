"""fused_adam in torch: opcheck, version counters, torch.compile(fullgraph=True)."""

import pytest
import torch
from adam_reference import (
    BFLOAT16_WITH_REMAINDERS,
    HALF_WITH_MASTERS,
    OPTIONS,
    WITH_MASTERS,
    AdamLists,
    Dtypes,
    adam_lists,
)
from ampfuse.ops import fused_adam, multi_tensor_norm
from reference import same_bits
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import ReinplaceCounters

AMSGRAD = OPTIONS | {"amsgrad": True}
LAYOUTS = {
    "contiguous": lambda x: x,
    "strided": lambda x: x[:, ::2],
    "empty": lambda x: x[:0],
}


def sample(dtypes, device, layout="contiguous"):
    """Return the lists of two parameters that a step changes, unless their layout is empty."""
    lists = adam_lists([(5, 7), (5, 7)], device, dtypes, amsgrad=True, steps=2)
    cut = LAYOUTS[layout]
    return AdamLists(*([cut(x) if x.dim() else x for x in column] for column in lists.columns()))


def signals(device):
    values = {"lr": 1e-3, "grad_scale": 4.0, "found_inf": 0.0, "total_norm": 9.0, "grad_norm": 0.0}
    scalars = {name: torch.tensor(value, device=device) for name, value in values.items()}
    return scalars | {"max_norm": 1.0}


# Every kind of masters, and every layout of the kind with the most tensors.
SAMPLES = [(dtypes, "contiguous") for dtypes in (Dtypes(), *WITH_MASTERS)]
SAMPLES += [(HALF_WITH_MASTERS, layout) for layout in ("strided", "empty")]


# The overload that also writes the gradients declares it in its own schema.
@pytest.mark.parametrize("overload", ["default", "write_back_grads"])
@pytest.mark.parametrize(("dtypes", "layout"), SAMPLES, ids=str)
def test_opcheck_passes_with_all_scalars(device, dtypes, layout, overload):
    columns = sample(dtypes, device, layout).columns()
    op = getattr(torch.ops.ampfuse.fused_adam, overload)

    torch.library.opcheck(op, tuple(columns), AMSGRAD | signals(device))


@pytest.mark.parametrize("write_back_grads", [False, True])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_version_of_every_written_tensor_rises_by_one(device, found_inf, write_back_grads):
    # Only the device knows if the step is skipped, so versions rise in any case.
    lists = sample(HALF_WITH_MASTERS, device)
    scalars = signals(device)
    scalars["found_inf"].fill_(found_inf)
    read = [x for name, x in scalars.items() if name not in ("grad_norm", "max_norm")]
    written = [scalars["grad_norm"], *lists.tensors()]
    if not write_back_grads:
        read += lists.grads
        written = [x for x in written if all(x is not grad for grad in lists.grads)]
    of_read, of_written = ([x._version for x in tensors] for tensors in (read, written))

    fused_adam(*lists.columns(), **AMSGRAD, **scalars, write_back_grads=write_back_grads)

    assert [x._version for x in read] == of_read
    assert [x._version for x in written] == [version + 1 for version in of_written]


def step(columns, lr, grad_scale, found_inf, grad_norm):
    fused_adam(*columns, lr=lr, grad_scale=grad_scale, found_inf=found_inf, **AMSGRAD)


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
        **AMSGRAD,
    )


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


# Parameters without masters, with float32 masters and with remainders; one kind without a norm.
@pytest.mark.usefixtures("missed_copies")
@pytest.mark.parametrize(
    ("take", "dtypes"),
    [
        (step, HALF_WITH_MASTERS),
        (norm_then_step, Dtypes()),
        (norm_then_step, HALF_WITH_MASTERS),
        (norm_then_step, BFLOAT16_WITH_REMAINDERS),
    ],
    ids=lambda x: x.__name__ if callable(x) else str(x),
)
def test_compiled_step_gives_the_bits_of_the_eager_one_and_copies_nothing(device, take, dtypes):
    compiled = torch.compile(take, fullgraph=True)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (2, 3, 4):  # new rates, scales, step counts and flags, same graph
            ours, theirs = arguments(dtypes, device, seed), arguments(dtypes, device, seed)
            compiled(*ours)
            take(*theirs)
            assert all(map(same_bits, written(*ours), written(*theirs)))

    assert ReinplaceCounters.get_total_missed() == 0
    assert ReinplaceCounters.get_total_missed_bytes() == 0


@pytest.mark.usefixtures("missed_copies")
@pytest.mark.parametrize("take", [step, norm_then_step])
def test_steps_of_one_list_share_a_graph(device, take):
    counter = CompileCounter()
    compiled = torch.compile(take, backend=counter, fullgraph=True)
    columns, lr, scale, flag, grad_norm = arguments(HALF_WITH_MASTERS, device, seed=2)
    for t in range(5):
        compiled(columns, lr.fill_(0.1 / (t + 1)), scale.fill_(2.0**t), flag, grad_norm)

    assert counter.frame_count == 1
    assert columns[5][0].item() == 7
