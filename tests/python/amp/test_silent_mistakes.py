"""Mistakes in the use of a scaler that torch lets pass, each with a warning or an error."""

import warnings

import ampfuse
import pytest
import torch
from scaled_training import EVERY_SGD, Training
from torch import nn
from torch.utils.checkpoint import checkpoint


@EVERY_SGD
def test_losses_that_are_not_scaled_any_more_are_noticed(device, make):
    training = Training(device, make)
    training.scaler.scale(training.loss()).backward()
    training.step()

    def run():
        for _ in range(6):
            training.loss().backward()
            training.step()

    with pytest.warns(
        UserWarning, match="3 steps in a row were divided by the loss scale"
    ) as caught:
        run()
    assert len(caught) == 1


@EVERY_SGD
@pytest.mark.parametrize("new_scale", [None, 64.0])
def test_a_loss_module_that_knows_the_scaler_makes_an_unscaled_loss_an_error(
    device, make, new_scale
):
    training = Training(device, make)
    training.criterion = ampfuse.CrossEntropyLoss(scaler=training.scaler)
    training.scaler.scale(training.loss()).backward()
    training.scaler.step(training.optimizer)
    training.scaler.update(new_scale)
    training.loss().backward()
    with pytest.raises(AssertionError, match="no loss was scaled since the last update"):
        training.step()


@EVERY_SGD
def test_losses_of_a_module_with_a_scaler_that_are_never_scaled_are_noticed(device, make):
    training = Training(device, make)
    training.criterion = ampfuse.CrossEntropyLoss(scaler=training.scaler)

    def run():
        for _ in range(30):
            training.loss().backward()
            training.optimizer.step()

    with pytest.warns(UserWarning, match="has computed 20 losses, but none of them was") as caught:
        run()
    assert len(caught) == 1


def test_steps_in_spite_of_overflows_do_not_count_as_skipped(device):
    training = Training(device, torch.optim.SGD)

    def run():
        for _ in range(40):
            training.scaler.scale(training.loss() * torch.inf).backward()
            training.scaler.unscale_(training.optimizer)
            training.optimizer.step()
            training.scaler.update()

    with pytest.warns(UserWarning, match="optimizer.step.. has taken a step although"):
        run()
    assert len(training.scaler.mistakes()) == 1


@EVERY_SGD
def test_a_loss_that_is_scaled_twice_is_noticed(device, make):
    training = Training(device, make)
    with pytest.warns(UserWarning, match="multiplied by the loss scale twice"):
        training.scaler.scale(training.scaler.scale(training.loss())).backward()


@pytest.mark.parametrize("scales_list", [False, True])
@pytest.mark.parametrize("first", [0, 5])
def test_a_second_step_with_scaled_gradients_is_noticed(device, first, scales_list):
    training = Training(device, ampfuse.SGD)

    def run():
        for step in range(8):
            losses = training.scaler.scale([training.loss()] if scales_list else training.loss())
            (losses[0] if scales_list else losses).backward()
            training.scaler.step(training.optimizer)
            if step >= first:
                training.optimizer.step()
            training.scaler.update()

    with pytest.warns(UserWarning, match="was called by itself") as caught:
        run()
    assert len(caught) == 1


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@EVERY_SGD
@pytest.mark.parametrize("known", [False, True])
def test_correct_training_gives_no_warning(device, no_warning, make, known):
    training = Training(device, make)
    for index in range(8):
        loss = training.loss()
        scale = training.scaler.get_scale() if known and index > 0 else None
        (training.scaler.scale(loss) if scale is None else loss * scale).backward()
        training.scaler.scale(loss).item()  # for a log
        if index % 2:
            training.scaler.clip_grad_norm_(training.optimizer, 0.01)
        training.step()
        training.loss().backward()
        training.optimizer.step()  # without a scaler
    assert training.scaler.mistakes() == []


def test_one_loss_for_four_optimizers_with_an_update_after_each_gives_no_warning(
    device, no_warning
):
    params = [nn.Parameter(torch.ones(4, device=device)) for _ in range(4)]
    optimizers = [ampfuse.SGD([param], lr=0.1) for param in params]
    scaler = ampfuse.GradScaler(device.type)
    for step in range(4):
        scaler.scale(sum((1 + step) * param.square().sum() for param in params)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@pytest.mark.parametrize("write_back", [False, True])
def test_a_step_with_other_gradients_before_the_update_gives_no_warning(
    device, no_warning, write_back
):
    param = nn.Parameter(torch.ones(4, device=device))
    optimizer = ampfuse.SGD([param], lr=0.1, write_back_grads=write_back)
    scaler = ampfuse.GradScaler(device.type)
    for step in range(4):
        scaler.scale((1 + step) * param.square().sum()).backward()
        scaler.step(optimizer)
        if not write_back:
            optimizer.zero_grad()
            param.sin().sum().backward()  # a penalty in float32
        optimizer.step()
        scaler.update()
        optimizer.zero_grad()


def test_scaling_a_loss_reads_no_saved_tensors(device, no_warning):
    model, forwards = nn.Linear(4, 1).to(device), []

    def loss(inputs):
        forwards.append(1)
        return model(inputs).square().mean() / 4

    scaler = ampfuse.GradScaler(device.type)
    for _ in range(2):
        inputs = torch.randn(2, 4, device=device)
        checkpointed = checkpoint(loss, inputs, use_reentrant=False)
        scaler.scale(checkpointed).backward()
    assert len(forwards) == 4


@pytest.mark.parametrize("micro_batches", [1, 25])
def test_steps_of_a_second_optimizer_without_the_scaler_are_noticed(device, micro_batches):
    training = Training(device, ampfuse.SGD)
    head = nn.Linear(4, 4).to(device)
    second = ampfuse.SGD(head.parameters(), lr=1e-9)
    training.criterion = lambda out, target: nn.functional.cross_entropy(head(out), target)

    def run():
        for _ in range(3):
            second.zero_grad()
            for _ in range(micro_batches):
                training.scaler.scale(training.loss()).backward()
            training.scaler.step(training.optimizer)
            second.step()
            training.scaler.update()

    with pytest.warns(UserWarning, match="called by itself, with gradients that are") as caught:
        run()
    assert len(caught) == 1


@EVERY_SGD
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.filterwarnings("error")
def test_a_discriminator_that_is_trained_without_the_scaler_gives_no_warning(
    device, make, set_to_none
):
    training = Training(device, make)
    judge = nn.Linear(4, 1).to(device)
    second = make(judge.parameters(), lr=0.1)
    for _ in range(30):
        inputs = torch.randn(32, 8).to(device)
        fake = training.model(inputs)
        training.optimizer.zero_grad()
        training.scaler.scale(judge(fake).mean()).backward()
        training.step()
        second.zero_grad(set_to_none=set_to_none)
        judge(fake.detach()).mean().backward()
        second.step()


@EVERY_SGD
def test_backward_passes_of_losses_that_were_not_scaled_are_noticed(device, make):
    training = Training(device, make)

    def run():
        for _ in range(6):
            loss = training.loss()
            loss.backward()
            training.scaler.scale(loss)
            training.step()

    with pytest.warns(UserWarning, match="did not begin at the scaled losses") as caught:
        run()
    assert len(caught) == 1


def test_gradients_that_are_never_finite_are_noticed_after_32_steps(device):
    training = Training(device, ampfuse.SGD)

    def run(steps):
        for _ in range(steps):
            training.scaler.scale(training.loss() * float("nan")).backward()
            training.step()
        training.scaler.was_skipped()  # on a GPU the copy of the scale has arrived

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(31)
    with pytest.warns(UserWarning, match="each of the last 32 steps was skipped"):
        run(17)


def model_and_scaler(device, cls=nn.Linear):
    return cls(4, 4).to(device), ampfuse.GradScaler(device.type, 64.0)


@pytest.mark.filterwarnings("error")
def test_gradients_that_a_backward_pass_leaves_as_they_are_give_no_warning(device):
    (judge, scaler), network = model_and_scaler(device), nn.Linear(4, 4).to(device)
    of_judge, of_network = (ampfuse.SGD(one.parameters(), lr=0.1) for one in (judge, network))
    inputs = torch.randn(8, 4).to(device)
    for _ in range(8):
        of_judge.zero_grad()
        of_network.zero_grad()
        scaler.scale(judge(network(inputs).detach()).mean()).backward()
        scaler.unscale_(of_judge)
        torch.autograd.grad(scaler.scale(judge(inputs).mean()), judge.weight)
        loss = scaler.scale(-judge(network(inputs)).mean())
        loss.backward(inputs=list(network.parameters()))
        nn.utils.clip_grad_norm_(judge.parameters(), 0.1)
        scaler.step(of_judge)
        scaler.step(of_network)
        scaler.update()


@pytest.mark.filterwarnings("error")
def test_masters_and_clamps_of_the_program_give_no_warning(device):
    model, scaler = model_and_scaler(device)
    masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
    optimizer = ampfuse.SGD(masters, lr=0.1)
    for _ in range(8):
        model.zero_grad()
        scaler.scale(model(torch.ones(8, 4, device=device)).mean()).backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.clone()
        scaler.step(optimizer)
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master).clamp_(-1, 1)
        scaler.update()


@pytest.mark.filterwarnings("error")
def test_losses_that_are_only_logged_beside_a_list_give_no_warning(device):
    model, scaler = model_and_scaler(device)
    optimizer = ampfuse.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        out = model(torch.ones(8, 4, device=device))
        torch.autograd.backward(scaler.scale([out.mean(), out.square().mean()]))
        scaler.scale(out.abs().mean())
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.filterwarnings("error")
def test_a_scale_that_the_program_lowers_gives_no_warning(device):
    training = Training(device, ampfuse.SGD)
    for number in range(40):
        if number == 20:
            training.scaler.update(1.0)
        training.scaler.scale(training.loss()).backward()
        training.step()


def test_backward_passes_of_compiled_autograd_are_not_disturbed(device):
    from torch._dynamo import compiled_autograd

    model, scaler = model_and_scaler(device)
    loss = scaler.scale(model(torch.ones(8, 4, device=device)).mean())
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        loss.backward()
    torch.compiler.reset()
    assert model.weight.grad is not None


def test_replaced_unscaling_of_a_scaler_is_called(device):
    model, scaler = model_and_scaler(device)
    optimizer = ampfuse.SGD(model.parameters(), lr=0.1)
    unscale = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda *of: {at: flag + 1 for at, flag in unscale(*of).items()}
    scaler.scale(model(torch.ones(8, 4, device=device)).mean()).backward()
    scaler.step(optimizer)
    assert scaler.was_skipped()
