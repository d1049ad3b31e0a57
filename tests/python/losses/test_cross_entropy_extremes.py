"""Tests of cross_entropy with logits that are far apart, equal, infinite or NaN."""

import math

import ampfuse
import pytest
import torch
from cross_entropy_reference import assert_exact, exact, relatively_off, results, scaled
from cross_entropy_samples import batch
from torch.nn import functional

pytestmark = pytest.mark.vectorised

EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
INFINITY, NAN = math.inf, math.nan


def assert_as_torch(logits, target, **options):
    """Check the loss of each row and its gradient against torch's, in float64."""
    options["reduction"] = "none"
    loss, grad = results(ampfuse.cross_entropy, logits, target, **options)
    expected, gradient = exact(logits, target, **options)
    assert torch.allclose(loss.double(), expected, equal_nan=True)
    assert torch.allclose(grad.double(), gradient, rtol=1e-2, equal_nan=True)


@EVERY_DTYPE
def test_softcap_makes_a_logit_of_minus_infinity_finite(device, dtype):
    nothing = -INFINITY
    logits = torch.tensor([[nothing, 2, 1, nothing, 0], [nothing] * 5], dtype=dtype, device=device)
    logits.requires_grad_()
    target = torch.tensor([1, 0], device=device)

    loss, grad = scaled(logits, target, 8.0, softcap=1.0, label_smoothing=0.1)

    capped = torch.tanh(logits.detach().double()).requires_grad_()
    expected = functional.cross_entropy(capped, target, label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(expected, capped, torch.full_like(expected, 8.0))
    gradient = gradient * (1 - capped.detach() ** 2)
    assert relatively_off(loss, expected) <= 2e-6
    torch.testing.assert_close(grad.double(), gradient, rtol=0.005, atol=1e-7)


@EVERY_DTYPE
def test_sums_over_many_equal_logits_keep_their_digits(device, dtype):
    """The rounding errors of the additions do not average out here."""
    for other in (-0.0048, -0.3, 0.77):
        logits = torch.full((1, 2048), other, dtype=dtype, device=device)
        logits[0, 5] = 15
        loss = ampfuse.cross_entropy(logits, torch.tensor([5], device=device))
        margin = 15 - logits[0, 0].double()
        assert relatively_off(loss, torch.log1p(2047 * torch.exp(-margin))) <= 1e-6, other


@EVERY_DTYPE
def test_loss_and_gradient_of_confident_rows_keep_their_digits(device, dtype):
    """1 - p must be computed as the other classes' sum: 1 - 1 leaves only rounding errors."""
    margin = torch.tensor([10.0, 30.0, 60.0, 80.0])
    logits = torch.zeros(4, 1000, dtype=dtype)
    logits[torch.arange(4), torch.arange(4)] = margin.to(dtype)
    logits, target = logits.to(device).requires_grad_(), torch.arange(4, device=device)

    loss, grad = results(ampfuse.cross_entropy, logits, target, reduction="none")

    others = 999 * torch.exp(-margin.double())
    # On a GPU, the powers of two that stand for exponentials of 16-bit logits are rounded.
    rounding = 1e-7 * margin if device.type == "cuda" and dtype.itemsize == 2 else 0
    assert ((loss.cpu().double() / torch.log1p(others) - 1).abs() <= 1e-6 + rounding).all()
    of_target = -(others / (1 + others))
    diagonal = grad[target, target].cpu()
    if dtype != torch.float16:  # float16's smallest positive number is 6e-8
        assert ((diagonal.double() / of_target - 1).abs() <= 32 * torch.finfo(dtype).eps).all()


EXTREMES = {
    "up to 1e4": lambda x: x * 2500,
    "an offset of 2**24": lambda x: x.round() + 2.0**24,
    "an offset of -2**24": lambda x: x.round() - 2.0**24,
    "tiny": lambda x: x * 1e-30,
    "nearly float32's largest": lambda x: x * 2e37,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("change", EXTREMES)
def test_extreme_logits_give_the_exact_loss_and_gradient(device, dtype, change):
    for classes in (3, 3000):
        logits = batch(device, (4, classes), scale=4, leaf=False)[0]
        logits = EXTREMES[change](logits).to(dtype).requires_grad_()
        target = (logits > 0).int().argmax(1)  # the loss of a negative logit may overflow float32
        found = results(ampfuse.cross_entropy, logits, target, reduction="none")
        assert_exact(found, exact(logits, target, reduction="none"), classes)


ROWS = [  # logits and target
    ([-INFINITY, 2.0, -INFINITY], 1),
    ([-INFINITY, 2.0, 1.0], 1),
    ([-INFINITY, 2.0, 1.0], 0),
    ([-INFINITY, -INFINITY, -INFINITY], 0),
    ([INFINITY, 2.0, 1.0], 1),
    ([1.0, INFINITY, 1.0], 1),
    ([1.0, NAN, 1.0], 0),
    ([1.0, NAN, 1.0], 1),
]


@EVERY_DTYPE
@pytest.mark.parametrize("layout", ["tile", "blocks", "positions"])
def test_rows_with_infinities_and_nans_give_torchs_results(device, dtype, layout):
    """The padding of -infinity fills whole blocks of 2048 classes."""
    padding = 5000 if layout == "blocks" else 0
    rows = [row + [-INFINITY] * padding for row, _ in ROWS]
    logits = torch.tensor(rows, dtype=dtype, device=device)
    target = torch.tensor([target for _, target in ROWS], device=device)
    if layout == "positions":  # 24 of them: they are read in place
        logits, target = logits.t()[None].repeat(1, 1, 3).contiguous(), target[None].repeat(1, 3)
    assert_as_torch(logits.requires_grad_(), target)
    if layout == "blocks":  # threads share the blocks of a single row
        for row in range(len(ROWS)):
            alone = logits.detach()[row : row + 1].requires_grad_()
            assert_as_torch(alone, target[row : row + 1])


@EVERY_DTYPE
@pytest.mark.parametrize("padding", [1, 5000])
def test_classes_of_minus_infinity_with_a_probability_give_torchs_results(device, dtype, padding):
    """The padding fills whole blocks of 2048 classes, which then have no finite logit."""
    logits = torch.tensor([[1.0, 2.0] + [-INFINITY] * padding], dtype=dtype, device=device)
    logits.requires_grad_()
    assert_as_torch(logits, torch.tensor([1], device=device), label_smoothing=0.1)
    target = torch.full_like(logits, 1 / 8).detach().to(torch.promote_types(dtype, torch.float))
    for of_padding in (2.0**-13, 0):
        target[0, 2:] = of_padding
        assert_as_torch(logits, target)


@pytest.mark.parametrize("payload", [0x7FC00001, 0x7FFFFFFF, 0xFFC12345 - 2**32])
def test_nan_with_any_payload_makes_loss_and_gradient_nan(device, payload):
    for index in (0, 17, 2999):
        logits = torch.zeros(1, 3000)
        logits.view(torch.int32)[0, index] = payload
        logits = logits.to(device).requires_grad_()
        loss, grad = results(ampfuse.cross_entropy, logits, torch.tensor([5], device=device))
        assert loss.isnan(), index
        assert grad.isnan().all(), index


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("classes", [40, 3000])
def test_nan_makes_the_whole_gradient_of_a_row_nan_with_a_softcap(device, dtype, classes):
    target = torch.tensor([5, 5], device=device)
    for index in (0, 37):
        logits = torch.zeros(2, classes, dtype=dtype, device=device)
        logits[0, index] = NAN
        logits.requires_grad_()
        options = {"softcap": 30.0, "reduction": "none"}
        loss, grad = results(ampfuse.cross_entropy, logits, target, **options)
        assert loss.isnan().tolist() == [True, False]
        assert grad[0].isnan().all()
        assert grad[1].isfinite().all()


@pytest.mark.parametrize("shape", [(2, 40), (1, 3, 40)], ids=str)
def test_gradient_of_an_ignored_row_is_zero_even_for_nan_logits(device, shape):
    """The rows are those of a matrix, or positions. Only the first one counts."""
    first = (0, slice(None), *[0] * (len(shape) - 2))
    logits = torch.full(shape, NAN, device=device)
    logits[first] = 0
    target = torch.full((shape[0], *shape[2:]), -100, device=device)
    target.view(-1)[0] = 1
    loss, grad = results(ampfuse.cross_entropy, logits.requires_grad_(), target)
    assert loss.item() == pytest.approx(math.log(shape[1]))
    grad[first] = 0
    assert (grad == 0).all()
