"""ampfuse.AdamW on two ranks, with DTensors (FSDP2)."""

import copy

import ampfuse
import pytest
import torch
import torch.distributed as dist
from optim_models import assert_near, assert_same_bits
from processes import Scenarios
from reference import exact_norm, gradients, heavy_tailed
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


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("processes"))


def whole(tensors):
    return [(x.full_tensor() if isinstance(x, DTensor) else x).detach() for x in tensors]


# --- models that are sharded by fully_shard -----------------------------------------------------


def model(dtype):
    """Return a model whose shards on two ranks have different sizes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(dtype)


def sharded(dtype, cls=ampfuse.AdamW, **options):
    """Return a fully sharded model and its optimizer."""
    network = model(dtype)
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    return network, cls(network.parameters(), **OPTIONS, **options)


def train(network, optimizer, steps=4):
    """Train the model and return the norm that the optimizer reports after each step."""
    norms, dtype = [], next(network.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.linspace(-1, 1, 10).reshape(2, 5).to(dtype) * (step + 1)
        network(inputs).float().square().sum().backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return norms


CASES = ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, "remainder"))


@scenario(*CASES)
def fsdp(case):
    dtype, master_weights = case
    network, optimizer = sharded(dtype, master_weights=master_weights, max_grad_norm=CLIP)
    norms = train(network, optimizer)
    state = optimizer.state[network[0].weight]
    return {
        "params": whole(network.parameters()),
        "masters": whole(optimizer.master_params()),
        "norms": norms,
        "moments": whole(optimizer.state[p]["exp_avg"] for p in network.parameters()),
        "shards": {tuple(x.to_local().shape) for x in state.values() if x.dim()},
        "step": state["step"].item(),
    }


@scenario("SGD")
def fsdp_with_sgd(_):
    network, optimizer = sharded(torch.bfloat16, cls=ampfuse.SGD, momentum=0.9, max_grad_norm=CLIP)
    train(network, optimizer)
    buffers = [optimizer.state[param]["momentum_buffer"] for param in network.parameters()]
    return {"masters": whole(optimizer.master_params()), "buffers": whole(buffers)}


def test_fully_sharded_model_steps_with_sgd_like_an_unsharded_one():
    network = model(torch.bfloat16)
    alone = ampfuse.SGD(network.parameters(), momentum=0.9, max_grad_norm=CLIP, **OPTIONS)
    train(network, alone)
    for result in scenario.results("fsdp_with_sgd", "SGD"):
        for buffer, param in zip(result["buffers"], network.parameters(), strict=True):
            expected = alone.state[param]["momentum_buffer"]
            torch.testing.assert_close(buffer, expected, rtol=1e-5, atol=1e-6)
        for master, other in zip(result["masters"], alone.master_params(), strict=True):
            torch.testing.assert_close(master, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_fully_sharded_model_steps_like_an_unsharded_one(case):
    dtype, master_weights = case
    network = model(dtype)
    alone = ampfuse.AdamW(
        network.parameters(), max_grad_norm=CLIP, master_weights=master_weights, **OPTIONS
    )
    norms = train(network, alone)

    for rank, result in enumerate(scenario.results("fsdp", case)):
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


CHECKPOINTS = (*((*case, False) for case in CASES), (torch.bfloat16, "remainder", True))


@scenario(*CHECKPOINTS)
def fsdp_checkpoint(case):
    """Save shards or full tensors after two steps, load them into a new model, take two more."""
    dtype, master_weights, full = case
    options = checkpoint.StateDictOptions(full_state_dict=full)
    network, optimizer = sharded(dtype, master_weights=master_weights)
    train(network, optimizer, steps=2)
    saved = copy.deepcopy(checkpoint.get_state_dict(network, optimizer, options=options))

    other, other_optimizer = sharded(dtype, master_weights=master_weights)
    of_model, of_optimizer = saved
    checkpoint.set_state_dict(
        other,
        other_optimizer,
        model_state_dict=of_model,
        optim_state_dict=of_optimizer,
        options=options,
    )
    train(network, optimizer, steps=2)
    train(other, other_optimizer, steps=2)
    return {
        "params": [whole(x.parameters()) for x in (network, other)],
        "steps": [state["step"].item() for state in other_optimizer.state.values()],
    }


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_fully_sharded_run_continues_from_a_checkpoint(case):
    for result in scenario.results("fsdp_checkpoint", case):
        assert result["steps"] == [4] * 4
        assert_same_bits(*result["params"])


@scenario(None)
def fsdp_sync(_):
    network, optimizer = sharded(torch.bfloat16)
    train(network, optimizer, steps=1)
    with torch.no_grad():
        for param in network.parameters():
            param.fill_(0.5)
    optimizer.sync_masters_from_model()
    masters = whole(optimizer.master_params())
    train(network, optimizer, steps=1)
    return {"masters": masters}


def test_masters_of_shards_are_synced_from_the_model():
    for result in scenario.results("fsdp_sync", None):
        assert all((master == 0.5).all() for master in result["masters"])


@scenario(*CASES)
def fsdp_compiled(case):
    dtype, master_weights = case
    results = {}
    for name in ("eager", "compiled"):
        network, optimizer = sharded(dtype, master_weights=master_weights, max_grad_norm=CLIP)
        if name == "compiled":
            optimizer.step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
        norms = train(network, optimizer)
        results[name] = [*whole(network.parameters()), *whole(optimizer.master_params()), *norms]
    return results


@pytest.mark.parametrize("case", CASES)
def test_compiled_step_of_a_fully_sharded_model_gives_the_bits_of_eager(case):
    for result in scenario.results("fsdp_compiled", case):
        assert_same_bits(result["compiled"], result["eager"])


# --- DTensors of several placements and meshes, and plain tensors -------------------------------

PLACEMENTS = [
    ((2,), [Replicate()]),
    ((2,), [Shard(0)]),
    ((2,), [Shard(1)]),
    ((1, 2), [Replicate(), Shard(0)]),
    ((2, 1), [Shard(1), Shard(0)]),
    None,  # a plain tensor among the DTensors
]


def parameters_with_gradients(placements=PLACEMENTS):
    """Return a parameter for each placement, with a gradient."""

    def numbers(seed, placement):
        tensor = heavy_tailed((5, 3), torch.float32, CPU, seed)
        if placement is None:
            return tensor
        return distribute_tensor(tensor, init_device_mesh("cpu", placement[0]), placement[1])

    params = []
    for seed, placement in enumerate(placements):
        params.append(Parameter(numbers(seed, placement)))
        params[-1].grad = numbers(50 + seed, placement)
    return params


@scenario(None, CLIP)
def mixed_placements(clip):
    params = parameters_with_gradients()
    optimizer = ampfuse.AdamW(params, max_grad_norm=clip)
    optimizer.step()
    norms = [] if clip is None else [optimizer.grad_norm]
    norms.append(ampfuse.get_total_norm(gradients(params), 2.0))
    norms.append(ampfuse.clip_grad_norm_(params, CLIP, 2.0))
    return {"params": whole(params), "norms": norms, "grads": whole(gradients(params))}


@pytest.mark.parametrize("clip", [None, CLIP])
def test_dtensors_of_all_placements_step_and_are_clipped_together(clip):
    params = parameters_with_gradients([None] * len(PLACEMENTS))
    ampfuse.AdamW(params, max_grad_norm=clip).step()
    expected = exact_norm(gradients(params), 2)
    torch.nn.utils.clip_grad_norm_(params, CLIP)
    for result in scenario.results("mixed_placements", clip):
        assert_near(result["params"], params, steps=1)
        assert [norm.item() for norm in result["norms"]] == pytest.approx(
            [expected] * len(result["norms"]), rel=1e-6
        )
        torch.testing.assert_close(result["grads"], gradients(params))


@scenario(None, CLIP)
def partial_gradient(clip):
    mesh = init_device_mesh("cpu", (2,))
    param = Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    error = ""
    try:
        ampfuse.AdamW([param], max_grad_norm=clip).step()
    except ValueError as refusal:
        error = str(refusal)
    return {"error": error, "params": whole([param])}


@pytest.mark.parametrize("clip", [None, CLIP])
def test_partial_gradients_are_refused_before_any_write(clip):
    for result in scenario.results("partial_gradient", clip):
        assert "expected a sharded or replicated gradient" in result["error"]
        assert_same_bits(result["params"], [torch.ones(4)])


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


def test_rank_without_some_gradients_takes_part_in_all_collectives():
    for result in scenario.results("gradients_of_one_process", None):
        assert not result["skipped"]
        assert result["norm"].item() == pytest.approx((4 + 2) ** 0.5)


@scenario(None)
def clip_frozen(_):
    """Clip the gradient of a parameter that was frozen after backward, beside a DTensor's."""
    mesh = init_device_mesh("cpu", (2,))
    params = [
        Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])),
        Parameter(torch.ones(4)),
    ]
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    params[1].requires_grad = False
    return {"norm": ampfuse.clip_grad_norm_(params, 1.0).item()}


def test_gradients_of_frozen_parameters_are_clipped_beside_dtensors():
    for result in scenario.results("clip_frozen", None):
        assert result["norm"] == pytest.approx(32**0.5)
