"""max_grad_norm of ampfuse.Adam and AdamW, for all groups or one group, and grad_norm."""

import ampfuse
import pytest
import torch
from optim_models import (
    DTYPES_16_BIT,
    assert_near,
    assert_same_bits,
    assert_same_but_for_norms,
    clipped_adamw,
    clones,
    copies,
    feed,
    parameters,
    train,
    trained,
)
from reference import exact_norm, gradients
from torch.nn.utils import clip_grad_norm_


def two_groups(device, **options_of_second):
    """Return the parameters of the first group, those of the second, and both groups."""
    first, second = parameters(device), parameters(device, seed=9)
    return first, second, [{"params": first}, {"params": second, **options_of_second}]


@pytest.mark.parametrize(
    ("cls", "shared", "own"),
    [
        *((ampfuse.AdamW, shared, None) for shared in (0.0, 1e-3, 1.0, 1e9)),
        (ampfuse.Adam, 1.0, 0.5),
        (ampfuse.AdamW, 1.0, float("inf")),  # the second group is not clipped
        (ampfuse.AdamW, None, 0.5),  # only the second group is clipped
    ],
)
def test_groups_share_one_norm_unless_they_have_a_limit(device, cls, shared, own):
    options = {} if own is None else {"max_grad_norm": own}
    first, second, groups = two_groups(device, **options)
    optimizer = cls(groups, max_grad_norm=shared)
    everything = [*first, *second]
    feed(everything, step=0)
    grads = clones(gradients(everything))
    if shared is not None:
        norm = clip_grad_norm_(everything if own is None else first, shared)
    if own is not None:
        clip_grad_norm_(second, own)
    expected = copies(everything)
    for param, other, grad in zip(everything, expected, grads, strict=True):
        param.grad, other.grad = grad, param.grad
    cls(expected).step()

    optimizer.step()

    assert_near(everything, expected, steps=1)
    if shared is None:
        assert_same_bits(first, expected[: len(first)])
        assert optimizer.grad_norm is None
    else:
        assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)


def test_norm_is_computed_when_the_first_group_is_empty(device):
    param = torch.nn.Parameter(torch.zeros(2, device=device))
    optimizer = clipped_adamw([{"params": []}, {"params": [param]}])
    param.grad = torch.tensor([3.0, 4.0], device=device)
    optimizer.step()
    assert optimizer.grad_norm.item() == 5.0


def test_max_grad_norm_is_read_at_each_step(device):
    params = parameters(device)
    others = copies(params)
    optimizer, reference = (trained(clipped_adamw, tensors, [0]) for tensors in (params, others))
    optimizer.max_grad_norm = None
    reference.param_groups[0]["max_grad_norm"] = float("inf")
    train(optimizer, params, [1])
    train(reference, others, [1])
    assert_same_bits(params, others)


@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_masters_of_clipped_16_bit_models_match_a_clipped_float32_model(device, dtype):
    narrow = parameters(device, dtype)
    wide = copies(narrow, torch.float32)
    optimizer, reference = (trained(clipped_adamw, params, range(5)) for params in (narrow, wide))
    assert_same_but_for_norms(optimizer.master_params(), wide)
    assert_same_but_for_norms([optimizer.grad_norm], [reference.grad_norm])


def test_grad_norm_covers_parameters_of_all_dtypes(device):
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    params = [param for dtype in dtypes for param in parameters(device, dtype)]
    optimizer = trained(clipped_adamw, params, [0])
    expected = exact_norm(gradients(params), 2)
    assert optimizer.grad_norm.item() == pytest.approx(expected, rel=1e-6)


def test_grad_norm_is_none_before_the_first_clipped_step_and_not_overwritten_later(device):
    assert trained(ampfuse.AdamW, parameters(device), [0]).grad_norm is None
    params = parameters(device)
    optimizer = clipped_adamw(params)
    assert optimizer.grad_norm is None

    norms = []
    for step in range(3):
        train(optimizer, params, [step])
        norms.append((optimizer.grad_norm, exact_norm(gradients(params), 2)))

    for norm, expected in norms:
        assert norm.item() == pytest.approx(expected, rel=1e-6)
        assert (norm.shape, norm.device) == ((), params[0].device)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.grad_norm == 0  # of no gradients


@pytest.mark.parametrize("of_group", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_clipped_gradients_are_written_back_with_write_back_grads(device, max_grad_norm, of_group):
    first, second, groups = two_groups(device, **({"write_back_grads": True} if of_group else {}))
    optimizer = ampfuse.AdamW(groups, max_grad_norm=max_grad_norm, write_back_grads=not of_group)
    everything = [*first, *second]
    feed(everything, step=0)
    written, untouched = (second, first) if of_group else (everything, [])
    factor = 1.0
    if max_grad_norm is not None:
        factor = max_grad_norm / (exact_norm(gradients(everything), 2) + 1e-6)
    expected = [grad * factor for grad in gradients(written)]
    before = clones(gradients(untouched))

    optimizer.step()

    for grad, other in zip(gradients(written), expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-6, atol=0)
    assert_same_bits(gradients(untouched), before)


def test_nan_gradient_without_a_scaler_makes_the_same_elements_nan_as_in_torch(device):
    ours = parameters(device)
    theirs = copies(ours)
    for params in (ours, theirs):
        feed(params, step=0)
        params[0].grad[0, 0] = float("nan")
    clip_grad_norm_(theirs, 1.0)
    clipped_adamw(ours).step()
    torch.optim.AdamW(theirs).step()
    for param, other in zip(ours, theirs, strict=True):
        assert torch.equal(param.isnan(), other.isnan())


def test_conjugate_gradients_are_clipped_and_by_an_eager_step_written_back():
    """Autograd makes them of complex parameters."""
    stepped = []
    for is_compiled in (False, True):
        param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        (param.conj() * torch.tensor([1 - 2j, 2 + 1j, -3j])).real.sum().backward()
        assert param.grad.is_conj()
        expected = param.grad.resolve_conj() / torch.linalg.vector_norm(param.grad)
        optimizer = ampfuse.Adam([param], write_back_grads=True, max_grad_norm=1.0)
        step = optimizer.step
        if is_compiled:
            step = torch.compile(step, backend="aot_eager", fullgraph=True)
        step()
        stepped.append(param.detach())
        if not is_compiled:
            torch.testing.assert_close(param.grad.resolve_conj(), expected)
    torch.testing.assert_close(*stepped)
