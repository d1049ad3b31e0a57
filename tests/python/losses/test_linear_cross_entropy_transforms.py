"""Tests of linear_cross_entropy in torch.func and forward mode, where only vmap is supported."""

import ampfuse
import pytest
import torch
from linear_reference import head
from loss_transforms import TRANSFORMS
from torch.nn import functional


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("kind", ["mean", "none", "metrics"])
def test_error_for_unsupported_transforms_names_the_function(device, kind, name, transform):
    tensors = vars(head(device, torch.float32).as_leaves(torch.float32))
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def loss_of(x):
        if kind == "metrics":
            return ampfuse.linear_cross_entropy(**tensors | {name: x}, return_metrics=True)[0]
        return ampfuse.linear_cross_entropy(**tensors | {name: x}, reduction=kind).sum()

    refusal = r"^linear_cross_entropy: torch\.func .* use torch\.nn"
    with pytest.raises(NotImplementedError, match=refusal):
        TRANSFORMS[transform](loss_of, tensors[name])


def test_transform_of_a_model_whose_loss_is_a_module_is_refused(device):
    criterion = ampfuse.LinearCrossEntropyLoss(8, 30, device=device)
    batch = torch.zeros(4, 8, device=device), torch.arange(4, device=device)

    def loss_of(parameters):
        return torch.func.functional_call(criterion, parameters, batch)

    with pytest.raises(
        NotImplementedError, match=r"^linear_cross_entropy: torch\.func .* use torch\.nn"
    ):
        torch.func.grad(loss_of)(dict(criterion.named_parameters()))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_equals_a_loop(device, reduction):
    batch = head(device, torch.float32, rows=24)
    hidden, target = batch.hidden.view(3, 8, 24), batch.target.view(3, 8)

    def loss_of(hidden, target):
        return ampfuse.linear_cross_entropy(
            hidden, batch.weight, target, batch.bias, reduction=reduction
        )

    losses = torch.func.vmap(loss_of)(hidden, target)

    each = torch.stack([loss_of(*rows) for rows in zip(hidden, target, strict=True)])
    assert torch.equal(losses, each)
    for grad, expected in zip(batch.grads(losses), batch.grads(each), strict=True):
        torch.testing.assert_close(grad, expected)


def test_losses_that_are_not_differentiated_work_inside_transforms(device):
    batch = head(device, torch.float32)
    expected = batch.loss()

    def loss_and_metric(weight):
        logits = functional.linear(batch.hidden.detach(), weight, batch.bias.detach())
        with torch.no_grad():
            metric = ampfuse.linear_cross_entropy(batch.hidden, weight, batch.target, batch.bias)
        return functional.cross_entropy(logits, batch.target), metric

    _, metric = torch.func.grad(loss_and_metric, has_aux=True)(batch.weight.detach())
    assert torch.equal(metric, expected)
