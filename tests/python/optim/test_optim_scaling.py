"""ampfuse.Adam and AdamW with a gradient scaler: unscaling, skipped steps and step counters."""

import copy
import pickle

import ampfuse
import pytest
import torch
from optim_models import (
    DTYPES_16_BIT,
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
from scaler_languages import step_by
from torch import nn

SCALE = 2.0**12  # multiplying by a power of two is exact unless the product overflows
CLIPPED_OR_NOT = pytest.mark.parametrize("clip", [None, 1.0])
SCALERS = {"ours": ampfuse.GradScaler, "torch's": torch.amp.GradScaler}
EVERY_SCALER = pytest.mark.parametrize("scaler", SCALERS)
UNSCALED_OR_NOT = pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])


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
        step_by(scaler, optimizer, unscale=unscale)


def overflow(params, scale=SCALE, step=0):
    """Set gradients with one infinite element."""
    feed(params, step, scale)
    params[2].grad[8192] = float("inf")


@UNSCALED_OR_NOT
@pytest.mark.parametrize(
    ("cls", "options", "of_scaler", "last_scale"),
    [
        (ampfuse.AdamW, {}, {}, SCALE),
        (ampfuse.Adam, {"amsgrad": True, "maximize": True}, {}, SCALE),
        (ampfuse.AdamW, {}, {"growth_interval": 2}, 4 * SCALE),
        (ampfuse.AdamW, {}, {"enabled": False}, 1.0),
    ],
)
def test_scaled_run_equals_the_unscaled_one_bit_by_bit(
    device, cls, options, of_scaler, last_scale, unscale
):
    ours, plain = parameters(device), parameters(device)
    optimizer, scaler = cls(ours, **options), scaler_for(device, **of_scaler)
    scaled_steps(optimizer, ours, range(5), scaler, unscale)
    expected = trained(cls, plain, range(5), **options)
    assert scaler.get_scale() == last_scale
    assert_same_bits(ours, plain)
    assert_same_state(optimizer, state_values(expected))


@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
@CLIPPED_OR_NOT
def test_scaled_16_bit_models_match_float32_ones_without_unscale(device, dtype, clip):
    skip_what_torch_cannot(device, dtype)
    narrow = parameters(device, dtype)
    wide = copies(narrow, torch.float32)
    optimizer = ampfuse.AdamW(narrow, max_grad_norm=clip)
    scaled_steps(optimizer, narrow, range(5), scaler_for(device, 4.0))
    trained(ampfuse.AdamW, wide, range(5), max_grad_norm=clip)
    same = assert_same_bits if clip is None else assert_same_but_for_norms
    same(optimizer.master_params(), wide)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_grad_scale_divides_gradients_once(device, shape):
    params, plain = parameters(device), parameters(device)
    optimizer = ampfuse.AdamW(params, max_grad_norm=10.0)
    expected = trained(ampfuse.AdamW, plain, range(1), max_grad_norm=10.0)

    optimizer.grad_scale = torch.full(shape, SCALE, device=device)
    feed(params, step=0, scale=SCALE)
    before = clones(gradients(params))
    optimizer.step()

    assert_same_bits(params, plain)
    assert_same_bits([optimizer.grad_norm], [expected.grad_norm])
    assert_same_bits(gradients(params), before)  # the gradients themselves are still scaled
    del optimizer.grad_scale
    train(optimizer, params, [1])
    train(expected, plain, [1])
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
@UNSCALED_OR_NOT
def test_gradients_are_written_only_by_unscale_or_with_write_back_grads(
    device, unscale, write_back_grads
):
    params, plain = parameters(device), parameters(device)
    optimizer = ampfuse.AdamW(params, write_back_grads=write_back_grads)
    scaled_steps(optimizer, params, range(1), scaler_for(device), unscale)
    feed(plain, step=0, scale=1.0 if unscale or write_back_grads else SCALE)
    assert_same_bits(gradients(params), gradients(plain))


@pytest.mark.parametrize(
    ("dtype", "clip"),
    [*((dtype, None) for dtype in (torch.float32, *DTYPES_16_BIT)), (torch.bfloat16, 1.0)],
)
def test_overflow_at_the_first_step_keeps_parameters_and_leaves_zero_state(device, dtype, clip):
    skip_what_torch_cannot(device, dtype)
    params, plain = parameters(device, dtype), parameters(device, dtype)
    optimizer = ampfuse.AdamW(params, max_grad_norm=clip)
    scaler = scaler_for(device, 4.0)
    prepare(scaler, device)

    overflow(params, 4.0)
    step_by(scaler, optimizer)

    assert_same_bits(params, plain)
    assert scaler.get_scale() == 2.0
    for state in state_values(optimizer):
        master = state.pop("master_param", None)
        assert not any(value.count_nonzero() for value in state.values())  # `step` is 0, too
        assert master is None or dtype in DTYPES_16_BIT
    scaled_steps(optimizer, params, range(1), scaler)
    expected = trained(ampfuse.AdamW, plain, range(1), max_grad_norm=clip)
    assert_same_bits(params, plain)
    assert_same_state(optimizer, state_values(expected))


@pytest.mark.parametrize(("dtype", "clip"), [(torch.float32, 1.0), (torch.bfloat16, None)])
@UNSCALED_OR_NOT
def test_overflow_in_mid_run_skips_only_that_step(device, dtype, clip, unscale):
    skip_what_torch_cannot(device, dtype)
    params, plain = parameters(device, dtype), parameters(device, dtype)
    optimizer = ampfuse.AdamW(params, max_grad_norm=clip)
    scaler = scaler_for(device)

    scaled_steps(optimizer, params, range(2), scaler, unscale)
    norm = optimizer.grad_norm
    overflow(params, step=99)
    step_by(scaler, optimizer, unscale=unscale)
    if clip is not None:
        feed(plain, step=1)
        assert norm.item() == pytest.approx(exact_norm(gradients(plain), 2), rel=1e-6)
        assert not optimizer.grad_norm.isfinite()
    scaled_steps(optimizer, params, range(2, 4), scaler, unscale)

    expected = trained(ampfuse.AdamW, plain, range(4), max_grad_norm=clip)
    assert scaler.get_scale() == SCALE / 2
    assert_same_bits(params, plain)
    assert_same_state(optimizer, state_values(expected))


@pytest.mark.parametrize("limit", [None, 0.5, float("inf")])
def test_step_with_a_scale_alone_is_skipped_if_any_group_overflows(device, limit):
    params = parameters(device)
    groups = [{"params": params[:1]}, {"params": params[1:], "max_grad_norm": limit}]
    optimizer = ampfuse.AdamW(groups)
    optimizer.grad_scale = torch.tensor(SCALE, device=device)
    before = clones(params)
    overflow(params)
    optimizer.step()
    assert_same_bits(params, before)


@CLIPPED_OR_NOT
def test_any_nonzero_found_inf_skips_the_step(device, clip):
    params = parameters(device, torch.bfloat16)
    optimizer = trained(ampfuse.AdamW, params, range(2), max_grad_norm=clip)
    before, states = clones(params), state_values(optimizer)

    for flag in (1.0, 2.0, 3.0, 1e-30, float("inf"), float("nan")):
        optimizer.found_inf = torch.tensor(flag, device=device)
        train(optimizer, params, [2])
        assert_same_bits(params, before)
        assert_same_state(optimizer, states)

    optimizer.found_inf = torch.tensor(0.0, device=device)
    train(optimizer, params, [2])
    assert optimizer.state[params[0]]["step"] == 3
    assert not torch.equal(next(optimizer.master_params()), states[0]["master_param"])


# --- `unscale`: whether the scaler or the step unscales gradients, and decides to skip -----------


class Training:
    """A model that overflows in its third step."""

    def __init__(self, device, scaler="ours", **options):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3).to(device)
        self.optimizer = ampfuse.AdamW(self.model.parameters(), lr=0.1, **options)
        self.scaler = SCALERS[scaler](device.type, init_scale=1024.0)
        self.device, self.called = device, 0

    def count_calls(self, module="accelerate.optimizer"):
        """Wrap the step as code of a module may do, to find out whether it was called."""
        step = self.optimizer.step

        def counted(*args, **kwargs):
            self.called += 1
            return step(*args, **kwargs)

        counted.__module__ = module
        self.optimizer.step = counted

    def run(self, clip=False):
        for number in range(6):
            self.optimizer.zero_grad()
            loss = self.model(torch.full((2, 4), 0.5 + number, device=self.device)).square().sum()
            self.scaler.scale(loss * (float("inf") if number == 2 else 1)).backward()
            if clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            step_by(self.scaler, self.optimizer)
        return [param.detach() for param in self.model.parameters()]


@EVERY_SCALER
@pytest.mark.parametrize("clip", [False, True])
def test_weights_are_those_of_unscaling_in_the_step(device, scaler, clip):
    before = Training(device, scaler, unscale="before")
    in_step = Training(device, scaler, unscale="in_step")
    assert_same_bits(before.run(clip), in_step.run(clip))
    assert before.scaler.get_scale() == in_step.scaler.get_scale()


@EVERY_SCALER
@pytest.mark.parametrize(
    ("wrapped_by", "unscale", "calls"),
    [
        *(("accelerate.optimizer", *case) for case in (("auto", 5), ("before", 5), ("in_step", 6))),
        ("another module", "auto", 6),
    ],
)
def test_wrapped_step_is_called_although_gradients_overflow_only_if_it_unscales(
    device, scaler, wrapped_by, unscale, calls
):
    training = Training(device, scaler, unscale=unscale)
    training.count_calls(wrapped_by)
    training.run()
    assert training.called == calls


def test_gradients_are_unscaled_before_only_while_accelerate_wraps_the_step(device):
    training = Training(device)
    for _ in range(2):
        torch.optim.lr_scheduler.StepLR(training.optimizer, 2)
    assert training.optimizer._step_supports_amp_scaling
    step_of_scheduler = training.optimizer.step
    training.count_calls()
    assert not training.optimizer._step_supports_amp_scaling
    training.run()
    assert training.called == 5
    training.optimizer.step = step_of_scheduler
    assert training.optimizer._step_supports_amp_scaling


def test_wrapped_step_of_a_process_group_unscales_by_itself(device):
    optimizer = Training(device).optimizer
    optimizer.process_group, optimizer.step = object(), lambda: None
    assert optimizer._step_supports_amp_scaling


@EVERY_SCALER
def test_hooks_see_unscaled_gradients(device, scaler):
    training, seen = Training(device, scaler, unscale="before"), []
    hook = training.optimizer.register_step_pre_hook
    hook(lambda *_: seen.append(training.model.bias.grad.abs().max().item()))
    training.run()
    assert len(seen) == 5
    assert max(seen) < 100  # they are 1024 times as large while they are scaled


def test_frameworks_see_who_unscales_and_may_change_it(device):
    """The attribute that they read and set is torch's; copies of the optimizer have it, too."""

    def seen(optimizer):
        copied = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
        return {one._step_supports_amp_scaling for one in (optimizer, *copied)}

    for unscale, expected in (("before", False), ("in_step", True), ("auto", True)):
        optimizer = Training(device, unscale=unscale).optimizer
        assert seen(optimizer) == {expected}
        for value in (True, False):
            optimizer._step_supports_amp_scaling = value
            assert seen(optimizer) == {value}
        assert "unscale" not in optimizer.state_dict()["param_groups"][0]


def test_clipping_in_the_step_still_works(device):
    before = Training(device, unscale="before", max_grad_norm=0.5)
    in_step = Training(device, max_grad_norm=0.5)
    for one, other in zip(before.run(), in_step.run(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(before.optimizer.grad_norm, in_step.optimizer.grad_norm)


def test_other_values_and_a_process_group_are_refused():
    params = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match='unscale: expected "auto", "in_step" or "before", g'):
        ampfuse.AdamW(params, unscale=True)
    with pytest.raises(ValueError, match='unscale: expected "auto" or "in_step" with a process'):
        ampfuse.AdamW(params, unscale="before", process_group=object())
