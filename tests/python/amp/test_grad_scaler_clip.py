"""GradScaler.clip_grad_norm_ unscales gradients, checks for overflow, computes the norm and clips.

No norm is cached for later calls: each call computes it from the current gradients.
"""

from functools import partial

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits
from scaler_languages import EVERY_LANGUAGE, ready
from torch.nn import Parameter


def scaled(device, count=3, scale=8.0, optimizer=torch.optim.SGD):
    """Return parameters with scaled gradients, their optimizer and its scaler."""
    params = [Parameter(torch.ones(5, device=device)) for _ in range(count)]
    scaler = ampfuse.GradScaler(device.type, scale)
    scaler.scale(sum((i + 1) * param.sum() for i, param in enumerate(params))).backward()
    return params, optimizer(params, lr=0.1), scaler


def operators(call):
    """Return the result of `call` and the names of ampfuse's operators it calls, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()
    names = [event.name for event in profile.events()]
    return result, [name for name in names if name.startswith("ampfuse::")]


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_result_has_the_bits_of_unscale_followed_by_clip_grad_norm(device, max_norm):
    params, optimizer, scaler = scaled(device)
    others, other_optimizer, other_scaler = scaled(device)
    norm = scaler.clip_grad_norm_(optimizer, max_norm)
    other_scaler.unscale_(other_optimizer)
    expected = ampfuse.clip_grad_norm_(others, max_norm)
    assert_same_bits([norm], [expected])
    assert norm.dtype == torch.float32
    assert_same_bits([p.grad for p in params], [p.grad for p in others])


@EVERY_LANGUAGE
def test_gradients_are_unscaled_and_clipped_in_two_passes_and_not_unscaled_again(language, device):
    param, optimizer, scaler = ready(language, device)
    norm, names = operators(lambda: scaler.clip_grad_norm_(optimizer, 1.0))
    assert norm.item() == pytest.approx(2**0.5)
    assert param.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    assert names == ["ampfuse::multi_tensor_unscale_norm", "ampfuse::multi_tensor_clip"]
    clipped, before = param.grad.clone(), param.detach().clone()
    scaler.step(optimizer)
    assert_same_bits([param.grad], [clipped])
    assert not torch.equal(param.detach(), before)


@EVERY_LANGUAGE
def test_norm_is_computed_anew_if_gradients_changed_after_unscale(language, device):
    """No call keeps a norm for later ones."""
    for clip in (
        lambda scaler, optimizer, param: scaler.clip_grad_norm_(optimizer, 1.0),
        lambda scaler, optimizer, param: ampfuse.clip_grad_norm_([param], 1.0),
    ):
        param, optimizer, scaler = ready(language, device)
        scaler.unscale_(optimizer)
        param.grad.data.mul_(10)  # through .data, so that the version counter does not move
        assert clip(scaler, optimizer, param).item() == pytest.approx(10 * 2**0.5)
        assert param.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


@EVERY_LANGUAGE
def test_clipping_an_overflow_skips_the_step(language, device):
    param, optimizer, scaler = ready(language, device)
    param.grad[0] = torch.inf
    before = param.detach().clone()
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not norm.isfinite()
    assert_same_bits([param.detach()], [before])
    assert scaler.was_skipped()


def test_a_disabled_scaler_clips_without_unscaling(device):
    param = Parameter(torch.zeros(2, device=device))
    param.grad = torch.tensor([3.0, 4.0], device=device)
    scaler = ampfuse.GradScaler(device.type, enabled=False)
    norm = scaler.clip_grad_norm_(torch.optim.SGD([param], lr=1.0), 1.0)
    assert norm.item() == 5.0
    assert param.grad.norm().item() == pytest.approx(1.0)


def test_an_optimizer_without_gradients_has_norm_zero(device):
    _, _, scaler = scaled(device)
    optimizer = torch.optim.SGD([Parameter(torch.zeros(2, device=device))], lr=1.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0.0


def test_the_norm_is_float64_for_float64_gradients_and_float32_otherwise(device):
    """Only parameters that have gradients count, whether `unscale_` was called before or not."""
    for dtype in (torch.float64, torch.bfloat16):
        for unscales in (False, True):
            other = Parameter(torch.ones(2, device=device, dtype=torch.float64))
            param = Parameter(torch.ones(4, device=device, dtype=dtype))
            scaler = ampfuse.GradScaler(device.type, 4.0)
            scaler.scale(param.sum()).backward()
            optimizer = torch.optim.SGD([param, other], lr=1.0)
            if unscales:
                scaler.unscale_(optimizer)

            norm = scaler.clip_grad_norm_(optimizer, 1.0)

            assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert norm.item() == 2.0


def test_a_parameter_in_two_groups_is_clipped_as_after_unscale(device):
    """The gradient is unscaled twice, as by torch."""
    results = []
    for together in (True, False):
        param = Parameter(torch.ones(4, device=device))
        scaler = ampfuse.GradScaler(device.type, 4.0)
        scaler.scale(param.sum()).backward()
        optimizer = torch.optim.SGD([param], lr=1.0)
        optimizer.param_groups.append({**optimizer.param_groups[0]})
        if together:
            norm = scaler.clip_grad_norm_(optimizer, 0.25)
        else:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_([param, param], 0.25)
        results.append([norm, param.grad])
    torch.testing.assert_close(*results)


def sparse_gradient_scaled_by_4(scaler):
    table = torch.nn.Embedding.from_pretrained(torch.ones(4, 2), freeze=False, sparse=True)
    scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
    return table.weight, torch.optim.SparseAdam(table.parameters())


def test_sparse_gradients_are_clipped_if_torch_supports_their_norm():
    theirs, ours = torch.amp.GradScaler("cpu", 4.0), ampfuse.GradScaler("cpu", 4.0)
    param, optimizer = sparse_gradient_scaled_by_4(theirs)
    theirs.unscale_(optimizer)
    our_param, our_optimizer = sparse_gradient_scaled_by_4(ours)
    try:
        norm = torch.nn.utils.clip_grad_norm_(param, 0.5)
    except NotImplementedError:  # torch 2.11
        with pytest.raises(ValueError, match=r"parameters\[0\].grad: expected a strided tensor"):
            ours.clip_grad_norm_(our_optimizer, 0.5)
        return

    assert torch.equal(ours.clip_grad_norm_(our_optimizer, 0.5), norm)
    torch.testing.assert_close(our_param.grad.to_dense(), param.grad.to_dense())


@EVERY_LANGUAGE
def test_step_of_an_optimizer_that_clips_reads_gradients_twice(language, device):
    """One pass checks for overflow and computes the norm, the other one updates parameters."""
    param, _, scaler = ready(language, device)
    optimizer = language.adamw([param], lr=0.5, max_grad_norm=1.0)
    _, names = operators(lambda: scaler.step(optimizer))
    assert names == ["ampfuse::multi_tensor_unscale_norm", "ampfuse::fused_adam"]
    assert optimizer.grad_norm.item() == pytest.approx(2**0.5)


def multiply(param, factor, *_):
    """Multiply the gradient in place; further arguments are what an optimizer passes to hooks."""
    param.grad.mul_(factor)


def multiply_unseen(param, factor, *_):
    """Multiply the gradient without moving its version counter."""
    param.grad.data.mul_(factor)


class Doubling(ampfuse.AdamW):
    """An AdamW whose overridden step changes gradients before it calls AdamW.step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                multiply_unseen(param, 2.0)
        return super().step(closure)


@pytest.mark.parametrize("write", [multiply, multiply_unseen, None])
def test_norm_is_computed_after_a_hook_or_a_derived_step_changes_gradients(device, write):
    param = Parameter(torch.zeros(4, device=device))
    optimizer = (ampfuse.AdamW if write else Doubling)([param], max_grad_norm=1.0)
    if write:
        optimizer.register_step_pre_hook(partial(write, param, 2.0))
    scaler = ampfuse.GradScaler(device.type, 4.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.grad_norm.item() == pytest.approx(4.0)


def test_groups_with_separate_limits_are_clipped_by_separate_norms(device):
    params = [Parameter(torch.zeros(4, device=device)) for _ in range(2)]
    groups = [{"params": params[:1], "max_grad_norm": 1.0}, {"params": params[1:]}]
    optimizer = ampfuse.AdamW(groups, max_grad_norm=1.0, write_back_grads=True)
    scaler = ampfuse.GradScaler(device.type, 4.0)
    scaler.scale(params[0].sum() + 2 * params[1].sum()).backward()
    scaler.step(optimizer)
    assert optimizer.grad_norm.item() == pytest.approx(4.0)
    norms = [param.grad.norm().item() for param in params]
    assert norms == [pytest.approx(1.0, rel=1e-5)] * 2


@EVERY_LANGUAGE
@pytest.mark.parametrize("write", [multiply, multiply_unseen])
def test_adamw_computes_the_norm_anew_if_gradients_changed_after_unscale(language, device, write):
    param, _, scaler = ready(language, device)
    optimizer = language.adamw([param], lr=0.5, max_grad_norm=1.0)
    scaler.unscale_(optimizer)
    write(param, 10.0)
    scaler.step(optimizer)
    assert optimizer.grad_norm.item() == pytest.approx(10 * 2**0.5)


@pytest.mark.needs_cuda
def test_a_captured_clip_computes_the_norm_of_each_replay():
    params, optimizer, scaler = scaled(torch.device("cuda"))
    scaler.unscale_(optimizer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = scaler.clip_grad_norm_(optimizer, 1e9)
    for param in params:
        param.grad.mul_(3)
    graph.replay()
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad for p in params]))


def test_step_clips_by_the_norm_of_the_gradients_that_its_closure_computes(device):
    param = Parameter(torch.zeros(4, device=device))
    optimizer = ampfuse.AdamW([param], max_grad_norm=1.0, write_back_grads=True)
    scaler = ampfuse.GradScaler(device.type, init_scale=8.0)

    def closure(factor=3.0):
        optimizer.zero_grad()
        scaler.scale((factor * param).sum()).backward()

    closure(factor=1.0)
    scaler.step(optimizer, closure)
    assert optimizer.grad_norm.item() == 6
    assert param.grad.tolist() == pytest.approx([0.5] * 4)
