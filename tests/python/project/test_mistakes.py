"""Mistakes that raise no error: ampfuse warns of certain ones, and never in correct programs."""

import copy
import pickle
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import ampfuse
import pytest
import torch
from ampfuse.gradients import mistakes
from torch.nn import Parameter


@pytest.fixture(autouse=True)
def no_unexpected_warning():
    """Turn warnings that a test does not expect into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
        yield


class Loop:
    """A training loop of one parameter."""

    def __init__(self, device, make=ampfuse.AdamW, **options):
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

    def iterate(self, clip, *factors):
        """Make a step for each factor of the loss, with `clip` between backward and step."""
        for factor in factors:
            self.backward(factor)
            clip()
            self.finish()


class Other:
    """A network in float32 that is trained without the scaler beside a `Loop`."""

    def __init__(self, device):
        self.param = Parameter(torch.ones(8, device=device))
        self.optimizer = ampfuse.AdamW([self.param], lr=0.1)

    def iterate(self, is_clipped=False):
        self.optimizer.zero_grad()
        self.param.sum().backward()
        if is_clipped:
            ampfuse.clip_grad_norm_([self.param], 1.0)
        self.optimizer.step()


@pytest.mark.parametrize("make", [torch.optim.SGD, ampfuse.AdamW])
@pytest.mark.parametrize("way", ["in one call", "in two calls", "before unscale_"])
def test_clipping_gradients_that_are_still_scaled_warns_once(device, make, way):
    loop = Loop(device, make)

    def clip():
        if way == "in two calls":
            total_norm = ampfuse.get_total_norm([loop.param.grad])
            ampfuse.clip_grads_with_norm_([loop.param], 1.0, total_norm)
        else:
            ampfuse.clip_grad_norm_([loop.param], 1.0)
        if way == "before unscale_":
            loop.scaler.unscale_(loop.optimizer)

    with pytest.warns(UserWarning, match="clipped to max_norm=1 while they were still") as caught:
        loop.iterate(clip, 1.0, 1.0)

    assert [warning.filename for warning in caught] == [__file__]
    loop.iterate(clip, 1.0, 1.0)


@pytest.mark.parametrize("make", [torch.optim.SGD, ampfuse.AdamW])
@pytest.mark.parametrize("way", ["scaler", "unscale_", 1.0, 5e-4, "optimizer", "after"])
def test_correct_clipping_gives_no_warning(device, make, way):
    loop = Loop(device, make)

    def clip():
        if way == "scaler":
            loop.scaler.clip_grad_norm_(loop.optimizer, 1.0)
        elif way == "unscale_":
            loop.scaler.unscale_(loop.optimizer)
            ampfuse.clip_grad_norm_([loop.param], 1.0)
        elif isinstance(way, float):  # the limit is multiplied by the scale, and may be small
            ampfuse.clip_grad_norm_([loop.param], way * loop.scaler.get_scale())
        elif way == "optimizer" and make is ampfuse.AdamW:
            loop.optimizer.max_grad_norm = 1.0

    for _ in range(6):
        loop.iterate(clip, 1.0)
        if way == "after":
            ampfuse.clip_grad_norm_([loop.param], 1.0)


def test_only_gradients_whose_norm_was_above_the_limit_count_as_clipped(device):
    loop = Loop(device)

    def clip():
        ampfuse.clip_grad_norm_([loop.param], 1.0)

    loop.iterate(clip, 1e-9)
    with pytest.warns(UserWarning, match="clipped to max_norm=1 while they were still"):
        loop.iterate(clip, 1.0)


def test_torch_clipping_in_addition_to_max_grad_norm_warns_once(device):
    loop = Loop(device, max_grad_norm=1.0)

    def clip():
        torch.nn.utils.clip_grad_norm_([loop.param], 1.0)

    with pytest.warns(UserWarning, match="max_grad_norm=1 clips them inside the step") as caught:
        loop.iterate(clip, 1.0, 2.0, 3.0, 4.0)

    assert len(caught) == 1
    loop.iterate(clip, 5.0)

    loop = Loop(device, max_grad_norm=1.0)
    loop.scaler = ampfuse.GradScaler(device.type, init_scale=1.0)
    loop.iterate(clip, *[1.0] * 5)  # it is allowed where gradients are not scaled


class Gan:
    """A generator and a critic, whose losses alternate and are scaled or not."""

    def __init__(self, device, critics_step, *, is_scaled=True):
        self.generator, self.critic = (Parameter(torch.ones(8, device=device)) for _ in range(2))
        self.optimizers = [
            torch.optim.SGD([param], lr=1e-6) for param in (self.generator, self.critic)
        ]
        self.scaler = ampfuse.GradScaler(device.type)
        self.critics_step, self.is_scaled = critics_step, is_scaled

    def iterate(self):
        generators, critics = self.optimizers
        critics.zero_grad()
        loss = (self.critic * self.generator.detach()).sum()
        (self.scaler.scale(loss) if self.is_scaled else loss).backward()
        if self.critics_step == "unscale_":
            self.scaler.unscale_(critics)
        (critics.step if self.critics_step != "scaler" else lambda: self.scaler.step(critics))()
        generators.zero_grad()
        self.scaler.scale((self.critic * self.generator).sum()).backward()
        self.scaler.step(generators)
        self.scaler.update()


def test_optimizer_that_steps_beside_the_scaler_warns_once(device):
    gan = Gan(device, "its own")
    for _ in range(9):
        gan.iterate()
    with pytest.warns(UserWarning, match="but by other steps than scaler.step") as caught:
        gan.iterate()
    assert len(caught) == 1
    for _ in range(20):
        gan.iterate()


@pytest.mark.parametrize("critics_step", ["scaler", "unscale_", "its own"])
def test_optimizer_whose_gradients_are_not_scaled_may_step_beside_the_scaler(device, critics_step):
    gan = Gan(device, critics_step, is_scaled=critics_step != "its own")
    for _ in range(30):
        gan.iterate()


@pytest.mark.parametrize("make", [torch.optim.SGD, ampfuse.AdamW])
def test_scale_that_has_fallen_too_far_for_any_step_warns_once(device, make):
    loop = Loop(device, make)
    with pytest.warns(UserWarning, match="each of the last 32 steps was skipped"):
        loop.iterate(lambda: None, *[float("inf")] * 140)
    assert loop.scaler._scale == 2.0**-124
    with pytest.warns(UserWarning, match=r"fallen to \S+, at which each step") as caught:
        loop.iterate(lambda: None, *[float("inf")] * 36)
    assert len(caught) == 1
    loop.iterate(lambda: None, *[1.0] * 40)


@pytest.mark.parametrize("make", [torch.optim.SGD, ampfuse.AdamW])
def test_steps_without_the_scaler_warn_once(device, make):
    loop = Loop(device, make)

    def iterate(times):
        for _ in range(times):
            loop.backward()
            loop.optimizer.step()
            loop.scaler.state_dict()  # reads the scale, but does not return it to the loop

    # Optimizers of ampfuse look at their gradients.
    first, text = (
        (1, "called by itself") if make is ampfuse.AdamW else (20, r"but scaler.step\(opt")
    )
    iterate(first - 1)
    with pytest.warns(UserWarning, match=text) as caught:
        iterate(1)

    assert [warning.filename for warning in caught] == [__file__]
    iterate(50)


@pytest.mark.parametrize("way", ["get_scale", "scale_tensor"])
def test_program_that_unscales_by_itself_gets_no_warning(device, way):
    loop = Loop(device)
    for _ in range(30):
        loop.backward()
        loop.param.grad /= getattr(loop.scaler, way)()
        loop.optimizer.step()


@pytest.mark.parametrize("make", [torch.optim.SGD, ampfuse.AdamW])
def test_step_of_the_optimizer_after_an_overflow_that_unscale_found_warns_once(device, make):
    loop = Loop(device, make)
    loop.scaler = ampfuse.GradScaler(device.type, history=4)

    def iterate(*factors):
        for factor in factors:
            loop.backward(factor)
            loop.scaler.unscale_(loop.optimizer)
            loop.optimizer.step()
            loop.scaler.update()
            if loop.param.is_cuda:
                torch.cuda.synchronize()

    iterate(1.0)
    with pytest.warns(UserWarning, match="although scaler.unscale_.optimizer. had found") as caught:
        iterate(float("inf"), float("inf"))

    assert [warning.filename for warning in caught] == [__file__]
    assert [record.skipped for record in loop.scaler.history()] == [False] * 3


def test_program_that_skips_steps_by_itself_after_unscale_gets_no_warning(device):
    loop = Loop(device, torch.optim.SGD)
    loop.scaler = ampfuse.GradScaler(device.type, history=4)
    for factor in (1.0, float("inf"), 1.0):
        loop.backward(factor)
        loop.scaler.unscale_(loop.optimizer)
        if loop.param.grad.isfinite().all():
            loop.optimizer.step()
        loop.scaler.update()
    assert [record.skipped for record in loop.scaler.history()] == [False, True, False]


def test_steps_that_a_compiled_function_takes_with_the_scaler_give_no_warning(device):
    loop = Loop(device)
    finish = torch.compile(loop.finish, backend="eager")
    for _ in range(25):
        loop.backward()
        finish()


def test_a_second_network_without_a_scaler_gives_no_warning(device):
    """It is clipped, or makes many steps, between the first one's backward passes and step."""
    loop, other = Loop(device, torch.optim.SGD), Other(device)
    for _ in range(150):
        loop.backward()
        other.iterate(is_clipped=True)
        loop.finish()

    loop, other = Loop(device), Other(device)
    for _ in range(128):  # micro-batches
        loop.scaler.scale(loop.param.sum()).backward()
        other.iterate()
    loop.finish()

    loop, other = Loop(device), Other(device)
    loop.backward()
    for _ in range(150):
        other.iterate()
    loop.finish()


def test_a_discriminator_without_a_scaler_gives_no_warning(device):
    """The generator's loss, whose batch has many micro-batches, is of the discriminator, too."""
    loop, other = Loop(device), Other(device)
    for _ in range(24):
        loop.scaler.scale((loop.param.sum() * other.param.sum()).sum()).backward()
        other.iterate()
    loop.finish()


def test_two_scalers_with_one_optimizer_each_give_no_warning(device):
    loops = [Loop(device), Loop(device, torch.optim.SGD)]
    for _ in range(120):
        for loop in loops:
            loop.backward()
            loop.scaler.clip_grad_norm_(loop.optimizer, 1.0)
        for loop in loops:
            loop.finish()


def test_batch_of_many_micro_batches_gives_no_warning(device):
    loop = Loop(device)
    loop.backward()
    for _ in range(300):
        loop.scaler.scale(loop.param.sum()).backward()
    loop.finish()


def test_clipped_gradient_is_saved_and_loaded(device, tmp_path):
    loop = Loop(device, torch.optim.SGD)
    loop.backward()
    ampfuse.clip_grad_norm_([loop.param], 1e6)

    torch.save(loop.param.grad, tmp_path / "grad.pt")

    assert torch.equal(torch.load(tmp_path / "grad.pt", weights_only=True), loop.param.grad)


def test_training_on_the_meta_device_gives_no_warning():
    """A tensor on the meta device has no memory to read a number from."""
    loop = Loop(torch.device("cpu"), max_grad_norm=1.0)
    loop.param = Parameter(torch.ones(8, device="meta"))
    loop.optimizer = ampfuse.AdamW([loop.param], max_grad_norm=1.0)
    for _ in range(5):
        loop.scaler.scale(loop.param.sum()).backward()
        loop.finish()


@pytest.fixture
def frequent_switches():
    """Make Python switch between threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_train_separate_models_without_errors(device, frequent_switches):
    def train():
        for _ in range(30):
            loop = Loop(device)
            for _ in range(4):
                loop.backward()
                loop.scaler.unscale_(loop.optimizer)
                ampfuse.clip_grad_norm_([loop.param], 1.0)
                loop.finish()
                loop.param.grad = torch.ones_like(loop.param)
                loop.optimizer.step()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(train) for _ in range(4)]:
            done.result()  # raises the thread's error


def test_lookup_of_a_clipped_gradient_is_safe_while_a_thread_scales_losses(
    device, frequent_switches
):
    grad, done = torch.ones(3, device=device), threading.Event()
    watches, scaler = [mistakes.Watch(), mistakes.Watch()], ampfuse.GradScaler("cpu")

    def scale_losses():
        while not done.is_set():
            watches[1].note_scaled_loss(None, None, scaler, scaler._history)

    watches[0].note_scaled_loss(None, None, scaler, scaler._history)
    with ThreadPoolExecutor(1) as pool:
        scaling = pool.submit(scale_losses)
        try:
            for _ in range(3000):
                mistakes.note_clip([grad], 1.0, torch.tensor(2.0))
                clip = mistakes.first_clip([grad])
                assert clip is None or clip.max_norm == 1.0
        finally:
            done.set()
        scaling.result()


def test_scalers_that_have_stepped_are_copied_and_pickled(device):
    loop = Loop(device, torch.optim.SGD)
    loop.backward()
    loop.finish()

    for scaler in (copy.deepcopy(loop.scaler), pickle.loads(pickle.dumps(loop.scaler))):
        loop.scaler = scaler
        loop.backward()
        loop.finish()


def test_second_clipping_of_an_optimizer_that_comes_later_is_warned_about():
    params = [Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [ampfuse.AdamW([params[0]]), ampfuse.AdamW([params[1]], max_grad_norm=1.0)]
    scaler = ampfuse.GradScaler("cpu")

    def run():
        for index in [0] * 5 + [1] * 5:
            optimizers[index].zero_grad()
            scaler.scale((100 * params[index]).sum()).backward()
            if index == 1:
                torch.nn.utils.clip_grad_norm_([params[1]], 1.0)
            scaler.step(optimizers[index])
            scaler.update()

    with pytest.warns(UserWarning, match="the optimizer's max_grad_norm=1 clips them"):
        run()
