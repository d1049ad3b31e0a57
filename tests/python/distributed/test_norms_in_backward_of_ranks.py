"""`norms_in_backward` on four ranks: DDP, fully_shard and tensor parallelism."""

import functools

import ampfuse
import pytest
import torch
from ampfuse.distributed import norms_in_backward
from gradient_reads import assert_same, train
from processes import Scenarios
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.slow
scenario = Scenarios(ranks=4)
DDP = functools.partial(DistributedDataParallel, bucket_cap_mb=0.001)  # several buckets


def ddp(model, **options):
    return DDP(model, **options)


def fsdp(model, **options):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in (model.first, model.sometimes, model.last, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def fsdp_of_replicas(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model, mesh=mesh)
    return model


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WRAPPERS = {
    "DDP": ddp,
    "DDP, gradients in buckets": functools.partial(ddp, gradient_as_bucket_view=True),
    "DDP, static graph": functools.partial(ddp, static_graph=True),
    "DDP, unused parameters": functools.partial(ddp, find_unused_parameters=True),
    "FSDP2": fsdp,
    "FSDP2 in bfloat16": functools.partial(fsdp, mp_policy=BFLOAT16),
    "FSDP2 of replicas": fsdp_of_replicas,
}


CASES = [
    (wrapper, scaled, passes)
    for wrapper in WRAPPERS
    for scaled in (False, True)
    for passes in (1, 2)
]


@scenario(*CASES)
def both(case):
    wrapper, scaled, passes = case
    skips = wrapper == "DDP, unused parameters"
    options = {"scaled": scaled, "passes": passes, "skips": skips, "wrap": WRAPPERS[wrapper]}
    return {"with": train(True, **options), "without": train(False, **options)}


def tensor_parallel():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (4,)), plan)


def sharded():
    return fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))


def clip_by_ours(model):
    ampfuse.clip_grad_norm_(model.parameters(), 0.1)


def double(model):
    for param in model.parameters():
        param.grad.mul_(2)


WRITES = {
    "zeroed in place": (tensor_parallel, False, None),
    "accumulated": (tensor_parallel, True, None),
    "clipped": (sharded, True, clip_by_ours),
    "doubled": (sharded, True, double),
}


@scenario(*WRITES)
def norms_after_writes(kind):
    """Take steps with and without norms of backward, whose DTensors are written in other ways."""
    make, set_to_none, write = WRITES[kind]
    norms = {}
    for with_norms in (False, True):
        torch.manual_seed(0)
        model = make()
        optimizer = ampfuse.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.5)
        if with_norms:
            norms_in_backward(model, optimizer)
        norms[with_norms] = []
        for step in range(3):
            for number in range(1 + (kind == "accumulated")):
                model(torch.ones(2, 8) * (1 + step + number)).square().mean().backward()
            if write is not None:
                write(model)
            optimizer.step()
            norms[with_norms].append(optimizer.grad_norm.item())
            optimizer.zero_grad(set_to_none)
    return {"same": norms[True] == pytest.approx(norms[False], rel=2**-23)}


@scenario(None)
def uneven_inputs(_):
    """Let ranks take different numbers of steps: those that have joined run no backward pass."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 3))
    optimizer = ampfuse.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.1)
    norms_in_backward(torch.compile(model), optimizer)
    with model.join():
        for _ in range(2 + torch.distributed.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    return {"has norms": len(optimizer._backward_norms._records) > 0}


@scenario(None)
def refused(_):
    """Return the errors for models whose gradients may be reduced after backward."""
    inner = nn.Linear(4, 4)
    models = [inner, nn.Sequential(DDP(nn.Linear(4, 4))), DDP(inner).module]
    messages = []
    for model in models:
        with pytest.raises(ValueError, match="reduced after backward") as caught:
            norms_in_backward(model, ampfuse.AdamW(model.parameters()))
        messages.append(str(caught.value))
    return {"messages": messages}


def reduce_in_float32(_, bucket):
    """Return a result in float32, which DDP rounds to the gradients' float16."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer().float() * 2.0**16)
    return future


@scenario(None)
def overflow_by_rounding(_):
    skipped = {}
    for with_norms in (False, True):
        torch.manual_seed(0)
        model = DDP(nn.Linear(4, 3).half())
        optimizer = ampfuse.AdamW(model.parameters())
        scaler = ampfuse.GradScaler("cpu", init_scale=1024.0)
        if with_norms:
            norms_in_backward(model, optimizer, (None, reduce_in_float32))
        else:
            model.register_comm_hook(None, reduce_in_float32)
        scaler.scale(model(torch.ones(2, 4).half()).sum()).backward()
        scaler.step(optimizer)
        skipped[with_norms] = scaler.was_skipped()
    return skipped


@scenario(None)
def compressed(_):
    hook = (None, bf16_compress_hook)
    return {"with": train(True, wrap=DDP, hook=hook), "without": train(False, wrap=DDP, hook=hook)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("ranks"))
    return scenario


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_read_gradients_once_and_get_the_same_norm(outcomes, case):
    wrapper, scaled, _ = case
    for result in outcomes.results("both", case):
        assert_same(result["with"], result["without"])
        assert result["without"]["reads"] == [2, 2, 2]
        # Buckets in which some parameters are unused are read again.
        assert max(result["with"]["reads"]) <= (1 if "unused" not in wrapper else 2)
        assert result["with"]["skipped"] == ([False, True, False] if scaled else [])


def test_norm_is_that_of_gradients_after_a_communication_hook(outcomes):
    for result in outcomes.results("compressed", None):
        assert_same(result["with"], result["without"])
        assert result["with"]["reads"] == [1, 1, 1]


@pytest.mark.parametrize("kind", WRITES)
def test_dtensors_that_were_written_after_backward_are_read_again(outcomes, kind):
    assert all(result["same"] for result in outcomes.results("norms_after_writes", kind))


def test_ranks_may_have_uneven_inputs_and_compiled_models(outcomes):
    assert all(result["has norms"] for result in outcomes.results("uneven_inputs", None))


def test_models_whose_gradients_may_be_reduced_later_are_refused(outcomes):
    for result in outcomes.results("refused", None):
        assert len(result["messages"]) == 3


def test_overflow_is_found_after_the_rounding_of_a_communication_hooks_result(outcomes):
    for result in outcomes.results("overflow_by_rounding", None):
        assert result[True]
        assert result[False]
