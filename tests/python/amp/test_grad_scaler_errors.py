"""Misuse of a scaler raises torch's errors, and invalid arguments are refused by name."""

import pickle
import re
from math import inf, nan

import ampfuse
import pytest
import torch
from scaler_languages import EVERY_LANGUAGE, LANGUAGES, ready
from torch.nn import Parameter


def message_of(error, call, *arguments, **options):
    """Return the message of the error that the call raises."""
    try:
        call(*arguments, **options)
    except error as refused:
        return str(refused)
    return "there was no error"


def twice(call):
    def calls(scaler, optimizer):
        call(scaler, optimizer)
        call(scaler, optimizer)

    return calls


def after_step(scaler, optimizer):
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.unscale_(optimizer)


def step_without_gradients(scaler, optimizer):
    optimizer.zero_grad()
    scaler.step(optimizer)


MISUSE = {
    "unscale_() has already been called": twice(lambda s, o: s.unscale_(o)),
    "step() has already been called": twice(lambda s, o: s.step(o)),
    "unscale_() is being called after step()": after_step,
    "No inf checks were recorded for this optimizer": step_without_gradients,
    "No inf checks were recorded prior to update": lambda s, _: s.update(),
}


@EVERY_LANGUAGE
@pytest.mark.parametrize("words", MISUSE)
def test_calls_in_the_wrong_order_raise_torchs_errors(language, device, words):
    _, optimizer, scaler = ready(language, device)
    with pytest.raises((RuntimeError, language.misuse)) as refused:
        MISUSE[words](scaler, optimizer)
    assert words in str(refused.value)


def test_closures_and_pickling_between_updates_raise_torchs_errors(device):
    _, optimizer, scaler = ready(LANGUAGES["Python"], device)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: None)
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled"):
        pickle.dumps(scaler)


def test_cpp_refuses_lbfgs_before_unscaling_gradients(device):
    cpp = LANGUAGES["C++"]
    param, _, scaler = ready(cpp, device)
    with pytest.raises(RuntimeError, match=r"Closure use is not currently supported.*LBFGS"):
        scaler.step(cpp.lbfgs([param]))
    assert (param.grad == 4).all()


@EVERY_LANGUAGE
def test_methods_raise_before_the_first_scale(language, device):
    _, optimizer, _ = ready(language, device)
    scaler = language.scaler(device)
    calls = {"unscale_": [optimizer], "step": [optimizer], "update": []}
    if language is LANGUAGES["Python"]:
        calls["_check_inf_per_device"] = [optimizer]
    for name, arguments in calls.items():
        message = message_of(language.misuse, getattr(scaler, name), *arguments)
        assert f"Attempted {name} but _scale is None" in message


FINITE = "expected a finite float above 0"
SENSELESS = [
    ("init_scale", FINITE, [0.0, -1.0, nan, inf, 1e-60, 1e39]),
    ("growth_factor", "expected a finite number, at least 1", [nan, inf]),
    ("backoff_factor", "expected more than 0 and at most 1", [nan, 0.0, -0.5]),
    ("growth_interval", "expected at least 1", [0, -3]),
    ("min_scale", "expected None or more than 0", [0.0, nan]),
    ("max_scale", "expected None or more than 0", [-1.0]),
    ("hysteresis", "expected at least 1", [0]),
    ("hysteresis_refill", "expected", ["x"]),
    ("max_consecutive_skips", "expected .*at least 1", [0]),
    ("history", "expected at least 0", [-1]),
]
CONTRADICTORY = [  # the scale begins with 65536
    ({"min_scale": 1e6}, "init_scale: expected at least min_scale=1"),
    ({"max_scale": 1.0}, "init_scale: expected at most max_scale=1"),
    ({"min_scale": 4.0, "max_scale": 2.0}, "max_scale: expected at least min_scale"),
]


@EVERY_LANGUAGE
def test_invalid_options_are_refused(language, device):
    for name, words, values in SENSELESS:
        for value in values:
            message = message_of(ValueError, language.scaler, device, **{name: value})
            got = value if isinstance(value, str) else re.escape(f"{value:g}")
            assert re.search(f"{name}: {words}.*, got '?{got}", message)
    for options, words in CONTRADICTORY:
        assert words in message_of(ValueError, language.scaler, device, **options)
    for name, limit in (("growth", "> 1.0"), ("backoff", "< 1.0")):
        message = message_of(language.misuse, language.scaler, device, **{f"{name}_factor": 1.0})
        assert f"{name} factor must be {limit}" in message.lower()  # as in torch


WRONG_TYPES = [
    ("init_scale", "a number", [True, "big"]),
    ("backoff_factor", "a number", [False]),
    ("growth_interval", "an int", [True, 1.5, 2000.0]),
    ("min_scale", "a number", ["1"]),
    ("hysteresis", "an int", [True, 1.5]),
    ("dynamic", "a bool", [2, "no"]),
    ("max_consecutive_skips", "an int", [1.5]),
    ("history", "an int", [True]),
]


def test_options_of_a_wrong_type_are_refused(device):
    for name, expected, values in WRONG_TYPES:
        for value in values:
            message = message_of(TypeError, ampfuse.GradScaler, device.type, **{name: value})
            got = type(value).__name__ + (f" {value!r}" if name == "dynamic" else "")
            assert message == f"{name}: expected {expected}, got {got}"


def test_setters_refuse_invalid_values(device):
    scaler = ampfuse.GradScaler(device.type)
    before = scaler.state_dict()
    for name, value, error, words in (
        ("growth_factor", 0.5, ValueError, "expected a finite number, at least 1, got 0.5"),
        ("backoff_factor", 2, ValueError, "expected more than 0 and at most 1, got 2"),
        ("backoff_factor", 0.0, ValueError, "expected more than 0 and at most 1, got 0"),
        ("growth_interval", 7.0, TypeError, "expected an int, got float"),
        ("growth_interval", 0, ValueError, "expected at least 1, got 0"),
    ):
        assert f"{name}: {words}" in message_of(error, getattr(scaler, f"set_{name}"), value)
    assert scaler.state_dict() == before


@EVERY_LANGUAGE
def test_update_refuses_an_invalid_new_scale(language, device):
    scaler = language.scaler(device, 64.0)
    scaler.scale(torch.ones((), device=device))
    for new_scale in (0.0, -1.0, nan, inf, 1e39):
        assert f"new_scale: {FINITE}" in message_of(ValueError, scaler.update, new_scale)
    if language is LANGUAGES["Python"]:
        for wrong in ({"size": (2,)}, {"requires_grad": True}, {"device": "meta"}):
            new_scale = torch.ones(**{"size": (1,), "device": device, **wrong})
            message = message_of(AssertionError, scaler.update, new_scale)
            assert "new_scale should be a float or a 1-element" in message  # torch's words
    assert scaler.get_scale() == 64.0


@EVERY_LANGUAGE
def test_float16_gradients_are_refused_unless_allowed(language, device):
    param = Parameter(torch.ones(2, 3, dtype=torch.float16, device=device))
    param.grad = torch.full_like(param, 8.0)
    optimizer = language.sgd([param], lr=1.0)
    scaler = language.scaler(device, 4.0)
    scaler.scale(torch.ones((), device=device))
    with pytest.raises(ValueError, match=r"FP16 gradients. Parameter 0 of group 0.*[(\[]2, 3"):
        scaler.unscale_(optimizer)
    kinder = language.scaler(device, 4.0, allow_fp16_grads=True)
    kinder.scale(torch.ones((), device=device))
    kinder.unscale_(optimizer)
    assert (param.grad == 2).all()


def test_parameters_in_the_place_of_an_optimizer_or_a_model_are_refused():
    params, scaler = torch.nn.Linear(2, 2).parameters(), ampfuse.GradScaler("cpu")
    with pytest.raises(TypeError, match=r"^optimizer: expected an optimizer, got generator"):
        scaler.clip_grad_norm_(params, 1.0)
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module, got generator"):
        scaler.overflow_report(params)
