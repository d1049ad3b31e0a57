"""Tests of arguments of cross_entropy: torch's own samples, unusual ones, and errors for others."""

import ampfuse
import pytest
import torch
from cross_entropy_reference import results
from cross_entropy_samples import batch
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import sample_inputs_cross_entropy


def assert_as_in_torch(logits, target, **options):
    indices = target if target.is_floating_point() else target.long()
    expected = results(functional.cross_entropy, logits, indices, **options)
    found = results(ampfuse.cross_entropy, logits, target, **options)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_sample_of_torchs_suite_gives_torchs_loss_and_gradient(device, dtype):
    samples = list(sample_inputs_cross_entropy(None, device, dtype, requires_grad=True))
    assert len(samples) > 20
    for sample in samples:
        logits = sample.input.detach().requires_grad_()
        found, expected = (
            results(function, logits, *sample.args, **sample.kwargs)
            for function in (ampfuse.cross_entropy, functional.cross_entropy)
        )
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.vectorised
@pytest.mark.parametrize("ignore_index", [-100, 255, 156, 7])
def test_uint8_targets_are_compared_with_ignore_index_as_integers(device, ignore_index):
    """No byte equals -100. If -100 were cast to a byte, it would be 156."""
    logits, _ = batch(device, (6, 300))
    target = torch.tensor([255, 156, 7, 200, 0, 255], dtype=torch.uint8, device=device)
    assert_as_in_torch(logits, target, ignore_index=ignore_index)


@pytest.mark.vectorised
@pytest.mark.parametrize("ignore_index", [2**32 + 1, -(2**32) + 1, 2**63 - 1])
def test_ignore_index_may_be_out_of_range_of_the_target_dtype(device, ignore_index):
    logits, _ = batch(device)
    for dtype in (torch.int32, torch.uint8):
        target = torch.ones(6, dtype=dtype, device=device)  # 2³² + 1 is 1, too, if cut to 32 bits
        assert_as_in_torch(logits, target, ignore_index=ignore_index)


@pytest.mark.parametrize("which", ["logits", "probabilities", "both"])
def test_an_empty_batch_may_have_any_strides(device, which):
    strided = torch.zeros(7, 6, device=device).t()[:0]
    plain = torch.zeros(0, 7, device=device)
    logits = plain if which == "probabilities" else strided
    target = torch.zeros(0, dtype=torch.long, device=device) if which == "logits" else strided
    assert ampfuse.cross_entropy(logits, target, reduction="sum") == 0


@pytest.mark.parametrize("shape", [(4, 0), (2, 0, 16), (2, 0, 3)], ids=str)
def test_rows_of_zero_classes_give_results_of_the_right_shape(device, shape):
    logits = torch.empty(shape, device=device)
    rows = (shape[0], *shape[2:])
    for target in (torch.full(rows, -100, device=device), torch.empty(shape, device=device)):
        of_rows = torch.ops.ampfuse.cross_entropy.metrics(logits, target, reduction=0)
        assert [result.shape for result in of_rows] == [rows] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_probabilities_may_be_sliding_windows(device, dtype):
    logits, _ = batch(device, (3, 6))
    windows = torch.rand(8, device=device).to(dtype).unfold(0, 6, 1)
    torch.testing.assert_close(
        ampfuse.cross_entropy(logits, windows), ampfuse.cross_entropy(logits, windows.contiguous())
    )


# --- errors -------------------------------------------------------------------------------------

X = torch.zeros(3, 5)
T = torch.zeros(3, dtype=torch.long)
ONE = torch.ones(())
WEIGHT = torch.ones(5, requires_grad=True)
SPARSE = torch.ones(5).to_sparse()
OF_SUM = {"denominator": ONE, "reduction": "sum"}
SCALERS = {"a scaler": ampfuse.GradScaler("cpu"), "torch's": torch.amp.GradScaler("cpu")}
REFUSED = {  # logits, target, options, error, words
    "another batch": (X, T[:2], {}, ValueError, r"Expected input batch_size \(3\) to match"),
    "another shape": (X[:, :, None], T, {}, ValueError, r"Expected target size \[3, 1\], got \[3"),
    "float indices": (X, T.float(), {}, ValueError, "or probabilities of the shape .* got float32"),
    "booleans": (X, T.bool(), {}, TypeError, r"expected indices \(int64.* or prob.*, got bool"),
    "integer logits": (X.long(), T, {}, TypeError, "input: expected dtype float16, bfloat16"),
    "one number": (X[0, 0], T[0], {}, ValueError, "got a single number"),
    "a list": (X, [0, 1, 2], {}, TypeError, "target: expected a Tensor, got list"),
    "weight's shape": (X, T, {"weight": X[0, :4]}, ValueError, "for all 5 classes or no classes"),
    "weight's dtype": (X, T, {"weight": T.new_ones(5)}, TypeError, "weight: expected a floating"),
    "sparse weight": (X, T, {"weight": SPARSE}, ValueError, "weight: expected a strided .*Sparse"),
    "weight's grad": (X, T, {"weight": WEIGHT}, ValueError, "weight: .* not require grad; detach"),
    "smoothing": (X, T, {"label_smoothing": 1.5}, ValueError, "must be between 0.0 and 1.0. Got"),
    "reduction": (X, T, {"reduction": "all"}, ValueError, ".none., .mean. or .sum., got 'all'"),
    "an index to ignore": (X, X, {"ignore_index": 1}, ValueError, "ignore_index is not supported"),
    "softcap": (X, T, {"softcap": 0.0}, ValueError, "softcap: expected a finite number above 0"),
    "softcap's type": (X, T, {"softcap": ONE}, TypeError, "softcap: expected a number, got a tens"),
    "z_loss": (X, T, {"z_loss": float("nan")}, ValueError, "z_loss: expected a finite number"),
    "z_loss's type": (X, T, {"z_loss": ONE}, TypeError, "z_loss: expected a number, got a tensor"),
    "of a sum": (X, T, OF_SUM, ValueError, 'denominator: only .* reduction="mean", got "sum"'),
    "divisor 0": (X, T, {"denominator": 0}, ValueError, "denominator: expected .* other than 0"),
    "not a number": (X, T, {"denominator": [1]}, TypeError, "denominator: expected .*, got list"),
    **{
        name: (X, T, {"grad_scale": scaler}, TypeError, "grad_scale: .*; pass scaler.scale_tensor")
        for name, scaler in SCALERS.items()
    },
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_invalid_arguments_are_refused(device, case):
    def on_device(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device).detach().requires_grad_(value.requires_grad)

    logits, target, options, error, words = case
    options = {name: on_device(value) for name, value in options.items()}
    with pytest.raises(error, match=words):
        ampfuse.cross_entropy(on_device(logits), on_device(target), **options)


def test_targets_on_another_device_are_refused(device):
    logits, target = batch(device)
    message = rf"target: expected input's device, {device}.*, got meta"
    for elsewhere in (target.to("meta"), torch.rand(6, 50, device="meta")):
        for function in (ampfuse.cross_entropy, ampfuse.cross_entropy_):
            with pytest.raises(ValueError, match=message):
                function(logits * 1, elsewhere)


CALLS = {
    "grad_scale": lambda input, target: ampfuse.cross_entropy(input, target, grad_scale=2.0),
    "in place": lambda input, target: ampfuse.cross_entropy_(input, target, denominator=2.0),
    "module": ampfuse.CrossEntropyLoss(),
    "scaler": ampfuse.CrossEntropyLoss(scaler=SCALERS["a scaler"]),
    "scaler of torch": ampfuse.CrossEntropyLoss(scaler=SCALERS["torch's"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_none_or_a_list_in_place_of_a_tensor_is_refused_by_name(call):
    for given, name, kind in (
        (([[1.0, 2.0]], T), "input", "list"),
        ((None, T), "input", "None"),
        ((X, None), "target", "None"),
    ):
        function = "cross_entropy_" if call == "in place" else "cross_entropy"
        with pytest.raises(TypeError, match=f"^{function}: {name}: expected a Tensor, got {kind}"):
            CALLS[call](*given)


@pytest.mark.vectorised
@pytest.mark.parametrize("bad", [5, -1, 2**40, -(2**40)])
def test_error_names_the_target_that_is_out_of_range_and_its_row(bad):
    """The rows are those of a matrix, which is not overwritten then, or positions."""
    for shape, row in (((3, 5), 1), ((2, 5, 20), 27)):
        logits, target = torch.zeros(shape), torch.zeros(shape[0], *shape[2:], dtype=torch.long)
        target.view(-1)[row] = bad
        message = rf"Target {bad} is out of bounds: in row {row}, expected a class in"
        with pytest.raises(IndexError, match=message):
            ampfuse.cross_entropy(logits, target)
    logits = torch.zeros(3, 5)
    with pytest.raises(IndexError):
        ampfuse.cross_entropy_(logits, torch.tensor([0, bad, 1]))
    assert (logits == 0).all()
