"""GradScaler on two ranks, in both languages: all ranks skip a step, or no rank does."""

from functools import partial

import ampfuse
import pytest
import torch
import torch.distributed as dist
from processes import Scenarios
from scaler_languages import LANGUAGES, step_by
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

pytestmark = pytest.mark.slow

scenario = Scenarios()
PYTHON, CPP = LANGUAGES["Python"], LANGUAGES["C++"]
OPTIMIZERS = {
    "ours": (PYTHON, ampfuse.AdamW),
    "ours, clipping": (PYTHON, partial(ampfuse.AdamW, max_grad_norm=1.0)),
    "fused": (PYTHON, partial(torch.optim.AdamW, fused=True)),
    "SGD": (PYTHON, partial(torch.optim.SGD, lr=0.1)),
    "C++ AdamW": (CPP, CPP.adamw),
    "C++ AdamW, clipping": (CPP, partial(CPP.adamw, max_grad_norm=1.0)),
    "C++ SGD": (CPP, partial(CPP.sgd, lr=0.1)),
}
# The optimizer, and whether the program calls unscale_().
CASES = [(name, False) for name in OPTIMIZERS] + [("ours", True), ("C++ AdamW", True)]


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("processes"))


def made(name, params, **options):
    """Return an optimizer and a scaler in its language, with the group of all ranks."""
    language, optimizer = OPTIMIZERS[name]
    group = dist.group.WORLD
    scaler = language.scaler(torch.device("cpu"), 8.0, process_group=group, **options)
    return optimizer(params), scaler


def sharded(*sizes, **options):
    """Return a layer of which each rank holds a shard."""
    torch.manual_seed(0)
    network = torch.nn.Linear(*sizes, **options)
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    return network


@scenario(*CASES)
def one_overflows(case):
    """Each rank has a parameter of its own; rank 1 has an infinite gradient."""
    name, unscale = case
    param = Parameter(torch.ones(2))
    optimizer, scaler = made(name, [param])
    scaler.scale(param.sum()).backward()
    if dist.get_rank() == 1:
        param.grad[0] = torch.inf
    step_by(scaler, optimizer, unscale=unscale)
    return {"param": param.tolist(), "scale": scaler.get_scale(), "skipped": scaler.was_skipped()}


@pytest.mark.parametrize("case", CASES)
def test_step_is_skipped_on_every_rank_when_one_overflows(case):
    for result in scenario.results("one_overflows", case):
        assert (result["scale"], result["skipped"], result["param"]) == (4.0, True, [1.0, 1.0])


@scenario("SGD", "C++ SGD")
def no_gradients_here(name):
    """Rank 1 has no gradients, but still takes part in the decision to skip."""
    param = Parameter(torch.ones(2))
    optimizer, scaler = made(name, [param], allow_no_grads=True)
    loss = scaler.scale(param.sum())
    if dist.get_rank() == 0:
        loss.backward()
        param.grad[0] = torch.nan
    step_by(scaler, optimizer)
    return {"scale": scaler.get_scale()}


@pytest.mark.parametrize("name", ["SGD", "C++ SGD"])
def test_a_rank_without_gradients_backs_off_when_another_overflows(name):
    assert [result["scale"] for result in scenario.results("no_gradients_here", name)] == [4, 4]


FSDP = [("ours", True), ("fused", False), ("SGD", False)]


@scenario(*FSDP)
def fsdp(case):
    name, unscale = case
    network = sharded(4, 6)
    optimizer = OPTIMIZERS[name][1](network.parameters())
    scaler = ampfuse.GradScaler("cpu", 8.0)
    scales, moved = [], []
    for overflow in (False, True):
        optimizer.zero_grad()
        scaler.scale(network(torch.ones(1, 4)).sum()).backward()
        if overflow and dist.get_rank() == 1:
            network.weight.grad.to_local()[0, 0] = torch.inf
        before = network.weight.to_local().clone()
        step_by(scaler, optimizer, unscale=unscale)
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, network.weight.to_local()))
    return {"scales": scales, "moved": moved, "report": scaler.overflow_report(network)}


@pytest.mark.parametrize("case", FSDP)
def test_every_shard_of_a_model_skips_when_one_overflows(case):
    for rank, result in enumerate(scenario.results("fsdp", case)):
        assert result["scales"] == [8.0, 4.0]
        assert result["moved"] == [True, False]
        assert result["report"] == (["weight"] if rank == 1 else [])


@scenario(None)
def norm_of_shards(_):
    network = sharded(4, 6)
    optimizer = ampfuse.AdamW(network.parameters(), max_grad_norm=0.1)
    scaler = torch.amp.GradScaler("cpu", 8.0)
    scaler.scale(network(torch.arange(4.0)).square().sum()).backward()
    parts = [param.grad.full_tensor() / 8 for param in network.parameters()]
    scaler.step(optimizer)
    return {"told": optimizer.grad_norm.item(), "exact": torch.nn.utils.get_total_norm(parts)}


def test_grad_norm_of_a_sharded_model_covers_all_shards_with_torchs_scaler():
    """distributed/test_sharded.py compares norms with our scaler."""
    for result in scenario.results("norm_of_shards", None):
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
def test_norm_is_computed_after_gradients_are_all_reduced(name):
    for result in scenario.results("averaged_after_unscaling", name):
        assert result["norm"] == pytest.approx(55.0)


OUTLIERS = [("ours", "none"), ("ours", "torch's"), ("ours", "scaler's"), ("SGD", "none")]


@scenario(*OUTLIERS)
def outlier_of_shards(case):
    """Give a sharded model an outlier that only one rank has in its shard."""
    name, clip = case
    model = sharded(4, 2, bias=False)
    optimizer = OPTIMIZERS[name][1](list(model.parameters()))
    scaler = ampfuse.GradScaler("cpu", 8.0, skip_outliers=6.0, history=100)
    for number in range(65):
        factors = [1.0, 1.0 + number % 3] if number < 64 else [100.0, 1.0]
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(1, 4)) * torch.tensor(factors)).sum()).backward()
        if clip == "torch's":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif clip == "scaler's":
            scaler.clip_grad_norm_(optimizer, 1.0)
        step_by(scaler, optimizer)
    norms = [record.norm for record in scaler.history()]
    return {"skipped": scaler.was_skipped(), "norms": norms, "scale": scaler.get_scale()}


@pytest.mark.parametrize("case", OUTLIERS)
def test_outlier_in_one_shard_is_skipped_on_all_ranks(case):
    expected = [2 * (1 + (1.0 + number % 3) ** 2) ** 0.5 for number in range(64)]
    for result in scenario.results("outlier_of_shards", case):
        assert result["skipped"]
        assert result["norms"] == pytest.approx([*expected, 2 * (100.0**2 + 1) ** 0.5])
        assert result["scale"] == 8


@scenario(None)
def gradient_of_one_rank(_):
    param = Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    scaler = ampfuse.GradScaler("cpu", 8.0, skip_outliers=6.0, history=1, allow_no_grads=True)
    scaler.scale_tensor()
    if dist.get_rank() == 0:
        param.grad = torch.ones_like(param)
    step_by(scaler, ampfuse.AdamW([param]))
    return {"skipped": scaler.was_skipped()}


def test_rank_without_gradients_takes_part_in_the_norm():
    results = scenario.results("gradient_of_one_rank", None)
    assert [result["skipped"] for result in results] == [False] * 2


@scenario(None)
def large_scale(_):
    """The scale is so large that squares of scaled gradients exceed float32."""
    model = sharded(64, 64, bias=False)
    optimizer = ampfuse.AdamW(model.parameters())
    scaler = ampfuse.GradScaler("cpu", 2.0**124, skip_outliers=6.0, history=80)
    for _ in range(70):
        optimizer.zero_grad()
        step_by(scaler, optimizer, (model(torch.ones(1, 64)) * 2).sum())
    return {"records": [tuple(record)[1:] for record in scaler.history()]}


def test_norm_of_scaled_shards_may_exceed_float32():
    for result in scenario.results("large_scale", None):
        assert result["records"] == [(False, pytest.approx(128.0))] * 70


def test_outliers_and_a_process_group_are_not_combined():
    message = "skip_outliers: expected None with a process_group"
    with pytest.raises(ValueError, match=message):
        ampfuse.GradScaler("cpu", skip_outliers=6.0, process_group=object())
    scaler = ampfuse.GradScaler("cpu", process_group=object())
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict(ampfuse.GradScaler("cpu", 4.0, skip_outliers=6.0).state_dict())
    assert scaler.state_dict() == before
