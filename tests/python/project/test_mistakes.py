"""Mistakes that raise no error: ampfuse warns of certain ones, and never in correct programs."""

import copy
import pickle
import sys
import threading
import warnings

import ampfuse
import pytest
import torch
from ampfuse import _mistakes
from torch.nn import Parameter


@pytest.fixture(autouse=True)
def no_unexpected_warning():
    """Turn warnings that a test does not expect into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Loop:
    """A training loop of one parameter."""

    def __init__(self, device, make=torch.optim.SGD, **options):
        self.param = Parameter(torch.ones(8, device=device))
        self.optimizer = make([self.param], lr=0.1, **options)
        self.scaler = ampfuse.GradScaler(device.type)

    def backward(self, factor=1.0):
        self.optimizer.zero_grad()
        self.scaler.scale(factor * self.param.sum()).backward()

    def finish(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.param.is_cuda:
            torch.cuda.synchronize()


@pytest.mark.parametrize("make", [torch.optim.SGD, ampfuse.AdamW])
@pytest.mark.parametrize("unscaled_after", [False, True])
@pytest.mark.parametrize("in_two_calls", [False, True])
def test_clipping_gradients_that_are_still_scaled_warns_once(
    device, make, unscaled_after, in_two_calls
):
    loop = Loop(device, make)

    def iterate(times):
        for _ in range(times):
            loop.backward()
            if in_two_calls:
                total_norm = ampfuse.get_total_norm([loop.param.grad])
                ampfuse.clip_grads_with_norm_([loop.param], 1.0, total_norm)
            else:
                ampfuse.clip_grad_norm_([loop.param], 1.0)
            if unscaled_after:
                loop.scaler.unscale_(loop.optimizer)
            loop.finish()

    with pytest.warns(UserWarning, match="clipped to max_norm=1 while they were still") as caught:
        iterate(2)

    assert len(caught) == 1
    assert caught[0].filename == __file__
    iterate(2)


@pytest.mark.parametrize("make", [torch.optim.SGD, ampfuse.AdamW])
@pytest.mark.parametrize("way", ["scaler", "unscale_", "by the scale", "optimizer", "after"])
def test_correct_clipping_gives_no_warning(device, make, way):
    loop = Loop(device, make)
    for _ in range(6):
        loop.backward()
        if way == "scaler":
            loop.scaler.clip_grad_norm_(loop.optimizer, 1.0)
        elif way == "unscale_":
            loop.scaler.unscale_(loop.optimizer)
            ampfuse.clip_grad_norm_([loop.param], 1.0)
        elif way == "by the scale":
            ampfuse.clip_grad_norm_([loop.param], 1.0 * loop.scaler.get_scale())
        elif way == "optimizer" and make is ampfuse.AdamW:
            loop.optimizer.max_grad_norm = 1.0
        loop.finish()
        if way == "after":
            ampfuse.clip_grad_norm_([loop.param], 1.0)


def test_clipping_a_second_unscaled_network_gives_no_warning(device):
    """The second network is clipped and stepped between backward and step of the first."""
    loop, other = Loop(device), Parameter(torch.ones(8, device=device))
    optimizer = ampfuse.AdamW([other], lr=0.1)
    for _ in range(150):
        loop.backward()
        optimizer.zero_grad()
        other.sum().backward()
        ampfuse.clip_grad_norm_([other], 1.0)
        optimizer.step()
        loop.finish()


def test_torch_clipping_in_addition_to_max_grad_norm_warns_once(device):
    loop = Loop(device, ampfuse.AdamW, max_grad_norm=1.0)

    def iterate(*factors):
        for factor in factors:
            loop.backward(factor)
            torch.nn.utils.clip_grad_norm_([loop.param], 1.0)
            loop.finish()

    with pytest.warns(UserWarning, match="max_grad_norm=1 clips them inside the step") as caught:
        iterate(1.0, 2.0, 3.0, 4.0)

    assert len(caught) == 1
    iterate(5.0)


def test_steps_without_the_scaler_warn_once(device):
    loop = Loop(device, ampfuse.AdamW)

    def iterate(times):
        for _ in range(times):
            loop.backward()
            loop.optimizer.step()
            loop.scaler.state_dict()  # reads the scale, but does not return it to the loop

    iterate(999)
    with pytest.warns(UserWarning, match=r"none by scaler.step\(optimizer\)") as caught:
        iterate(1)

    assert len(caught) == 1
    assert caught[0].filename == __file__
    iterate(150)


def test_torch_clipping_in_addition_to_max_grad_norm_is_allowed_at_scale_1(device):
    loop = Loop(device, ampfuse.AdamW, max_grad_norm=1.0)
    loop.scaler = ampfuse.GradScaler(device.type, init_scale=1.0)
    for _ in range(5):
        loop.backward()
        torch.nn.utils.clip_grad_norm_([loop.param], 1.0)
        loop.finish()


@pytest.mark.parametrize("way", ["get_scale", "scale_tensor"])
def test_program_that_unscales_by_itself_gets_no_warning(device, way):
    loop = Loop(device, ampfuse.AdamW)
    for _ in range(1100):
        loop.backward()
        loop.param.grad /= getattr(loop.scaler, way)()
        loop.optimizer.step()


def test_only_gradients_whose_norm_was_above_the_limit_count_as_clipped(device):
    loop = Loop(device, ampfuse.AdamW)

    def iterate(factor):
        loop.backward(factor)
        ampfuse.clip_grad_norm_([loop.param], 1.0)
        loop.finish()

    iterate(1e-9)
    with pytest.warns(UserWarning, match="clipped to max_norm=1 while they were still"):
        iterate(1.0)


def test_small_limit_multiplied_by_the_scale_gives_no_warning(device):
    loop = Loop(device)
    for _ in range(5):
        loop.backward()
        ampfuse.clip_grad_norm_([loop.param], 5e-4 * loop.scaler.get_scale())
        loop.finish()


def test_network_that_steps_after_each_micro_batch_of_another_gets_no_warning(device):
    loop, other = Loop(device, ampfuse.AdamW), Parameter(torch.ones(8, device=device))
    optimizer = ampfuse.AdamW([other], lr=0.1)
    for _ in range(128):
        loop.scaler.scale(loop.param.sum()).backward()
        optimizer.zero_grad()
        other.sum().backward()
        optimizer.step()
    loop.finish()


def test_network_trained_between_backward_and_step_of_another_gets_no_warning(device):
    loop, other = Loop(device, ampfuse.AdamW), Parameter(torch.ones(8, device=device))
    optimizer = ampfuse.AdamW([other], lr=0.1)
    loop.backward()
    for _ in range(150):
        optimizer.zero_grad()
        other.sum().backward()
        optimizer.step()
    loop.finish()


def test_two_scalers_with_one_optimizer_each_give_no_warning(device):
    loops = [Loop(device, ampfuse.AdamW), Loop(device, torch.optim.SGD)]
    for _ in range(120):
        for loop in loops:
            loop.backward()
            loop.scaler.clip_grad_norm_(loop.optimizer, 1.0)
        for loop in loops:
            loop.finish()


def test_clipped_gradient_is_saved_and_loaded(device, tmp_path):
    loop = Loop(device)
    loop.backward()
    ampfuse.clip_grad_norm_([loop.param], 1e6)

    torch.save(loop.param.grad, tmp_path / "grad.pt")

    assert torch.equal(torch.load(tmp_path / "grad.pt", weights_only=True), loop.param.grad)


def test_training_on_the_meta_device_gives_no_warning():
    """A tensor on the meta device has no memory to read a number from."""
    loop = Loop(torch.device("cpu"), ampfuse.AdamW, max_grad_norm=1.0)
    param = Parameter(torch.ones(8, device="meta"))
    optimizer = ampfuse.AdamW([param], max_grad_norm=1.0)
    for _ in range(5):
        loop.scaler.scale(param.sum()).backward()
        loop.scaler.step(optimizer)
        loop.scaler.update()


def test_threads_train_separate_models_without_errors(device):
    errors = []

    def train():
        try:
            for _ in range(30):
                loop = Loop(device, ampfuse.AdamW)
                for _ in range(4):
                    loop.backward()
                    loop.scaler.unscale_(loop.optimizer)
                    ampfuse.clip_grad_norm_([loop.param], 1.0)
                    loop.finish()
                    loop.param.grad = torch.ones_like(loop.param)
                    loop.optimizer.step()
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=train) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_lookup_of_a_clipped_gradient_is_safe_while_a_thread_scales_losses(device):
    grad, done = torch.ones(3, device=device), threading.Event()
    watches = [_mistakes.Watch(), _mistakes.Watch()]

    def scale_losses():
        while not done.is_set():
            watches[1].note_scaled_loss()

    watches[0].note_scaled_loss()
    thread, interval = threading.Thread(target=scale_losses), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(3000):
            _mistakes.note_clip([grad], 1.0, torch.tensor(2.0))
            clip = _mistakes.first_clip([grad])
            assert clip is None or clip.max_norm == 1.0
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_batch_of_many_micro_batches_gives_no_warning(device):
    loop = Loop(device, ampfuse.AdamW)
    loop.backward()
    for _ in range(300):
        loop.scaler.scale(loop.param.sum()).backward()
    loop.finish()


def test_reading_a_history_that_was_not_recorded_warns(device):
    loop = Loop(device)
    with pytest.warns(UserWarning, match=r"GradScaler\(history=100\)"):
        assert loop.scaler.history() == []


@pytest.mark.parametrize("device", [65536.0, 2**16, None])
def test_scale_passed_as_the_device_is_refused(device):
    with pytest.raises(TypeError, match="device: expected a str like 'cuda', got"):
        ampfuse.GradScaler(device)


def test_scalers_that_have_stepped_are_copied_and_pickled(device):
    loop = Loop(device)
    loop.backward()
    loop.finish()

    for scaler in (copy.deepcopy(loop.scaler), pickle.loads(pickle.dumps(loop.scaler))):
        loop.scaler = scaler
        loop.backward()
        loop.finish()
