"""`ampfuse.memory.plan`: which changes and checkpoints fit a step into a budget."""

import copy

import ampfuse
import pytest
import torch
from account_models import sgd, stepper
from ampfuse._texts import bytes_of, size_text
from ampfuse.memory import account, plan
from models import GPT2, Size
from torch import nn
from torch.nn import functional

SIZE = Size(width=128, depth=5, heads=4, classes=1000, length=64, batch=16)


def test_sizes_are_numbers_or_texts():
    sizes = {"24GiB": 24 * 2**30, "1.5 G": 3 * 2**29, "500mb": 500 * 1000**2, ".5KiB": 512}
    sizes |= {"1kB": 1000, "80GB": 80 * 1000**3, "2TiB": 2 * 2**40, "1TB": 1000**4}
    for text, size in sizes.items():
        assert bytes_of(text) == bytes_of(size) == bytes_of(float(size)) == size
    for text in ("24", "GiB", "1..5G", "-1GiB", "5 PB", ""):
        with pytest.raises(ValueError, match=f"expected a size like 24GiB, got {text}"):
            bytes_of(text)


def gpt2():
    torch.manual_seed(0)
    return GPT2(SIZE)


def model_and_step(model=None, make=torch.optim.AdamW, **options):
    """Return a model, its optimizer and a step."""
    model = model or gpt2()
    optimizer = make(model.parameters(), **options)
    words = torch.randint(SIZE.classes, (SIZE.batch, SIZE.length + 1))

    def loss_of():
        hidden = model(words[:, :-1])
        return functional.cross_entropy(hidden @ model.weight.T, words[:, 1:].flatten())

    return model, optimizer, stepper(optimizer, loss_of)


def planned(budget, **options):
    return plan(*model_and_step(), budget, device="cpu", **options)


@pytest.fixture(scope="module")
def before():
    return account(*model_and_step(), device="cpu")


def test_nothing_is_changed_if_the_step_fits(before):
    made = planned(before.peak)
    assert (made.fits, made.changes, made.blocks, made.recomputed) == (True, [], [], 0)
    assert made.peak == before.peak


@pytest.mark.parametrize("part", [0.9, 0.6])
def test_as_few_blocks_as_possible_are_checkpointed(before, part):
    budget = int(part * before.peak)
    made = planned(budget, allow=())
    assert made.fits
    assert made.peak <= budget
    assert 0 < len(made.blocks) < SIZE.depth
    tighter = planned(made.peak - 1, allow=())
    assert len(tighter.blocks) > len(made.blocks)
    assert tighter.recomputed > made.recomputed > 0


def test_applied_plan_has_the_peak_that_it_says(before):
    made = planned(int(0.6 * before.peak), allow=["bfloat16 moments"])
    model = gpt2()
    applied = model_and_step(model, ampfuse.AdamW, **made.apply(model))
    assert account(*applied, device="cpu").peak == pytest.approx(made.peak, rel=0.05)
    assert "state_dtype: bfloat16" in repr(applied[1])


def test_plan_for_a_program_with_sgd_has_its_options():
    made = plan(*model_and_step(make=torch.optim.SGD, lr=0.1, momentum=0.9), 1, device="cpu")
    assert "bfloat16 moments: ampfuse.SGD(..., momentum_dtype=torch.bfloat16)" in str(made)
    assert made.apply(gpt2()) == {"momentum_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("bfloat16 weights, remainders", {"master_weights": "remainder"}),
        ("bfloat16 weights, stochastic", {"master_weights": "stochastic"}),
    ],
)
def test_weights_in_bfloat16_are_applied(change, options):
    made = planned(1, allow=[change])
    model = gpt2()
    assert made.apply(model) == options
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_moments_in_8_bits_are_applied():
    made = planned(1, allow=["bfloat16 moments", "8-bit moments"])
    assert made.apply(gpt2()) == {"state_dtype": "8bit"}


def test_changes_come_before_checkpoints_and_in_the_order_given(before):
    weights, moments = "bfloat16 weights, remainders", "bfloat16 moments"
    assert planned(before.peak - 1, allow=[moments, weights]).changes == [moments]
    assert planned(before.peak - 1, allow=[weights, moments]).changes == [weights]
    everything = planned(1, allow=[weights, moments, "linear cross-entropy"])
    assert everything.changes == [weights, moments, "linear cross-entropy"]
    assert len(everything.blocks) == SIZE.depth


def test_plan_for_an_impossible_budget_has_the_least_peak_and_the_same_results():
    made = planned(1, allow=())
    assert not made.fits
    assert made.recomputed < 1  # the last layer is not in a block
    assert f"a peak of {size_text(made.peak)} does not fit" in str(made)
    model, plain = gpt2(), gpt2()
    made.apply(model)
    copied = copy.deepcopy(model)  # a model with checkpoints can be copied and saved
    copied.load_state_dict(model.state_dict())
    words = torch.randint(SIZE.classes, (2, SIZE.length))
    gradients = []
    for one in (plain, model, copied):
        one(words).square().sum().backward()
        gradients.append(one.blocks[0].widen.weight.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    assert gradients[1] is not gradients[2]


def test_blocks_that_update_running_statistics_are_not_checkpointed():
    def block():
        linear = nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)
        return nn.Sequential(*linear, nn.BatchNorm1d(64))

    model, *program = blocks_and_step(block, 4)
    assert plan(model, *program, 1).blocks == []
    for norm in (one[-1] for one in model[:3]):
        norm.eval()
    assert plan(model, *program, 1).blocks == ["0", "1", "2"]


def test_unknown_change_is_refused():
    with pytest.raises(ValueError, match=r"allow: expected names of .*, got 'checkpoints'"):
        planned(1, allow=["checkpoints"])
    with pytest.raises(TypeError, match="allow: expected a list of names, got the str '8-bit"):
        planned(1, allow="8-bit moments")


def blocks_and_step(make_block, count, micro_batches=1):
    """Return a model of blocks, its optimizer and a step."""
    model = nn.Sequential(*(make_block() for _ in range(count)))
    optimizer = sgd(model)
    step = stepper(
        optimizer, lambda: model(torch.zeros(4096, 64)).sum(), micro_batches=micro_batches
    )
    return model, optimizer, step


def test_changes_and_checkpoints_that_save_nothing_are_left_out():
    program = blocks_and_step(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh()), 4)
    made = plan(*program, 1, allow=["bfloat16 moments", "linear cross-entropy"])
    assert (made.fits, made.blocks, made.changes) == (False, [], [])


def applied(budget, activation, micro_batches=1):
    """Return a plan for a model of eight blocks, after comparing its peak with that of a step."""

    def block():
        return nn.Sequential(nn.Linear(64, 256), activation(), nn.Linear(256, 64))

    program = blocks_and_step(block, 8, micro_batches)
    found = plan(*program, budget, device="cpu")
    found.apply(program[0])
    peak = account(*program, device="cpu").peak
    assert found.peak == pytest.approx(peak, rel=0.02)
    assert found.fits == (peak <= bytes_of(budget))
    return found


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_activations_that_are_computed_again_live_until_backward_ends(activation):
    """Their memory is taken when backward first reads them, not when it first frees one."""
    for budget in ("20MiB", "32MiB"):
        applied(budget, activation)


def test_inputs_of_a_micro_batch_are_kept_until_its_own_backward_ends():
    assert len(applied("1MiB", nn.GELU, micro_batches=3).blocks) == 8


class Halves(nn.Module):
    """A model whose parts have submodules, but that repeats none."""

    def __init__(self):
        super().__init__()
        self.down, self.up = (
            nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Tanh(), nn.Linear(512, 64))
            for _ in range(2)
        )

    def forward(self, batch):
        return self.up(self.down(batch))


@pytest.mark.parametrize(("model", "has_parts"), [(Halves(), True), (Halves().down, False)])
def test_parts_are_checkpointed_and_a_plan_without_checkpoints_says_why(model, has_parts):
    optimizer = sgd(model)
    step = stepper(optimizer, lambda: model(torch.zeros(4096, 64)).square().sum())
    made = plan(model, optimizer, step, 1, device="cpu")
    assert made.blocks == (["down", "up"] if has_parts else [])
    assert ("no checkpoints: no part of the model can" in str(made)) == (not has_parts)
