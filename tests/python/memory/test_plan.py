"""`ampfuse.memory.plan`: which changes and checkpoints fit a step into a budget."""

import copy

import ampfuse
import pytest
import torch
from ampfuse._texts import bytes_of, size_text
from ampfuse.memory import account, plan
from models import GPT2, Size
from torch.nn import functional

SIZE = Size(width=128, depth=8, heads=4, classes=1000, length=64, batch=16)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("1.5 G", 3 * 2**29), ("500mb", 500 * 2**20), (".5KiB", 512)],
)
def test_sizes_may_be_texts(text, size):
    assert bytes_of(text) == bytes_of(size) == size


@pytest.mark.parametrize("text", ["24", "GiB", "1..5G", "-1GiB", "5 PB", ""])
def test_other_texts_are_no_sizes(text):
    with pytest.raises(ValueError, match="expected a size like 24GiB, got"):
        bytes_of(text)


def gpt2():
    torch.manual_seed(0)
    return GPT2(SIZE)


def stepper(model, optimizer):
    words = torch.randint(SIZE.classes, (SIZE.batch, SIZE.length + 1))
    target = words[:, 1:].flatten()

    def step():
        hidden = model(words[:, :-1])
        functional.cross_entropy(hidden @ model.weight.T, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def planned(budget, **options):
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    return plan(model, optimizer, stepper(model, optimizer), budget, device="cpu", **options)


@pytest.fixture(scope="module")
def before():
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    return account(model, optimizer, stepper(model, optimizer), device="cpu")


def test_nothing_is_changed_if_the_step_fits(before):
    made = planned(before.peak)
    assert (made.fits, made.changes, made.blocks, made.recomputed) == (True, [], [], 0)
    assert made.peak == before.peak


@pytest.mark.parametrize("part", [0.9, 0.7, 0.6])
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
    optimizer = ampfuse.AdamW(model.parameters(), **made.apply(model))
    after = account(model, optimizer, stepper(model, optimizer), device="cpu")
    assert after.peak == pytest.approx(made.peak, rel=0.05)
    assert "state_dtype: bfloat16" in repr(optimizer)


def test_changes_come_before_checkpoints_and_in_the_order_given(before):
    weights, moments = "bfloat16 weights, remainders", "bfloat16 moments"
    assert planned(before.peak - 1, allow=[moments, weights]).changes == [moments]
    assert planned(before.peak - 1, allow=[weights, moments]).changes == [weights]
    everything = planned(1, allow=[weights, moments, "linear cross-entropy"])
    assert everything.changes == [weights, moments, "linear cross-entropy"]
    assert len(everything.blocks) == SIZE.depth


def test_impossible_budget_gives_the_least_peak(before):
    made = planned(1, allow=())
    assert not made.fits
    assert made.recomputed < 1  # the last layer is not in a block
    assert str(made).startswith(f"a peak of {size_text(made.peak)} does not fit into")


def test_weights_in_bfloat16_are_applied(before):
    made = planned(1, allow=["bfloat16 weights, remainders"])
    model = gpt2()
    assert made.apply(model) == {"master_weights": "remainder"}
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_model_with_checkpoints_computes_the_same_and_can_be_copied_and_saved(before):
    made = planned(1, allow=())
    model, plain = gpt2(), gpt2()
    made.apply(model)
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())
    words = torch.randint(SIZE.classes, (2, SIZE.length))
    gradients = []
    for one in (plain, model, copied):
        one(words).square().sum().backward()
        gradients.append(one.blocks[0].widen.weight.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    assert copied.blocks[0].widen.weight.grad is not model.blocks[0].widen.weight.grad


def test_checkpoints_that_save_nothing_are_left_out():
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.zeros(4096, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    made = plan(model, optimizer, step, 1)
    assert (made.fits, made.blocks) == (False, [])


def test_unknown_change_is_refused():
    with pytest.raises(ValueError, match=r"allow: expected names of .*, got 'checkpoints'"):
        planned(1, allow=["checkpoints"])


def test_sizes_may_be_floats():
    assert bytes_of(24e9) == 24_000_000_000


def mlp_step(activation, micro_batches):
    """Return a model of eight blocks, its optimizer and a step."""
    linear = torch.nn.Linear
    blocks = [torch.nn.Sequential(linear(64, 256), activation(), linear(256, 64)) for _ in range(8)]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        for _ in range(micro_batches):
            model(torch.zeros(4096, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def applied(budget, activation, micro_batches=1):
    """Return a plan, and the peak of a step after it was applied."""
    model, optimizer, step = mlp_step(activation, micro_batches)
    found = plan(model, optimizer, step, budget, device="cpu")
    found.apply(model)
    return found, account(model, optimizer, step, device="cpu").peak


@pytest.mark.parametrize("activation", [torch.nn.Tanh, torch.nn.ReLU])
@pytest.mark.parametrize("budget", ["20MiB", "32MiB"])
def test_activations_that_are_computed_again_live_until_backward_ends(activation, budget):
    """Their memory is taken when backward first reads them, not when it first frees one."""
    found, peak = applied(budget, activation)
    assert found.peak == pytest.approx(peak, rel=0.02)
    assert found.fits == (peak <= bytes_of(budget))


def test_inputs_of_a_micro_batch_are_kept_until_its_own_backward_ends():
    found, peak = applied("1MiB", torch.nn.GELU, micro_batches=3)
    assert len(found.blocks) == 8
    assert found.peak == pytest.approx(peak, rel=0.02)
