"""ampfuse.AdamW on two ranks, with DTensors (FSDP2)."""

import copy

import ampfuse
import pytest
import torch
import torch.distributed as dist
from optim_models import assert_near, assert_same_bits, clones
from processes import Scenarios
from reference import exact_norm, heavy_tailed
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
CLIP = 0.5
scenario = Scenarios()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Play all scenarios; return the function that looks up the results of one on each rank."""
    scenario.play(tmp_path_factory.mktemp("processes"))
    return scenario.results


def model(dtype):
    """Return a model whose shards on two ranks have different sizes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(dtype)


def train(network, optimizer, dtype, steps=4, scaler=None):
    """Train the model and return the norm that the optimizer reports after each step."""
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.linspace(-1, 1, 10).reshape(2, 5).to(dtype) * (step + 1)
        loss = network(inputs).float().square().sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        norms.append(optimizer.grad_norm)
    return norms


def whole(tensors):
    return [(x.full_tensor() if isinstance(x, DTensor) else x).detach() for x in tensors]


CASES = ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, "remainder"))


def sharded(dtype, **options):
    """Return a fully sharded model and its optimizer."""
    network = model(dtype)
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    return network, ampfuse.AdamW(network.parameters(), **OPTIONS, **options)


@scenario(*CASES)
def fsdp(case):
    dtype, master_weights = case
    network, optimizer = sharded(dtype, master_weights=master_weights, max_grad_norm=CLIP)
    norms = train(network, optimizer, dtype)
    state = optimizer.state[network[0].weight]
    return {
        "params": whole(network.parameters()),
        "masters": whole(optimizer.master_params()),
        "norms": norms,
        "moments": whole(optimizer.state[p]["exp_avg"] for p in network.parameters()),
        "shards": {tuple(x.to_local().shape) for x in state.values() if x.dim()},
        "step": state["step"].item(),
    }


@pytest.mark.parametrize("case", CASES)
def test_fully_sharded_model_steps_like_an_unsharded_one(outcomes, case):
    dtype, master_weights = case
    network = model(dtype)
    alone = ampfuse.AdamW(
        network.parameters(), max_grad_norm=CLIP, master_weights=master_weights, **OPTIONS
    )
    norms = train(network, alone, dtype)

    for rank, result in enumerate(outcomes("fsdp", case)):
        # Squares are summed in another order, so clip factors may differ by a rounding.
        for norm, expected in zip(result["norms"], norms, strict=True):
            assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
            assert norm.item() > CLIP
        for moment, param in zip(result["moments"], network.parameters(), strict=True):
            torch.testing.assert_close(moment, alone.state[param]["exp_avg"], rtol=1e-5, atol=1e-7)
        assert result["shards"] == {((4, 3)[rank], 5)}
        assert result["step"] == 4
        for param, other in zip(result["params"], network.parameters(), strict=True):
            torch.testing.assert_close(param, other, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert_near(result["masters"], list(alone.master_params()), steps=4, lr=0.01)


CHECKPOINTS = tuple((*case, full) for case in CASES for full in (False, True))


@scenario(*CHECKPOINTS)
def fsdp_checkpoint(case):
    """Save shards or full tensors after two steps, load them into a new model, take two more."""
    dtype, master_weights, full = case
    options = checkpoint.StateDictOptions(full_state_dict=full)
    network, optimizer = sharded(dtype, master_weights=master_weights)
    train(network, optimizer, dtype, steps=2)
    saved = checkpoint.get_state_dict(network, optimizer, options=options)

    other, other_optimizer = sharded(dtype, master_weights=master_weights)
    of_model, of_optimizer = copy.deepcopy(saved)
    checkpoint.set_state_dict(
        other,
        other_optimizer,
        model_state_dict=of_model,
        optim_state_dict=of_optimizer,
        options=options,
    )
    train(network, optimizer, dtype, steps=2)
    train(other, other_optimizer, dtype, steps=2)
    return {
        "params": [whole(x.parameters()) for x in (network, other)],
        "steps": [state["step"].item() for state in other_optimizer.state.values()],
    }


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_fully_sharded_run_continues_from_a_checkpoint(outcomes, case):
    for result in outcomes("fsdp_checkpoint", case):
        assert result["steps"] == [4] * 4
        assert_same_bits(*result["params"])


@scenario(torch.float32, torch.bfloat16)
def fsdp_overflow(dtype):
    network, optimizer = sharded(dtype, max_grad_norm=CLIP)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    train(network, optimizer, dtype, steps=1, scaler=scaler)
    scaler.update()
    before = clones(whole(network.parameters()))
    if dist.get_rank() == 1:
        network[0].weight.grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return {"params": [before, whole(network.parameters())], "scale": scaler.get_scale()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_is_skipped_on_both_ranks_when_one_overflows(outcomes, dtype):
    for result in outcomes("fsdp_overflow", dtype):
        assert_same_bits(*result["params"])
        assert result["scale"] == 2.0


@scenario(torch.float32, torch.bfloat16)
def fsdp_sync(dtype):
    network, optimizer = sharded(dtype)
    train(network, optimizer, dtype, steps=1)
    with torch.no_grad():
        for param in network.parameters():
            param.fill_(0.5)
    optimizer.sync_masters_from_model()
    masters = whole(optimizer.master_params())
    train(network, optimizer, dtype, steps=1)
    return {"masters": masters}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_of_shards_are_synced_from_the_model(outcomes, dtype):
    for result in outcomes("fsdp_sync", dtype):
        assert all((master == 0.5).all() for master in result["masters"])


PLACEMENTS = [
    ((2,), [Replicate()]),
    ((2,), [Shard(0)]),
    ((2,), [Shard(1)]),
    ((1, 2), [Replicate(), Shard(0)]),
    ((2, 1), [Shard(1), Shard(0)]),
    None,  # a plain tensor among the DTensors
]


def placed(tensor, placement):
    if placement is None:
        return tensor
    return distribute_tensor(tensor, init_device_mesh("cpu", placement[0]), placement[1])


def numbers(seed):
    return [heavy_tailed((5, 3), torch.float32, CPU, seed + i) for i in range(len(PLACEMENTS))]


@scenario(None, CLIP)
def mixed_placements(clip):
    params = [Parameter(placed(*pair)) for pair in zip(numbers(0), PLACEMENTS, strict=True)]
    optimizer = ampfuse.AdamW(params, max_grad_norm=clip)
    for param, *pair in zip(params, numbers(50), PLACEMENTS, strict=True):
        param.grad = placed(*pair)
    optimizer.step()
    return {"params": whole(params), "norm": optimizer.grad_norm}


@pytest.mark.parametrize("clip", [None, CLIP])
def test_dtensors_of_all_placements_step_and_are_clipped_together(outcomes, clip):
    params = [Parameter(tensor) for tensor in numbers(0)]
    optimizer = ampfuse.AdamW(params, max_grad_norm=clip)
    for param, grad in zip(params, numbers(50), strict=True):
        param.grad = grad
    optimizer.step()

    for result in outcomes("mixed_placements", clip):
        assert_near(result["params"], params, steps=1)
        if clip is not None:
            assert result["norm"].item() == pytest.approx(exact_norm(numbers(50), 2), rel=1e-6)


@scenario(None, CLIP)
def partial_gradient(clip):
    mesh = init_device_mesh("cpu", (2,))
    param = Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    optimizer = ampfuse.AdamW([param], max_grad_norm=clip)
    try:
        optimizer.step()
    except ValueError as error:
        return {"error": str(error), "params": whole([param])}
    return {"error": "none", "params": whole([param])}


@pytest.mark.parametrize("clip", [None, CLIP])
def test_partial_gradients_are_refused_before_any_write(outcomes, clip):
    for result in outcomes("partial_gradient", clip):
        assert "expected a sharded or replicated gradient" in result["error"]
        assert_same_bits(result["params"], [torch.ones(4)])


@scenario(*CASES)
def fsdp_compiled(case):
    dtype, master_weights = case
    results = {}
    for name in ("eager", "compiled"):
        network, optimizer = sharded(dtype, master_weights=master_weights, max_grad_norm=CLIP)
        if name == "compiled":
            optimizer.step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
        norms = train(network, optimizer, dtype)
        results[name] = [*whole(network.parameters()), *whole(optimizer.master_params()), *norms]
    return results


@pytest.mark.parametrize("case", CASES)
def test_compiled_step_of_a_fully_sharded_model_gives_the_bits_of_eager(outcomes, case):
    for result in outcomes("fsdp_compiled", case):
        assert_same_bits(result["compiled"], result["eager"])


@scenario(None)
def gradients_of_one_process(_):
    """Step two experts: rank 0 has gradients of both, rank 1 only of the first."""
    mesh = init_device_mesh("cpu", (2,))
    values = [torch.arange(1.0, 5.0), torch.arange(5.0, 9.0)]
    params = [Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values]
    optimizer = ampfuse.AdamW(params, max_grad_norm=CLIP)
    scaler = ampfuse.GradScaler("cpu", 4.0)
    scaler.scale_tensor()
    for param in params[: 2 if dist.get_rank() == 0 else 1]:
        param.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None) * 4
    scaler.step(optimizer)
    scaler.update()
    return {"norm": optimizer.grad_norm, "skipped": scaler.was_skipped()}


def test_rank_without_some_gradients_takes_part_in_all_collectives(outcomes):
    for result in outcomes("gradients_of_one_process", None):
        assert not result["skipped"]
        assert result["norm"].item() == pytest.approx((4 + 2) ** 0.5)


@scenario(2.0)
def clipped_with_plain_tensors(norm_type):
    params = [Parameter(placed(*pair)) for pair in zip(numbers(0), PLACEMENTS, strict=True)]
    for param, *pair in zip(params, numbers(50), PLACEMENTS, strict=True):
        param.grad = placed(*pair)
    measured = ampfuse.get_total_norm([param.grad for param in params], norm_type)
    norm = ampfuse.clip_grad_norm_(params, CLIP, norm_type)
    return {"norms": [measured, norm], "grads": whole(param.grad for param in params)}


def test_clip_grad_norm_clips_dtensors_of_several_meshes_and_plain_tensors(outcomes):
    params = [Parameter(tensor) for tensor in numbers(0)]
    for param, grad in zip(params, numbers(50), strict=True):
        param.grad = grad
    expected = torch.nn.utils.clip_grad_norm_(params, CLIP)

    for result in outcomes("clipped_with_plain_tensors", 2.0):
        for norm in result["norms"]:
            assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(result["grads"], [param.grad for param in params])


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


@scenario(None)
def clip_frozen(_):
    """Clip the gradient of a parameter that was frozen after backward, beside a DTensor's."""
    mesh = init_device_mesh("cpu", (2,))
    params = [
        torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])),
        torch.nn.Parameter(torch.ones(4)),
    ]
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    params[1].requires_grad = False
    return {"norm": ampfuse.clip_grad_norm_(params, 1.0).item()}


def test_gradients_of_frozen_parameters_are_clipped_beside_dtensors(outcomes):
    for result in outcomes("clip_frozen", None):
        assert result["norm"] == pytest.approx(32**0.5)


def test_ranks_of_a_process_group_need_not_all_scale_a_loss(outcomes):
    for result in outcomes("first_stage_of_a_pipeline", None):
        assert torch.equal(result["param"], torch.full((3,), 0.75))
        assert result["scale"] == 4.0
