"""Misuse of a scaler raises torch's errors; a disabled scaler only steps the optimizer."""

from functools import partial

import ampfuse
import pytest
import torch
from scaler_languages import EVERY_LANGUAGE, LANGUAGES, ready
from torch.nn import Parameter

CPP = LANGUAGES["C++"]


def twice(call):
    def calls(scaler, optimizer):
        call(scaler, optimizer)
        call(scaler, optimizer)

    return calls


def unscale_after_step(scaler, optimizer):
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def step_without_gradients(scaler, optimizer):
    optimizer.zero_grad()
    scaler.step(optimizer)


MISUSE = {
    "unscale_() has already been called": twice(lambda s, o: s.unscale_(o)),
    "step() has already been called": twice(lambda s, o: s.step(o)),
    "unscale_() is being called after step()": unscale_after_step,
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


@EVERY_LANGUAGE
@pytest.mark.parametrize("what", ["unscale_", "step", "update"])
def test_methods_raise_before_the_first_scale(language, device, what):
    _, optimizer, _ = ready(language, device)
    scaler = language.scaler(device)
    arguments = [] if what == "update" else [optimizer]

    with pytest.raises(language.misuse, match=f"Attempted {what} but _scale is None"):
        getattr(scaler, what)(*arguments)


@EVERY_LANGUAGE
def test_a_disabled_scaler_only_steps_the_optimizer(language, device):
    param = Parameter(torch.ones(1, device=device))
    scaler, optimizer = language.scaler(device, enabled=False), language.sgd([param], lr=0.5)
    loss = 2 * param.sum()

    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()

    assert param.item() == 0.0
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1.0, {}, False)
    assert (scaler.history(), scaler.was_skipped(), scaler.scale_tensor().item()) == ([], False, 1)
    scaler.load_state_dict({"anything": 1})


def test_a_disabled_scaler_has_setters(device):
    scaler = ampfuse.GradScaler(device.type, enabled=False)

    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)

    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (3.0, 0.25)


def test_cpp_refuses_lbfgs_before_unscaling_gradients(device):
    param, _, scaler = ready(CPP, device)

    with pytest.raises(RuntimeError, match=r"Closure use is not currently supported.*LBFGS"):
        scaler.step(CPP.lbfgs([param]))

    assert (param.grad == 4).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@EVERY_LANGUAGE
def test_a_scaler_for_a_missing_gpu_warns_and_is_disabled(language):
    with pytest.warns(UserWarning, match="GradScaler is enabled, but CUDA is not available"):
        scaler = language.scaler(torch.device("cuda"))
    assert not scaler.is_enabled()


class WithTorchsUnscaling(ampfuse.GradScaler):
    """A scaler whose gradients are unscaled by torch's method."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        unscale = torch.amp.GradScaler._unscale_grads_
        return unscale(self, optimizer, inv_scale, found_inf, True)


@pytest.mark.parametrize(
    "make", [ampfuse.Adam, partial(torch.optim.Adam, fused=True), torch.optim.SGD]
)
def test_derived_class_may_unscale_as_torch_does(make):
    param = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = make([param], lr=0.1), WithTorchsUnscaling("cpu")
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (param < 1).all()
    param.grad = None
    scaler.scale(param.sum()).backward()
    assert scaler.clip_grad_norm_(optimizer, 1.0) == 2.0


def test_device_may_be_an_object():
    scaler = ampfuse.GradScaler(torch.device("cpu"))
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(4.0))
    assert scaler.get_scale() == 4.0


def test_norm_for_clipping_has_one_dtype_whatever_is_called_before():
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2).double())]
    optimizer = torch.optim.SGD(params)
    for unscales in (False, True):
        scaler = ampfuse.GradScaler("cpu")
        params[0].grad = None
        scaler.scale(params[0].sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        assert scaler.clip_grad_norm_(optimizer, 1.0).dtype == torch.float32
