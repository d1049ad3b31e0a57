"""GradScaler and optimizers of Python and of C++ with the same interface."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ampfuse
import ampfuse_cpp as cpp
import pytest
import torch
from torch.nn import Parameter


@dataclass(frozen=True)
class Language:
    """The parts of a training loop in one language."""

    scaler: Callable[..., Any]  # takes a device, an initial scale and options
    sgd: Callable[..., Any]
    adamw: Callable[..., Any]
    lbfgs: Callable[..., Any]
    misuse: type[Exception]  # raised for misuse that torch in Python catches by assertions
    save: Callable[[Any, Path], None]
    load: Callable[[Any, Path], None]


def python_scaler(device: torch.device, init_scale: float = 65536.0, **options: Any) -> Any:
    return ampfuse.GradScaler(device.type, init_scale, **options)


def save_python(scaler: Any, file: Path) -> None:
    ampfuse.save_cpp_scaler_state(scaler.state_dict(), file)


def load_python(scaler: Any, file: Path) -> None:
    scaler.load_state_dict(ampfuse.load_cpp_scaler_state(file))


LANGUAGES = {
    "Python": Language(
        python_scaler,
        torch.optim.SGD,
        ampfuse.AdamW,
        torch.optim.LBFGS,
        AssertionError,
        save_python,
        load_python,
    ),
    "C++": Language(
        cpp.GradScaler,
        cpp.SGD,
        cpp.AdamW,
        cpp.LBFGS,
        RuntimeError,
        lambda scaler, file: scaler.save(str(file)),
        lambda scaler, file: scaler.load(str(file)),
    ),
}
EVERY_LANGUAGE = pytest.mark.parametrize("language", LANGUAGES.values(), ids=list(LANGUAGES))


def ready(language: Language, device: torch.device, **options: Any) -> tuple[Parameter, Any, Any]:
    """Return a parameter with a gradient scaled by 4, its optimizer, and the scaler."""
    param = Parameter(torch.ones(2, device=device))
    scaler = language.scaler(device, 4.0, **options)
    scaler.scale(param.sum()).backward()
    return param, language.sgd([param], lr=0.5), scaler
