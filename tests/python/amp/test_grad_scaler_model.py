"""Random sequences of scaler calls, in both languages, compared with a model of the scaler."""

import copy
import io
import pickle
import tempfile

import ampfuse
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scaler_languages import EVERY_LANGUAGE, LANGUAGES
from scaler_model import Expected, Optimizer, Scaler
from torch.nn import Parameter

CPU = torch.device("cpu")

# Constructor of an optimizer, its options, and True if it takes scale and flag as tensors.
KINDS = {
    "AdamW": (lambda language: language.adamw, {}, True),
    "AdamW, clipping": (lambda language: language.adamw, {"max_grad_norm": 1.0}, True),
    "SGD": (lambda language: language.sgd, {}, False),
    "fused": (lambda _: torch.optim.AdamW, {"fused": True}, True),
}

# Commands with the values that they take; those that are listed twice are drawn more often.
VALUES = {
    "overflow": st.sampled_from([float("inf"), float("nan")]),
    "backward": st.sampled_from([0.5, 1.0, -2.0, 3.0]),
}
NAMES = ["backward", "backward", "overflow", "zero_grad", "unscale_", "clip", "step", "step"]
NAMES += ["update", "update", "save_and_load", "pickle"]
COMMANDS = st.one_of(
    st.tuples(st.just(name), st.integers(0, 2), VALUES.get(name, st.none())) for name in NAMES
)


class Run:
    """A scaler with its optimizers, and the model of both."""

    def __init__(self, language, kinds, options):
        self.language = language
        self.params = [[Parameter(torch.ones(1)) for _ in range(2)] for _ in kinds]
        self.optimizers = [
            KINDS[kind][0](language)(params, lr=0.125, **KINDS[kind][1])
            for kind, params in zip(kinds, self.params, strict=True)
        ]
        self.scaler = language.scaler(CPU, **options)
        self.model = Scaler([Optimizer([None] * 2, KINDS[k][2]) for k in kinds], **options)

    def do(self, command, index, value):
        """Apply the command to the scaler and to the model, and check that they agree."""
        index %= len(self.optimizers)
        getattr(self, command)(index, value)
        assert self.scaler.get_scale() == self.model.get_scale()
        state = self.scaler.state_dict()
        assert state["_growth_tracker"] == self.model.growth_tracker
        assert state["_hysteresis_tracker"] == self.model.hysteresis_tracker
        assert state["_consecutive_skips"] == self.model.skips

    def both(self, expected, call):
        """Run `call`; check that it raises the error that the model expects, if any."""
        if isinstance(expected, Expected):
            is_misuse = expected.error is AssertionError
            with pytest.raises(self.language.misuse if is_misuse else expected.error) as raised:
                call()
            assert expected.words in str(raised.value)
        else:
            call()

    def backward(self, index, grad):
        param = self.params[index][0]
        self.scaler.scale((param * grad).sum()).backward()
        grads = self.model.optimizers[index].grads
        scaled = torch.tensor(grad) * self.model.scale_()
        grads[0] = scaled.item() if grads[0] is None else (torch.tensor(grads[0]) + scaled).item()

    def overflow(self, index, value):
        if self.params[index][0].grad is not None:
            self.params[index][0].grad.fill_(value)
            self.model.optimizers[index].grads[0] = value

    def zero_grad(self, index, _):
        self.optimizers[index].zero_grad()
        self.model.optimizers[index].grads = [None, None]

    def unscale_(self, index, _):
        expected = self.model.unscale_(self.model.optimizers[index])
        self.both(expected, lambda: self.scaler.unscale_(self.optimizers[index]))

    def clip(self, index, _):
        """Clip to a norm that is not reached, so that gradients keep their values."""
        if all(g is None or abs(g) < 1e30 for g in self.model.optimizers[index].grads):
            ampfuse.clip_grad_norm_(self.params[index], 1e38)

    def step(self, index, _):
        optimizer, before = self.optimizers[index], [p.clone() for p in self.params[index]]
        model = self.model.optimizers[index]
        had = model.steps
        expected = self.model.step(model)
        self.both(expected, lambda: self.scaler.step(optimizer))
        moved = any(not torch.equal(*pair) for pair in zip(before, self.params[index], strict=True))
        grad = model.grads[0]
        # A tiny gradient may leave the parameter unchanged. A gradient that becomes infinite after
        # unscale_() is not checked again and makes the parameter non-finite for good.
        if grad is not None and not abs(grad) < 1e-3 and before[0].isfinite().all():
            assert moved == (model.steps > had)
        if model.overflow is not None and expected is None:
            assert self.scaler.was_skipped() == model.overflow == self.scaler.step_skipped.item()
        # The model does not specify the gradients that remain after a step of torch's fused AdamW.
        for i, param in enumerate(self.params[index]):
            model.grads[i] = None if param.grad is None else param.grad.item()

    def update(self, _, __):
        self.both(self.model.update(), self.scaler.update)

    def save_and_load(self, _, __):
        file = io.BytesIO()
        torch.save(self.scaler.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        through_torch = torch.amp.GradScaler("cpu")
        through_torch.load_state_dict(saved)
        assert through_torch.state_dict().items() <= saved.items()
        if not self.model.is_between_updates():
            for language in LANGUAGES.values():
                fresh = language.scaler(CPU)
                fresh.load_state_dict(saved)
                assert fresh.state_dict() == saved
        self.scaler.load_state_dict(saved)

    def pickle(self, _, __):
        """Pickle a scaler of Python; save a scaler of C++ in an archive."""
        if isinstance(self.scaler, ampfuse.GradScaler):
            self.pickle_python()
        elif not self.model.is_between_updates():
            fresh = self.language.scaler(CPU)
            with tempfile.NamedTemporaryFile() as file:
                self.scaler.save(file.name)
                fresh.load(file.name)
            self.take(fresh)

    def pickle_python(self):
        if len(self.scaler._per_optimizer_states):
            with pytest.raises(AssertionError, match="may only be pickled"):
                pickle.dumps(self.scaler)
            return
        copied = copy.deepcopy(self.scaler)
        self.take(pickle.loads(pickle.dumps(self.scaler)))
        assert copied.state_dict() == self.scaler.state_dict()

    def take(self, scaler):
        """Continue with a copy of the scaler, which creates its tensors at the next scale()."""
        self.scaler = scaler
        if self.model.scale is not None:
            self.scaler.scale(torch.ones(()))


OPTIONS = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([1.0, 4.0, 65536.0, 2.0**126]),
        "growth_interval": st.integers(1, 3),
        "hysteresis": st.integers(1, 3),
        "min_scale": st.sampled_from([1e-30, 1.0, 3.0]),
    }
).filter(lambda options: options["min_scale"] <= options["init_scale"])


@pytest.mark.slow
@EVERY_LANGUAGE
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
    derandomize=True,
)
@given(
    st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3),
    OPTIONS,
    # Long ones, since each beginning of a sequence is checked, too, and examples cost time to make.
    st.lists(COMMANDS, min_size=10, max_size=25),
)
def test_random_sequences_of_calls_match_the_model(language, kinds, options, commands):
    if language is LANGUAGES["C++"]:
        kinds = [kind.replace("fused", "SGD") for kind in kinds]  # LibTorch has no fused AdamW
    run = Run(language, kinds, options)
    for command in commands:
        run.do(*command)
