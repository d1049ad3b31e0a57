"""Mistakes in the use of a scaler that torch lets pass, each with a warning or an error."""

import warnings

import ampfuse
import pytest
import torch
from torch import nn

EVERY_SGD = pytest.mark.parametrize("make", [torch.optim.SGD, ampfuse.SGD])


class Training:
    """A small network, its optimizer and its scaler."""

    def __init__(self, device, make, criterion=None, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        self.optimizer = make(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = ampfuse.GradScaler(device.type, **options)
        self.criterion = criterion or nn.CrossEntropyLoss()

    def loss(self):
        self.optimizer.zero_grad()
        device = self.model[0].weight.device
        inputs = torch.randn(32, 8).to(device)
        return self.criterion(self.model(inputs), torch.randint(4, (32,)).to(device))

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


@EVERY_SGD
def test_clipping_of_scaled_gradients_by_torch_is_noticed_by_the_third_step(device, make):
    training = Training(device, make)

    def run():
        for _ in range(6):
            training.scaler.scale(training.loss()).backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            training.step()

    with pytest.warns(UserWarning, match="clipped to max_norm=1 while they were still") as caught:
        run()
    assert len(caught) == 1
    assert training.scaler.mistakes() == [str(caught[0].message)]


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
def test_a_loss_module_that_knows_the_scaler_makes_an_unscaled_loss_an_error(device, make):
    training = Training(device, make)
    training.criterion = ampfuse.CrossEntropyLoss(scaler=training.scaler)
    training.scaler.scale(training.loss()).backward()
    training.step()
    training.loss().backward()
    with pytest.raises(AssertionError, match="no loss was scaled since the last update"):
        training.step()


@EVERY_SGD
def test_a_loss_that_is_scaled_twice_is_noticed(device, make):
    training = Training(device, make)
    with pytest.warns(UserWarning, match="multiplied by the loss scale twice"):
        training.scaler.scale(training.scaler.scale(training.loss())).backward()


def test_a_second_step_with_scaled_gradients_is_noticed(device):
    training = Training(device, ampfuse.SGD)

    def run():
        for _ in range(3):
            training.scaler.scale(training.loss()).backward()
            training.scaler.step(training.optimizer)
            training.optimizer.step()
            training.scaler.update()

    with pytest.warns(UserWarning, match="was called beside scaler.step") as caught:
        run()
    assert len(caught) == 1


@EVERY_SGD
@pytest.mark.parametrize("known", [False, True])
def test_correct_training_gives_no_warning(device, make, known):
    training = Training(device, make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(8):
            loss = training.loss()
            scale = training.scaler.get_scale() if known and index > 0 else None
            (training.scaler.scale(loss) if scale is None else loss * scale).backward()
            if index % 2:
                training.scaler.clip_grad_norm_(training.optimizer, 0.01)
            training.step()
            training.loss().backward()
            training.optimizer.step()  # without a scaler
    assert training.scaler.mistakes() == []
