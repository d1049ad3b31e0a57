"""Optimizers with moments in 8 bits and with weights that are rounded at random."""

import copy

import ampfuse
import pytest
import torch
from optim_models import (
    assert_same_bits,
    clones,
    feed,
    parameters,
    state_values,
    train,
    trained,
)
from torch.nn import Parameter

CODED = {"state_dtype": "8bit"}
BFLOAT16 = torch.bfloat16


def largest_step_and_path_error(sigma, size=1.0, steps=300):
    """Step 4096 parameters whose gradients are lognormal; compare with float32 moments.

    Returns the largest step in learning rates, and the distance of the two paths' ends in relation
    to their length.
    """
    torch.manual_seed(0)
    sizes = size * torch.exp(sigma * torch.randn(4096))
    mean = 0.3 * torch.randn(4096)
    params = [Parameter(torch.zeros(4096)) for _ in range(2)]
    optimizers = [
        ampfuse.AdamW([param], lr=1.0, weight_decay=0, **options)
        for param, options in zip(params, (CODED, {}), strict=True)
    ]
    largest = 0.0
    for _ in range(steps):
        grad = sizes * (mean + torch.randn(4096))
        before = params[0].detach().clone()
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
        largest = max(largest, (params[0] - before).abs().max().item())
    coded, exact = (param.detach() for param in params)
    return largest, ((coded - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_no_step_explodes_if_gradients_of_a_group_differ_in_size(sigma):
    largest, _ = largest_step_and_path_error(sigma)
    assert largest < 5


def test_gradients_of_1e_7_lead_along_the_path_of_float32_moments():
    _, error = largest_step_and_path_error(0.0, size=1e-7)
    assert error < 0.05


def test_the_second_moment_shrinks_after_large_gradients():
    # With bfloat16 moments and this beta it stays three times too large.
    torch.manual_seed(0)
    param = Parameter(torch.zeros(4096))
    optimizer = ampfuse.AdamW([param], **CODED)
    exact = torch.zeros(4096)
    for step in range(1500):
        param.grad = torch.randn(4096) * (30 if step < 5 else 1)
        optimizer.step()
        exact = 0.999 * exact + 0.001 * param.grad.square()
    second = optimizer.state_dict(decoded=True)["state"][0]["exp_avg_sq"]
    assert abs((second.sum() / exact.sum()).item() - 1) < 0.02


def test_state_takes_the_bytes_that_are_documented(device):
    param = Parameter(torch.ones(320, 100, dtype=BFLOAT16, device=device))
    for kind, expected in (("remainder", 6.125), ("stochastic", 4.125), (True, 8.125)):
        optimizer = ampfuse.AdamW([param], master_weights=kind, **CODED)
        param.grad = torch.ones_like(param)
        optimizer.step()
        state = [x for x in optimizer.state[param].values() if x.dim()]
        taken = sum(x.numel() * x.element_size() for x in [param, *state])
        assert taken == expected * param.numel()


@pytest.mark.parametrize("kind", ["stochastic", "remainder", True])
def test_two_runs_have_the_same_bits_and_another_seed_has_others(device, kind):
    runs = []
    for seed in (3, 3, 4):
        params = parameters(device, BFLOAT16)
        optimizer = ampfuse.AdamW(params, master_weights=kind, seed=seed, **CODED)
        train(optimizer, params, range(4))
        runs.append([*clones(params), *optimizer.state[params[0]].values()])
    assert_same_bits(runs[0], runs[1])
    assert any(not torch.equal(x, y) for x, y in zip(runs[0], runs[2], strict=True))


def test_a_parameter_rounds_alike_whichever_others_have_gradients(device):
    ends = []
    for others in (True, False):
        params = parameters(device, BFLOAT16)
        optimizer = ampfuse.AdamW(params, master_weights="stochastic")
        for step in range(3):
            feed(params, step)
            if not others:
                params[0].grad = None
            optimizer.step()
        ends.append(params[2])
    assert_same_bits(ends[:1], ends[1:])


@pytest.mark.filterwarnings("ignore:master_weights='stochastic' has no effect")
def test_float32_parameters_are_not_rounded_at_random(device):
    ends = []
    for kind in ("stochastic", "auto"):
        params = parameters(device)
        trained(ampfuse.AdamW, params, range(3), master_weights=kind)
        ends.append(params)
    assert_same_bits(*ends)


def test_small_updates_of_a_bfloat16_weight_add_up_if_it_is_rounded_at_random(device):
    ends = {}
    for kind in (True, "stochastic", False):
        param = Parameter(torch.ones(10_000, dtype=BFLOAT16, device=device))
        optimizer = ampfuse.SGD([param], lr=1e-4, master_weights=kind)
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
        ends[kind] = param.float().mean().item()
    assert ends[False] == 1.0  # no update reaches half of the last place
    assert abs(ends[True] - 0.99) < 0.002
    assert abs(ends["stochastic"] - 0.99) < 2e-4


@pytest.mark.parametrize(
    ("options", "make"),
    [(CODED, ampfuse.AdamW), ({"momentum_dtype": "8bit", "momentum": 0.9}, ampfuse.SGD)],
    ids=["AdamW", "SGD"],
)
def test_saved_codes_are_loaded_bit_for_bit_and_training_goes_on(device, options, make):
    options = {"lr": 0.01, "master_weights": "stochastic", "ema": 0.9, **options}
    params = parameters(device, BFLOAT16)
    optimizer = trained(make, params, range(3), **options)
    saved = copy.deepcopy(optimizer.state_dict())
    others = [Parameter(param.detach().clone()) for param in params]
    other = make(others, **options)
    other.load_state_dict(saved)
    assert_same_bits(*(tensors_of(one) for one in (optimizer, other)))
    assert any(name.endswith("_codes") for name in saved["state"][0])
    train(optimizer, params, range(3, 6))
    train(other, others, range(3, 6))
    assert_same_bits(params, others)
    assert_same_bits(*(tensors_of(one) for one in (optimizer, other)))


def tensors_of(optimizer):
    return [state[name] for state in state_values(optimizer) for name in sorted(state)]


def test_decoded_state_is_loaded_by_torch_and_encoded_again_to_the_same_codes(device):
    params = [Parameter(torch.randn(300, device=device))]
    optimizer = trained(ampfuse.AdamW, params, range(5), **CODED)
    decoded = optimizer.state_dict(decoded=True)
    assert decoded["state"][0]["exp_avg"].dtype == torch.float32

    torchs = torch.optim.AdamW(params)
    torchs.load_state_dict(copy.deepcopy(decoded))
    feed(params, 9)
    torchs.step()
    again = ampfuse.AdamW(params, **CODED)
    again.load_state_dict(decoded)

    assert_same_bits(tensors_of(again), tensors_of(optimizer))


@pytest.mark.parametrize("target", [CODED, {}], ids=["8bit", "float32"])
def test_codes_that_torchs_class_has_kept_are_dropped(device, target):
    params = parameters(device)
    options = {"lr": 0.1, "momentum": 0.9}
    saved = trained(ampfuse.SGD, params, range(2), momentum_dtype="8bit", **options).state_dict()
    torchs = torch.optim.SGD(params, **options)
    torchs.load_state_dict(copy.deepcopy(saved))
    train(torchs, params, range(2, 4))
    momentum_dtype = target.get("state_dtype", torch.float32)
    optimizer = ampfuse.SGD(params, momentum_dtype=momentum_dtype, **options)
    optimizer.load_state_dict(torchs.state_dict())
    found = optimizer.state_dict(decoded=True)["state"][0]["momentum_buffer"]
    expected = torchs.state[params[0]]["momentum_buffer"]
    assert (found - expected).abs().max() <= expected.abs().max() / 100


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda state: state.pop("exp_avg_units"), KeyError, "parameter 0: expected Adam's step"),
        (
            lambda state: state.update(exp_avg_codes=state["exp_avg_codes"].byte()),
            TypeError,
            "exp_avg_codes of parameter 0: expected torch.int8, got torch.uint8",
        ),
        (
            lambda state: state.update(exp_avg_units=state["exp_avg_units"][1:]),
            ValueError,
            "exp_avg_units of parameter 0: expected shape",
        ),
    ],
    ids=["units are missing", "another dtype", "another shape"],
)
def test_codes_that_do_not_fit_are_refused_before_anything_is_loaded(change, error, message):
    params = parameters("cpu")
    optimizer = trained(ampfuse.AdamW, params, range(2), **CODED)
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved["state"][0])
    before = clones(tensors_of(optimizer))
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(saved)
    assert_same_bits(tensors_of(optimizer), before)


def test_state_with_a_third_moment_is_refused_before_anything_is_loaded():
    params = parameters("cpu")
    saved = trained(torch.optim.AdamW, params, range(2), amsgrad=True).state_dict()
    optimizer = trained(ampfuse.AdamW, params, range(2), **CODED)
    before = clones(tensors_of(optimizer))
    with pytest.raises(ValueError, match="group 0 has amsgrad, whose third moment"):
        optimizer.load_state_dict(saved)
    assert_same_bits(tensors_of(optimizer), before)


@pytest.mark.parametrize("kind", ["remainder", "stochastic"])
def test_an_option_of_16_bit_weights_warns_if_there_are_none(kind):
    with pytest.warns(UserWarning, match=f"master_weights='{kind}' has no effect"):
        ampfuse.AdamW(parameters("cpu"), master_weights=kind)


def test_an_optimizer_that_was_pickled_without_options_of_ours_steps():
    params = parameters("cpu")
    optimizer = trained(ampfuse.AdamW, params, range(2))
    state = optimizer.__getstate__()
    state["_own_options"] = {"master_weights": "auto", "state_dtype": None}
    optimizer.__setstate__(state)
    train(optimizer, params, [2])


def test_state_of_torch_is_encoded(device):
    params = parameters(device)
    torchs = trained(torch.optim.AdamW, params, range(3))
    optimizer = ampfuse.AdamW(params, **CODED)
    optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
    for number, param in enumerate(params):
        expected = torchs.state[param]["exp_avg_sq"]
        units = optimizer.state[param]["exp_avg_sq_units"]
        found = optimizer.state_dict(decoded=True)["state"][number]["exp_avg_sq"]
        largest = units.float().max() if units.numel() else 0
        assert ((found.sqrt() - expected.sqrt()).abs() <= 1.01 * largest).all()
    train(optimizer, params, range(3, 5))


def test_moments_are_converted_if_the_option_of_a_group_changes(device):
    params = parameters(device)
    optimizer = trained(ampfuse.AdamW, params, range(3), **CODED)
    decoded = optimizer.state_dict(decoded=True)["state"][0]["exp_avg"]
    optimizer.param_groups[0]["state_dtype"] = "float32"
    params[0].grad.zero_()
    optimizer.step()
    assert "exp_avg_units" not in optimizer.state[params[0]]
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], 0.9 * decoded)
    optimizer.param_groups[0]["state_dtype"] = "8bit"
    optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.int8


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.float64, {}, "parameter 0 of group 0 is torch.float64, and only float16, bfloat16"),
        (torch.complex64, {}, "parameter 0 of group 0 is torch.complex64"),
        (torch.float32, {"amsgrad": True}, "group 0 has amsgrad, whose third moment has no 8-bit"),
        (torch.float32, {"state_dtype": "4bit"}, 'state_dtype: expected .* or "8bit", got 4bit'),
        (torch.float32, {"seed": 0.5}, "seed: expected an int, got float 0.5"),
        (
            torch.float32,
            {"seed": 2**63},
            "seed: expected an int of 64 bits, got 9223",
        ),
        (torch.float32, {"ema": 1.0}, "ema: expected a decay from 0 to less than 1, got 1.0"),
        (torch.float32, {"ema": "0.9"}, "ema: expected None or a number, got str '0.9'"),
        (
            torch.float32,
            {"ema_dtype": torch.float16},
            "ema_dtype: expected torch.float32 or torch.bfloat16, got float16",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(dtype, options, message):
    param = Parameter(torch.ones(3, dtype=dtype))
    with pytest.raises((ValueError, TypeError), match=message):
        ampfuse.AdamW([param], **CODED | options)


def test_another_memory_format_is_refused_by_name():
    param = Parameter(torch.randn(4, 8, 3, 3))
    optimizer = ampfuse.AdamW([param], **CODED)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data = param.data.to(memory_format=torch.channels_last)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="neither a change of the memory format"):
        optimizer.step()
    # A state dict that is loaded follows it.
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()


@pytest.mark.parametrize("options", [CODED, {"ema": 0.9, "ema_dtype": BFLOAT16}], ids=str)
def test_compiled_steps_have_the_bits_of_eager_ones(device, options):
    ends = []
    for compiles in (False, True):
        params = parameters(device, BFLOAT16)
        optimizer = ampfuse.AdamW(
            params, master_weights="stochastic", max_grad_norm=1.0, seed=2, **options
        )
        step = optimizer.step
        if compiles:
            step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
        for number in range(3):
            feed(params, number)
            step()
        ends.append([*params, *tensors_of(optimizer)])
    assert_same_bits(*ends)


def test_skipped_steps_draw_no_random_numbers(device):
    ends = []
    for skips in (False, True):
        params = parameters(device, BFLOAT16)
        optimizer = ampfuse.AdamW(params, master_weights="stochastic", ema=0.9, **CODED)
        for number in range(3):
            if skips:
                feed(params, 50 + number)
                optimizer.found_inf = torch.ones((), device=device)
                optimizer.step()
                del optimizer.found_inf
            feed(params, number)
            optimizer.step()
        ends.append([*params, *tensors_of(optimizer)])
    assert_same_bits(*ends)
