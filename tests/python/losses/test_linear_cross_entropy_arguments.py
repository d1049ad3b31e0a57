"""Tests of unusual and invalid arguments of linear_cross_entropy."""

import ampfuse
import pytest
import torch
from linear_reference import head


def call(batch, **changes):
    arguments = {"hidden": batch.hidden, "weight": batch.weight, "target": batch.target}
    arguments |= {"bias": batch.bias} | changes
    return ampfuse.linear_cross_entropy(**arguments)


def check_refused(batch, message, error=ValueError, **changes):
    with pytest.raises(error, match=message):
        call(batch, **changes)


@pytest.fixture
def batch(device):
    return head(device, torch.float32)


def test_wrong_shapes_are_refused(batch, device):
    def zeros(*shape):
        return torch.zeros(*shape, device=device)

    features = r"hidden: expected 23 features, as weight has \(\[101, 23\]\), got 24"
    check_refused(batch, features, weight=zeros(101, 23))
    check_refused(batch, "weight: expected .classes, features.", weight=zeros(24))
    check_refused(batch, r"bias: expected \[101\]", bias=zeros(100))
    check_refused(batch, r"target: expected shape \[21\]", target=batch.target[:20])
    probabilities = "target: expected indices .* or probabilities of shape"
    check_refused(batch, probabilities, target=zeros(21, 100))
    class_weight = "class_weight tensor should be defined either for all 101 classes"
    check_refused(batch, class_weight, class_weight=zeros(100))
    check_refused(batch, "hidden: expected .*features", hidden=zeros(()))
    check_refused(batch, "grad_scale: expected one number", grad_scale=zeros(2))
    check_refused(batch, "denominator: expected one number", denominator=zeros(2))


def test_invalid_options_are_refused(batch):
    check_refused(batch, "chunk_rows: expected at least 1, got 0", chunk_rows=0)
    check_refused(batch, "label_smoothing must be between", label_smoothing=1.5)
    check_refused(batch, "z_loss: expected", z_loss=-1.0)
    check_refused(batch, "z_loss: expected a number", TypeError, z_loss=torch.tensor(1.0))
    check_refused(batch, "softcap: expected", softcap=0.0)
    check_refused(batch, "reduction: expected .none., .mean. or .sum.", reduction="median")
    only = "denominator: only allowed with reduction=.mean., got .sum."
    check_refused(batch, only, denominator=3.0, reduction="sum")
    check_refused(batch, "chunk_classes: expected at least 1, got 0", chunk_classes=0)
    check_refused(batch, "and neither with chunk_rows", chunk_classes=8, chunk_rows=8)
    only = 'only allowed with reduction="mean" or "sum"'
    check_refused(batch, only, chunk_classes=8, reduction="none")
    probabilities = torch.zeros(21, 101, device=batch.hidden.device)
    ignored = "ignore_index is not supported for floating point target"
    check_refused(batch, ignored, target=probabilities, ignore_index=3)


def test_wrong_dtypes_are_refused(batch, device):
    tensors = {name: getattr(batch, name).detach() for name in ("hidden", "weight", "bias")}
    narrow = {name: tensor.to(torch.float8_e5m2) for name, tensor in tensors.items()}
    whole = {name: tensor.long() for name, tensor in tensors.items()}
    mixed = "one dtype, or autocast, got hidden of float32, weight of bfloat16"
    check_refused(batch, mixed, TypeError, weight=batch.weight.bfloat16())
    mixed = r"or autocast, got .* weight of float32, bias of float16"
    check_refused(batch, mixed, TypeError, bias=batch.bias.half())
    check_refused(batch, r"hidden: expected .*, got float8_e5m2", TypeError, **narrow)
    check_refused(batch, r"hidden: expected float16, .*, got int64", TypeError, **whole)
    with torch.autocast(device.type, torch.bfloat16):
        no_float8 = r"hidden: expected float16, .*, got float8_e5m2"
        check_refused(batch, no_float8, TypeError, hidden=narrow["hidden"])
    indices = r"target: expected indices .int64, int32 or uint8. or probabilities"
    check_refused(batch, indices, TypeError, target=batch.target.bool())


def test_tensors_on_another_device_are_refused(batch):
    for name in ("weight", "bias", "target"):
        elsewhere = getattr(batch, name).to("meta")
        check_refused(batch, f"{name}: expected .*got", **{name: elsewhere})
    elsewhere = torch.zeros(101, device="meta")
    check_refused(batch, "class_weight: expected device", class_weight=elsewhere)


def test_arguments_without_a_derivative_may_not_require_grad(batch, device):
    for name, shape in {"grad_scale": (), "denominator": (), "class_weight": (101,)}.items():
        tensor = torch.ones(shape, device=device, requires_grad=True)
        message = f"{name}: expected a tensor that does not require grad"
        check_refused(batch, message, **{name: tensor})
    target = torch.ones(21, 101, device=device, requires_grad=True)
    message = "target: gradients with respect to probabilities are not supported"
    check_refused(batch, message, target=target)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "target", "class_weight"])
def test_sparse_tensors_and_none_are_refused_by_name(batch, device, name):
    tensor = torch.ones(101, device=device) if name == "class_weight" else getattr(batch, name)
    tensor = tensor.detach().clone()
    strided = f"{name}: expected a strided tensor, got layout Sparse"
    check_refused(batch, strided, **{name: tensor.to_sparse()})
    if name in ("hidden", "weight", "target"):
        check_refused(batch, f"{name}: expected a Tensor, got None", TypeError, **{name: None})


def test_missing_weight_is_refused_by_name_also_with_a_process_group(batch):
    for options in ({}, {"process_group": "a group"}):
        with pytest.raises(TypeError, match="weight: expected a Tensor, got None"):
            ampfuse.linear_cross_entropy(torch.ones(1, 2), None, torch.tensor([0]), **options)


def test_process_groups_that_are_none_are_refused(batch):
    with pytest.raises(ValueError, match="group: expected the name of a process group"):
        torch.ops.ampfuse.linear_cross_entropy(
            batch.hidden, batch.weight, batch.target, vocab_shard=[2, 0, 202]
        )
    for group in (-100, True, "tp"):
        message = r"process_group: expected a torch\.distributed\.Pro"
        check_refused(batch, message, TypeError, process_group=group)


@pytest.mark.parametrize("target", [-1, 101])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_error_names_the_target_that_is_out_of_range_and_its_row(target, reduction):
    batch = head(torch.device("cpu"), torch.float32)
    batch.target[17] = target
    message = rf"Target {target} is out of bounds: in row 17, expected a class in .0, 101."
    check_refused(batch, message, IndexError, reduction=reduction, chunk_rows=4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunk_rows_may_exceed_the_number_of_rows(batch, reduction):
    whole = call(batch, reduction=reduction, chunk_rows=21)
    expected = batch.grads(whole)
    for chunk_rows in (22, 2**31, 2**63 - 3, 2**63 - 1):
        loss = call(batch, reduction=reduction, chunk_rows=chunk_rows)
        assert torch.equal(loss, whole), chunk_rows
        assert all(map(torch.equal, batch.grads(loss), expected)), chunk_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_of_one_feature_may_have_any_strides(device, dtype):
    there = torch.randn(50, 8, 3, device=device, dtype=dtype)[:, 2:3, 1]
    assert there.stride() != (1, 1)
    hidden = torch.randn(9, 1, device=device, dtype=dtype)
    target = torch.arange(9, device=device)
    expected = ampfuse.linear_cross_entropy(hidden, there.contiguous(), target)
    assert torch.equal(ampfuse.linear_cross_entropy(hidden, there, target), expected)
