"""max_grad_norm of ampfuse.Adam and AdamW, for all groups or one group, and grad_norm."""

import ampfuse
import pytest
import torch
from optim_models import (
    BOTH,
    DTYPES_16_BIT,
    assert_near,
    assert_same_bits,
    assert_same_but_for_norms,
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


def step_of_clipped(cls, params):
    """Return copies of the parameters after a step with their present gradients, unclipped."""
    others = copies(params)
    for param, other in zip(params, others, strict=True):
        other.grad = param.grad
    cls(others).step()
    return others


@BOTH
@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3, 1.0, 1e9])
def test_norm_is_taken_over_all_groups(device, cls, max_grad_norm):
    first, second, groups = two_groups(device)
    optimizer = cls(groups, max_grad_norm=max_grad_norm)
    everything = [*first, *second]
    feed(everything, step=0)
    grads = clones(gradients(everything))
    norm = clip_grad_norm_(everything, max_grad_norm)
    expected = step_of_clipped(cls, everything)

    for param, grad in zip(everything, grads, strict=True):
        param.grad = grad
    optimizer.step()

    assert_near(everything, expected, steps=1)
    assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)


@BOTH
@pytest.mark.parametrize("own", [0.5, float("inf")])
def test_group_with_its_own_limit_is_excluded_from_the_shared_norm(device, cls, own):
    first, second, groups = two_groups(device, max_grad_norm=own)
    optimizer = cls(groups, max_grad_norm=1.0)
    feed([*first, *second], step=0)
    grads = clones(gradients([*first, *second]))
    norm = clip_grad_norm_(first, 1.0)
    clip_grad_norm_(second, own)
    expected = [*step_of_clipped(cls, first), *step_of_clipped(cls, second)]

    for param, grad in zip([*first, *second], grads, strict=True):
        param.grad = grad
    optimizer.step()

    assert_near([*first, *second], expected, steps=1)
    assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)


def test_clipping_may_be_enabled_for_a_single_group(device):
    first, second, groups = two_groups(device, max_grad_norm=0.5)
    optimizer = ampfuse.AdamW(groups)
    feed([*first, *second], step=0)
    grads = clones(gradients(second))
    clip_grad_norm_(second, 0.5)
    expected = [*step_of_clipped(ampfuse.AdamW, first), *step_of_clipped(ampfuse.AdamW, second)]

    for param, grad in zip(second, grads, strict=True):
        param.grad = grad
    optimizer.step()

    assert_same_bits(first, expected[: len(first)])
    assert_near(second, expected[len(first) :], steps=1)
    assert optimizer.grad_norm is None


def test_max_grad_norm_is_read_at_each_step(device):
    params = parameters(device)
    others = copies(params)
    optimizer = trained(lambda p: ampfuse.AdamW(p, max_grad_norm=1.0), params, range(1))
    reference = trained(lambda p: ampfuse.AdamW(p, max_grad_norm=1.0), others, range(1))

    optimizer.max_grad_norm = None
    reference.param_groups[0]["max_grad_norm"] = float("inf")
    train(optimizer, params, [1])
    train(reference, others, [1])

    assert_same_bits(params, others)


@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_masters_of_clipped_16_bit_models_match_a_clipped_float32_model(device, dtype):
    narrow = parameters(device, dtype)
    wide = copies(narrow, torch.float32)

    optimizer = trained(lambda p: ampfuse.AdamW(p, max_grad_norm=1.0), narrow, range(5))
    reference = trained(lambda p: ampfuse.AdamW(p, max_grad_norm=1.0), wide, range(5))

    assert_same_but_for_norms(optimizer.master_params(), wide)
    assert_same_but_for_norms([optimizer.grad_norm], [reference.grad_norm])


def test_grad_norm_covers_parameters_of_all_dtypes(device):
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    params = [param for dtype in dtypes for param in parameters(device, dtype)]
    optimizer = ampfuse.AdamW(params, max_grad_norm=1.0)
    feed(params, step=0)

    optimizer.step()

    expected = exact_norm(gradients(params), 2)
    assert optimizer.grad_norm.item() == pytest.approx(expected, rel=1e-6)


def test_grad_norm_is_none_before_the_first_clipped_step(device):
    unclipped = trained(ampfuse.AdamW, parameters(device), range(1))
    assert unclipped.grad_norm is None

    params = parameters(device)
    optimizer = ampfuse.AdamW(params, max_grad_norm=1.0)
    assert optimizer.grad_norm is None
    train(optimizer, params, range(1))
    assert optimizer.grad_norm.shape == ()
    assert optimizer.grad_norm.device == params[0].device


def test_grad_norm_of_each_step_is_not_overwritten_by_later_steps(device):
    params = parameters(device)
    optimizer = ampfuse.AdamW(params, max_grad_norm=1.0)

    norms = []
    for step in range(3):
        train(optimizer, params, [step])
        norms.append((optimizer.grad_norm, exact_norm(gradients(params), 2)))

    for norm, expected in norms:
        assert norm.item() == pytest.approx(expected, rel=1e-6)


def test_grad_norm_of_a_step_without_gradients_is_zero(device):
    params = parameters(device)
    optimizer = trained(lambda p: ampfuse.AdamW(p, max_grad_norm=1.0), params, range(1))
    assert optimizer.grad_norm > 0

    optimizer.zero_grad()
    optimizer.step()

    assert optimizer.grad_norm == 0


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

    ampfuse.AdamW(ours, max_grad_norm=1.0).step()
    torch.optim.AdamW(theirs).step()

    for param, other in zip(ours, theirs, strict=True):
        assert torch.equal(param.isnan(), other.isnan())


def test_conjugate_gradients_are_written_back():
    """Autograd makes them of complex parameters."""
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    weight = torch.tensor([1 - 2j, 2 + 1j, -3j])
    (param.conj() * weight).real.sum().backward()
    assert param.grad.is_conj()
    expected = param.grad.resolve_conj() / torch.linalg.vector_norm(param.grad)
    ampfuse.Adam([param], write_back_grads=True, max_grad_norm=1.0).step()
    torch.testing.assert_close(param.grad.resolve_conj(), expected)


def test_conjugate_gradients_are_clipped_in_a_compiled_step():
    steps = []
    for compiles in (False, True):
        param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        param.grad = torch.tensor([1 - 2j, 2 + 1j, -3j]).conj()
        optimizer = ampfuse.Adam([param], write_back_grads=True, max_grad_norm=1.0)
        step = optimizer.step
        if compiles:
            step = torch.compile(step, backend="aot_eager", fullgraph=True)
        step()
        steps.append(param.detach())
    torch.testing.assert_close(*steps)
