"""Tests of losses and gradients of cross_entropy, against float64 from the same rounded logits."""

import ampfuse
import pytest
import torch
from cross_entropy_reference import ULPS, exact, relatively_off, ulp, ulps_off
from torch.nn import functional

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# One class; fewer than a vector holds; multiples of warps and vectors and their neighbours; odd and
# prime numbers on both sides of a block of 2048; GPT-2's vocabulary; the largest one in use, and a
# neighbour.
CLASSES = [1, 2, 7, 31, 64, 128, 129, 1000, 2047, 2048, 2049, 4099, 50257, 262144, 262147]


def logits_of(rows, classes, dtype, device, scale=4.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator) * scale
    return logits.to(device, dtype).requires_grad_()


def targets_of(rows, classes, device, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(classes, (rows,), generator=generator).to(device)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_and_gradient_are_the_exact_ones_rounded(device, dtype, classes, reduction):
    logits, target = logits_of(5, classes, dtype, device), targets_of(5, classes, device)
    target[3] = -100
    scale = torch.tensor(1024.0, device=device)

    loss = ampfuse.cross_entropy(
        logits, target, reduction=reduction, grad_scale=None if reduction == "none" else scale
    )
    upstream = scale if reduction != "none" else torch.arange(1.0, 6.0, device=device) / 3
    loss.backward(upstream)

    expected, gradient = exact(logits, target, upstream, reduction=reduction)
    assert loss.dtype == torch.float32
    assert relatively_off(loss, expected) <= 1e-6
    assert ulps_off(logits.grad, gradient) <= ULPS
    assert (logits.grad[3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_class_weights_give_the_exact_loss_and_gradient(device, dtype, reduction):
    logits, target = logits_of(6, 300, dtype, device), targets_of(6, 300, device)
    weight = torch.rand(300, generator=torch.Generator().manual_seed(2)).to(device)
    scale = torch.tensor(512.0, device=device)

    loss = ampfuse.cross_entropy(
        logits,
        target,
        weight,
        reduction=reduction,
        grad_scale=None if reduction == "none" else scale,
    )
    loss.backward(scale.expand(loss.shape))

    expected, gradient = exact(logits, target, scale, reduction=reduction, weight=weight)
    assert relatively_off(loss, expected) <= 1e-6
    assert ulps_off(logits.grad, gradient) <= ULPS


def assert_gradient_is_close(result, expected, largest_term):
    """Allow an error of eps times the result, plus that of float32 terms that cancel."""
    allowed = torch.finfo(result.dtype).eps * expected.abs() + 4e-7 * largest_term
    assert ((result.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 10, 2049, 5000])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["indices", "probabilities", "half probabilities"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_label_smoothing_and_probabilities_give_the_exact_results(
    device, dtype, classes, weighted, kind, reduction
):
    logits = logits_of(4, classes, dtype, device)
    generator = torch.Generator().manual_seed(3)
    target = targets_of(4, classes, device)
    if kind != "indices":
        target = torch.rand(4, classes, generator=generator).softmax(1).to(device)
        target = target.half() if kind == "half probabilities" else target
    options = {"label_smoothing": 0.1, "reduction": reduction}
    if weighted:
        options["weight"] = torch.rand(classes, generator=generator).to(device)
    scale = torch.tensor(64.0, device=device)

    loss = ampfuse.cross_entropy(
        logits, target, grad_scale=None if reduction == "none" else scale, **options
    )
    loss.backward(scale.expand(loss.shape))

    expected, gradient = exact(logits, target, scale, **options)
    assert relatively_off(loss, expected) <= 1e-6 or classes == 1
    divisor = 1.0
    if reduction == "mean":
        with_weight = weighted and kind == "indices"
        divisor = options["weight"][target].sum().item() if with_weight else 4.0
    assert_gradient_is_close(logits.grad, gradient, 64.0 / divisor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_z_loss_and_softcap_give_the_exact_loss_and_gradient(device, dtype):
    logits, target = logits_of(6, 500, dtype, device, scale=20.0), targets_of(6, 500, device)
    target[2] = -100
    scale = torch.tensor(8.0, device=device)
    options = {"z_loss": 1e-3, "softcap": 15.0}

    loss = ampfuse.cross_entropy(logits, target, grad_scale=scale, **options)
    loss.backward(scale)

    expected, gradient = exact(logits, target, scale, **options)
    assert relatively_off(loss, expected) <= 2e-6
    # z is rounded to float32 before the exponential; at 15 an ulp is 1e-6.
    off = (logits.grad.double() - gradient).abs()
    assert (off <= ulp(dtype, gradient) + 4e-6 * gradient.abs()).all()
    assert (logits.grad[2] == 0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_softcap_makes_a_logit_of_minus_infinity_finite(device, dtype):
    nothing = -torch.inf
    logits = torch.tensor([[nothing, 2, 1, nothing, 0], [nothing] * 5], dtype=dtype, device=device)
    logits.requires_grad_()
    target = torch.tensor([1, 0], device=device)
    scale = torch.tensor(8.0, device=device)

    loss = ampfuse.cross_entropy(logits, target, softcap=1.0, label_smoothing=0.1, grad_scale=scale)
    loss.backward(scale)

    capped = torch.tanh(logits.detach().double()).requires_grad_()
    expected = torch.nn.functional.cross_entropy(capped, target, label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(expected, capped, scale.double())
    gradient = gradient * (1 - capped.detach() ** 2)
    assert relatively_off(loss, expected) <= 2e-6
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=0.005, atol=1e-7)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_sums_over_many_equal_logits_keep_their_digits(device, dtype):
    """The rounding errors of the additions do not average out here."""
    for other in (-0.0048, -0.3, 0.77):
        logits = torch.full((1, 2048), other, dtype=dtype, device=device)
        logits[0, 5] = 15
        target = torch.tensor([5], device=device)
        loss = ampfuse.cross_entropy(logits, target)
        margin = 15 - logits[0, 0].double()
        assert relatively_off(loss, torch.log1p(2047 * torch.exp(-margin))) <= 1e-6


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_loss_and_gradient_of_confident_rows_keep_their_digits(device, dtype):
    """1 - p must be computed as the other classes' sum: 1 - 1 leaves only rounding errors."""
    margin = torch.tensor([10.0, 30.0, 60.0, 80.0])
    logits = torch.zeros(4, 1000, dtype=dtype)
    logits[torch.arange(4), torch.arange(4)] = margin.to(dtype)
    logits, target = logits.to(device).requires_grad_(), torch.arange(4, device=device)

    loss = ampfuse.cross_entropy(logits, target, reduction="none")
    loss.sum().backward()

    others = 999 * torch.exp(-margin.double())
    expected = torch.log1p(others)
    assert torch.allclose(loss.cpu().double(), expected, rtol=1e-6, atol=0)
    of_target = -(others / (1 + others))
    diagonal = logits.grad[target, target].cpu()
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
@pytest.mark.parametrize("classes", [3, 3000])
@pytest.mark.parametrize("change", EXTREMES.values(), ids=list(EXTREMES))
def test_extreme_logits_give_the_exact_loss_and_gradient(device, dtype, classes, change):
    logits = change(logits_of(4, classes, torch.float32, device).detach())
    logits, target = logits.to(dtype).requires_grad_(), targets_of(4, classes, device)

    loss = ampfuse.cross_entropy(logits, target, reduction="none")
    loss.sum().backward()

    expected, gradient = exact(logits, target, reduction="none")
    assert relatively_off(loss, expected) <= 1e-6
    assert ulps_off(logits.grad, gradient) <= ULPS


INFINITY = float("inf")
ROWS = {
    "all but one": ([-INFINITY, 2.0, -INFINITY], 1),
    "all but the target and another": ([-INFINITY, 2.0, 1.0], 1),
    "the target": ([-INFINITY, 2.0, 1.0], 0),
    "all": ([-INFINITY, -INFINITY, -INFINITY], 0),
    "positive elsewhere": ([INFINITY, 2.0, 1.0], 1),
    "positive target": ([1.0, INFINITY, 1.0], 1),
    "a NaN": ([1.0, float("nan"), 1.0], 0),
    "a NaN target": ([1.0, float("nan"), 1.0], 1),
}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("padding", [0, 5000])
@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_rows_with_infinities_and_nans_give_torchs_results(device, dtype, padding, row):
    values, target = row
    logits = torch.tensor([values + [-INFINITY] * padding], dtype=dtype, device=device)
    logits.requires_grad_()
    target = torch.tensor([target], device=device)

    loss = ampfuse.cross_entropy(logits, target, reduction="none")
    loss.backward()

    expected, gradient = exact(logits, target, reduction="none")
    assert torch.allclose(loss.double(), expected, equal_nan=True)
    assert torch.allclose(logits.grad.double(), gradient, rtol=1e-2, equal_nan=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("padding", [1, 5000])
@pytest.mark.parametrize("kind", ["smoothed", "probabilities", "probabilities of 0"])
def test_classes_of_minus_infinity_with_a_probability_give_torchs_results(
    device, dtype, padding, kind
):
    """The padding fills whole blocks of 2048 classes, which then have no finite logit."""
    logits = torch.tensor([[1.0, 2.0] + [-INFINITY] * padding], dtype=dtype, device=device)
    logits.requires_grad_()
    target, smoothing = torch.tensor([1], device=device), 0.1
    if kind != "smoothed":
        target = torch.full_like(logits, 1 / 8).detach().to(torch.promote_types(dtype, torch.float))
        target[0, 2:] = 0 if kind == "probabilities of 0" else 2.0**-13
        smoothing = 0.0

    options = {"label_smoothing": smoothing, "reduction": "none"}
    loss = ampfuse.cross_entropy(logits, target, **options)
    loss.backward()

    expected, gradient = exact(logits, target, **options)
    assert torch.allclose(loss.double(), expected, equal_nan=True)
    assert torch.allclose(logits.grad.double(), gradient, rtol=1e-2, equal_nan=True)


def test_ignore_index_may_be_a_class(device):
    logits, target = logits_of(6, 4, torch.float32, device), targets_of(6, 4, device)
    loss = ampfuse.cross_entropy(logits, target, ignore_index=2)
    assert torch.allclose(loss, functional.cross_entropy(logits, target, ignore_index=2))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_batch_without_counted_rows_gives_torchs_loss_and_a_zero_gradient(device, reduction):
    """The cases are an empty batch and a batch of ignored rows."""
    for rows in (0, 3):
        logits = torch.randn(rows, 5, device=device, requires_grad=True)
        target = torch.full((rows,), -100, device=device)
        loss = ampfuse.cross_entropy(logits, target, reduction=reduction)
        expected = functional.cross_entropy(logits.detach(), target, reduction=reduction)
        assert torch.allclose(loss, expected, equal_nan=True)
        loss.sum().backward()
        assert (logits.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integer_targets_of_any_dtype_give_the_same_loss(device, dtype):
    logits, target = logits_of(6, 200, torch.float32, device), targets_of(6, 200, device)
    loss = ampfuse.cross_entropy(logits, target.to(dtype))
    assert torch.equal(loss, ampfuse.cross_entropy(logits, target))


SHAPES = [(3,), (4, 3), (2, 3, 1), (2, 3, 4), (2, 3, 4, 5), (2, 3, 0), (0, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("memory", ["contiguous", "channels last", "strided"])
def test_loss_and_gradient_equal_torchs_for_any_shape_and_strides(
    device, shape, reduction, probabilities, memory
):
    logits = torch.randn(shape, device=device)
    if memory == "channels last" and len(shape) > 2:
        logits = logits.movedim(1, -1).contiguous().movedim(-1, 1)
    if memory == "strided":
        logits = torch.stack([logits, logits], -1)[..., 1]
    logits.requires_grad_()
    index_shape = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.randint(3, index_shape, device=device)
    if probabilities:
        target = torch.rand(shape, device=device)

    loss = ampfuse.cross_entropy(logits, target, reduction=reduction)
    expected = functional.cross_entropy(logits, target, reduction=reduction)

    assert loss.shape == expected.shape
    assert torch.allclose(loss, expected, equal_nan=True, atol=1e-6)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    (reference,) = torch.autograd.grad(expected.sum(), logits)
    assert torch.allclose(grad, reference, atol=1e-6)


def test_rows_of_a_padded_vocabulary_give_the_exact_loss_and_gradient(device):
    """Rows of a padded vocabulary begin at any alignment."""
    for width, skip in ((1003, 0), (1003, 3), (5007, 1)):
        room = torch.randn(7, width, device=device).bfloat16()
        logits = room[:, skip : width - 2].detach().requires_grad_()
        target = targets_of(7, logits.shape[1], device)
        loss = ampfuse.cross_entropy(logits, target)
        loss.backward()
        expected, gradient = exact(logits, target)
        assert relatively_off(loss, expected) <= 1e-6
        assert ulps_off(logits.grad, gradient) <= ULPS
