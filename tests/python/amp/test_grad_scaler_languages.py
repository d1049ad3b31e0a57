"""The scalers of Python, C++ and torch train identically and load each other's states."""

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits
from scaler_languages import EVERY_LANGUAGE, LANGUAGES
from torch.nn import Parameter

PYTHON, CPP = LANGUAGES["Python"], LANGUAGES["C++"]


class Training:
    """A regression whose gradients overflow at some steps; any scaler can continue it."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(0)
        self.weights = [
            Parameter(torch.randn(shape, generator=generator).to(device))
            for shape in ((8, 8), (8,), (3, 8))
        ]
        self.inputs = torch.randn(16, 4, 8, generator=generator).to(device)
        self.scales = []
        self.norms = []

    def step(self, scaler, optimizer, step, clip=None):
        """Run one iteration; every fifth overflows."""
        optimizer.zero_grad()
        hidden = torch.tanh(self.inputs[step] @ self.weights[0] + self.weights[1])
        scaler.scale((hidden @ self.weights[2].T).square().mean()).backward()
        if step % 5 == 3:
            self.weights[1].grad[step % 8] = float("inf")
        if clip is not None:
            scaler.unscale_(optimizer)
            self.norms.append(ampfuse.clip_grad_norm_(self.weights, clip).item())
        scaler.step(optimizer)
        scaler.update()
        self.scales.append(scaler.get_scale())

    def outcome(self):
        """Return the weights, scales and norms."""
        return [*self.weights, torch.tensor(self.scales), torch.tensor(self.norms)]


OPTIMIZERS = {
    "SGD": lambda language, params: language.sgd(params, lr=0.5),
    "AdamW": lambda language, params: language.adamw(params, lr=0.5),
    "AdamW, clipping": lambda language, params: language.adamw(params, lr=0.5, max_grad_norm=0.1),
}
OPTIONS = {"growth_interval": 3, "hysteresis": 2, "min_scale": 8.0, "history": 20}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("clip", [None, 0.05])
def test_training_in_python_and_cpp_has_the_same_bits(device, make, clip):
    outcomes, histories = [], []
    for language in (PYTHON, CPP):
        training, scaler = Training(device), language.scaler(device, 64.0, **OPTIONS)
        optimizer = make(language, training.weights)
        for step in range(16):
            training.step(scaler, optimizer, step, clip)
        outcomes.append(training.outcome())
        histories.append(torch.tensor(scaler.history()))

    assert_same_bits(outcomes[0], outcomes[1])
    assert_same_bits([histories[0]], [histories[1]])


def through_file(before, of_before, after, of_after, folder):
    """Load one scaler's state into another through a file."""
    of_before.save(before, folder / "scaler.pt")
    of_after.load(after, folder / "scaler.pt")


@pytest.mark.parametrize("languages", [(PYTHON, CPP), (CPP, PYTHON)], ids=["to C++", "to Python"])
def test_training_continues_in_the_other_language_and_back(device, languages, tmp_path):
    outcomes = []
    for route in (languages[:1] * 3, (languages[0], languages[1], languages[0])):
        training = Training(device)
        before = None
        for part, language in enumerate(route):
            scaler = language.scaler(device, 64.0, **OPTIONS)
            if before is not None:
                through_file(*before, scaler, language, tmp_path)
            optimizer = language.sgd(training.weights, lr=0.5)
            for step in range(5 * part, 5 * part + 5):
                training.step(scaler, optimizer, step)
            before = (scaler, language)
        outcomes.append([*training.outcome(), torch.tensor(before[0].state_dict()["_updates"])])

    assert_same_bits(outcomes[0], outcomes[1])


@EVERY_LANGUAGE
def test_training_continues_with_torchs_scaler_and_back(language, device):
    def torchs():
        return torch.amp.GradScaler(device.type, 64.0, growth_interval=3)

    def ours():
        return language.scaler(device, 64.0, growth_interval=3)

    outcomes = []
    for route in ([torchs, torchs, torchs], [torchs, ours, torchs], [ours, torchs, ours]):
        training, state = Training(device), None
        for part, make in enumerate(route):
            is_cpp = make is ours and language is CPP
            optimizer = (CPP if is_cpp else PYTHON).sgd(training.weights, lr=0.5)
            scaler = make()
            if state is not None:
                scaler.load_state_dict(state)
            for step in range(5 * part, 5 * part + 5):
                training.step(scaler, optimizer, step)
            state = scaler.state_dict()
        outcomes.append(training.outcome())

    assert_same_bits(outcomes[1], outcomes[0])
    assert_same_bits(outcomes[2], outcomes[0])


def test_python_converts_a_state_of_torchs_scaler_for_cpp(tmp_path):
    theirs, scaler = torch.amp.GradScaler("cpu", 32, growth_interval=7), CPP.scaler()
    ampfuse.save_cpp_scaler_state(theirs.state_dict(), tmp_path / "scaler.pt")

    CPP.load(scaler, tmp_path / "scaler.pt")

    assert scaler.state_dict().items() >= theirs.state_dict().items()
