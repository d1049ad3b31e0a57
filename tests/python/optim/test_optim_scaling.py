"""ampfuse.Adam and AdamW with a gradient scaler: unscaling, skipped steps and step counters."""

import ampfuse
import pytest
import torch
from optim_models import (
    BOTH,
    BOTH_AND_TORCHS,
    CLASSES,
    DTYPES_16_BIT,
    assert_near,
    assert_same_bits,
    assert_same_but_for_norms,
    assert_same_state,
    clones,
    copies,
    feed,
    parameters,
    state_values,
    train,
    trained,
)
from reference import exact_norm, gradients

SCALE = 2.0**12  # multiplying by a power of two is exact unless the product overflows


def scaler_for(device, scale=SCALE, **options):
    return torch.amp.GradScaler(device.type, init_scale=scale, **options)


def skip_what_torch_cannot(device, dtype):
    if device.type == "cuda" and dtype == torch.bfloat16:
        pytest.skip("torch's scaler takes no bfloat16 gradients on a GPU")


def prepare(scaler, device):
    """Initialise the scaler as the first `scaler.scale(loss)` does, without a loss."""
    scaler.scale(torch.ones((), device=device))


def scaled_steps(optimizer, params, steps, scaler, unscale=False, scale=None):
    """Take steps whose gradients are multiplied by the scale."""
    for step in steps:
        prepare(scaler, params[0].device)
        feed(params, step, scaler.get_scale() if scale is None else scale)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def overflow(params, scale=SCALE, step=0):
    """Set gradients with one infinite element."""
    feed(params, step, scale)
    params[2].grad[8192] = float("inf")


@BOTH
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}])
def test_scaled_run_equals_the_unscaled_one_bit_by_bit(device, cls, unscale, options):
    ours, plain = parameters(device), parameters(device)
    optimizer = cls(ours, **options)

    scaled_steps(optimizer, ours, range(5), scaler_for(device), unscale)
    expected = trained(lambda params: cls(params, **options), plain, range(5))

    assert_same_bits(ours, plain)
    assert_same_state(optimizer, state_values(expected))


@BOTH_AND_TORCHS
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("clip", [None, 1.0, 1e9], ids=["no clip", "clip", "clip not reached"])
def test_scaled_and_clipped_steps_follow_torch(device, cls, of_torch, unscale, clip):
    ours = parameters(device)
    theirs = copies(ours)
    optimizer, reference = cls(ours, max_grad_norm=clip), of_torch(theirs, fused=True)

    scaled_steps(optimizer, ours, range(5), scaler_for(device, 1000.0), unscale)
    for step in range(5):
        feed(theirs, step)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        reference.step()

    assert_near(ours, theirs, steps=5)


@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_scaled_16_bit_models_match_float32_ones_without_unscale(device, dtype, clip):
    skip_what_torch_cannot(device, dtype)
    narrow = parameters(device, dtype)
    wide = copies(narrow, torch.float32)
    optimizer = ampfuse.AdamW(narrow, max_grad_norm=clip)

    scaled_steps(optimizer, narrow, range(5), scaler_for(device, 4.0))
    trained(lambda params: ampfuse.AdamW(params, max_grad_norm=clip), wide, range(5))

    same = assert_same_bits if clip is None else assert_same_but_for_norms
    same(optimizer.master_params(), wide)


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES_16_BIT])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_overflow_at_the_first_step_keeps_parameters_and_leaves_zero_state(device, dtype, clip):
    skip_what_torch_cannot(device, dtype)
    params, plain = parameters(device, dtype), parameters(device, dtype)
    optimizer = ampfuse.AdamW(params, max_grad_norm=clip)
    scaler = scaler_for(device, 4.0)
    prepare(scaler, device)

    overflow(params, 4.0)
    scaler.step(optimizer)
    scaler.update()

    assert_same_bits(params, plain)
    assert scaler.get_scale() == 2.0
    for state in state_values(optimizer):
        master = state.pop("master_param", None)
        assert not any(value.count_nonzero() for value in state.values())  # `step` is 0, too
        assert master is None or dtype in DTYPES_16_BIT
    scaled_steps(optimizer, params, range(1), scaler)
    expected = trained(lambda p: ampfuse.AdamW(p, max_grad_norm=clip), plain, range(1))
    assert_same_bits(params, plain)
    assert_same_state(optimizer, state_values(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_overflow_in_mid_run_skips_only_that_step(device, dtype, unscale):
    skip_what_torch_cannot(device, dtype)
    params, plain = parameters(device, dtype), parameters(device, dtype)
    optimizer = ampfuse.AdamW(params)
    scaler = scaler_for(device)

    scaled_steps(optimizer, params, range(2), scaler, unscale)
    overflow(params, step=99)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaled_steps(optimizer, params, range(2, 4), scaler, unscale)

    expected = trained(ampfuse.AdamW, plain, range(4))
    assert scaler.get_scale() == SCALE / 2
    assert_same_bits(params, plain)
    assert_same_state(optimizer, state_values(expected))


@BOTH
@pytest.mark.parametrize("flag", [1.0, 2.0, 3.0, 1e-30, float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_any_nonzero_found_inf_skips_the_step(device, cls, flag, clip):
    params = parameters(device, torch.bfloat16)
    optimizer = trained(lambda p: cls(p, max_grad_norm=clip), params, range(2))
    before, states = clones(params), state_values(optimizer)

    optimizer.found_inf = torch.tensor(flag, device=device)
    train(optimizer, params, [2])
    assert_same_bits(params, before)
    assert_same_state(optimizer, states)

    optimizer.found_inf = torch.tensor(0.0, device=device)
    train(optimizer, params, [2])
    assert optimizer.state[params[0]]["step"] == 3
    assert not torch.equal(next(optimizer.master_params()), states[0]["master_param"])


@BOTH
@pytest.mark.parametrize("shape", [(), (1,)])
def test_grad_scale_divides_gradients_once(device, cls, shape):
    params, plain = parameters(device), parameters(device)
    optimizer = cls(params, max_grad_norm=10.0)
    expected = trained(lambda p: cls(p, max_grad_norm=10.0), plain, range(1))

    optimizer.grad_scale = torch.full(shape, SCALE, device=device)
    feed(params, step=0, scale=SCALE)
    before = clones(gradients(params))
    optimizer.step()

    assert_same_bits(params, plain)
    assert_same_bits([optimizer.grad_norm], [expected.grad_norm])
    assert_same_bits(gradients(params), before)  # the gradients themselves are still scaled
    del optimizer.grad_scale
    feed(params, step=1)
    feed(plain, step=1)
    optimizer.step()
    expected.step()
    assert_same_bits(params, plain)


def test_grad_scale_set_by_the_user_multiplies_the_scalers_scale(device):
    params, plain = parameters(device), parameters(device)
    optimizer = ampfuse.AdamW(params)
    optimizer.grad_scale = torch.tensor(8.0, device=device)

    scaled_steps(optimizer, params, range(1), scaler_for(device), scale=8 * SCALE)

    trained(ampfuse.AdamW, plain, range(1))
    assert_same_bits(params, plain)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("write_back_grads", [False, True])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_gradients_are_written_only_by_unscale_or_with_write_back_grads(
    device, unscale, write_back_grads
):
    params, plain = parameters(device), parameters(device)
    optimizer = ampfuse.AdamW(params, write_back_grads=write_back_grads)

    scaled_steps(optimizer, params, range(1), scaler_for(device), unscale)

    feed(plain, step=0, scale=1.0 if unscale or write_back_grads else SCALE)
    assert_same_bits(gradients(params), gradients(plain))


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_grad_norm_is_of_unscaled_gradients_and_non_finite_after_overflow(device, unscale):
    params = parameters(device)
    optimizer = ampfuse.AdamW(params, max_grad_norm=1.0)
    scaler = scaler_for(device)

    scaled_steps(optimizer, params, range(1), scaler, unscale)
    norm = optimizer.grad_norm
    overflow(params)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)

    feed(params, step=0)
    assert norm.item() == pytest.approx(exact_norm(gradients(params), 2), rel=1e-6)
    assert not optimizer.grad_norm.isfinite()
    assert norm.isfinite()  # the norm that was returned earlier is not overwritten


def test_scaler_steps_several_optimizers_and_skips_only_the_overflowed_one(device):
    # torch's scaler refuses bfloat16 gradients on a GPU.
    half = torch.bfloat16 if device.type == "cpu" else torch.float16
    models = [parameters(device, dtype) for dtype in (torch.float32, half)]
    plain = parameters(device)
    before = clones(models[1])
    optimizers = [cls(params) for cls, params in zip(CLASSES, models, strict=True)]
    scaler = scaler_for(device, 4.0)
    prepare(scaler, device)

    feed(models[0], step=0, scale=4.0)
    overflow(models[1], 4.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()

    trained(CLASSES[0], plain, range(1))
    assert_same_bits(models[0], plain)
    assert_same_bits(models[1], before)
    assert scaler.get_scale() == 2.0


def test_growing_scale_does_not_change_the_parameters(device):
    params, plain = parameters(device), parameters(device)
    optimizer = ampfuse.AdamW(params)
    scaler = scaler_for(device, growth_interval=2)

    scaled_steps(optimizer, params, range(6), scaler)

    trained(ampfuse.AdamW, plain, range(6))
    assert scaler.get_scale() == 8 * SCALE
    assert_same_bits(params, plain)


def test_disabled_scaler_steps_as_if_there_were_none(device):
    params, plain = parameters(device), parameters(device)
    optimizer = ampfuse.AdamW(params)

    scaled_steps(optimizer, params, range(2), scaler_for(device, enabled=False))

    trained(ampfuse.AdamW, plain, range(2))
    assert_same_bits(params, plain)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_fp16_model_learns_with_a_scaler(device, clip):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1, dtype=torch.float16, device=device)
    inputs = torch.randn(64, 8, dtype=torch.float16, device=device)
    targets = inputs.float() @ torch.randn(8, 1, device=device)
    optimizer = ampfuse.AdamW(model.parameters(), lr=0.05, weight_decay=0.0, max_grad_norm=clip)
    scaler = scaler_for(device, 2.0**24)  # the first steps overflow

    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = (model(inputs).float() - targets).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())

    assert scaler.get_scale() < 2.0**24
    assert losses[-1] < 1e-3 * losses[0]
