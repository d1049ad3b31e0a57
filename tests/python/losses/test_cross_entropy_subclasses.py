"""Tests of logits that are not plain tensors: DTensors, wrappers, layouts without strides."""

import ampfuse
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor


def batch(device, rows=6, classes=50):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator).to(device)
    return logits, torch.randint(classes, (rows,), generator=generator).to(device)


@pytest.fixture
def mesh(device):
    """Yield a mesh of two ranks. Only one rank exists, and its process group sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh(device.type, (2,))
    dist.destroy_process_group()


PLACEMENTS = {
    "rows": (Shard(0), Shard(0)),
    "classes": (Shard(1), Replicate()),
    "nothing": (Replicate(), Replicate()),
}


@pytest.mark.parametrize("placements", PLACEMENTS.values(), ids=list(PLACEMENTS))
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dtensor_logits_are_refused(device, mesh, placements, reduction, requires_grad):
    """torch has no sharding rule for the operator, so it cannot compute a loss of one shard."""
    logits, target = (
        DTensor.from_local(local, mesh, [placement])
        for local, placement in zip(batch(device), placements, strict=True)
    )
    logits.requires_grad_(requires_grad)
    with pytest.raises(NotImplementedError, match=r"cross_entropy_forward.* sharding strategy"):
        ampfuse.cross_entropy(logits, target, reduction=reduction)


def test_in_place_dtensor_logits_are_refused_and_not_overwritten(device, mesh):
    logits, target = (DTensor.from_local(x, mesh, [Shard(0)]) for x in batch(device))
    before = logits.to_local().clone()
    with pytest.raises(NotImplementedError, match="cross_entropy_: input"):
        ampfuse.cross_entropy_(logits, target)
    assert torch.equal(logits.to_local(), before)


@pytest.mark.parametrize("name", ["target", "weight", "grad_scale"])
def test_dtensors_beside_plain_logits_are_refused(device, mesh, name):
    logits, target = batch(device)
    plain = {"target": target, "weight": torch.ones(50, device=device)}
    plain["grad_scale"] = torch.ones((), device=device)
    arguments = {"target": target, name: DTensor.from_local(plain[name], mesh, [Replicate()])}
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        ampfuse.cross_entropy(logits, **arguments)


def test_losses_of_local_row_shards_add_up_with_one_denominator(device, mesh):
    whole, target = batch(device, rows=8)
    whole.requires_grad_()
    expected = functional.cross_entropy(whole, target)
    expected.backward()

    losses, grads = [], []
    for x, t in zip(whole.detach().chunk(2), target.chunk(2), strict=True):  # of each rank
        logits = DTensor.from_local(x, mesh, [Shard(0)]).requires_grad_()
        loss = ampfuse.cross_entropy(logits.to_local(), t, denominator=len(target))
        loss.backward()
        assert logits.grad.placements == (Shard(0),)
        losses.append(loss)
        grads.append(logits.grad.to_local())

    torch.testing.assert_close(sum(losses), expected)
    torch.testing.assert_close(torch.cat(grads), whole.grad)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_wrapper_gives_the_results_of_its_inner_tensors(device, reduction):
    logits, target = batch(device)
    wrapper = TwoTensor(logits, -logits).requires_grad_()

    loss = ampfuse.cross_entropy(wrapper, target, reduction=reduction)
    loss.sum().backward()

    for inner, of_loss, of_grad in (
        (logits, loss.a, wrapper.grad.a),
        (-logits, loss.b, wrapper.grad.b),
    ):
        inner = inner.detach().requires_grad_()
        expected = functional.cross_entropy(inner, target, reduction=reduction)
        expected.sum().backward()
        torch.testing.assert_close(of_loss, expected.detach())
        torch.testing.assert_close(of_grad, inner.grad)


class Named(torch.Tensor):
    """A subclass, as libraries define it to set attributes on tensors."""


def test_loss_of_a_subclass_without_torch_dispatch_has_its_type(device):
    logits, target = batch(device)
    loss = ampfuse.cross_entropy(logits.as_subclass(Named), target)
    assert type(loss) is Named
    assert torch.equal(loss.as_subclass(torch.Tensor), ampfuse.cross_entropy(logits, target))


def test_meta_tensors_give_results_of_the_right_shape_and_dtype():
    logits = torch.empty(6, 50, dtype=torch.bfloat16, device="meta", requires_grad=True)
    target = torch.empty(6, dtype=torch.long, device="meta")
    loss, metrics = ampfuse.cross_entropy(logits, target, return_metrics=True)
    loss.backward()
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert [x.shape for x in metrics] == [(6,)] * 4
    assert (logits.grad.shape, logits.grad.dtype) == ((6, 50), torch.bfloat16)


LAYOUTS = {
    "sparse": lambda logits: logits.to_sparse(),
    "sparse rows": lambda logits: logits.to_sparse_csr(),
    "nested": lambda logits: torch.nested.nested_tensor([logits[:2], logits[2:]]),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors).*:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_layouts_without_strides_are_refused(device, layout):
    logits, target = batch(device)
    with pytest.raises(ValueError, match="expected a strided tensor"):
        ampfuse.cross_entropy(layout(logits), target)
