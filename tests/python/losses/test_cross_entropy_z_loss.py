"""Tests of the number by which reduction="mean" divides the z-loss, for both losses."""

import ampfuse
import pytest
import torch

ROWS, CLASSES = 4, 10


def z_loss_of(loss_of):
    """Return the z-loss's part of a mean, for a factor of 1."""
    return (loss_of(z_loss=1.0) - loss_of()).item()


def batch(device):
    """Return logits, class weights, and the square of each row's log-sum-exp."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, CLASSES, generator=generator, dtype=torch.float64).to(device)
    weight = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64, device=device)
    return logits, weight, logits.logsumexp(1).square()


def cross_entropy(logits, target, weight, **options):
    return ampfuse.cross_entropy(logits, target, weight, **options)


def linear_cross_entropy(logits, target, weight, **options):
    identity = torch.eye(CLASSES, dtype=torch.float64, device=logits.device)
    return ampfuse.linear_cross_entropy(logits, identity, target, class_weight=weight, **options)


EVERY_LOSS = pytest.mark.parametrize("loss", [cross_entropy, linear_cross_entropy])


@EVERY_LOSS
def test_mean_divides_the_z_loss_by_the_class_weights_of_the_counted_targets(device, loss):
    logits, weight, squares = batch(device)
    target = torch.tensor([1, -100, 3, 3], device=device)

    z_loss = z_loss_of(lambda **options: loss(logits, target, weight, **options))

    counted = target != -100
    divisor = weight[target[counted]].sum()  # neither 3, the number of counted rows, nor 1
    assert z_loss == pytest.approx((squares[counted].sum() / divisor).item())


@EVERY_LOSS
def test_mean_divides_the_z_loss_by_the_number_of_rows_for_probabilities(device, loss):
    logits, weight, squares = batch(device)
    target = torch.full_like(logits, 1 / CLASSES)

    z_loss = z_loss_of(lambda **options: loss(logits, target, weight, **options))

    assert z_loss == pytest.approx((squares.sum() / ROWS).item())


@EVERY_LOSS
def test_mean_divides_the_z_loss_by_the_denominator_that_is_passed(device, loss):
    logits, weight, squares = batch(device)
    target = torch.tensor([1, 0, 3, 3], device=device)

    z_loss = z_loss_of(lambda **options: loss(logits, target, weight, denominator=7, **options))

    assert z_loss == pytest.approx((squares.sum() / 7).item())
