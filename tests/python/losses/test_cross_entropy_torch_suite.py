"""Tests with torch's own samples of cross-entropy, and of arguments that are refused."""

import ampfuse
import pytest
import torch
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import sample_inputs_cross_entropy
from torch.testing._internal.common_nn import cross_entropy_loss_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_sample_of_torchs_suite_gives_torchs_loss_and_gradient(device, dtype):
    samples = list(sample_inputs_cross_entropy(None, device, dtype, requires_grad=True))
    assert len(samples) > 20
    for sample in samples:
        (target,) = sample.args
        results = []
        for function in (functional.cross_entropy, ampfuse.cross_entropy):
            logits = sample.input.detach().requires_grad_()
            loss = function(logits, target, **sample.kwargs)
            results.append((loss, *torch.autograd.grad(loss.sum(), logits)))
        for expected, result in zip(*results, strict=True):
            torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("probabilities", [False, True])
def test_loss_equals_torchs_reference_implementation(device, reduction, shape, probabilities):
    logits = torch.randn(shape, dtype=torch.float64, device=device)
    target = torch.randint(3, shape[:1] + shape[2:], device=device)
    if probabilities:
        target = torch.rand(shape, dtype=torch.float64, device=device)
    options = {"reduction": reduction, "label_smoothing": 0.15}
    options["weight"] = torch.rand(3, dtype=torch.float64, device=device)
    torch.testing.assert_close(
        ampfuse.cross_entropy(logits, target, **options),
        cross_entropy_loss_reference(logits, target, **options),
    )


X = torch.zeros(3, 5)
T = torch.zeros(3, dtype=torch.long)
REFUSED = {
    "another batch": (X, T[:2], {}, ValueError, r"Expected input batch_size \(3\) to match"),
    "another shape": (
        X[:, :, None],
        T,
        {},
        ValueError,
        r"Expected target size \[3, 1\], got \[3\]",
    ),
    "floats for indices": (X, T.float(), {}, ValueError, "probabilities of the shape of input"),
    "booleans": (
        X,
        T.bool(),
        {},
        TypeError,
        r"expected indices \(int64, int32 or uint8\) or probabilities, got bool",
    ),
    "integer logits": (X.long(), T, {}, TypeError, "input: expected dtype float16, bfloat16"),
    "one number": (X[0, 0], T[0], {}, ValueError, "got a single number"),
    "weight's shape": (X, T, {"weight": X[0, :4]}, ValueError, "for all 5 classes or no classes"),
    "weight's dtype": (X, T, {"weight": T.new_ones(5)}, TypeError, "weight: expected a floating"),
    "weight's gradient": (
        X,
        T,
        {"weight": torch.ones(5, requires_grad=True)},
        ValueError,
        "weight: expected a tensor that does not require grad; detach",
    ),
    "smoothing": (X, T, {"label_smoothing": 1.5}, ValueError, "must be between 0.0 and 1.0. Got"),
    "reduction": (
        X,
        T,
        {"reduction": "all"},
        ValueError,
        "expected .none., .mean. or .sum., got 'all'",
    ),
    "an index to ignore": (X, X, {"ignore_index": 1}, ValueError, "ignore_index is not supported"),
    "softcap": (X, T, {"softcap": 0.0}, ValueError, "softcap: expected a finite number above 0"),
    "z_loss": (X, T, {"z_loss": float("nan")}, ValueError, "z_loss: expected a finite number"),
    "scales": (X, T, {"grad_scale": torch.ones(2)}, ValueError, "grad_scale: expected one number"),
    "denominator": (
        X,
        T,
        {"denominator": torch.ones(()), "reduction": "sum"},
        ValueError,
        'denominator: only allowed with reduction="mean", got "sum"',
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_invalid_arguments_are_refused(device, case):
    logits, target, options, error, words = case
    options = {
        name: value.to(device).detach().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in options.items()
    }
    with pytest.raises(error, match=words):
        ampfuse.cross_entropy(logits.to(device), target.to(device), **options)


@pytest.mark.parametrize("target", [5, -1, 2**40, -(2**40)])
def test_error_names_the_target_that_is_out_of_range_and_its_row(target):
    with pytest.raises(
        IndexError, match=rf"Target {target} is out of bounds: in row 1, expected a class in"
    ):
        ampfuse.cross_entropy(torch.zeros(3, 5), torch.tensor([0, target, 1]))
    logits = torch.zeros(3, 5)
    with pytest.raises(IndexError):
        ampfuse.cross_entropy_(logits, torch.tensor([0, target, 1]))
    assert (logits == 0).all()


@pytest.mark.needs_cuda
def test_target_out_of_range_on_a_gpu_is_named_by_a_later_call():
    logits = torch.zeros(3, 5, device="cuda")
    loss = ampfuse.cross_entropy(logits, torch.tensor([0, 7, 1], device="cuda"))
    assert loss.isnan()
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        ampfuse.cross_entropy(logits, torch.tensor([0, 1, 1], device="cuda"))
    assert not ampfuse.cross_entropy(logits, torch.tensor([0, 1, 1], device="cuda")).isnan()
