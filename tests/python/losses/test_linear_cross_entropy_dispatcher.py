"""Tests of the operators of linear cross-entropy: torch's own checks, and torch.func."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from linear_reference import DTYPES, Head, head
from linear_samples import LINEAR_KEYWORDS, LINEAR_SAMPLES, public
from loss_transforms import TRANSFORMS
from op_overloads import overload
from torch.nn import functional

BFLOAT16, HALF = torch.bfloat16, torch.float16
PUBLIC = ["linear_cross_entropy", "linear_cross_entropy.metrics"]
OF_ROWS = ["linear_cross_entropy_forward", "linear_cross_entropy_backward"]
EVERY_OP_OF_ROWS = pytest.mark.parametrize("op", OF_ROWS)


@pytest.mark.parametrize(
    ("op", "dtype", "count"),
    [(op, dtype, 8) for op in OF_ROWS for dtype in DTYPES]
    + [(op, BFLOAT16, 8) for op in PUBLIC]
    + [(op, BFLOAT16, 0) for op in LINEAR_SAMPLES],
)
def test_operators_pass_opcheck(device, op, dtype, count):
    sample = LINEAR_SAMPLES[op](dtype, device, count)
    torch.library.opcheck(overload(op), sample, LINEAR_KEYWORDS.get(op, {}))


@pytest.mark.parametrize(
    ("op", "dtype", "options"),
    [(op, dtype, {"reduction": 1, "chunk_rows": 3}) for op in PUBLIC for dtype in DTYPES]
    + [(op, BFLOAT16, {"reduction": n, "chunk_rows": 3}) for op in PUBLIC for n in (0, 2)]
    + [("linear_cross_entropy", BFLOAT16, {"chunk_classes": 3})]
    + [("linear_cross_entropy", BFLOAT16, {"logits_dtype": BFLOAT16})],
    ids=str,
)
def test_public_operators_pass_opcheck_with_gradients(device, op, dtype, options):
    hidden, weight, target, bias = public(dtype, device, 8)
    for tensor in (hidden, weight, bias):
        tensor.requires_grad_()
    torch.library.opcheck(overload(op), (hidden, weight, target, bias), options)


@EVERY_OP_OF_ROWS
def test_gradients_that_are_not_requested_are_empty(device, op):
    sample = list(LINEAR_SAMPLES[op](BFLOAT16, device, 8))
    for only in (None, 0, 1, 2):
        wanted = [index == only for index in range(3)]
        sample[19 if op.endswith("forward") else 20] = wanted
        results = overload(op)(*sample)
        grads = results[1:4] if op.endswith("forward") else results
        assert [grad.numel() > 0 for grad in grads] == wanted


@EVERY_OP_OF_ROWS
def test_weight_grad_dtype_must_be_that_of_products_or_sums(device, op):
    # float16 sums would overflow. The other dtypes are neither those of products nor of sums.
    for dtype, wrong in zip(DTYPES, (torch.float32, BFLOAT16, HALF, HALF), strict=True):
        sample = list(LINEAR_SAMPLES[op](dtype, device, 8))
        sample[14 if op.endswith("forward") else 15] = wrong
        with pytest.raises(TypeError, match=r"weight_grad_dtype: expected .* for products of"):
            overload(op)(*sample)


# --- torch.func and forward mode, where only vmap is supported ------------------------------------


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_error_for_unsupported_transforms_names_the_function(device, transform):
    batch = head(device, torch.float32)
    refusal = r"^linear_cross_entropy: torch\.func .* use torch\.nn"

    def loss_of(name, options, x):
        tensors = {name: tensor.detach() for name, tensor in vars(batch).items()}
        loss = Head(**tensors | {name: x}).loss(**options)
        return loss[0] if isinstance(loss, tuple) else loss.sum()

    for options in ({}, {"reduction": "none"}, {"return_metrics": True}):
        for name in ("hidden", "weight", "bias"):
            x = getattr(batch, name).detach()
            with pytest.raises(NotImplementedError, match=refusal):
                TRANSFORMS[transform](partial(loss_of, name, options), x)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_equals_a_loop(device, reduction):
    batch = head(device, torch.float32, rows=24)
    hidden, target = batch.hidden.view(3, 8, 24), batch.target.view(3, 8)

    def loss_of(hidden, target):
        return replace(batch, hidden=hidden, target=target).loss(reduction=reduction)

    losses = torch.func.vmap(loss_of)(hidden, target)

    each = torch.stack([loss_of(*rows) for rows in zip(hidden, target, strict=True)])
    assert torch.equal(losses, each)
    torch.testing.assert_close(batch.grads(losses), batch.grads(each))


def test_losses_that_are_not_differentiated_work_inside_transforms(device):
    batch = head(device, torch.float32)
    expected = batch.loss()

    def loss_and_metric(weight):
        logits = functional.linear(batch.hidden.detach(), weight, batch.bias.detach())
        with torch.no_grad():
            metric = replace(batch, weight=weight).loss()
        return functional.cross_entropy(logits, batch.target), metric

    _, metric = torch.func.grad(loss_and_metric, has_aux=True)(batch.weight.detach())
    assert torch.equal(metric, expected)
