"""Tests of cross_entropy with hooks, checkpoints and accumulated gradients."""

import ampfuse
import pytest
import torch
from cross_entropy_reference import ULPS, exact, ulps_off
from cross_entropy_samples import batch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

# The gradient is computed in forward, in backward, or in forward in place of the logits.
KINDS = {
    "mean": lambda logits, target: ampfuse.cross_entropy(logits, target),
    "none": lambda logits, target: ampfuse.cross_entropy(logits, target, reduction="none").mean(),
    "in place": lambda logits, target: ampfuse.cross_entropy_(logits, target),
}
EVERY_KIND = pytest.mark.parametrize("loss_of", KINDS.values(), ids=list(KINDS))
SHAPE = (8, 300)


class Head:
    """Hidden states, the layer that maps them to logits, and targets."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.hidden = torch.randn(8, 16).to(device).requires_grad_()
        self.layer = torch.nn.Linear(16, 300).to(device)
        self.target = torch.randint(300, (8,)).to(device)

    def gradients(self, loss, upstream=1.0, **options):
        of = [self.hidden, *self.layer.parameters()]
        return torch.autograd.grad(loss, of, torch.tensor(upstream, device=loss.device), **options)

    def expected(self, loss_of, upstream=1.0):
        """Return the gradients of a graph without hooks."""
        return self.gradients(loss_of(self.layer(self.hidden), self.target), upstream)


def assert_same(results, expected):
    assert all(map(torch.equal, results, expected))


@EVERY_KIND
def test_hooks_may_store_saved_tensors_elsewhere(device, loss_of):
    head, packed = Head(device), []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        # The bits of a product depend on the strides of its factors, so keep them.
        return tensor.detach().cpu().numpy().copy(order="K")

    def unpack(array):
        return torch.from_numpy(array).clone().to(device)

    for upstream in (1.0, 3.0):
        packed.clear()
        with saved_tensors_hooks(pack, unpack):
            loss = loss_of(head.layer(head.hidden), head.target)
        assert packed.count(SHAPE) == 1  # either the logits or their gradient
        first = head.gradients(loss, upstream, retain_graph=True)
        second = head.gradients(loss, upstream)
        expected = head.expected(loss_of, upstream)
        assert_same(first, expected)
        assert_same(second, expected)


@EVERY_KIND
def test_hooks_may_return_saved_tensors_with_other_strides(device, loss_of):
    head = Head(device)

    def by_columns(tensor):
        return tensor if tensor.dim() != 2 else tensor.t().contiguous().t()

    with saved_tensors_hooks(lambda tensor: tensor, by_columns):
        logits = head.layer(head.hidden)
    with saved_tensors_hooks(lambda tensor: tensor.clone(), by_columns):
        loss = loss_of(logits, head.target)
    # With other strides, a GPU's product adds in another order.
    tolerance = {"rtol": 0, "atol": 0} if device.type == "cpu" else {}
    found, expected = head.gradients(loss, 3.0), head.expected(loss_of, 3.0)
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("kind", ["mean", "none"])
def test_hooks_may_return_saved_positions_with_other_strides(device, kind):
    logits, target = batch(device, (2, 5, 33))
    (expected,) = torch.autograd.grad(KINDS[kind](logits, target), logits)
    with saved_tensors_hooks(lambda x: torch.stack([x, x], -1)[..., 0], lambda x: x):
        loss = KINDS[kind](logits, target)
    assert torch.equal(*torch.autograd.grad(loss, logits), expected)


@EVERY_KIND
def test_checkpoint_gives_the_same_gradients_as_often_as_backward_runs(device, loss_of):
    head = Head(device)

    def block(hidden):
        return loss_of(head.layer(hidden), head.target)

    loss = checkpoint(block, head.hidden, use_reentrant=False)
    assert_same(head.gradients(loss, 5.0, retain_graph=True), head.expected(loss_of, 5.0))
    assert_same(head.gradients(loss, 3.0), head.expected(loss_of, 3.0))

    loss = checkpoint(block, head.hidden, use_reentrant=True)
    loss.backward(torch.tensor(3.0, device=device))
    grads = [head.hidden.grad, *(param.grad for param in head.layer.parameters())]
    assert_same(grads, head.expected(loss_of, 3.0))


@EVERY_KIND
def test_hook_of_the_logits_receives_their_gradient_and_may_change_it(device, loss_of):
    leaf, target = batch(device, SHAPE)
    logits, seen = leaf * 1, []

    def negated(grad):
        seen.append(grad.clone())
        return -grad

    logits.register_hook(negated)
    loss_of(logits, target).backward()

    (grad,) = seen
    assert ulps_off(grad, exact(leaf, target)[1]) <= ULPS
    assert torch.equal(leaf.grad, -grad)


@EVERY_KIND
def test_retained_gradient_of_the_logits_equals_that_of_the_leaf(device, loss_of):
    leaf, target = batch(device, SHAPE)
    logits = leaf * 1
    logits.retain_grad()
    loss_of(logits, target).backward(torch.tensor(3.0, device=device))
    assert torch.equal(logits.grad, leaf.grad)


@EVERY_KIND
def test_backward_may_be_restricted_to_some_inputs(device, loss_of):
    head = Head(device)
    loss = loss_of(head.layer(head.hidden), head.target)
    loss.backward(inputs=[head.layer.bias])
    assert torch.equal(head.layer.bias.grad, head.expected(loss_of)[2])
    assert head.hidden.grad is head.layer.weight.grad is None


@pytest.mark.parametrize("kind", ["mean", "none"])
def test_gradients_of_two_losses_of_the_same_logits_add_up(device, kind):
    logits, first = batch(device, SHAPE, torch.float64)
    _, second = batch(device, SHAPE, seed=1)
    loss = KINDS[kind](logits, first) + 2 * KINDS[kind](logits, second)

    loss.backward()

    expected = exact(logits, first)[1] + exact(logits, second, 2.0)[1]
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-15)


@EVERY_KIND
def test_upstream_gradient_may_depend_on_the_loss(device, loss_of):
    leaf, target = batch(device, SHAPE, torch.float64)
    loss_of(leaf * 1, target).square().backward()
    loss, _ = exact(leaf, target)
    expected = exact(leaf, target, 2 * loss)[1]
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-13, atol=1e-15)


@EVERY_KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_two_batches_accumulate_in_a_leaf(device, loss_of, dtype):
    leaf, target = batch(device, SHAPE, dtype)
    other = batch(device, SHAPE, seed=1)[1]
    grads = [torch.autograd.grad(loss_of(leaf * 1, t), leaf)[0] for t in (target, other)]

    for retain_graph in (True, False):
        leaf.grad = None
        loss_of(leaf * 1, target).backward(retain_graph=retain_graph)
        first = leaf.grad.clone()
        loss_of(leaf * 1, other).backward(retain_graph=retain_graph)
        assert_same([first, leaf.grad], [grads[0], grads[0] + grads[1]])


@pytest.mark.parametrize("kind", ["mean", "none"])
@pytest.mark.parametrize("retain_graph", [True, False])
def test_gradient_of_a_leaf_is_not_changed_by_later_passes(device, kind, retain_graph):
    """The later passes are through new graphs, or through the graph that made the gradient."""
    logits, target = batch(device, SHAPE)
    loss = KINDS[kind](logits, target)
    loss.backward(retain_graph=retain_graph)
    grad, before = logits.grad, logits.grad.clone()
    logits.grad = None

    if retain_graph:
        loss.backward(torch.tensor(3.0, device=device))
    for upstream in (1.0, 5.0):
        KINDS[kind](logits, target).backward(torch.tensor(upstream, device=device))

    assert torch.equal(grad, before)


@EVERY_KIND
def test_gradients_of_two_leaves_of_the_same_logits_share_no_memory(device, loss_of):
    leaf, target = batch(device, SHAPE)
    other = torch.zeros_like(leaf, requires_grad=True)
    loss_of(leaf + other, target).backward()
    assert torch.equal(leaf.grad, other.grad)
    other.grad.zero_()
    assert ulps_off(leaf.grad, exact(leaf, target)[1]) <= ULPS
