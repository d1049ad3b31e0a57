"""`norms_in_backward`: steps read gradients once, with the norms that they would have computed."""

import functools
import gc
import warnings
import weakref
from types import SimpleNamespace

import ampfuse
import pytest
import torch
from ampfuse.distributed import _collector, norms_in_backward
from processes import Scenarios
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

scenario = Scenarios(ranks=4)
DDP = functools.partial(DistributedDataParallel, bucket_cap_mb=0.001)  # several buckets


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class GradientReads(TorchDispatchMode):
    """Counts the bytes of gradients that our operators take."""

    def __init__(self, params):
        super().__init__()
        grads = [local(param.grad) for param in params if param.grad is not None]
        self._addresses = {grad.data_ptr() for grad in grads if grad.numel()}
        self.size, self.read = sum(grad.nbytes for grad in grads), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "ampfuse":
            for tensor in tree_iter((args, kwargs or {})):
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in self._addresses:
                    self.read += tensor.nbytes
        return function(*args, **(kwargs or {}))


class Model(nn.Module):
    """Layers of odd sizes, of which one is used only in some passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sometimes = nn.Linear(7, 30), nn.Linear(30, 30)
        self.last = nn.Linear(30, 3)

    def forward(self, inputs, skips=False):
        hidden = self.first(inputs).relu()
        return self.last(hidden if skips else self.sometimes(hidden))


def plain(model):
    return model


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
    "plain": plain,
    "DDP": ddp,
    "DDP, gradients in buckets": functools.partial(ddp, gradient_as_bucket_view=True),
    "DDP, static graph": functools.partial(ddp, static_graph=True),
    "DDP, unused parameters": functools.partial(ddp, find_unused_parameters=True),
    "FSDP2": fsdp,
    "FSDP2 in bfloat16": functools.partial(fsdp, mp_policy=BFLOAT16),
    "FSDP2 of replicas": fsdp_of_replicas,
}


def train(wrapper, with_norms, *, scaled=True, passes=1, skips=False, hook=None, between=None):
    """Take three steps, the second with an overflow; return what happened, and reads per step."""
    model = WRAPPERS[wrapper](Model())
    optimizer = ampfuse.AdamW(model.parameters(), lr=0.05, max_grad_norm=0.5)
    scaler = ampfuse.GradScaler("cpu", init_scale=256.0, enabled=scaled, history=3)
    handle = norms_in_backward(model, optimizer, hook) if with_norms else None
    if hook is not None and not with_norms:
        model.register_comm_hook(*hook)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    norms, reads = [], []
    for step in range(3):
        for number in range(passes):
            inputs = torch.linspace(-1, 2, 28).reshape(4, 7) * (1 + rank + step + number)
            loss = model(inputs, skips).square().mean()
            overflows = scaled and step == 1 and rank == 0
            scaler.scale(loss * float("inf") if overflows else loss).backward()
        if between is not None:
            between(model)
        with GradientReads(model.parameters()) as counted:
            scaler.step(optimizer)
        scaler.update()
        norms.append(optimizer.grad_norm.item())
        reads.append(counted.read / counted.size)
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    params = [local(param.detach()).clone() for param in model.parameters()]
    skipped = [record.skipped for record in scaler.history()]
    return {"params": params, "norms": norms, "reads": reads, "skipped": skipped}


def assert_same(found, expected):
    assert found["skipped"] == expected["skipped"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=2**-23, nan_ok=True)
    for mine, other in zip(found["params"], expected["params"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


CASES = [
    (wrapper, scaled, passes)
    for wrapper in WRAPPERS
    for scaled in (False, True)
    for passes in (1, 2)
]


@scenario(*[case for case in CASES if case[0] != "plain"])
def both(case):
    wrapper, scaled, passes = case
    skips = wrapper == "DDP, unused parameters"
    options = {"scaled": scaled, "passes": passes, "skips": skips}
    return {"with": train(wrapper, True, **options), "without": train(wrapper, False, **options)}


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
    return {"with": train("DDP", True, hook=hook), "without": train("DDP", False, hook=hook)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("ranks"))
    return scenario


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "plain"], ids=str)
def test_ranks_read_gradients_once_and_get_the_same_norm(outcomes, case):
    wrapper, scaled, _ = case
    for result in outcomes.results("both", case):
        assert_same(result["with"], result["without"])
        assert result["without"]["reads"] == [2, 2, 2]
        # Buckets in which some parameters are unused are read again.
        assert max(result["with"]["reads"]) <= (1 if "unused" not in wrapper else 2)
        assert result["with"]["skipped"] == ([False, True, False] if scaled else [])


@pytest.mark.slow
def test_norm_is_that_of_gradients_after_a_communication_hook(outcomes):
    for result in outcomes.results("compressed", None):
        assert_same(result["with"], result["without"])
        assert result["with"]["reads"] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITES)
def test_dtensors_that_were_written_after_backward_are_read_again(outcomes, kind):
    assert all(result["same"] for result in outcomes.results("norms_after_writes", kind))


@pytest.mark.slow
def test_ranks_may_have_uneven_inputs_and_compiled_models(outcomes):
    assert all(result["has norms"] for result in outcomes.results("uneven_inputs", None))


@pytest.mark.slow
def test_models_whose_gradients_may_be_reduced_later_are_refused(outcomes):
    for result in outcomes.results("refused", None):
        assert len(result["messages"]) == 3


@pytest.mark.slow
def test_overflow_is_found_after_the_rounding_of_a_communication_hooks_result(outcomes):
    for result in outcomes.results("overflow_by_rounding", None):
        assert result[True]
        assert result[False]


@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "plain"], ids=str)
@pytest.mark.parametrize("bytes_at_once", [2**24, 1000])
def test_one_process_reads_gradients_once(case, bytes_at_once, monkeypatch):
    monkeypatch.setattr(_collector, "BYTES_AT_ONCE", bytes_at_once)
    wrapper, scaled, passes = case
    found = train(wrapper, True, scaled=scaled, passes=passes)
    assert_same(found, train(wrapper, False, scaled=scaled, passes=passes))
    assert found["reads"] == [1, 1, 1]


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_were_written_after_backward_are_read_again(scaled):
    def clamp(model):
        model.last.bias.grad.clamp_(-1e-2, 1e-2)

    found = train("plain", True, scaled=scaled, between=clamp)
    assert_same(found, train("plain", False, scaled=scaled, between=clamp))
    assert found["reads"] == [2, 2, 2]


def test_replaced_gradients_are_read(monkeypatch):
    monkeypatch.setattr(_collector, "BYTES_AT_ONCE", 1)  # a record for each gradient

    def replace(model):
        model.last.bias.grad = model.last.bias.grad * 2

    found = train("plain", True, between=replace)
    assert_same(found, train("plain", False, between=replace))
    assert 1 < found["reads"][0] < 1.1


def test_backward_pass_after_one_that_raised_is_inspected():
    model = Model()
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    norms_in_backward(model, optimizer)
    inputs = torch.ones(1, 7, requires_grad=True)
    hidden = model.first(inputs)
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.last(hidden).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(1, 7)).sum().backward()
    with GradientReads(model.parameters()) as counted:
        optimizer.step()
    assert counted.read == counted.size


def test_gradients_are_freed_as_without_norms():
    model = Model()
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    norms_in_backward(model, optimizer)
    model(torch.ones(1, 7)).sum().backward()
    records = optimizer._backward_norms._records
    optimizer.zero_grad()
    assert records
    assert all(record.unwritten() is None for record in records)


def test_groups_with_limits_of_their_own_are_read_once():
    model = Model()
    groups = [{"params": layer.parameters(), "max_grad_norm": 0.5} for layer in model.children()]
    optimizer = ampfuse.AdamW(groups)
    norms_in_backward(model, optimizer)
    for _ in range(2):  # the first step checks the arguments of all groups before it writes any
        model(torch.ones(1, 7)).sum().backward()
        with GradientReads(model.parameters()) as counted:
            optimizer.step()
        optimizer.zero_grad()
    assert counted.read == counted.size


def test_graph_of_a_backward_pass_is_freed():
    model = Model()
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    norms_in_backward(model, optimizer)
    inputs = torch.ones(1, 7)
    freed = weakref.ref(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of create_graph
        model(inputs).square().sum().backward(create_graph=True)
    optimizer.step()
    del inputs
    optimizer.zero_grad()
    gc.collect()
    assert freed() is None


def test_wrapped_optimizer_gets_the_norms_of_the_one_inside():
    model = Model()
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    norms = norms_in_backward(model, SimpleNamespace(optimizer=optimizer))
    assert optimizer._backward_norms is not None
    again = norms_in_backward(model, optimizer)
    norms.remove()
    assert optimizer._backward_norms is not None
    again.remove()
    assert optimizer._backward_norms is None


def test_overflow_report_names_parameters_in_their_order():
    model = Model()
    optimizer, scaler = ampfuse.AdamW(model.parameters()), ampfuse.GradScaler("cpu")
    norms_in_backward(model, optimizer)
    scaler.scale(model(torch.ones(1, 7)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert scaler.overflow_report(model) == [name for name, _ in model.named_parameters()]


def test_removed_norms_are_computed_in_the_step_again():
    model = Model()
    optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    norms_in_backward(model, optimizer).remove()
    model(torch.ones(1, 7)).sum().backward()
    with GradientReads(model.parameters()) as counted:
        optimizer.step()
    assert counted.read == 2 * counted.size


def test_other_optimizers_are_refused():
    model = Model()
    with pytest.raises(TypeError, match=r"optimizer: expected ampfuse\.Adam or AdamW, got SGD"):
        norms_in_backward(model, torch.optim.SGD(model.parameters()))


def test_comm_hook_of_a_model_that_is_not_ddps_is_refused():
    model = Model()
    with pytest.raises(ValueError, match="comm_hook: expected None"):
        norms_in_backward(model, ampfuse.AdamW(model.parameters()), (None, bf16_compress_hook))
