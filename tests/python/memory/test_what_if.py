"""Changes save as much as an account predicts: the changed programs have accounts, too."""

from contextlib import nullcontext
from functools import cache

import ampfuse
import pytest
import torch
from account_models import accounted, stepper
from ampfuse.memory import account
from models import GPT2, Size
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SIZE = Size(width=256, depth=3, heads=4, classes=8192, length=128, batch=8)
BFLOAT16 = torch.bfloat16


def checkpoint_blocks(blocks):
    for block in blocks:
        call = block.forward
        block.forward = lambda *args, call=call, **kwargs: checkpoint(
            call, *args, use_reentrant=False, **kwargs
        )


@cache
def account_of(
    *,
    device="cpu",
    weights=torch.float32,
    master_weights="auto",
    state_dtype=torch.float32,
    is_linear=False,
    is_checkpointed=False,
    has_autocast=False,
    micro_batches=1,
):
    """Return the account of a training program, which may have some changes."""
    torch.manual_seed(0)
    model = GPT2(SIZE).to(weights)
    if is_checkpointed:
        checkpoint_blocks(model.blocks)
    options = {"master_weights": master_weights, "state_dtype": state_dtype}
    optimizer = ampfuse.AdamW(model.parameters(), **options)
    words = torch.randint(SIZE.classes, (SIZE.batch, SIZE.length + 1))
    target = words[:, 1:].flatten()

    def loss_of():
        with torch.autocast(device, BFLOAT16) if has_autocast else nullcontext():
            hidden = model(words[:, :-1])
            if is_linear:
                return ampfuse.linear_cross_entropy(hidden, model.weight, target)
            return functional.cross_entropy(hidden @ model.weight.T, target)

    step = stepper(optimizer, loss_of, micro_batches=micro_batches)
    return account(model, optimizer, step, device=device)


CHANGES = {
    "bfloat16 weights, masters": {"weights": BFLOAT16, "has_autocast": False},
    "bfloat16 weights, stochastic": {
        "weights": BFLOAT16,
        "has_autocast": False,
        "master_weights": "stochastic",
    },
    "8-bit moments": {"state_dtype": "8bit"},
    "bfloat16 weights, remainders": {
        "weights": BFLOAT16,
        "has_autocast": False,
        "master_weights": "remainder",
    },
    "bfloat16 moments": {"state_dtype": BFLOAT16},
    "linear cross-entropy": {"is_linear": True},
    "checkpoints": {"is_checkpointed": True},
}
CHANGES["all of these"] = {
    name: value for change in CHANGES.values() for name, value in change.items()
}
OF_AUTOCAST = list(CHANGES)
CHANGES["autocast"] = {"has_autocast": True}
PROGRAMS = {
    "GPU, float32": {"device": "cuda"},
    "GPU, autocast": {"device": "cuda", "has_autocast": True},
    "CPU, float32": {},
    "CPU, autocast": {"has_autocast": True},
    "GPU, accumulation": {"device": "cuda", "has_autocast": True, "micro_batches": 2},
    "CPU, accumulation": {"has_autocast": True, "micro_batches": 2},
}


def peak_of(made, name):
    """Return the peak that an account predicts for a change."""
    (found,) = (saving.peak for saving in made.savings if saving.name == name)
    return found


# Autocast copies weights and changes the dtype of logits. Gradients that are added up stay.
OF_DTYPES = ("bfloat16 weights, masters", "linear cross-entropy")
OF_GRADIENTS = ("linear cross-entropy", "checkpoints")
SOME = {
    "GPU, float32": (*OF_DTYPES, "autocast"),
    "GPU, autocast": OF_AUTOCAST,
    "CPU, autocast": OF_DTYPES,
    "GPU, accumulation": OF_GRADIENTS,
    "CPU, accumulation": OF_GRADIENTS,
}
CASES = [(program, name) for program in PROGRAMS for name in SOME.get(program, CHANGES)]


@pytest.mark.parametrize(("program", "name"), CASES)
def test_change_saves_what_the_account_says(program, name):
    before = account_of(**PROGRAMS[program])
    after = account_of(**PROGRAMS[program] | CHANGES[name])
    assert peak_of(before, name) == pytest.approx(after.peak, rel=0.05)
    assert after.peak < before.peak


def test_shards_take_their_part_of_a_model_on_gpus():
    assert not any(one.name.startswith("sharded") for one in account_of().savings)
    before = account_of(device="cuda")
    (saving,) = (one for one in before.savings if one.name.startswith("sharded"))
    for kind in ("parameters", "moments"):
        assert saving.kinds[kind] == pytest.approx(before.kinds[kind] / 8, rel=1e-3)


def test_changes_that_do_not_concern_the_program_are_left_out():
    model = nn.Linear(8, 8).to(BFLOAT16)
    made = accounted(model, lambda: model(torch.zeros(2, 8, dtype=BFLOAT16)).sum(), device="cuda")
    assert [saving.name for saving in made.savings] == ["sharded over 8 GPUs"]


def test_one_change_is_not_shown_again_as_all_of_these():
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(8))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.RMSprop(model.parameters())  # has no change of its own
    loss_of = lambda: model(torch.zeros(4096, 64)).square().sum()  # noqa: E731
    made = accounted(model, loss_of, optimizer=optimizer)
    assert "checkpoints" in str(made)
    assert "all of these" not in str(made)
    assert "(outside modules: the loss, and other functions)" in str(made)


def test_frozen_weights_have_no_masters_and_only_adam_and_sgd_can_have_any():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    model[:7].requires_grad_(False)

    def savings(make, *options):
        optimizer = make(model[7].parameters(), *options)
        step = stepper(optimizer, lambda: model(torch.zeros(1, 256)).sum())
        return {saving.name: saving for saving in account(model, optimizer, step).savings}

    for make in (torch.optim.AdamW, torch.optim.SGD):
        masters = savings(make)["bfloat16 weights, masters"].kinds["masters"]
        assert masters == 4 * (256 * 256 + 256)
    assert list(savings(torch.optim.RMSprop)) == ["autocast", "sharded over 8 GPUs"]


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, {"amsgrad": True}), (torch.float64, {})], ids=str
)
def test_8_bit_moments_are_not_proposed_where_the_optimizer_refuses_them(dtype, options):
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2, dtype=dtype))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    loss_of = lambda: model[1](model[0](torch.zeros(1, 256)).to(dtype)).sum()  # noqa: E731
    made = account(model, optimizer, stepper(optimizer, loss_of))
    assert "8-bit moments" not in [saving.name for saving in made.savings]


BFLOAT16_SGD = "model.to(torch.bfloat16), no autocast, ampfuse.SGD"
OF_SGD = {
    "bfloat16 weights, masters": (BFLOAT16_SGD, BFLOAT16, {}),
    "bfloat16 weights, remainders": (
        f'{BFLOAT16_SGD}(..., master_weights="remainder")',
        BFLOAT16,
        {"master_weights": "remainder"},
    ),
    "bfloat16 weights, stochastic": (
        f'{BFLOAT16_SGD}(..., master_weights="stochastic")',
        BFLOAT16,
        {"master_weights": "stochastic"},
    ),
    "8-bit moments": (
        'ampfuse.SGD(..., momentum_dtype="8bit")',
        torch.float32,
        {"momentum_dtype": "8bit"},
    ),
    "bfloat16 moments": (
        "ampfuse.SGD(..., momentum_dtype=torch.bfloat16)",
        torch.float32,
        {"momentum_dtype": BFLOAT16},
    ),
}


@pytest.mark.parametrize("name", OF_SGD)
def test_change_of_a_program_with_sgd_saves_what_the_account_says(name):
    def account_of_sgd(weights, make, **options):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to(weights)
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9, **options)
        batch = torch.zeros(8, 512, dtype=weights)
        return account(model, optimizer, stepper(optimizer, lambda: model(batch).sum()))

    how, weights, options = OF_SGD[name]
    before = account_of_sgd(torch.float32, torch.optim.SGD)
    after = account_of_sgd(weights, ampfuse.SGD, **options)
    (saving,) = (one for one in before.savings if one.name == name)
    assert saving.how == how
    assert saving.peak == pytest.approx(after.peak, rel=0.02)
    assert saving.kinds["moments"] == pytest.approx(after.kinds["moments"], rel=0.01)


def test_sgd_without_momentum_has_no_moments():
    model = nn.Linear(256, 256)
    optimizer = ampfuse.SGD(model.parameters(), lr=0.1)
    step = stepper(optimizer, lambda: model(torch.zeros(1, 256)).sum())
    made = account(model, optimizer, step)
    assert "moments" not in made.kinds
    assert "bfloat16 moments" not in [saving.name for saving in made.savings]


# Layers that end with a norm return float32, and the next layer saves a copy of another dtype.
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_inputs_of_checkpointed_blocks_stay_until_backward(dtype):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def loss_of():
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            return model(torch.zeros(16, 128, 64)).square().mean()

    before = accounted(model, loss_of, device="cuda")
    checkpoint_blocks(model.layers)
    after = accounted(model, loss_of, device="cuda")
    tolerance = 1e-3 if dtype == torch.float32 else 0.04
    assert peak_of(before, "checkpoints") == pytest.approx(after.peak, rel=tolerance)


def test_hidden_states_as_wide_as_the_classes_are_not_logits():
    width = 512
    layers = (nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(4))
    model = nn.Sequential(*layers, nn.Linear(width, width, bias=False))
    target = torch.randint(width, (4096,))

    def hidden():
        return model[:4](torch.zeros(4096, width))

    before = accounted(model, lambda: functional.cross_entropy(model[4](hidden()), target))
    after = accounted(
        model, lambda: ampfuse.linear_cross_entropy(hidden(), model[4].weight, target)
    )
    assert peak_of(before, "linear cross-entropy") == pytest.approx(after.peak, rel=0.05)
