"""Tests of unusual and invalid arguments of linear_cross_entropy."""

import ampfuse
import pytest
import torch
from linear_reference import head


def call(batch, **changes):
    arguments = {"hidden": batch.hidden, "weight": batch.weight, "target": batch.target}
    arguments |= {"bias": batch.bias} | changes
    return ampfuse.linear_cross_entropy(**arguments)


@pytest.fixture
def batch(device):
    return head(device, torch.float32)


def test_wrong_shapes_are_refused(batch, device):
    wrong = {
        r"hidden: expected 23 features, as weight has \(\[101, 23\]\), got 24": {
            "weight": torch.zeros(101, 23, device=device)
        },
        "weight: expected .classes, features.": {"weight": torch.zeros(24, device=device)},
        r"bias: expected \[101\]": {"bias": torch.zeros(100, device=device)},
        r"target: expected shape \[21\]": {"target": batch.target[:20]},
        "target: expected indices .* or probabilities of shape": {
            "target": torch.zeros(21, 100, device=device)
        },
        "class_weight tensor should be defined either for all 101 classes": {
            "class_weight": torch.zeros(100, device=device)
        },
        "hidden: expected .*features": {"hidden": torch.zeros((), device=device)},
        "grad_scale: expected one number": {"grad_scale": torch.zeros(2, device=device)},
        "denominator: expected one number": {"denominator": torch.zeros(2, device=device)},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            call(batch, **change)


def test_invalid_options_are_refused(batch):
    wrong = {
        "chunk_rows: expected at least 1, got 0": {"chunk_rows": 0},
        "label_smoothing must be between": {"label_smoothing": 1.5},
        "z_loss: expected": {"z_loss": -1.0},
        "softcap: expected": {"softcap": 0.0},
        "reduction: expected .none., .mean. or .sum.": {"reduction": "median"},
        "denominator: only allowed with reduction=.mean., got .sum.": {
            "denominator": 3.0,
            "reduction": "sum",
        },
        "ignore_index is not supported for floating point target": {
            "target": torch.zeros(21, 101, device=batch.hidden.device),
            "ignore_index": 3,
        },
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            call(batch, **change)


def test_wrong_dtypes_are_refused(batch):
    with pytest.raises(
        TypeError, match="one dtype, or autocast, got hidden of float32, weight of bfloat16"
    ):
        call(batch, weight=batch.weight.bfloat16())
    with pytest.raises(TypeError, match=r"or autocast, got .* weight of float32, bias of float16"):
        call(batch, bias=batch.bias.half())
    narrow = {name: getattr(batch, name).detach() for name in ("hidden", "weight", "bias")}
    narrow = {name: tensor.to(torch.float8_e5m2) for name, tensor in narrow.items()}
    with pytest.raises(TypeError, match=r"hidden: expected .*, got float8_e5m2"):
        call(batch, **narrow)
    with pytest.raises(TypeError, match=r"hidden: expected float16, .*, got int64"):
        call(batch, **{name: getattr(batch, name).long() for name in ("hidden", "weight", "bias")})
    with pytest.raises(
        TypeError, match=r"target: expected indices .int64, int32 or uint8. or probabilities"
    ):
        call(batch, target=batch.target.bool())
    with pytest.raises(TypeError, match="z_loss: expected a number, got a tensor"):
        call(batch, z_loss=torch.tensor(1.0))


def test_tensors_on_another_device_are_refused(batch):
    for name in ("weight", "bias", "target"):
        with pytest.raises(ValueError, match=f"{name}: expected .*got"):
            call(batch, **{name: getattr(batch, name).to("meta")})
    with pytest.raises(ValueError, match="class_weight: expected device"):
        call(batch, class_weight=torch.zeros(101, device="meta"))


def test_arguments_without_a_derivative_may_not_require_grad(batch, device):
    for name in ("grad_scale", "denominator"):
        with pytest.raises(
            ValueError, match=f"{name}: expected a tensor that does not require grad"
        ):
            call(batch, **{name: torch.ones((), device=device, requires_grad=True)})
    with pytest.raises(
        ValueError, match="class_weight: expected a tensor that does not require grad"
    ):
        call(batch, class_weight=torch.ones(101, device=device, requires_grad=True))
    with pytest.raises(
        ValueError, match="target: gradients with respect to probabilities are not supported"
    ):
        call(batch, target=torch.ones(21, 101, device=device, requires_grad=True))


@pytest.mark.parametrize("target", [-1, 101])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_error_names_the_target_that_is_out_of_range_and_its_row(target, reduction):
    batch = head(torch.device("cpu"), torch.float32)
    batch.target[17] = target
    message = rf"Target {target} is out of bounds: in row 17, expected a class in .0, 101."
    with pytest.raises(IndexError, match=message):
        call(batch, reduction=reduction, chunk_rows=4)


def test_tensors_whose_storage_was_freed_are_refused(batch):
    for name in ("hidden", "weight", "bias", "target"):
        tensor = getattr(batch, name).detach().clone()
        tensor.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"{name}: its storage is empty"):
            call(batch, **{name: tensor})


def test_sparse_hidden_states_are_refused(batch):
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        call(batch, hidden=batch.hidden.detach().to_sparse())


@pytest.mark.parametrize("chunk_rows", [22, 2**31, 2**63 - 3, 2**63 - 1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunk_rows_may_exceed_the_number_of_rows(batch, reduction, chunk_rows):
    whole = call(batch, reduction=reduction, chunk_rows=21)
    loss = call(batch, reduction=reduction, chunk_rows=chunk_rows)
    assert torch.equal(loss, whole)
    upstream = torch.ones_like(loss)
    assert all(map(torch.equal, batch.grads(loss, upstream), batch.grads(whole, upstream)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_of_one_feature_may_have_any_strides(device, dtype):
    there = torch.randn(50, 8, 3, device=device, dtype=dtype)[:, 2:3, 1]
    assert there.stride() != (1, 1)
    hidden = torch.randn(9, 1, device=device, dtype=dtype)
    target = torch.arange(9, device=device)
    expected = ampfuse.linear_cross_entropy(hidden, there.contiguous(), target)
    assert torch.equal(ampfuse.linear_cross_entropy(hidden, there, target), expected)


def test_buffer_that_overlaps_itself_or_the_weight_is_refused(batch):
    weight = batch.weight.detach()
    for message, buffer in {
        r"elements that share no memory, got shape \[101, 24\] with strides \[0, 1\]": (
            torch.zeros(1, 24, device=weight.device).expand(101, 24)
        ),
        "overlaps weight or hidden": weight,
    }.items():
        with pytest.raises(ValueError, match=message):
            call(batch, accumulate_into=buffer)


def test_vocab_shard_without_a_group_is_refused(batch):
    with pytest.raises(ValueError, match="group: expected the name of a process group"):
        torch.ops.ampfuse.linear_cross_entropy(
            batch.hidden, batch.weight, batch.target, vocab_shard=[2, 0, 202]
        )


@pytest.mark.parametrize("group", [-100, True, "tp"])
def test_process_group_of_a_wrong_type_is_refused(batch, group):
    with pytest.raises(TypeError, match=r"process_group: expected a torch\.distributed\.Pro"):
        call(batch, process_group=group)


@pytest.mark.parametrize("name", ["hidden", "weight", "target"])
def test_none_in_place_of_a_tensor_is_refused_by_name(batch, name):
    with pytest.raises(TypeError, match=f"{name}: expected a Tensor, got None"):
        call(batch, **{name: None})


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "target"])
def test_sparse_tensors_are_refused_by_name(batch, name):
    sparse = getattr(batch, name).detach().to_sparse()
    with pytest.raises(ValueError, match=f"{name}: expected a strided tensor, got layout Sparse"):
        call(batch, **{name: sparse})


def test_sparse_class_weight_is_refused_by_name(batch):
    weight = torch.ones(len(batch.weight), device=batch.weight.device).to_sparse()
    with pytest.raises(ValueError, match="class_weight: expected a strided tensor, got layout Spa"):
        call(batch, class_weight=weight)


def test_float8_is_refused_under_autocast_too(batch, device):
    hidden = batch.hidden.detach().to(torch.float8_e4m3fn)
    with (
        torch.autocast(device.type, torch.bfloat16),
        pytest.raises(TypeError, match=r"hidden: expected float16, .*, got float8_e4m3fn"),
    ):
        call(batch, hidden=hidden)


def test_freed_hidden_states_of_three_dimensions_are_refused(device):
    hidden = torch.randn(8, 3, 16, device=device).transpose(0, 1)
    weight, target = torch.randn(7, 16, device=device), torch.zeros(3, 8, device=device).long()
    hidden.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="hidden: its storage is empty"):
        ampfuse.linear_cross_entropy(hidden, weight, target)
