"""Changes save as much as an account predicts: the changed programs have accounts, too."""

from dataclasses import dataclass

import ampfuse
import pytest
import torch
from ampfuse.memory import account
from models import GPT2, Size
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SIZE = Size(width=256, depth=4, heads=4, classes=8192, length=128, batch=8)
BFLOAT16 = torch.bfloat16


@dataclass(frozen=True)
class Program:
    """A training program, and the changes that it has."""

    weights: torch.dtype = torch.float32
    master_weights: bool | str = "auto"
    state_dtype: torch.dtype = torch.float32
    is_linear: bool = False
    is_checkpointed: bool = False
    has_autocast: bool = False
    micro_batches: int = 1

    def account(self, device):
        torch.manual_seed(0)
        model = GPT2(SIZE).to(self.weights)
        if self.is_checkpointed:
            for block in model.blocks:
                call = block.forward
                block.forward = lambda x, call=call: checkpoint(call, x, use_reentrant=False)
        optimizer = ampfuse.AdamW(
            model.parameters(), master_weights=self.master_weights, state_dtype=self.state_dtype
        )
        words = torch.randint(SIZE.classes, (SIZE.batch, SIZE.length + 1))
        target = words[:, 1:].flatten()

        def step():
            for _ in range(self.micro_batches):
                with torch.autocast(device, BFLOAT16, enabled=self.has_autocast):
                    hidden = model(words[:, :-1])
                    if self.is_linear:
                        loss = ampfuse.linear_cross_entropy(hidden, model.weight, target)
                    else:
                        loss = functional.cross_entropy(hidden @ model.weight.T, target)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return account(model, optimizer, step, device=device)


CHANGES = {
    "bfloat16 weights, masters": {"weights": BFLOAT16, "has_autocast": False},
    "bfloat16 weights, remainders": {
        "weights": BFLOAT16,
        "has_autocast": False,
        "master_weights": "remainder",
    },
    "bfloat16 moments": {"state_dtype": BFLOAT16},
    "linear cross-entropy": {"is_linear": True},
    "checkpoints": {"is_checkpointed": True},
}


@pytest.mark.parametrize("has_autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CHANGES)
def test_change_saves_what_the_account_says(name, device, has_autocast):
    before = Program(has_autocast=has_autocast).account(device)
    after = Program(**({"has_autocast": has_autocast} | CHANGES[name])).account(device)
    (said,) = (saving.peak for saving in before.savings if saving.name == name)
    assert said == pytest.approx(after.peak, rel=0.05)
    assert after.peak < before.peak


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_changes_together_save_what_the_account_says(device):
    before = Program(has_autocast=True).account(device)
    changed = {name: value for change in CHANGES.values() for name, value in change.items()}
    after = Program(**changed).account(device)
    (said,) = (saving.peak for saving in before.savings if saving.name == "all of these")
    assert said == pytest.approx(after.peak, rel=0.05)


def test_shards_take_their_part_of_the_model():
    before = Program().account("cpu")
    (saving,) = (one for one in before.savings if one.name.startswith("sharded"))
    for kind in ("parameters", "moments"):
        assert saving.kinds[kind] == pytest.approx(before.kinds[kind] / 8, rel=1e-3)


def test_changes_that_do_not_concern_the_program_are_left_out():
    model = nn.Linear(8, 8).to(BFLOAT16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.zeros(2, 8, dtype=BFLOAT16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    savings = account(model, optimizer, step).savings
    assert [saving.name for saving in savings] == ["sharded over 8 GPUs"]


def mostly_frozen(make):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    model[:7].requires_grad_(False)
    optimizer = make(model[7].parameters())

    def step():
        model(torch.zeros(1, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {saving.name: saving for saving in account(model, optimizer, step).savings}


def test_frozen_weights_have_no_masters():
    savings = mostly_frozen(torch.optim.AdamW)
    masters = savings["bfloat16 weights, masters"].kinds["masters"]
    assert masters == 4 * (256 * 256 + 256)


def test_changes_that_need_adamw_are_left_out_for_other_optimizers():
    savings = mostly_frozen(lambda params: torch.optim.SGD(params, 0.1, momentum=0.9))
    assert list(savings) == ["sharded over 8 GPUs"]


@pytest.mark.parametrize("name", ["linear cross-entropy", "checkpoints"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_change_saves_what_the_account_says_with_accumulated_gradients(name, device):
    before = Program(has_autocast=True, micro_batches=3).account(device)
    after = Program(**(CHANGES[name] | {"has_autocast": True, "micro_batches": 3})).account(device)
    (said,) = (saving.peak for saving in before.savings if saving.name == name)
    assert said == pytest.approx(after.peak, rel=0.05)


def encoder_account(dtype, *, is_checkpointed):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    if is_checkpointed:
        for block in model.layers:
            call = block.forward
            block.forward = lambda *args, call=call, **kwargs: checkpoint(
                call, *args, use_reentrant=False, **kwargs
            )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = model(torch.zeros(16, 128, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return account(model, optimizer, step)


# Layers that end with a norm return float32, and the next layer saves a copy of another dtype.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
def test_inputs_of_checkpointed_blocks_stay_until_backward(dtype):
    before = encoder_account(dtype, is_checkpointed=False)
    after = encoder_account(dtype, is_checkpointed=True)
    (said,) = (saving.peak for saving in before.savings if saving.name == "checkpoints")
    assert said == pytest.approx(after.peak, rel=1e-3 if dtype == torch.float32 else 0.04)


def test_hidden_states_as_wide_as_the_classes_are_not_logits():
    width = 512
    layers = (nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(4))
    model = nn.Sequential(*layers, nn.Linear(width, width, bias=False))
    target = torch.randint(width, (4096,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def made(loss_of):
        def step():
            loss_of(model[:4](torch.zeros(4096, width))).backward()
            optimizer.step()
            optimizer.zero_grad()

        return account(model, optimizer, step, device="cpu")

    before = made(lambda hidden: functional.cross_entropy(model[4](hidden), target))
    after = made(lambda hidden: ampfuse.linear_cross_entropy(hidden, model[4].weight, target))
    (said,) = (one.peak for one in before.savings if one.name == "linear cross-entropy")
    assert said == pytest.approx(after.peak, rel=0.05)
