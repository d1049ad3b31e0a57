"""The multi-tensor ops in autograd: gradients, leaves, version counters, inference mode."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from ampfuse import ops

# torch itself warns when forward mode is first used
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

MUTATING = {
    "multi_tensor_unscale": lambda tensors, scalars: ops.multi_tensor_unscale(
        tensors, scalars["found_inf"], scalars["inv_scale"]
    ),
    "multi_tensor_unscale_norm": lambda tensors, scalars: ops.multi_tensor_unscale_norm(
        tensors, scalars["found_inf"], scalars["inv_scale"]
    ),
    "multi_tensor_clip": lambda tensors, scalars: ops.multi_tensor_clip(
        tensors, scalars["total_norm"], 2.5e6
    ),
}
EVERY_MUTATING_OP = pytest.mark.parametrize("op", MUTATING)


def halving(device):
    """Return scalars with which each op halves its tensors."""
    return {
        "found_inf": torch.zeros((), device=device),
        "inv_scale": torch.tensor(0.5, device=device),
        "total_norm": torch.tensor(5e6, device=device),
    }


def is_written(op, name):
    """Return True if an op writes this scalar."""
    return name == "found_inf" and op != "multi_tensor_clip"


def test_backward_through_the_norm_is_not_implemented(device):
    parameter = torch.ones(3, device=device, requires_grad=True)
    result = ops.multi_tensor_norm([parameter])

    with pytest.raises(RuntimeError, match="derivative for ampfuse::multi_tensor_norm is not impl"):
        result.total_norm.backward()
    with pytest.raises(RuntimeError, match="derivative for ampfuse::multi_tensor_norm is not impl"):
        result.norms.sum().backward()


def test_norm_under_no_grad_does_not_require_grad(device):
    parameter = torch.ones(3, device=device, requires_grad=True)

    with torch.no_grad():
        assert not ops.multi_tensor_norm([parameter]).total_norm.requires_grad


def test_forward_mode_through_the_norm_is_not_implemented(device):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, device=device), torch.ones(3, device=device))

        with pytest.raises(NotImplementedError, match="forward AD with ampfuse::multi_tensor_norm"):
            ops.multi_tensor_norm([dual])


@EVERY_MUTATING_OP
def test_tensor_with_a_forward_mode_tangent_is_refused(device, op):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, device=device), torch.ones(3, device=device))

        with pytest.raises(RuntimeError, match=r"forward"):
            MUTATING[op]([dual], halving(device))


READ = [
    ("multi_tensor_unscale", "inv_scale"),
    ("multi_tensor_unscale_norm", "inv_scale"),
    ("multi_tensor_clip", "total_norm"),
]


@pytest.mark.parametrize(("op", "name"), READ)
def test_scalar_that_requires_grad_is_refused_except_under_no_grad(device, op, name):
    tensors, scalars = [torch.full((3,), 4.0, device=device)], halving(device)
    scalars[name].requires_grad_()

    with pytest.raises(RuntimeError, match=f"{op}: {name}: expected a tensor that does not requ"):
        MUTATING[op](tensors, scalars)

    assert tensors[0].tolist() == [4.0] * 3
    with torch.no_grad():
        MUTATING[op](tensors, scalars)
    torch.testing.assert_close(tensors[0], torch.full((3,), 2.0, device=device))


@pytest.mark.parametrize(("op", "name"), READ)
def test_scalar_with_a_forward_mode_tangent_is_refused(device, op, name):
    with forward_ad.dual_level():
        scalars = halving(device)
        scalars[name] = forward_ad.make_dual(scalars[name], torch.ones((), device=device))

        with pytest.raises(RuntimeError, match=f"{op}: {name}: expected a tensor without a forw"):
            MUTATING[op]([torch.ones(3, device=device)], scalars)


@EVERY_MUTATING_OP
def test_leaf_that_requires_grad_is_refused(device, op):
    plain = torch.full((3,), 4.0, device=device)
    leaf = torch.full((3,), 4.0, device=device, requires_grad=True)

    with pytest.raises(RuntimeError, match=rf"{op}: tensors\[1\]: a leaf Variable that requires"):
        MUTATING[op]([plain, leaf], halving(device))

    assert plain.tolist() == leaf.tolist() == [4.0] * 3
    assert plain._version == leaf._version == 0


@EVERY_MUTATING_OP
def test_result_that_requires_grad_is_refused(device, op):
    plain = torch.full((3,), 4.0, device=device)
    result = torch.full((3,), 2.0, device=device, requires_grad=True) * 2

    with pytest.raises(RuntimeError, match=rf"{op}: tensors\[1\]: .*has no derivative"):
        MUTATING[op]([plain, result], halving(device))

    assert plain.tolist() == result.tolist() == [4.0] * 3
    assert plain._version == result._version == 0


@pytest.mark.parametrize("op", ["multi_tensor_unscale", "multi_tensor_unscale_norm"])
def test_flag_that_requires_grad_is_refused(device, op):
    plain, scalars = torch.full((3,), 4.0, device=device), halving(device)
    scalars["found_inf"].requires_grad_()

    with pytest.raises(RuntimeError, match=rf"{op}: found_inf: a leaf Variable that requires"):
        MUTATING[op]([plain], scalars)

    assert plain.tolist() == [4.0] * 3


@EVERY_MUTATING_OP
def test_tensors_that_require_grad_are_accepted_under_no_grad(device, op):
    leaf = torch.full((3,), 4.0, device=device, requires_grad=True)
    result = leaf * 1

    with torch.no_grad():
        MUTATING[op]([leaf, result], halving(device))

    assert leaf.tolist() == result.tolist() == pytest.approx([2.0] * 3, rel=1e-6)
    assert leaf.requires_grad
    assert leaf._version == result._version == 1


@EVERY_MUTATING_OP
def test_version_of_every_written_tensor_rises_by_one(device, op):
    storage = torch.full((4, 6), 4.0, device=device)
    tensors = [torch.ones(8193, device=device), storage[:, ::2], torch.empty(0, device=device)]
    scalars = halving(device)

    MUTATING[op](tensors, scalars)

    assert [tensor._version for tensor in tensors] == [1, 1, 1]
    assert {name: scalar._version for name, scalar in scalars.items()} == {
        name: int(is_written(op, name)) for name in scalars
    }


@EVERY_MUTATING_OP
def test_version_rises_even_at_factor_one(device, op):
    # The factor is on the device, so the host, which counts versions, does not know it.
    tensor = torch.ones(3, device=device)
    ones = {"found_inf": 0.0, "inv_scale": 1.0, "total_norm": 1.0}

    MUTATING[op]([tensor], {name: torch.tensor(x, device=device) for name, x in ones.items()})

    assert tensor.tolist() == [1.0] * 3
    assert tensor._version == 1


@EVERY_MUTATING_OP
def test_backward_through_a_value_saved_before_the_write_is_refused(device, op):
    weight = torch.ones(3, device=device, requires_grad=True)
    saved = torch.full((3,), 4.0, device=device)
    loss = (weight * saved).sum()

    MUTATING[op]([saved], halving(device))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@EVERY_MUTATING_OP
def test_backward_through_another_view_of_a_written_storage_is_refused(device, op):
    weight = torch.ones(2, device=device, requires_grad=True)
    storage = torch.full((4,), 4.0, device=device)
    loss = (weight * storage[2:]).sum()

    MUTATING[op]([storage[:2]], halving(device))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@EVERY_MUTATING_OP
def test_inference_tensors_are_written(device, op):
    with torch.inference_mode():
        tensor = torch.full((3,), 4.0, device=device)
        scalars = halving(device)
        MUTATING[op]([tensor], scalars)

    MUTATING[op]([tensor], scalars)

    assert tensor.tolist() == pytest.approx([1.0] * 3, rel=1e-6)


@EVERY_MUTATING_OP
def test_version_of_a_normal_tensor_rises_in_inference_mode(device, op):
    normal, scalars = torch.full((3,), 4.0, device=device), halving(device)

    with torch.inference_mode():
        MUTATING[op]([normal, torch.ones(3, device=device)], scalars)

    assert normal.tolist() == pytest.approx([2.0] * 3, rel=1e-6)
    assert normal._version == 1


def test_norm_of_inference_tensors_is_computed(device):
    with torch.inference_mode():
        tensor = torch.tensor([3.0, 4.0], device=device)
        assert ops.multi_tensor_norm([tensor]).total_norm.item() == 5.0

    assert ops.multi_tensor_norm([tensor]).total_norm.item() == 5.0
