"""`ampfuse.memory.account`: what the memory of a training step is for."""

import ampfuse
import pytest
import torch
from account_error import MODELS, SETTINGS, Tagger, Task, compare, gpt2, lstm, resnet, words
from account_models import ACTIVATION, ROWS, WEIGHTS, WIDTH, accounted, sgd, stepper, two_layers
from ampfuse.memory import account
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def wide_lstm():
    """Return an LSTM whose own copies of weights and gates decide the peak."""
    model = Tagger(200, 256)
    model.lstm = nn.LSTM(256, 256, batch_first=True)
    return Task(model, words(16, 64, 200))


# All models in float32, and a transformer and convolutions in all settings. The LSTM has operators
# of its own under autocast.
MEASURED = [(make, SETTINGS[0]) for make in MODELS] + [(lstm, SETTINGS[3])]
MEASURED += [(wide_lstm, SETTINGS[0])]
MEASURED += [(make, setting) for make in (gpt2, resnet) for setting in SETTINGS[1:]]

# On other CPUs, the library behind torch converts 16-bit convolutions to float32 in buffers of its
# own, and has no 16-bit LSTM.
HAS_16_BIT_LAYERS = torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "setting"), MEASURED, ids=lambda one: getattr(one, "name", None) or one.__name__
)
def test_account_is_within_5_percent_of_the_measured_peak(make, setting):
    if make in (lstm, resnet) and setting != SETTINGS[0] and not HAS_16_BIT_LAYERS:
        pytest.skip("this CPU has no 16-bit convolutions and LSTMs")
    predicted, measured = compare(make, setting)
    assert predicted == pytest.approx(measured, rel=0.05)


def test_kinds_add_up_to_the_peak_and_are_the_tensors_of_the_step():
    model = two_layers()
    made = accounted(model, optimizer=ampfuse.AdamW(model.parameters()))
    assert sum(made.kinds.values()) == made.peak
    assert made.kinds["parameters"] == 2 * 4 * WEIGHTS
    assert made.kinds["moments"] == 2 * (8 * WEIGHTS + 2 * 4)  # and the two counters of steps
    assert made.kinds["data"] == pytest.approx(ACTIVATION, abs=64)  # and a few single numbers
    assert made.phase == "backward"
    assert made.device == "cpu"


def test_state_of_16_bit_weights_is_divided_into_masters_and_moments():
    model = two_layers(torch.bfloat16)
    optimizer = ampfuse.AdamW(model.parameters(), state_dtype=torch.bfloat16)
    kinds = accounted(model, optimizer=optimizer).kinds
    assert (kinds["parameters"], kinds["masters"]) == (2 * 2 * WEIGHTS, 2 * 4 * WEIGHTS)
    assert kinds["moments"] == 2 * (4 * WEIGHTS + 2 * 4)
    optimizer = ampfuse.AdamW(model.parameters(), master_weights="remainder")
    assert accounted(model, optimizer=optimizer).kinds["masters"] == 2 * 2 * WEIGHTS


def test_gradients_are_counted_where_they_are_live():
    model = two_layers()
    optimizer = sgd(model)

    def step():
        model(torch.zeros(1, WIDTH)).sum().backward()
        optimizer.step()  # gradients stay

    assert account(model, optimizer, step, device="cpu").kinds["gradients"] == 2 * 4 * WEIGHTS


def test_copies_of_weights_under_autocast_are_a_kind_of_their_own():
    # Backward needs the second layer's copy, and not those of biases.
    assert accounted(two_layers(), autocast=True).kinds["copies of weights"] >= 2 * WIDTH * WIDTH


def test_activations_are_counted_by_the_module_that_computed_them():
    model = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 4 * WIDTH)})

    def loss_of():
        hidden = model["first"](torch.zeros(ROWS, WIDTH))  # the square keeps it for backward
        return model["last"](hidden.square()).square().sum()

    modules = accounted(model, loss_of).modules
    # The square outside of modules is kept for the last layer.
    assert modules["first"] == ACTIVATION
    assert modules["last"] == 4 * ACTIVATION
    assert modules[""] == pytest.approx(ACTIVATION, abs=64)  # and a few single numbers


def test_loss_workspace_is_that_of_linear_cross_entropy():
    head = nn.Linear(WIDTH, 50_000, bias=False)
    target = torch.randint(50_000, (64,))

    def loss_of():
        hidden = torch.randn(64, WIDTH, requires_grad=True)
        return ampfuse.linear_cross_entropy(hidden, head.weight, target)

    made = accounted(head, loss_of)
    assert made.kinds["loss workspace"] == 64 * 50_000 * 4
    assert made.phase == "forward"


def test_on_a_gpu_sizes_are_multiples_of_512_and_layer_norm_is_in_float32():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    on_gpu = accounted(model, autocast=True, device="cuda")
    assert all(size % 512 == 0 for size in on_gpu.kinds.values())
    assert on_gpu.peak > 1.1 * accounted(model, autocast=True).peak


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_checkpoints_compute_layer_norms_in_float32_again(weights):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).to(weights)
    batch = torch.randn(ROWS, WIDTH, dtype=weights)

    def loss_of():
        with torch.autocast("cuda", torch.bfloat16):
            return checkpoint(model, batch, use_reentrant=False).float().square().mean()

    # One half of the activations would be 16-bit if the norm were.
    assert accounted(model, loss_of, device="cuda").peak > 2 * ACTIVATION


def test_program_for_a_gpu_is_accounted_without_one():
    model = two_layers()
    batch = torch.randn(ROWS, WIDTH)
    seen = []

    def loss_of():
        torch.cuda.set_device(0)
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.float16):
            output = model(batch.pin_memory().to(0).cuda().to("cuda:0", non_blocking=True))
            loss = functional.mse_loss(output, torch.zeros(ROWS, WIDTH, device="cuda"))
        assert torch.isfinite(loss).all()
        torch.distributions.Normal(loss, loss)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() == 0
        seen.append((output.dtype, loss.item()))
        return loss

    made = accounted(model, loss_of, optimizer=ampfuse.AdamW(model.parameters()), device="cuda")
    assert made.kinds["copies of weights"] > 0
    assert seen == [(torch.float16, 0.0)] * 2  # numbers that the program may print are zeros


def test_attention_with_dropout_keeps_no_number_per_pair_of_words_on_a_gpu():
    layer = nn.Linear(64, 3 * 64)

    def loss_of():
        query, key, value = layer(torch.zeros(1, 1, 2048, 64)).chunk(3, -1)
        attend = functional.scaled_dot_product_attention
        sum_of_both = attend(query, key, value, dropout_p=0.1) + attend(
            query, key, value, None, 0.1
        )
        return sum_of_both.sum()

    pairs = 4 * 2048 * 2048
    assert accounted(layer, loss_of, device="cuda").peak < pairs
    assert accounted(layer, loss_of).peak > pairs


def test_arguments_that_cannot_be_are_refused():
    model = two_layers()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="device: expected 'cuda' or 'cpu', got 'mps'"):
        account(model, optimizer, lambda: None, device="mps")
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got SGD"):
        account(optimizer, model, lambda: None)
    with pytest.raises(TypeError, match="optimizer: expected an Optimizer, got function"):
        account(model, lambda: None, optimizer)
    with pytest.raises(ValueError, match=r"step: expected a call of optimizer.step\(\)"):
        account(model, optimizer, lambda: model(torch.zeros(1, WIDTH)).sum().backward())
    for lazy in (nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False)):  # parameters, and buffers
        params = [*lazy.parameters()] or [nn.Parameter(torch.ones(1))]
        with pytest.raises(ValueError, match="expected initialized parameters"):
            account(lazy, torch.optim.SGD(params), lambda: None)
    with pytest.raises(ValueError, match="expected parameters on the CPU, got them on meta"):
        account(model.to("meta"), optimizer, lambda: None)


def test_data_that_is_not_moved_to_the_gpu_does_not_count():
    model = two_layers()
    dataset = torch.zeros(50 * ROWS, WIDTH)
    device = torch.device("cpu")  # as a program chooses it where there is no GPU

    def loss_of():
        return model(dataset[:ROWS].to(device)).sum()

    assert accounted(model, loss_of, device="cuda").kinds["data"] < 2 * ACTIVATION
    assert accounted(model, loss_of).kinds["data"] >= 50 * ACTIVATION


def test_compiled_functions_are_compiled_after_an_account():
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    model = two_layers()
    compiled, optimizer = torch.compile(model, backend=backend), sgd(model)
    step = stepper(optimizer, lambda: compiled(torch.zeros(ROWS, WIDTH)).sum())
    assert account(model, optimizer, step).device == "cuda"  # unless another one is given
    assert not graphs
    step()
    assert graphs


def test_closure_of_a_step_is_forward_and_backward():
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.zeros(ROWS, WIDTH)).square().sum()
        loss.backward()
        return loss

    made = account(model, optimizer, lambda: optimizer.step(closure), device="cpu")
    assert made.phase == "backward"
    assert made.kinds["activations"] >= 2 * ACTIVATION


def around_the_outputs(layer):
    """Draw from a distribution whose scale, like all numbers of a dry run, is zero."""
    means = layer(torch.ones(4, WIDTH))
    return torch.distributions.Normal(means, torch.ones(4, WIDTH)).rsample()


TOKENS, HIDDEN = torch.randint(1000, (4, 8)), torch.zeros(4, 8, WIDTH)
ATTENTION = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
PARTS = {
    "sparse gradients": (nn.Embedding(1000, WIDTH, sparse=True), lambda part: part(TOKENS)),
    "GRU": (nn.GRU(WIDTH, WIDTH), lambda part: part(HIDDEN)[0]),
    "attention": (ATTENTION, lambda part: part(HIDDEN)),
    "distribution": (nn.Linear(WIDTH, WIDTH), around_the_outputs),
}


@pytest.mark.parametrize(("part", "call"), PARTS.values(), ids=list(PARTS))
def test_unusual_parts_are_accounted(part, call):
    for device in ("cpu", "cuda"):
        assert accounted(part, lambda: call(part).square().sum(), device=device).peak > 0


def test_masks_of_dropout_are_bools_on_a_gpu():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    on_cpu, on_gpu = (
        accounted(model, device=device).kinds["activations"] for device in ("cpu", "cuda")
    )
    assert on_cpu - on_gpu == pytest.approx(0.75 * ACTIVATION, rel=0.01)


def test_optimizer_takes_lists_of_tensors_on_a_gpu():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))

    def loss_of():
        return model(torch.zeros(1, 512)).sum()

    peaks = []
    for foreach in (None, True):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        peaks.append(accounted(model, loss_of, optimizer=optimizer, device="cuda").peak)
    assert peaks[0] == peaks[1]


def test_account_is_shown_as_text_and_picture_with_what_changes_would_save(tmp_path):
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000))
    words = torch.randint(1000, (512,))
    optimizer = torch.optim.AdamW(model.parameters())
    step = stepper(optimizer, lambda: functional.cross_entropy(model(words), words))
    made = account(model, optimizer, step)
    lines = str(made).splitlines()
    assert "peak of a training step on a GPU: " in lines[0]
    assert any(line.split()[:1] == ["moments"] for line in lines)
    assert any("ampfuse.linear_cross_entropy" in line for line in lines)
    assert [one.name for one in made.savings][:2] == ["autocast", "bfloat16 weights, masters"]
    made.plot(tmp_path / "account.png")
    assert (tmp_path / "account.png").stat().st_size > 10_000


def test_autocast_is_compared_only_in_a_step_with_the_same_batch():
    for rows, names in (((64, 64, 64), ["autocast"]), ((64, 64, 8), [])):
        model, batches = two_layers(), iter(rows)
        optimizer = sgd(model)

        def loss_of(model=model, batches=batches):
            return model(torch.zeros(next(batches), WIDTH)).sum()

        made = account(model, optimizer, stepper(optimizer, loss_of))
        assert [one.name for one in made.savings if one.name == "autocast"] == names


class KeepsFloat32(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            return super().forward(x.float())


@pytest.mark.parametrize(
    ("make", "saves"), [(nn.Sequential, True), (KeepsFloat32, False)], ids=["program", "module"]
)
def test_autocast_is_suggested_if_the_program_disables_it_but_not_inside_a_module(make, saves):
    model = make(*two_layers())

    def loss_of():
        with torch.autocast("cuda", enabled=False):
            return model(torch.zeros(ROWS, WIDTH)).sum()

    made = accounted(model, loss_of, device="cuda")
    (autocast,) = (one for one in made.savings if one.name == "autocast")
    assert (autocast.peak < made.peak) == saves


def test_shapes_that_depend_on_computed_numbers_are_named_and_others_are_not():
    model = two_layers()
    rows = torch.arange(ROWS)

    def loss_of():
        batch = torch.randn(ROWS, WIDTH)[rows % 2 == 0][rows[:9]]  # of integers, which are known
        output = model(batch)
        return output[output[:, 0] > 0].sum() + output.sum()

    made = accounted(model, loss_of)
    (line,) = made.unknown
    assert "`return output[output[:, 0] > 0].sum()" in line
    assert str(made).splitlines()[-1].strip() == line
    assert accounted(model).unknown == []
