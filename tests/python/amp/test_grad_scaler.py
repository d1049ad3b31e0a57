"""The scale of a GradScaler, its creation and its use; and scalers that are disabled."""

import pickle

import ampfuse
import pytest
import torch
from scaler_languages import EVERY_LANGUAGE, LANGUAGES, ready, step_by
from torch.nn import Parameter


def step_once(scaler, device):
    """Take a step without overflow on a new parameter; return the parameter's value after it."""
    param = Parameter(torch.ones(1, device=device))
    step_by(scaler, torch.optim.SGD([param], lr=0.5), param.sum())
    return param.item()


def test_torchs_positional_arguments_have_torchs_meaning_and_others_are_keywords(device):
    scaler = ampfuse.GradScaler(device.type, 4.0, 3.0, 0.25, 7, True)
    assert isinstance(scaler, torch.amp.GradScaler)
    factors = (scaler.get_growth_factor(), scaler.get_backoff_factor())
    assert (scaler.get_scale(), *factors, scaler.get_growth_interval()) == (4.0, 3.0, 0.25, 7)
    assert step_once(ampfuse.GradScaler(device), device) == 0.5  # a torch.device instead of a name
    with pytest.raises(TypeError):
        ampfuse.GradScaler("cpu", 1.0, 2.0, 0.5, 2000, True, 1.0)


def test_numpy_and_tensor_options_are_saved_as_python_numbers(device):
    """torch.load(weights_only=True) accepts only plain Python numbers."""
    np = pytest.importorskip("numpy")
    given = {
        "min_scale": np.float32(1),
        "max_scale": torch.tensor(1e6),
        "hysteresis": np.int64(2),
        "dynamic": np.bool_(True),
    }
    state = ampfuse.GradScaler(device.type, **given).state_dict()
    assert [type(state[name]) for name in given] == [float, float, int, bool]
    assert type(state["_hysteresis_tracker"]) is int


def test_nested_and_lazy_outputs_are_scaled_and_other_types_are_refused(device):
    scaler, one = ampfuse.GradScaler(device.type, 4.0), torch.ones((), device=device)
    outputs = iter([one, (one, [one]), 1.0])
    assert ampfuse.GradScaler(device.type, enabled=False).scale(outputs) is outputs
    lazy = scaler.scale(outputs)
    assert scaler._scale is None  # no output is scaled yet
    assert next(lazy) == 4
    assert next(lazy) == (4, [4])
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        next(lazy)
    assert scaler.scale([one, (one, [one])]) == [4, (4, [4])]


@pytest.mark.parametrize("shape", [None, (), (1,)], ids=["int", "0-dim", "one element"])
def test_update_copies_the_new_scale_and_keeps_the_growth_tracker(device, shape):
    _, optimizer, scaler = ready(LANGUAGES["Python"], device, growth_interval=2)
    new_scale = 32 if shape is None else torch.full(shape, 32.0, device=device)
    step_by(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update(new_scale)
    new_scale *= 2
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 1)
    step_by(scaler, optimizer)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (64.0, 0)


# float32 ends at 3.4e38: 16 · 1e38 is beyond it; 16 · 1e37 is not, but 16² · 1e37 is.
@pytest.mark.parametrize(("init_scale", "last"), [(1e38, 1e38), (1e37, 1.6e38)])
def test_scale_stops_growing_before_it_is_infinite(device, init_scale, last):
    scaler = ampfuse.GradScaler(device.type, init_scale, growth_factor=16.0, growth_interval=1)
    for _ in range(3):
        # 1/1.6e38 is subnormal and rounds by up to 2⁻¹⁵⁰, 1.1e-7 of it. Two roundings follow.
        assert step_once(scaler, device) == pytest.approx(0.5, rel=3e-7)
    assert scaler.get_scale() == pytest.approx(last, rel=2.0**-24)


def test_the_scale_tensor_may_be_created_early_and_twice(device):
    """Libraries call this method before they load a state, some of them twice."""
    scaler = ampfuse.GradScaler(device.type, 4.0)
    scaler._lazy_init_scale_growth_tracker(device.type)
    scale = scaler.scale_tensor()
    scaler.update(8.0)
    scaler._lazy_init_scale_growth_tracker(device)
    assert scaler.scale_tensor() is scale
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("make", [ampfuse.CrossEntropyLoss, ampfuse.LinearCrossEntropyLoss])
def test_training_works_after_a_loss_was_evaluated_in_inference_mode(device, make):
    scaler = ampfuse.GradScaler(device.type, history=2)
    is_linear = make is ampfuse.LinearCrossEntropyLoss
    loss = (make(4, 3, scaler=scaler) if is_linear else make(scaler=scaler)).to(device)
    network = torch.nn.Linear(4, 4 if is_linear else 3).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    inputs, target = torch.ones(2, 4, device=device), torch.tensor([1, 2], device=device)

    with torch.inference_mode():
        loss(network(inputs), target)
    step_by(scaler, optimizer, loss(network(inputs), target))

    assert not scaler.was_skipped()


@EVERY_LANGUAGE
def test_a_disabled_scaler_only_steps_the_optimizer(language, device):
    param = Parameter(torch.ones(1, device=device))
    scaler, optimizer = language.scaler(device, enabled=False), language.sgd([param], lr=0.5)
    loss = 2 * param.sum()

    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    step_by(scaler, optimizer)

    assert param.item() == 0.0
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1.0, {}, False)
    assert (scaler.history(), scaler.was_skipped(), scaler.scale_tensor().item()) == ([], False, 1)
    assert scaler.overflow_report(torch.nn.ParameterList([param])) == []
    scaler.load_state_dict({"anything": 1})


def test_a_disabled_scaler_takes_closures_has_setters_and_can_be_pickled(device):
    scaler = ampfuse.GradScaler(device.type, enabled=False, max_consecutive_skips=3)
    optimizer = torch.optim.SGD([Parameter(torch.ones(1, device=device))], lr=0.1)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    assert scaler.step(optimizer, closure=lambda: 7.0) == 7.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (3.0, 0.25)
    assert (scaler.max_consecutive_skips, scaler.process_group) == (3, None)
    assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@EVERY_LANGUAGE
def test_a_scaler_for_a_missing_gpu_warns_and_is_disabled(language):
    with pytest.warns(UserWarning, match="GradScaler is enabled, but CUDA is not available"):
        scaler = language.scaler(torch.device("cuda"))
    assert not scaler.is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("make", [ampfuse.GradScaler, torch.amp.GradScaler])
def test_warning_about_a_missing_gpu_names_the_line_that_makes_the_scaler(make):
    warns = pytest.warns(UserWarning, match="GradScaler is enabled, but CUDA is not available")
    with ampfuse.patched(), warns as caught:
        make("cuda")
    assert [warning.filename for warning in caught] == [__file__]
