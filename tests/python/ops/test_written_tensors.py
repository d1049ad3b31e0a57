"""Tensors that the ops write: autograd, version counters, and memory that they share.

Tensors that autograd makes the ops refuse are in test_list_errors.py.
"""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from ampfuse import ops

# Each op, and the list that it halves in these tests.
WRITTEN = [
    ("multi_tensor_unscale", "tensors"),
    ("multi_tensor_unscale_norm", "tensors"),
    ("multi_tensor_clip", "tensors"),
    ("fused_adam", "params"),
    ("fused_adam", "grads"),
]
EVERY_WRITTEN_LIST = pytest.mark.parametrize(("op", "name"), WRITTEN)

HALVING = {"found_inf": 0.0, "inv_scale": 0.5, "total_norm": 5e6, "lr": 0.5, "grad_scale": 2.0}
KEEPING = {"found_inf": 0.0, "inv_scale": 1.0, "total_norm": 1.0, "lr": 0.0, "grad_scale": 1.0}


def scalars(device, values=HALVING):
    return {name: torch.tensor(value, device=device) for name, value in values.items()}


def adam(params, grads, **options):
    """Take a step which halves the parameters if gradients are zero and the rate is 0.5."""
    columns = [[x.new_zeros(x.shape) for x in params] for _ in range(2)]
    steps = [torch.zeros((), device=param.device) for param in params]
    options |= {"beta1": 0.9, "beta2": 0.999, "weight_decay": 1.0, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
    ops.fused_adam(params, grads, *columns, [], steps, **options)


def write(op, name, tensors, given):
    """Call an op with these scalars, so that it writes `tensors`."""
    if op == "multi_tensor_clip":
        ops.multi_tensor_clip(tensors, given["total_norm"], 2.5e6)
    elif op == "fused_adam":
        signals = {key: given[key] for key in ("lr", "found_inf", "grad_scale")}
        lists = [tensors, [x.new_zeros(x.shape) for x in tensors]]
        lists = lists if name == "params" else lists[::-1]
        adam(*lists, write_back_grads=name == "grads", **signals)
    else:
        getattr(ops, op)(tensors, given["found_inf"], given["inv_scale"])


def halve(op, name, tensors):
    write(op, name, tensors, scalars(tensors[0].device))


def test_norm_has_no_derivative(device):
    parameter = torch.ones(3, device=device, requires_grad=True)
    message = "derivative for ampfuse::multi_tensor_norm is not impl"
    for name in ("total_norm", "norms"):
        result = ops.multi_tensor_norm([parameter])
        with pytest.raises(RuntimeError, match=message):
            getattr(result, name).sum().backward()

    with torch.no_grad():
        assert not ops.multi_tensor_norm([parameter]).total_norm.requires_grad


# torch itself warns when forward mode is first used
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_through_the_norm_is_not_implemented(device):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, device=device), torch.ones(3, device=device))

        with pytest.raises(NotImplementedError, match="forward AD with ampfuse::multi_tensor_norm"):
            ops.multi_tensor_norm([dual])


@EVERY_WRITTEN_LIST
def test_tensors_and_scalars_that_require_grad_are_accepted_under_no_grad(device, op, name):
    leaf = torch.full((3,), 4.0, device=device, requires_grad=True)
    result = leaf * 1
    given = {key: x.requires_grad_(key != "found_inf") for key, x in scalars(device).items()}

    with torch.no_grad():
        write(op, name, [leaf, result], given)

    assert leaf.tolist() == result.tolist() == pytest.approx([2.0] * 3, rel=1e-6)
    assert leaf.requires_grad
    assert leaf._version == result._version == 1


# The factor is on the device, so the host, which counts versions, does not know if it is 1.
@pytest.mark.parametrize("values", [HALVING, KEEPING], ids=["halving", "keeping"])
@EVERY_WRITTEN_LIST
def test_version_of_every_written_tensor_rises_by_one(device, op, name, values):
    storage = torch.full((4, 6), 4.0, device=device)
    tensors = [torch.ones(8193, device=device), storage[:, ::2], torch.empty(0, device=device)]
    given = scalars(device, values)

    write(op, name, tensors, given)

    assert storage[0, 0] == (2.0 if values is HALVING else 4.0)
    assert [tensor._version for tensor in tensors] == [1, 1, 1]
    writes_flag = op.startswith("multi_tensor_unscale")
    versions = {key: int(key == "found_inf" and writes_flag) for key in given}
    assert {key: scalar._version for key, scalar in given.items()} == versions


@EVERY_WRITTEN_LIST
def test_backward_through_a_value_saved_before_the_write_is_refused(device, op, name):
    weight = torch.ones(2, device=device, requires_grad=True)
    storage = torch.full((4,), 4.0, device=device)
    for saved in (storage[:2], storage[2:]):  # the tensor itself, and another part of its storage
        loss = (weight * saved).sum()

        halve(op, name, [storage[:2]])

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@EVERY_WRITTEN_LIST
def test_inference_tensors_and_normal_ones_are_written_in_inference_mode(device, op, name):
    normal = torch.full((3,), 4.0, device=device)
    with torch.inference_mode():
        tensor, given = torch.full((3,), 4.0, device=device), scalars(device)
        write(op, name, [tensor, normal], given)

    write(op, name, [tensor], given)

    assert tensor.tolist() == pytest.approx([1.0] * 3, rel=1e-6)
    assert normal.tolist() == pytest.approx([2.0] * 3, rel=1e-6)
    assert normal._version == 1


def test_norm_of_inference_tensors_is_computed(device):
    with torch.inference_mode():
        tensor = torch.tensor([3.0, 4.0], device=device)
        assert ops.multi_tensor_norm([tensor]).total_norm.item() == 5.0

    assert ops.multi_tensor_norm([tensor]).total_norm.item() == 5.0


OVERLAPS = {
    "one element": lambda x: [x[:51], x[50:]],
    "one inside the other": lambda x: [x, x[10:20]],
    "the same start": lambda x: [x, x[:20]],
    "the same end": lambda x: [x, x[80:]],
    "the same tensor": lambda x: [x, x],
    "three, of which the first and the last overlap": lambda x: [x[:60], x.new_ones(3), x[59:]],
    "another dtype's view": lambda x: [x, x.view(torch.bfloat16)[3:5]],
    "the same strided tensor": lambda x: [x[::2], x[::2]],
    "a strided one inside a dense one": lambda x: [x, x[1::2]],
    "a strided one that begins in a dense one": lambda x: [x[31::3], x[:40]],
}


@pytest.mark.parametrize("size", [100, 300_001])  # 300_001: shared among threads
@EVERY_WRITTEN_LIST
def test_tensors_that_overlap_are_refused_and_nothing_is_written(device, op, name, size):
    for kind, make in OVERLAPS.items():
        x = torch.full((size,), 8.0, device=device)
        tensors = make(x)

        with pytest.raises(
            ValueError, match=r"\[\d\]: expected (distinct tensors|a tensor that shares)"
        ):
            halve(op, name, tensors)

        assert (x == 8).all(), kind


@EVERY_WRITTEN_LIST
def test_error_names_both_overlapping_tensors(device, op, name):
    x, other = torch.ones(100, device=device), torch.ones(3, device=device)

    with pytest.raises(
        ValueError, match=rf"{name}\[2\].* shares no memory .* overlaps {name}\[0\]"
    ):
        halve(op, name, [x[:50], other, x[49:]])
    with pytest.raises(ValueError, match=rf"{name}\[2\].* distinct tensors, got {name}\[0\] again"):
        halve(op, name, [x[:50], other, x[:50]])


NEIGHBOURS = {
    "halves": lambda x: [x[:50], x[50:]],
    "the other way round": lambda x: [x[50:], x[:50]],
    "interleaved": lambda x: [x[::2], x[1::2]],
    "columns": lambda x: [x.view(10, 10)[:, :5], x.view(10, 10)[:, 5:]],
    "with one that is empty": lambda x: [x, x[50:50]],
    "with one that is empty, twice": lambda x: [*[x.new_empty(0)] * 2, x],
}


@EVERY_WRITTEN_LIST
def test_parts_of_one_buffer_that_do_not_overlap_are_written_once(device, op, name):
    for kind, make in NEIGHBOURS.items():
        x = torch.full((100,), 8.0, device=device)

        halve(op, name, make(x))

        assert (x == 4).all(), kind


@EVERY_WRITTEN_LIST
def test_lazy_clones_of_one_tensor_are_written_separately(device, op, name):
    x = torch.full((100,), 8.0, device=device)
    clones = [torch._lazy_clone(x), torch._lazy_clone(x)]

    halve(op, name, clones)

    assert (x == 8).all()
    assert all((clone == 4).all() for clone in clones)


@EVERY_WRITTEN_LIST
def test_lazy_clone_listed_twice_is_refused(device, op, name):
    clone = torch._lazy_clone(torch.full((100,), 8.0, device=device))

    with pytest.raises(ValueError, match="expected distinct tensors"):
        halve(op, name, [clone, clone])


def test_tensors_that_are_only_read_may_overlap(device):
    x = torch.ones(100, device=device)
    assert ops.multi_tensor_norm([x, x[50:]]).total_norm.item() == pytest.approx(150**0.5)
    params = [torch.ones(50, device=device) for _ in range(2)]
    adam(params, [x[:50], x[25:75]], lr=torch.tensor(0.5))
