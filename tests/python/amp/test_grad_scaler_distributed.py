"""GradScaler on two ranks, in both languages: all ranks skip a step, or no rank does."""

import ampfuse
import pytest
import torch
import torch.distributed as dist
from processes import Scenarios
from scaler_languages import LANGUAGES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

pytestmark = pytest.mark.slow

scenario = Scenarios()
OPTIMIZERS = ("ours", "ours, clipping", "fused", "SGD")
CPP = LANGUAGES["C++"]
CPP_OPTIMIZERS = {
    "C++ AdamW": lambda params: CPP.adamw(params),
    "C++ AdamW, clipping": lambda params: CPP.adamw(params, max_grad_norm=1.0),
    "C++ SGD": lambda params: CPP.sgd(params, lr=0.1),
}
CPU = torch.device("cpu")
CASES = [(name, u) for name in (*OPTIMIZERS, *CPP_OPTIMIZERS) for u in (False, True)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Play all scenarios; return a function from a scenario to the result of each rank."""
    scenario.play(tmp_path_factory.mktemp("processes"))
    return scenario.results


def make(name, params):
    if name in CPP_OPTIMIZERS:
        return CPP_OPTIMIZERS[name](params)
    if name == "SGD":
        return torch.optim.SGD(params, lr=0.1)
    if name == "fused":
        return torch.optim.AdamW(params, fused=True)
    return ampfuse.AdamW(params, max_grad_norm=1.0 if "clipping" in name else None)


def scaler_for(name, **options):
    """Return a scaler in the language of the optimizer, with the group of all ranks."""
    language = CPP if name in CPP_OPTIMIZERS else LANGUAGES["Python"]
    return language.scaler(CPU, 8.0, process_group=dist.group.WORLD, **options)


@scenario(*CASES)
def one_overflows(case):
    """Each rank has a parameter of its own; rank 1 has an infinite gradient."""
    name, unscale = case
    param = Parameter(torch.ones(2))
    optimizer = make(name, [param])
    scaler = scaler_for(name)
    scaler.scale(param.sum()).backward()
    if dist.get_rank() == 1:
        param.grad[0] = float("inf")
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return {
        "moved": not torch.equal(param.detach(), torch.ones(2)),
        "scale": scaler.get_scale(),
        "skipped": scaler.was_skipped(),
    }


@pytest.mark.parametrize("case", CASES)
def test_step_is_skipped_on_every_rank_when_one_overflows(outcomes, case):
    for result in outcomes("one_overflows", case):
        assert result["scale"] == 4.0
        assert result["skipped"]
        assert not result["moved"]


@scenario("SGD", "C++ SGD")
def no_gradients_here(name):
    """Rank 1 has no gradients, but still takes part in the decision to skip."""
    param = Parameter(torch.ones(2))
    optimizer = make(name, [param])
    scaler = scaler_for(name, allow_no_grads=True)
    loss = scaler.scale(param.sum())
    if dist.get_rank() == 0:
        loss.backward()
        param.grad[0] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    return {"scale": scaler.get_scale()}


@pytest.mark.parametrize("name", ["SGD", "C++ SGD"])
def test_a_rank_without_gradients_backs_off_when_another_overflows(outcomes, name):
    assert [result["scale"] for result in outcomes("no_gradients_here", name)] == [4.0, 4.0]


@scenario(*((name, unscale) for name in OPTIMIZERS for unscale in (False, True)))
def fsdp(case):
    name, unscale = case
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 6)
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    optimizer = make(name, network.parameters())
    scaler = ampfuse.GradScaler("cpu", 8.0)
    scales, moved = [], []
    for overflow in (False, True):
        optimizer.zero_grad()
        scaler.scale(network(torch.ones(1, 4)).sum()).backward()
        if overflow and dist.get_rank() == 1:
            network.weight.grad.to_local()[0, 0] = float("inf")
        before = network.weight.to_local().clone()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, network.weight.to_local()))
    report = scaler.overflow_report(network)
    return {"scales": scales, "moved": moved, "report": report, "rank": dist.get_rank()}


@pytest.mark.parametrize("case", [(n, u) for n in OPTIMIZERS for u in (False, True)])
def test_every_shard_of_a_model_skips_when_one_overflows(outcomes, case):
    for result in outcomes("fsdp", case):
        assert result["scales"] == [8.0, 4.0]
        assert result["moved"] == [True, False]
        assert result["report"] == (["weight"] if result["rank"] == 1 else [])


@scenario("our scaler", "torch's")
def norm_of_shards(name):
    """In a fully sharded model, each rank holds a shard of each gradient."""
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 6)
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    optimizer = ampfuse.AdamW(network.parameters(), max_grad_norm=0.1)
    scaler = (torch.amp if name == "torch's" else ampfuse).GradScaler("cpu", 8.0)
    scaler.scale(network(torch.arange(4.0)).square().sum()).backward()
    parts = [param.grad.full_tensor() / 8 for param in network.parameters()]
    scaler.step(optimizer)
    return {"told": optimizer.grad_norm.item(), "exact": torch.nn.utils.get_total_norm(parts)}


@pytest.mark.parametrize("name", ["our scaler", "torch's"])
def test_grad_norm_of_a_sharded_model_covers_all_shards(outcomes, name):
    for result in outcomes("norm_of_shards", name):
        assert result["told"] == pytest.approx(result["exact"].item())


@scenario("clip_grad_norm_", "AdamW")
def averaged_after_unscaling(name):
    """Replicas unscale, then all-reduce gradients, which does not move version counters."""
    param = Parameter(torch.zeros(2))
    optimizer = ampfuse.AdamW([param], max_grad_norm=1.0)
    scaler = ampfuse.GradScaler("cpu", 8.0)
    scaler.scale((param * torch.tensor([3.0, 4.0])).sum() * 10 ** dist.get_rank()).backward()
    scaler.unscale_(optimizer)
    dist.all_reduce(param.grad)
    if name == "clip_grad_norm_":
        return {"norm": ampfuse.clip_grad_norm_([param], 1.0).item()}
    scaler.step(optimizer)
    return {"norm": optimizer.grad_norm.item()}


@pytest.mark.parametrize("name", ["clip_grad_norm_", "AdamW"])
def test_norm_is_computed_after_gradients_are_all_reduced(outcomes, name):
    for result in outcomes("averaged_after_unscaling", name):
        assert result["norm"] == pytest.approx(55.0)


OUTLIERS = [(name, clip) for name in ("ours", "SGD") for clip in ("none", "torch's", "scaler's")]


@scenario(*OUTLIERS)
def outlier_of_shards(case):
    """Give a sharded model an outlier that only one rank has in its shard."""
    name, clip = case
    model = torch.nn.Linear(4, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = make(name, list(model.parameters()))
    scaler = ampfuse.GradScaler("cpu", 8.0, skip_outliers=6.0, history=100)

    def step(factors):
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(1, 4)) * torch.tensor(factors)).sum()).backward()
        if clip == "torch's":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif clip == "scaler's":
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    for number in range(64):
        step([1.0, 1.0 + number % 3])
    step([100.0, 1.0])
    return {
        "skipped": scaler.was_skipped(),
        "norms": [record.norm for record in scaler.history()],
        "scale": scaler.get_scale(),
    }


@pytest.mark.parametrize("case", OUTLIERS)
def test_outlier_in_one_shard_is_skipped_on_all_ranks(outcomes, case):
    results = outcomes("outlier_of_shards", case)
    expected = [2 * (1 + (1.0 + number % 3) ** 2) ** 0.5 for number in range(64)]
    for result in results:
        assert result["skipped"]
        assert result["norms"] == pytest.approx([*expected, 2 * (100.0**2 + 1) ** 0.5])
        assert result["scale"] == 8


@scenario("one rank")
def gradient_of_one_rank(_):
    param = Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    scaler = ampfuse.GradScaler("cpu", 8.0, skip_outliers=6.0, history=1, allow_no_grads=True)
    optimizer = ampfuse.AdamW([param])
    scaler.scale_tensor()
    if dist.get_rank() == 0:
        param.grad = torch.ones_like(param)
    scaler.step(optimizer)
    scaler.update()
    return {"skipped": scaler.was_skipped()}


def test_rank_without_gradients_takes_part_in_the_norm(outcomes):
    assert [one["skipped"] for one in outcomes("gradient_of_one_rank", "one rank")] == [False] * 2


@scenario("2 ** 124")
def large_scale(_):
    model = torch.nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = ampfuse.AdamW(model.parameters())
    scaler = ampfuse.GradScaler("cpu", 2.0**124, skip_outliers=6.0, history=80)
    for _ in range(70):
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(1, 64)) * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"records": [tuple(record)[1:] for record in scaler.history()]}


def test_norm_of_scaled_shards_may_exceed_float32(outcomes):
    for result in outcomes("large_scale", "2 ** 124"):
        assert result["records"] == [(False, pytest.approx(128.0))] * 70


def test_outliers_and_a_process_group_are_not_combined():
    with pytest.raises(ValueError, match="skip_outliers: expected None with a process_group"):
        ampfuse.GradScaler("cpu", skip_outliers=6.0, process_group=object())
