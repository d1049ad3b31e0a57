"""GradScaler and optimizers of Python and of C++ with the same interface."""

import ampfuse
import ampfuse_cpp as cpp
import pytest
import torch
from torch.nn import Parameter


class Python:
    """The parts of a training loop in Python."""

    sgd, adamw, lbfgs = torch.optim.SGD, ampfuse.AdamW, torch.optim.LBFGS
    misuse = AssertionError  # raised for misuse that torch in Python catches by assertions

    @staticmethod
    def scaler(device, init_scale=65536.0, **options):
        return ampfuse.GradScaler(device.type, init_scale, **options)


class Cpp:
    """The parts of a training loop in C++."""

    scaler, sgd, adamw, lbfgs = cpp.GradScaler, cpp.SGD, cpp.AdamW, cpp.LBFGS
    misuse = RuntimeError


LANGUAGES = {"Python": Python, "C++": Cpp}
EVERY_LANGUAGE = pytest.mark.parametrize("language", LANGUAGES.values(), ids=list(LANGUAGES))


def step_by(scaler, optimizer, loss=None, unscale=False):
    """Step by a scaler and update it. Gradients are those of the loss, or exist already."""
    if loss is not None:
        scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def ready(language, device, **options):
    """Return a parameter with a gradient scaled by 4, its optimizer, and the scaler."""
    param = Parameter(torch.ones(2, device=device))
    scaler = language.scaler(device, 4.0, **options)
    scaler.scale(param.sum()).backward()
    return param, language.sgd([param], lr=0.5), scaler
