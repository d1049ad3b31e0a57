"""Fake CUDA graphs of steps on a CPU: a capture has no effect, and a replay runs the step.

Like a real graph, a replay writes its results into the tensors that the capture returned, and
changes no Python objects.
"""

from contextlib import contextmanager, nullcontext

import torch
from ampfuse._nested import params_of


class FakeGraph:
    """A replacement for torch.cuda.CUDAGraph."""

    step = None  # the GraphedStep

    def replay(self):
        history = self.step.scaler._history if self.step.scaler.is_enabled() else None
        before = history and history.snapshot().last_step
        params = params_of(self.step.optimizer)
        grads = [param.grad for param in params]
        with capturing():
            loss = self.step._step(self.step._sample)
        self.step._loss.copy_(loss)
        for (param, captured), grad in zip(self.step._grads, grads, strict=True):
            if captured is not None:
                captured.copy_(param.grad)
            param.grad = grad
        if history:
            ours, now = self.step._captured.history.last_step, history.snapshot().last_step
            ours.found_inf.copy_(now.found_inf)
            pairs = zip(ours.graph_step[1].norms, now.graph_step[1].norms, strict=True)
            for captured, norms in pairs:
                captured.copy_(norms)
            history.put_last_step(before)


_is_capturing = False


@contextmanager
def capturing():
    global _is_capturing
    _is_capturing = True
    try:
        yield
    finally:
        _is_capturing = False


class Stream:
    def wait_stream(self, other):
        pass


def capture(step, monkeypatch):
    """Capture a step on a CPU as if it were on a GPU."""

    @contextmanager
    def graph(fake, capture_error_mode):
        fake.step = step
        tensors = [tensor for root in step._roots for tensor in root.parameters()]
        tensors += [tensor for root in step._roots for tensor in root.buffers()]
        for state in step.optimizer.state.values():
            tensors += state.values()
        tensors.append(step.optimizer._grad_norm)
        if step.scaler.is_enabled():
            scaler = step.scaler
            tensors += [scaler._scale, scaler._growth_tracker]
            tensors += [t for t in scaler._history.tensors(torch.device("cpu")) if t is not None]
        values = [tensor.detach().clone() for tensor in tensors]
        random_state = torch.get_rng_state()
        try:
            with capturing():
                yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            torch.set_rng_state(random_state)

    monkeypatch.setattr("ampfuse.amp._history.is_capturing", lambda: _is_capturing)
    monkeypatch.setattr("ampfuse.amp._history.is_in_graph", lambda: _is_capturing)
    monkeypatch.setattr("ampfuse.optim._state.is_capturing", lambda: _is_capturing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    step._capture()
