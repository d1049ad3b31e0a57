"""ampfuse.AdamW on two ranks, inside ZeroRedundancyOptimizer and PostLocalSGDOptimizer."""

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
from optim_models import assert_near, assert_same_bits, clones, feed, parameters, trained
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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Play all scenarios; return the function that looks up the results of one on each rank."""
    scenario.play(tmp_path_factory.mktemp("processes"))
    return scenario.results


@scenario(*DTYPES)
def zero_redundancy(dtype):
    params = parameters(CPU, dtype)
    optimizer = ZeroRedundancyOptimizer(params, ampfuse.AdamW, **OPTIONS)
    for step in range(5):
        feed(params, step)
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    saved = optimizer.state_dict() if dist.get_rank() == 0 else None
    owned = len(optimizer.optim.state)
    return {"params": clones(params), "saved": saved, "owned": owned}


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_in_zero_redundancy_optimizer_steps_as_on_one_rank(outcomes, dtype):
    params = parameters(CPU, dtype)
    alone = trained(lambda p: ampfuse.AdamW(p, **OPTIONS), params, range(5))

    results = outcomes("zero_redundancy", dtype)

    for result in results:
        assert_same_bits(result["params"], params)
    assert sum(result["owned"] for result in results) == len(params)
    saved = results[0]["saved"]["state"]
    for index, state in alone.state_dict()["state"].items():
        assert saved[index].keys() == state.keys()
        assert_same_bits([saved[index][name] for name in state], state.values())


def over_all_processes():
    """Return a class for ZeroRedundancyOptimizer that limits the norm over all ranks."""
    return partial(ampfuse.AdamW, max_grad_norm=CLIP, process_group=dist.group.WORLD)


@scenario(*DTYPES)
def zero_redundancy_clip(dtype):
    params = parameters(CPU, dtype)
    optimizer = ZeroRedundancyOptimizer(params, over_all_processes(), **OPTIONS)
    norms = []
    for step in range(5):
        feed(params, step)
        optimizer.step()
        norms.append(optimizer.optim.grad_norm)
    return {"params": clones(params), "norms": norms}


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_in_zero_redundancy_optimizer_clips_to_the_norm_of_all_ranks(outcomes, dtype):
    params = parameters(CPU, dtype)
    alone = ampfuse.AdamW(params, max_grad_norm=CLIP, **OPTIONS)
    norms = []
    for step in range(5):
        feed(params, step)
        alone.step()
        norms.append(alone.grad_norm)

    for result in outcomes("zero_redundancy_clip", dtype):
        for norm, expected in zip(result["norms"], norms, strict=True):
            assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        if dtype == torch.float32:
            assert_near(result["params"], params, steps=5, lr=0.01)
        else:
            for param, other in zip(result["params"], params, strict=True):
                torch.testing.assert_close(param, other, rtol=torch.finfo(dtype).eps, atol=1e-6)


@scenario("finite", "overflow", "no gradients")
def one_parameter_for_two_processes(case):
    """Step a single parameter, which rank 0 owns: rank 1 has no parameter and no gradient."""
    param = Parameter(torch.ones(3))
    optimizer = ZeroRedundancyOptimizer([param], over_all_processes(), lr=0.25, weight_decay=0)
    inner = optimizer.optim
    inner.grad_scale = torch.tensor(2.0)
    if case != "no gradients":
        param.grad = torch.tensor([6.0, 8.0, float("inf") if case == "overflow" else 0.0])
    optimizer.step()
    return {"param": clones([param])[0], "norm": inner.grad_norm}


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


def test_ranks_of_a_process_group_all_skip_a_step_when_one_overflows(outcomes):
    for result in outcomes("one_process_overflows", None):
        assert torch.equal(result["param"], torch.ones(3))
        assert result["steps"] == 0
        assert result["shared"]


@pytest.mark.parametrize(
    ("case", "norm", "param"),
    [
        ("finite", 5.0, [0.75, 0.75, 1.0]),
        ("overflow", float("inf"), [1.0] * 3),
        ("no gradients", 0.0, [1.0] * 3),
    ],
)
def test_ranks_without_gradients_take_part_in_norm_and_skip(outcomes, case, norm, param):
    for result in outcomes("one_parameter_for_two_processes", case):
        assert result["norm"].item() == norm
        torch.testing.assert_close(result["param"], torch.tensor(param))


def with_limit_as_keyword(params):
    return ZeroRedundancyOptimizer(params, ampfuse.AdamW, max_grad_norm=CLIP, **OPTIONS)


def with_limit_in_the_class(params):
    return ZeroRedundancyOptimizer(params, partial(ampfuse.AdamW, max_grad_norm=CLIP), **OPTIONS)


def with_limit_in_a_group(params):
    groups = [{"params": params, "max_grad_norm": CLIP}]
    return ZeroRedundancyOptimizer(groups, ampfuse.AdamW, **OPTIONS)


LIMITED = (with_limit_as_keyword, with_limit_in_the_class, with_limit_in_a_group)


@scenario(*LIMITED)
def limit_of_one_shard(make):
    params = parameters(CPU)
    before = clones(params)
    optimizer = make(params)
    feed(params, 0)
    try:
        optimizer.step()
    except ValueError as error:
        return {"error": str(error), "params": [before, clones(params)]}
    return {"error": "none", "params": [before, clones(params)]}


@pytest.mark.parametrize("make", LIMITED)
def test_max_grad_norm_for_the_norm_of_one_shard_is_refused(outcomes, make):
    for result in outcomes("limit_of_one_shard", make):
        assert (
            "functools.partial(ampfuse.AdamW, max_grad_norm=..., process_group="
            in (result["error"])
        )
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
def test_step_starts_from_parameters_that_a_model_averager_assigned(outcomes, dtype):
    results = outcomes("post_local_sgd", dtype)
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
