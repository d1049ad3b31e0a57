"""Tests of losses and gradients of cross_entropy for rows, and for positions of images.

They are compared with float64 from the same rounded logits.
"""

import os
import subprocess
import sys
from pathlib import Path

import ampfuse
import pytest
import torch
from cross_entropy_reference import (
    assert_exact,
    error_of_probability,
    exact,
    relatively_off,
    results,
    scaled,
    ulp,
    ulps_off,
)
from cross_entropy_samples import batch
from torch.nn import functional

pytestmark = pytest.mark.vectorised

FEWER_THAN_64_BITS = [torch.float16, torch.bfloat16, torch.float32]
EVERY_DTYPE = pytest.mark.parametrize("dtype", [*FEWER_THAN_64_BITS, torch.float64])
ALL_BUT_FLOAT64 = pytest.mark.parametrize("dtype", FEWER_THAN_64_BITS)
# One class; fewer than a vector holds; multiples of warps and vectors and their neighbours; odd and
# prime numbers on both sides of a block of 2048; GPT-2's vocabulary; the largest one in use, and a
# neighbour. A CPU takes rows of up to 128 classes in tiles of 32 rows.
CLASSES = [1, 7, 31, 64, 128, 129, 1000, 2047, 2048, 2049, 4099, 50257, 262144, 262147]
# Positions, whose classes are far apart in memory and are not copied: half a tile of 32, a tile and
# one more, and several tiles, in one dimension or two. Classes: one, a few, and more than 128.
POSITIONS = [(3, 1, 16), (2, 5, 33), (2, 21, 7, 15), (1, 150, 4, 20), (3, 2, 64)]
SHAPES = [(37 if classes <= 128 else 5, classes) for classes in CLASSES] + POSITIONS


def weighted(device, shape, dtype, scale=4):
    """Return logits, targets of which some are ignored, and class weights."""
    logits, target = batch(device, shape, dtype, scale)
    target.view(-1)[3::5] = -100
    weight = torch.rand(shape[1], generator=torch.Generator().manual_seed(2))
    return logits, target, weight.to(device)


@pytest.mark.sanitizer
@EVERY_DTYPE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient_are_the_exact_ones_rounded(device, dtype, shape):
    """The gradient is computed in forward for a mean, and in backward for the loss of each row."""
    logits, target, weight = weighted(device, shape, dtype)
    each = torch.linspace(0.3, 3.0, target.numel(), device=device).view_as(target)
    calls = [({"reduction": "mean"}, 1024.0), ({"reduction": "none", "weight": weight}, each)]
    if logits.numel() < 100_000:
        calls += [({"reduction": "mean", "weight": weight}, 1024.0), ({"reduction": "sum"}, 8.0)]
    for options, upstream in calls:
        indices = target.int() if options["reduction"] == "none" else target
        loss, grad = scaled(logits, indices, upstream, **options)
        assert_exact((loss, grad), exact(logits, target, upstream, **options), options)
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        assert (grad.movedim(1, -1)[target == -100] == 0).all()


# Reductions with and without class weights. A mean is divided by the weights of class targets.
REDUCTIONS = [("mean", False), ("mean", True), ("none", True), ("sum", False)]


@ALL_BUT_FLOAT64
@pytest.mark.parametrize("classes", [1, 10, 300, 2049])  # a tile; one block, two blocks
@pytest.mark.parametrize("kind", ["indices", "probabilities", "half probabilities"])
def test_label_smoothing_and_probabilities_give_the_exact_results(device, dtype, classes, kind):
    logits, target, weight = weighted(device, (4, classes), dtype)
    divisors = {False: 3, True: weight[target[target >= 0]].sum().item()}
    if kind != "indices":
        target = torch.rand(4, classes, generator=torch.Generator().manual_seed(3)).softmax(1)
        target = target.to(device, torch.half if kind == "half probabilities" else torch.float)
        divisors = {False: 4, True: 4}
    for reduction, is_weighted in REDUCTIONS:
        options = {"label_smoothing": 0.1, "reduction": reduction}
        options["weight"] = weight if is_weighted else None
        loss, grad = scaled(logits, target, 64.0, **options)
        expected, gradient = exact(logits, target, 64.0, **options)
        assert relatively_off(loss, expected) <= 1e-6 or classes == 1, options
        # An error of eps times the result, plus that of terms that cancel.
        largest = 64.0 / (divisors[is_weighted] if reduction == "mean" else 1)
        allowed = torch.finfo(dtype).eps * gradient.abs() + error_of_probability(logits) * largest
        assert ((grad.double() - gradient).abs() <= allowed).all(), options


@ALL_BUT_FLOAT64
@pytest.mark.parametrize("classes", [40, 500])
def test_z_loss_and_softcap_give_the_exact_loss_and_gradient(device, dtype, classes):
    logits, target, _ = weighted(device, (6, classes), dtype, scale=20)
    for reduction in ("mean", "none"):
        options = {"z_loss": 1e-3, "softcap": 15.0, "reduction": reduction}
        loss, grad = scaled(logits, target, 8.0, **options)
        expected, gradient = exact(logits, target, 8.0, **options)
        assert relatively_off(loss, expected) <= 2e-6, reduction
        # z is rounded to float32 before the exponential; at 15 an ulp is 1e-6.
        allowed = ulp(dtype, gradient) + 4e-6 * gradient.abs()
        assert ((grad.double() - gradient).abs() <= allowed).all(), reduction
        assert (grad[3] == 0).all()


@pytest.mark.parametrize("shape", [(4, 10, 40), (4, 10)], ids=str)
def test_gradient_of_the_target_keeps_its_digits_under_a_softcap(device, shape):
    logits, target, _ = weighted(device, shape, torch.float32, scale=1)
    at, is_target = target.clamp(min=0).unsqueeze(1), target.unsqueeze(1) >= 0
    for softcap in (1.0, 30.0):
        options = {"reduction": "sum", "softcap": softcap}
        grad = results(ampfuse.cross_entropy, logits, target, **options)[1]
        gradient = exact(logits, target, **options)[1]
        of_targets = (grad.gather(1, at)[is_target], gradient.gather(1, at)[is_target])
        # A GPU's tanh may be off by 2 ulps.
        assert ulps_off(*of_targets) <= (1.5 if device.type == "cpu" else 3.5), softcap


TORCH_SHAPES = [(3,), (4, 3), (2, 3, 1), (2, 3, 4), (2, 3, 4, 5), (2, 3, 0), (0, 3, 2)]
MEMORY = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 1],
}


@pytest.mark.parametrize("shape", TORCH_SHAPES, ids=str)
@pytest.mark.parametrize("memory", MEMORY)
def test_loss_and_gradient_equal_torchs_for_any_shape_and_strides(device, shape, memory):
    logits, target = batch(device, shape)
    logits = MEMORY[memory](logits.detach()).requires_grad_()
    for reduction in ("none", "mean", "sum"):
        for given in (target, torch.rand(shape, device=device)):
            found, expected = (
                results(function, logits, given, reduction=reduction)
                for function in (ampfuse.cross_entropy, functional.cross_entropy)
            )
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_rows_of_a_padded_vocabulary_give_the_exact_loss_and_gradient(device):
    """Rows of a padded vocabulary begin at any alignment."""
    for width, skip in ((1003, 0), (1003, 3), (5007, 1)):
        room = torch.randn(7, width, device=device).bfloat16()
        logits = room[:, skip : width - 2].detach().requires_grad_()
        target = batch(device, logits.shape)[1]
        found = results(ampfuse.cross_entropy, logits, target)
        assert_exact(found, exact(logits, target), (width, skip))


# --- positions of images -----------------------------------------------------------------------

ALL_OPTIONS = {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 10.0}
EACH_OPTION = [{"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"softcap": 10.0}]


# All shapes with all options together, and each option alone for more than 128 classes: contiguous
# rows of so many are not taken by tile.
@EVERY_DTYPE
@pytest.mark.parametrize(
    ("shape", "options"),
    [(shape, ALL_OPTIONS) for shape in POSITIONS]
    + [(POSITIONS[3], option) for option in EACH_OPTION],
    ids=str,
)
def test_positions_with_any_option_give_results_of_contiguous_rows(device, shape, dtype, options):
    logits, target, weight = weighted(device, shape, dtype)
    rows = logits.detach().movedim(1, -1).contiguous().movedim(-1, 1).requires_grad_()
    probabilities = torch.rand(shape, device=device).softmax(1)
    tolerance = max(2 * torch.finfo(dtype).eps, 1e-13)
    for given in (target, probabilities, probabilities.half()):
        for reduction in ("none", "mean"):
            call = {**options, "reduction": reduction, "weight": weight}
            loss, grad = scaled(logits, given, 8.0, **call)
            expected, gradient = scaled(rows, given, 8.0, **call)
            torch.testing.assert_close(loss, expected, rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(grad, gradient, rtol=tolerance, atol=tolerance)


VIEWS = {
    "a part of a batch's entries": lambda x: x[1:],
    "every second entry": lambda x: x[::2],
    "a part of classes": lambda x: x[:, 1:5],
    "a part of the positions": lambda x: x[..., 3:],
    "every second position": lambda x: x[..., ::2],
    "one entry for all": lambda x: x[:1].expand(x.shape),
    "one position for all": lambda x: x[..., :1].expand(x.shape),
    "transposed positions": lambda x: x.transpose(-1, -2),
    "rows in one piece": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_images_give_torchs_loss_and_gradient(device, view):
    def of_view(function):
        return lambda whole, target, **options: function(VIEWS[view](whole), target, **options)

    whole, _, _ = weighted(device, (4, 7, 6, 22), torch.float32)
    entries, classes, *positions = VIEWS[view](whole).shape
    target = torch.randint(classes, (entries, *positions), device=device)
    for reduction, upstream in (("none", torch.rand(target.shape, device=device)), ("mean", 0.7)):
        found, expected = (
            results(of_view(function), whole, target, upstream, reduction=reduction)
            for function in (ampfuse.cross_entropy, functional.cross_entropy)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# Logits are read in place if a class has at least max(16, classes / 16) positions. The shapes have
# the most classes for 16 positions, one class more, one position too few, far too many classes, and
# enough positions for many classes.
EDGES = [(2, 256, 16), (2, 257, 16), (2, 3, 15), (1, 4000, 16), (1, 5000, 400)]


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_results_of_images_are_exact_whether_they_are_copied_or_not(device, shape):
    logits, target, _ = weighted(device, shape, torch.float32)
    assert_exact(results(ampfuse.cross_entropy, logits, target), exact(logits, target))


# --- independence ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 5000), (3, 21, 100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_of_a_row_do_not_depend_on_other_rows(device, shape, dtype):
    """A row is one of a matrix, or a position; parts begin and end within tiles of positions."""
    logits, target = batch(device, shape, dtype, scale=4)
    parts = [(slice(row, row + 1),) for row in (0, 4, 8)]
    if len(shape) == 3:
        parts = [(slice(e, e + 1), slice(i, i + 40)) for e, i in ((0, 0), (1, 17), (2, 53))]
    for options in ({"reduction": "none"}, {"denominator": 1.0}):
        losses, grad = results(ampfuse.cross_entropy, logits, target, **options)
        for part in parts:
            at = (part[0], slice(None), *part[1:])
            alone = logits.detach()[at].clone().requires_grad_()
            loss, of_part = results(ampfuse.cross_entropy, alone, target[part], **options)
            assert torch.equal(of_part, grad[at])
            if losses.dim() > 0:
                assert torch.equal(loss, losses[part])


# The rows are fewer than 4 threads, which then share each row; or tiles of positions.
@pytest.mark.parametrize("shape", [(3, 9000), (2, 21, 90, 90)], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(set_threads, shape):
    logits, target = batch(torch.device("cpu"), shape)
    expected = None
    for threads in (1, 1, 2, 3, 4, 4):
        set_threads(threads)
        found = results(ampfuse.cross_entropy, logits, target)
        expected = expected or found
        assert all(map(torch.equal, found, expected)), threads


@pytest.mark.slow
def test_losses_pass_their_tests_without_vector_instructions():
    if ampfuse.build_info()["cpu_capability"] == "DEFAULT":
        pytest.skip("there is nothing less here")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cpu"]
    command += ["-m", "vectorised and not slow", str(Path(__file__).parent)]
    # One thread: if others use all cores, each that is woken for a small loop waits for a core. The
    # tests of threads set their number.
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
