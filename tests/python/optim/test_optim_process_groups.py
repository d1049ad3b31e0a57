"""ampfuse.AdamW of two ranks' parameters, alone or in one of torch's distributed optimizers."""

import copy
import gc
import sys
import warnings
import weakref
from functools import partial

import ampfuse
import pytest
import torch
import torch.distributed as dist
from optim_models import assert_same_bits, clones, parameters, train, trained
from processes import Scenarios
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn import Parameter

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
CLIP = 0.5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
scenario = Scenarios()


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("processes"))


CLASSES = {"AdamW": (ampfuse.AdamW, OPTIONS), "SGD": (ampfuse.SGD, {**OPTIONS, "momentum": 0.9})}
CASES = [*(("AdamW", dtype) for dtype in DTYPES), ("SGD", torch.bfloat16)]


@scenario(*CASES)
def zero_redundancy(case):
    name, dtype = case
    cls, options = CLASSES[name]
    params = parameters(CPU, dtype)
    optimizer = ZeroRedundancyOptimizer(params, cls, **options)
    train(optimizer, params, range(5))
    optimizer.consolidate_state_dict(to=0)
    saved = optimizer.state_dict() if dist.get_rank() == 0 else None
    return {"params": clones(params), "saved": saved, "owned": len(optimizer.optim.state)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_zero_redundancy_optimizer_steps_as_on_one_rank(case):
    name, dtype = case
    cls, options = CLASSES[name]
    params = parameters(CPU, dtype)
    alone = trained(cls, params, range(5), **options)
    results = scenario.results("zero_redundancy", case)
    for result in results:
        assert_same_bits(result["params"], params)
    assert sum(result["owned"] for result in results) == len(params)
    saved = results[0]["saved"]["state"]
    for index, state in alone.state_dict()["state"].items():
        assert saved[index].keys() == state.keys()
        assert_same_bits([saved[index][name] for name in state], state.values())


@scenario("finite", "overflow", "no gradients")
def one_parameter_for_two_processes(case):
    """Step a single parameter, which rank 0 owns: rank 1 has no parameter and no gradient."""
    param = Parameter(torch.ones(3))
    cls = partial(ampfuse.AdamW, max_grad_norm=CLIP, process_group=dist.group.WORLD)
    optimizer = ZeroRedundancyOptimizer([param], cls, lr=0.25, weight_decay=0)
    inner = optimizer.optim
    inner.grad_scale = torch.tensor(2.0)
    if case != "no gradients":
        param.grad = torch.tensor([6.0, 8.0, float("inf") if case == "overflow" else 0.0])
    optimizer.step()
    return {"param": clones([param])[0], "norm": inner.grad_norm}


@pytest.mark.parametrize(
    ("case", "norm", "param"),
    [
        ("finite", 5.0, [0.75, 0.75, 1.0]),
        ("overflow", float("inf"), [1.0] * 3),
        ("no gradients", 0.0, [1.0] * 3),
    ],
)
def test_ranks_without_gradients_take_part_in_norm_and_skip(case, norm, param):
    for result in scenario.results("one_parameter_for_two_processes", case):
        assert result["norm"].item() == norm
        torch.testing.assert_close(result["param"], torch.tensor(param))


@scenario(None)
def one_process_overflows(_):
    """Overflow on rank 1 only: torch's scaler checks only the gradients of its own rank."""
    param = Parameter(torch.ones(3))
    optimizer = ampfuse.AdamW([param], process_group=dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()
    if dist.get_rank() == 1:
        param.grad[0] = float("inf")
    scaler.step(optimizer)
    copied = copy.deepcopy(optimizer)
    return {
        "param": clones([param])[0],
        "steps": optimizer.state[param]["step"].item(),
        "shared": copied.process_group is optimizer.process_group,
    }


def test_ranks_of_a_process_group_all_skip_a_step_when_one_overflows():
    for result in scenario.results("one_process_overflows", None):
        assert torch.equal(result["param"], torch.ones(3))
        assert result["steps"] == 0
        assert result["shared"]


@scenario(None)
def first_stage_of_a_pipeline(_):
    """Scale a loss on rank 1 only, as in a pipeline whose last stage has the loss."""
    param = Parameter(torch.ones(3))
    optimizer = ampfuse.AdamW([param], process_group=dist.group.WORLD, lr=0.25, weight_decay=0)
    scaler = ampfuse.GradScaler("cpu", 4.0, process_group=dist.group.WORLD)
    loss = param.sum()
    (scaler.scale(loss) if dist.get_rank() == 1 else loss * 4).backward()
    scaler.step(optimizer)
    scaler.update()
    return {"param": clones([param])[0], "scale": scaler.get_scale()}


def test_ranks_of_a_process_group_need_not_all_scale_a_loss():
    for result in scenario.results("first_stage_of_a_pipeline", None):
        assert torch.equal(result["param"], torch.full((3,), 0.75))
        assert result["scale"] == 4.0


LIMITED = ("by keyword", "in the class", "in a group")


@scenario(*LIMITED)
def limit_of_one_shard(where):
    params = parameters(CPU)
    before = clones(params)
    groups, cls, options = {
        "by keyword": (params, ampfuse.AdamW, {"max_grad_norm": CLIP}),
        "in the class": (params, partial(ampfuse.AdamW, max_grad_norm=CLIP), {}),
        "in a group": ([{"params": params, "max_grad_norm": CLIP}], ampfuse.AdamW, {}),
    }[where]
    optimizer = ZeroRedundancyOptimizer(groups, cls, **options)
    error = ""
    try:
        train(optimizer, params, [0])
    except ValueError as refusal:
        error = str(refusal)
    return {"error": error, "params": [before, clones(params)]}


@pytest.mark.parametrize("where", LIMITED)
def test_max_grad_norm_for_the_norm_of_one_shard_is_refused(where):
    advice = "functools.partial(ampfuse.AdamW, max_grad_norm=..., process_group="
    for result in scenario.results("limit_of_one_shard", where):
        assert advice in result["error"]
        assert_same_bits(*result["params"])


@scenario(torch.float32, torch.bfloat16)
def post_local_sgd(dtype):
    """Step each rank by itself; torch's averager assigns `p.data` after each step."""
    spreads = {}
    for name, cls in (("torch", torch.optim.AdamW), ("ampfuse", ampfuse.AdamW)):
        param = Parameter(torch.zeros(4, dtype=dtype))
        optimizer = PostLocalSGDOptimizer(
            cls([param], lr=0.1, weight_decay=0), PeriodicModelAverager(period=1)
        )
        param.grad = torch.full_like(param, 1.0 if dist.get_rank() == 0 else -1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns once that masters take over assigned values
            for _ in range(3):
                optimizer.step()
            before = param.detach().float().clone()
            optimizer.optim.step()
        moved = (param.detach().float() - before)[0].item()
        optimizer.averager.average_parameters([param])
        spreads[name] = (moved, clones([param]))
    return spreads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_starts_from_parameters_that_a_model_averager_assigned(dtype):
    results = scenario.results("post_local_sgd", dtype)
    for result in results:
        (moved, params), (expected, others) = result["ampfuse"], result["torch"]
        assert moved == pytest.approx(expected, rel=1e-2)
        torch.testing.assert_close(params, others, rtol=0.02, atol=1e-3)
    (first,), (second,) = (result["ampfuse"][1] for result in results)
    assert torch.equal(first, second)


def test_optimizer_is_freed_with_its_last_reference_while_zero_is_imported():
    assert ZeroRedundancyOptimizer.__module__ in sys.modules
    gc.disable()
    try:
        ampfuse.AdamW(parameters(CPU, torch.float32))  # torch imports modules for the first one
        freed = weakref.ref(ampfuse.AdamW(parameters(CPU, torch.float32)))
        assert freed() is None
    finally:
        gc.enable()
