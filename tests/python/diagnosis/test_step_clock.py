"""The phases of training steps, as a clock measures them without a change to the program."""

import threading
import time
from itertools import islice

import ampfuse
import pytest
import torch
from ampfuse.optim.stepping import skips_unseen
from ampfuse.tools.diagnosis.phases import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OTHER,
    SCALER,
)
from clocked import Numbers, clocked, train
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

PAUSE = 0.02


@pytest.fixture
def steps():
    with clocked() as made:
        yield made


def step_time(step):
    return sum(step.values()) - step[EVALUATION]


def pause():
    time.sleep(PAUSE)


class Pausing:
    def __reduce__(self):
        pause()
        return (Pausing, ())


class Slow(Numbers):
    def __getitem__(self, index):
        pause()
        return torch.zeros(4)


def test_phases_of_a_step_add_up_to_its_time(steps):
    ends = []

    def after():
        ends.append(time.perf_counter())
        pause()

    train(after)
    assert len(steps.steps) == steps.clock.steps == 10
    seconds = sum(sum(step.values()) for step in steps.steps[1:])
    assert seconds == pytest.approx(ends[-1] - ends[0], rel=0.1)
    for phase in (INPUT, FORWARD, BACKWARD, OPTIMIZER):
        assert all(step[phase] > 0 for step in steps.steps)
    assert all(step[OTHER] >= PAUSE for step in steps.steps[1:])
    assert all(step[FORWARD] < PAUSE for step in steps.steps[1:])


def test_batches_that_the_program_makes_itself_belong_to_forward(steps):
    train(pause, (torch.zeros(4, 4) for _ in range(10)))
    assert steps.clock.loaders == []
    assert all(step[FORWARD] >= PAUSE for step in steps.steps[1:])


def test_time_before_backward_is_forward_also_of_a_second_network_and_of_parts_of_a_batch(steps):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (first, second)]
    for batch in DataLoader(Numbers(), 4):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            for part in batch.chunk(2):
                loss = model(part).sum()
                pause()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(steps.steps) == 10
    assert steps.backwards == 40
    assert all(step[FORWARD] >= 4 * PAUSE for step in steps.steps[1:])
    assert all(step[OTHER] < PAUSE for step in steps.steps[1:])


def test_evaluation_belongs_to_no_step(steps):
    def evaluate():
        if len(steps.steps) in (3, 10):
            for _ in DataLoader(Numbers(), 8):
                pause()

    train(evaluate)
    train()  # a second epoch
    assert len(steps.steps) == 20
    assert all(step_time(step) < 5 * PAUSE for step in steps.steps)  # not 5 batches


def test_end_of_a_loader_in_training_is_no_evaluation(steps):
    for _ in range(2):
        train()
    assert all(step[EVALUATION] == 0 for step in steps.steps)


def test_evaluation_without_a_loader_and_saving_are_not_forward(steps, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))

    def evaluate():
        model.eval()
        pause()
        model.train()

    def save():
        evaluate()
        torch.save(Pausing(), tmp_path / "model.pt")

    train(save, [torch.zeros(4, 4)] * 5)
    assert steps.steps[1][EVALUATION] >= PAUSE
    for step in steps.steps[1:]:
        assert step[OTHER] >= PAUSE
        assert step[FORWARD] < PAUSE


def test_model_in_evaluation_in_each_step_is_a_part_of_it_unless_it_reads_a_loader(steps):
    model = nn.Sequential(nn.Linear(4, 4))

    def evaluate():
        model.eval()
        pause()
        for _ in DataLoader(Numbers(), 40) if len(steps.steps) > 5 else ():
            pass
        model.train()

    train(evaluate, [torch.zeros(4, 4)] * 10)
    assert all(step[EVALUATION] == 0 and step[OTHER] >= PAUSE for step in steps.steps[2:6])
    assert all(step[EVALUATION] >= PAUSE for step in steps.steps[6:])


def test_forward_of_a_model_that_stays_in_evaluation_is_not_evaluation(steps):
    teacher = nn.Linear(4, 4)

    def batches():
        for _ in range(5):
            yield torch.zeros(4, 4)
            teacher.train()
            teacher.eval()
            pause()

    train(loader=batches())
    assert all(step[EVALUATION] < PAUSE <= step[FORWARD] for step in steps.steps[1:])


def test_two_batches_of_one_loader_or_of_two_that_make_a_batch_are_both_input(steps):
    batches = iter(DataLoader(Slow(), 1))
    train(loader=(next(batches) + next(batches) for _ in range(10)))
    pairs = zip(DataLoader(Slow(), 1), DataLoader(Slow(), 1), strict=True)
    train(loader=(one + two for one, two in islice(pairs, 10)))
    assert all(step[INPUT] >= 2 * PAUSE for step in steps.steps)


def test_time_in_the_scaler_and_in_its_optimizer_is_told_apart(steps):
    param = nn.Parameter(torch.zeros(3))
    optimizer, scaler = ampfuse.AdamW([param]), ampfuse.GradScaler("cpu")
    for _ in range(3):
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    of_first = [FORWARD, BACKWARD, OTHER, SCALER, OPTIMIZER]
    of_others = [SCALER, OTHER, SCALER, FORWARD, BACKWARD, OTHER, SCALER, OPTIMIZER]
    assert steps.phases == of_first + 2 * of_others
    assert all(step[SCALER] > 0 and step[OPTIMIZER] > 0 for step in steps.steps)


def test_other_threads_are_not_measured(steps):
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert steps.steps == []


def test_functions_and_hooks_of_torch_are_restored_also_after_an_error():
    before = (torch.autograd.backward, DataLoader.__iter__, ampfuse.GradScaler.step)

    def fail():
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), clocked() as made:
        train(fail)
    assert (torch.autograd.backward, DataLoader.__iter__, ampfuse.GradScaler.step) == before
    train()
    assert len(made.steps) == 1


def test_errors_of_a_dataset_and_of_backward_leave_the_phases_in_order(steps):
    class Broken(Numbers):
        def __getitem__(self, index):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        next(iter(DataLoader(Broken(), 1)))
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.zeros(1).backward()
    train()
    assert len(steps.steps) == 10
    for phase in (INPUT, FORWARD, BACKWARD, OPTIMIZER):
        assert all(step[phase] > 0 for step in steps.steps)


def test_error_in_an_optimizer_ends_its_phase(steps):
    param = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    for _ in range(3):
        param.sum().backward()
        pause()
        optimizer.step()
    assert all(step[OTHER] >= PAUSE for step in steps.steps[1:])


def test_notes_of_a_long_evaluation_are_read_meanwhile(steps):
    train(loader=[torch.zeros(4, 4)] * 2)
    for _ in DataLoader(range(2000)):
        pass
    assert len(steps.clock._notes) <= 1000
    assert EVALUATION in steps.phases
    train(loader=[torch.zeros(4, 4)] * 2)
    assert len(steps.steps) == 4
    assert steps.steps[2][INPUT] < PAUSE  # there was a start, which takes no time


def test_optimizers_skip_on_the_device_while_steps_are_measured(steps):
    optimizer = ampfuse.AdamW([nn.Parameter(torch.zeros(3))])
    assert skips_unseen(optimizer)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert not skips_unseen(optimizer)
    handle.remove()


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, {})

    def step(self, closure=None):
        self.base.step()


def test_optimizer_inside_of_an_optimizer_is_one_step(steps):
    param = nn.Parameter(torch.zeros(3))
    optimizer = Lookahead(torch.optim.SGD([param], lr=0.1))
    for _ in range(10):
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(steps.steps) == 10
    assert all(step[FORWARD] > 0 for step in steps.steps)


def test_second_optimizer_takes_the_place_of_the_first_when_that_is_gone(steps):
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    first, second = (torch.optim.SGD([param], lr=0.1) for param in params)
    for _ in range(3):
        first.step()
        second.step()
    del first
    second.step()
    assert steps.clock.steps == 4


def test_steps_without_backward_of_torch_are_measured(steps):
    time.sleep(10 * PAUSE)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Numbers(), 4):
        grads = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
    assert all(sum(step.values()) < 5 * PAUSE for step in steps.steps[1:])


def test_error_of_a_measurement_ends_it_and_not_the_program(steps):
    def fail(*_):
        raise ValueError("a mistake")

    steps.noted = fail  # called by a hook of optimizers, and by what is replaced
    train()
    train()
    assert str(steps.clock.error) == "a mistake"
    assert steps.clock._notes == []


COMPILED = """
import torch

torch._dynamo.config.trace_autograd_ops = True
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
scaler = torch.amp.GradScaler("cpu")

@torch.compile(fullgraph=True, backend="eager")
def step(inputs, target):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()

for _ in range(4):
    step(torch.randn(8, 64), torch.randint(10, (8,)))
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_compiled_step_is_one_graph_while_steps_are_measured(programs):
    programs.write("train.py", COMPILED)
    done = programs.ours("train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"


def test_step_of_mastered_counts_once_and_is_not_left_to_torch():
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = ampfuse.Mastered(torch.optim.Adagrad, model.parameters())
    with clocked() as made:
        for _ in range(3):
            model(torch.ones(4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        assert made.clock.steps == 3
        assert made.clock.left_to_torch == set()
        torch.optim.Adagrad(model.parameters()).step()
        assert made.clock.left_to_torch == {"Adagrad"}
