"""Tests of logits that are not plain tensors: DTensors, wrappers, layouts without strides."""

import ampfuse
import pytest
import torch
import torch.distributed as dist
from cross_entropy_reference import results
from cross_entropy_samples import batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor


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
def test_dtensor_logits_are_refused_and_not_overwritten(device, mesh, placements):
    """torch has no sharding rule for the operator, so it cannot compute a loss of one shard."""
    logits, target = (
        DTensor.from_local(local, mesh, [placement])
        for local, placement in zip(batch(device, leaf=False), placements, strict=True)
    )
    before = logits.to_local().clone()
    with pytest.raises(NotImplementedError, match="cross_entropy_: input"):
        ampfuse.cross_entropy_(logits, target)
    assert torch.equal(logits.to_local(), before)
    for requires_grad in (False, True):
        logits.requires_grad_(requires_grad)
        for reduction in ("none", "mean"):
            with pytest.raises(NotImplementedError, match=r"entropy_forward.* sharding strategy"):
                ampfuse.cross_entropy(logits, target, reduction=reduction)


@pytest.mark.parametrize("name", ["target", "weight", "grad_scale"])
def test_dtensors_beside_plain_logits_are_refused(device, mesh, name):
    logits, target = batch(device, leaf=False)
    plain = {"target": target, "weight": torch.ones(50, device=device)}
    plain["grad_scale"] = torch.ones((), device=device)
    arguments = {"target": target, name: DTensor.from_local(plain[name], mesh, [Replicate()])}
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        ampfuse.cross_entropy(logits, **arguments)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_wrapper_gives_the_results_of_its_inner_tensors(device, reduction):
    logits, target = batch(device, leaf=False)
    wrapper = TwoTensor(logits, -logits).requires_grad_()

    loss = ampfuse.cross_entropy(wrapper, target, reduction=reduction)
    loss.sum().backward()

    for inner, found in ((logits, (loss.a, wrapper.grad.a)), (-logits, (loss.b, wrapper.grad.b))):
        inner = inner.detach().requires_grad_()
        expected = results(functional.cross_entropy, inner, target, reduction=reduction)
        torch.testing.assert_close(found, expected)


class Named(torch.Tensor):
    """A subclass, as libraries define it to set attributes on tensors."""


def test_loss_of_a_subclass_without_torch_dispatch_has_its_type(device):
    logits, target = batch(device, leaf=False)
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
    logits, target = batch(device, leaf=False)
    with pytest.raises(ValueError, match="expected a strided tensor"):
        ampfuse.cross_entropy(layout(logits), target)
