"""State of ampfuse.SGD: saved, loaded, exchanged with torch's SGD, copied and compiled."""

import copy
import pickle

import ampfuse
import pytest
import torch
from optim_models import (
    assert_near,
    assert_same_bits,
    assert_same_state,
    clones,
    copies,
    feed,
    parameters,
    state_values,
    train,
    trained,
)
from torch._dynamo.testing import CompileCounter

KINDS = {
    "float32": (torch.float32, {}),
    "momentum": (torch.float32, {"momentum": 0.9, "max_grad_norm": 1.0}),
    "masters": (torch.bfloat16, {"momentum": 0.9, "dampening": 0.5}),
    "masters, no momentum": (torch.float16, {"max_grad_norm": 1.0}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder"}),
    "bf16 momentum": (
        torch.bfloat16,
        {"momentum": 0.9, "nesterov": True, "momentum_dtype": torch.bfloat16},
    ),
}
EVERY_KIND = pytest.mark.parametrize(("dtype", "options"), KINDS.values(), ids=KINDS)


def skipped_once(params, **options):
    """Return an optimizer whose only step was skipped: it has buffers that no step has set."""
    optimizer = ampfuse.SGD(params, **options)
    feed(params, 0)
    optimizer.found_inf = torch.ones((), device=params[0].device)
    optimizer.step()
    optimizer.found_inf = None
    return optimizer


@EVERY_KIND
def test_saved_loaded_pickled_and_copied_optimizers_continue_to_the_same_bits(
    device, dtype, options
):
    params = parameters(device, dtype)
    optimizer = trained(ampfuse.SGD, params, range(3), **options)
    others = copies(params)
    loaded = ampfuse.SGD(others, **options)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pairs = [
        (loaded, others),
        copy.deepcopy((optimizer, params)),
        pickle.loads(pickle.dumps((optimizer, params))),
    ]
    train(optimizer, params, range(3, 6))
    for other, its_params in pairs:
        train(other, its_params, range(3, 6))
        assert type(other) is ampfuse.SGD
        assert_same_bits(params, its_params)
        assert_same_state(optimizer, state_values(other))


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "dampening": 0.25}, {"momentum": 0.9, "nesterov": True}]
)
def test_state_moves_from_torch_to_ampfuse_and_back_in_mid_run(device, options):
    params = parameters(device)
    unbroken = copies(params)
    trained(torch.optim.SGD, unbroken, range(9), **options)

    first = trained(torch.optim.SGD, params, range(3), **options)
    second = ampfuse.SGD(params, **options)
    second.load_state_dict(first.state_dict())
    assert {state["step"].item() for state in second.state.values()} <= {1}
    train(second, params, range(3, 6))
    third = torch.optim.SGD(params, **options)
    third.load_state_dict(second.state_dict())
    train(third, params, range(6, 9))

    assert_near(params, unbroken, steps=9, lr=0.1)


def test_buffers_of_torch_that_are_none_are_loaded_as_no_buffers(device):
    params = parameters(device)
    reference = trained(torch.optim.SGD, params, range(2), lr=0.1, momentum=0.9)
    saved = reference.state_dict()
    for state in saved["state"].values():
        state["momentum_buffer"] = None
    others = copies(params)
    optimizer = ampfuse.SGD(others, momentum=0.9)
    optimizer.load_state_dict(saved)
    assert state_values(optimizer) == [{}] * len(params)
    train(optimizer, others, [2])
    assert all(state["step"] == 1 for state in optimizer.state.values())


def test_torch_does_not_take_buffers_for_momentum_that_no_step_has_set(device):
    params, others = parameters(device), parameters(device)
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    saved = skipped_once(params, **options).state_dict()
    assert [state.keys() for state in saved["state"].values()] == [{"step"}] * len(params)

    loaded = torch.optim.SGD(params, **options)
    loaded.load_state_dict(saved)
    train(loaded, params, range(2))
    trained(torch.optim.SGD, others, range(2), **options)

    assert_same_bits(params, others)


def test_counters_and_masters_that_torchs_class_only_kept_are_not_loaded(device):
    params = parameters(device, torch.bfloat16)
    saved = skipped_once(params, momentum=0.9).state_dict()
    between = torch.optim.SGD(params, momentum=0.9)
    between.load_state_dict(saved)
    train(between, params, range(2))
    weights = clones(params)
    optimizer = ampfuse.SGD(params, momentum=0.9)
    optimizer.load_state_dict(between.state_dict())
    assert all(state["step"] == 1 for state in optimizer.state.values())
    assert_same_bits(params, weights)
    assert_same_bits(optimizer.master_params(), params)


@pytest.mark.parametrize(
    ("of", "into", "words"),
    [
        (torch.optim.AdamW, ampfuse.SGD, "lacks dampening and momentum: expected lr, momentum, "),
        (ampfuse.SGD, ampfuse.AdamW, "lacks betas and eps: expected lr, betas, eps and weight"),
    ],
)
def test_state_of_another_optimizer_is_refused_and_nothing_is_loaded(device, of, into, words):
    params = parameters(device)
    saved = trained(of, params, range(2)).state_dict()
    optimizer = trained(into, params, range(2))
    before = state_values(optimizer)
    with pytest.raises(KeyError, match=words):
        optimizer.load_state_dict(saved)
    assert_same_state(optimizer, before)


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (torch.zeros(7), r"momentum_buffer of parameter 0: expected shape \(33, 5\), got \(7,\)"),
        (torch.zeros(33, 5, dtype=torch.int16), "expected a floating-point tensor"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_and_nothing_is_loaded(device, buffer, words):
    params = parameters(device)
    optimizer = trained(ampfuse.SGD, params, range(2), momentum=0.9)
    before = state_values(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["momentum_buffer"] = buffer
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert_same_state(optimizer, before)


@EVERY_KIND
def test_compiled_steps_give_the_bits_of_eager_ones_in_one_graph(
    device, dtype, options, fresh_compiler
):
    counter = CompileCounter()
    params, others = parameters(device, dtype), parameters(device, dtype)
    optimizer, reference = ampfuse.SGD(params, **options), ampfuse.SGD(others, **options)
    compiled = torch.compile(optimizer.step, fullgraph=True, backend=counter)
    for step in range(3):
        for stepped, its_params in ((compiled, params), (reference.step, others)):
            feed(its_params, step)
            stepped()
        assert_same_bits(params, others)
        assert_same_state(optimizer, state_values(reference))
    assert counter.frame_count == 1


def test_compiled_step_starts_momentum_anew_after_loading_state_without_it(device, fresh_compiler):
    options = {"momentum": 0.9, "dampening": 0.5}
    params, others = parameters(device), parameters(device)
    optimizer = ampfuse.SGD(params, **options)
    compiled = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    values, fresh = clones(params), skipped_once(others, **options).state_dict()
    for step in range(2):
        feed(params, step)
        compiled()
    optimizer.load_state_dict(fresh)
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
    for step in range(2):
        feed(params, step)
        compiled()
    trained(ampfuse.SGD, others, range(2), **options)
    assert_same_bits(params, others)
