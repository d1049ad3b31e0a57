"""`norms_in_backward` on four ranks: DDP, fully_shard and tensor parallelism."""

import functools

import ampfuse
import pytest
import torch
from ampfuse.distributed import norms_in_backward
from gradient_reads import GradientReads, assert_same, train
from on_ranks import on_ranks
from processes import Scenarios
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.slow
scenario = Scenarios(ranks=4)
DDP = functools.partial(DistributedDataParallel, bucket_cap_mb=0.001)  # several buckets


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
    "DDP": DDP,
    "DDP, gradients in buckets": functools.partial(DDP, gradient_as_bucket_view=True),
    "DDP, static graph": functools.partial(DDP, static_graph=True),
    "DDP, unused parameters": functools.partial(DDP, find_unused_parameters=True),
    "FSDP2": fsdp,
    "FSDP2 in bfloat16": functools.partial(fsdp, mp_policy=BFLOAT16),
    "FSDP2 of replicas": fsdp_of_replicas,
}


# How often backward runs before a step matters to each wrapper. Whether losses are scaled does not.
CASES = [(wrapper, True, passes) for wrapper in WRAPPERS for passes in (1, 2)]
CASES += [(wrapper, False, 1) for wrapper in ("DDP", "FSDP2")]


@on_ranks(scenario, *CASES)
def test_gradients_are_read_once_with_the_same_norm(case):
    wrapper, scaled, passes = case
    skips = wrapper == "DDP, unused parameters"
    options = {"scaled": scaled, "passes": passes, "skips": skips, "wrap": WRAPPERS[wrapper]}
    found, expected = train(True, **options), train(False, **options)
    assert_same(found, expected)
    assert expected["reads"] == [2, 2, 2]
    # Buckets in which some parameters are unused are read again.
    assert max(found["reads"]) <= (2 if skips else 1)
    assert found["skipped"] == ([False, True, False] if scaled else [])


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


@on_ranks(scenario, *WRITES)
def test_dtensors_that_are_written_after_backward_are_read_again(kind):
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
    assert norms[True] == pytest.approx(norms[False], rel=2**-23)


@on_ranks(scenario)
def test_uneven_inputs_and_compiled_models_are_served():
    """Let ranks take different numbers of steps: those that have joined run no backward pass."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 3))
    optimizer = ampfuse.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.1)
    norms_in_backward(torch.compile(model), optimizer)
    with model.join():
        for _ in range(2 + torch.distributed.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            with GradientReads(model.parameters()) as counted:
                optimizer.step()
    assert counted.read == counted.size


@on_ranks(scenario)
def test_models_whose_gradients_may_be_reduced_after_backward_are_refused():
    inner = nn.Linear(4, 4)
    for model in (inner, nn.Sequential(DDP(nn.Linear(4, 4))), DDP(inner).module):
        with pytest.raises(ValueError, match="reduced after backward"):
            norms_in_backward(model, ampfuse.AdamW(model.parameters()))


def reduce_in_float32(_, bucket):
    """Return a result in float32, which DDP rounds to the gradients' float16."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer().float() * 2.0**16)
    return future


@on_ranks(scenario)
def test_overflow_by_the_rounding_of_a_hooks_result_is_found():
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
        assert scaler.was_skipped()


@on_ranks(scenario)
def test_norm_is_that_of_gradients_after_a_hook():
    hook = (None, bf16_compress_hook)
    found = train(True, wrap=DDP, hook=hook)
    assert_same(found, train(False, wrap=DDP, hook=hook))
    assert found["reads"] == [1, 1, 1]
