"""`ampfuse.memory.account`: what the memory of a training step is for."""

import ampfuse
import ampfuse.memory
import pytest
import torch
from account_models import ACTIVATION, ROWS, WEIGHTS, WIDTH, stepper, two_layers
from ampfuse.memory import account
from torch import nn
from torch.nn import functional


def test_kinds_add_up_to_the_peak_and_are_the_tensors_of_the_step():
    model = two_layers()
    optimizer = ampfuse.AdamW(model.parameters())
    made = account(model, optimizer, stepper(model, optimizer), device="cpu")
    assert sum(made.kinds.values()) == made.peak
    assert made.kinds["parameters"] == 2 * 4 * WEIGHTS
    assert made.kinds["moments"] == 2 * (8 * WEIGHTS + 2 * 4)  # and the two counters of steps
    assert made.kinds["data"] == pytest.approx(ACTIVATION, abs=64)  # and a few single numbers
    assert made.phase == "backward"
    assert made.device == "cpu"


def test_state_of_16_bit_weights_is_divided_into_masters_and_moments():
    model = two_layers(torch.bfloat16)
    optimizer = ampfuse.AdamW(model.parameters(), state_dtype=torch.bfloat16)
    kinds = account(model, optimizer, stepper(model, optimizer), device="cpu").kinds
    assert (kinds["parameters"], kinds["masters"]) == (2 * 2 * WEIGHTS, 2 * 4 * WEIGHTS)
    assert kinds["moments"] == 2 * (4 * WEIGHTS + 2 * 4)
    optimizer = ampfuse.AdamW(model.parameters(), master_weights="remainder")
    kinds = account(model, optimizer, stepper(model, optimizer), device="cpu").kinds
    assert kinds["masters"] == 2 * 2 * WEIGHTS


def test_gradients_are_counted_where_they_are_live():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.zeros(1, WIDTH)).sum().backward()
        optimizer.step()  # gradients stay

    assert account(model, optimizer, step, device="cpu").kinds["gradients"] == 2 * 4 * WEIGHTS


def test_copies_of_weights_under_autocast_are_a_kind_of_their_own():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = stepper(model, optimizer, autocast=True)
    kinds = account(model, optimizer, step, device="cpu").kinds
    # Backward needs the second layer's copy, and not those of biases.
    assert kinds["copies of weights"] >= 2 * WIDTH * WIDTH


def test_activations_are_counted_by_the_module_that_computed_them():
    model = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 4 * WIDTH)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        hidden = model["first"](torch.zeros(ROWS, WIDTH))  # the square keeps it for backward
        model["last"](hidden.square()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    modules = account(model, optimizer, step, device="cpu").modules
    # The square outside of modules is kept for the last layer.
    assert modules["first"] == ACTIVATION
    assert modules["last"] == 4 * ACTIVATION
    assert modules[""] == pytest.approx(ACTIVATION, abs=64)  # and a few single numbers


def test_loss_workspace_is_that_of_linear_cross_entropy():
    head = nn.Linear(WIDTH, 50_000, bias=False)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    target = torch.randint(50_000, (64,))

    def step():
        hidden = torch.randn(64, WIDTH, requires_grad=True)
        ampfuse.linear_cross_entropy(hidden, head.weight, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    made = account(head, optimizer, step, device="cpu")
    assert made.kinds["loss workspace"] == 64 * 50_000 * 4
    assert made.phase == "forward"


def test_on_a_gpu_sizes_are_multiples_of_512_and_layer_norm_is_in_float32():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = stepper(model, optimizer, autocast=True)
    on_gpu = account(model, optimizer, step)
    assert on_gpu.device == "cuda"
    assert all(size % 512 == 0 for size in on_gpu.kinds.values())
    assert on_gpu.peak > 1.1 * account(model, optimizer, step, device="cpu").peak


def test_program_for_a_gpu_is_accounted_without_one():
    model = two_layers()
    optimizer = ampfuse.AdamW(model.parameters())
    batch = torch.randn(ROWS, WIDTH)
    seen = []

    def step():
        with torch.autocast("cuda", torch.float16):
            output = model(batch.cuda().to("cuda:0", non_blocking=True))
            loss = functional.mse_loss(output, torch.zeros(ROWS, WIDTH, device="cuda"))
        seen.append(output.dtype)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert account(model, optimizer, step).kinds["copies of weights"] > 0
    assert seen == [torch.float16, torch.float16]


def test_attention_with_dropout_keeps_no_number_per_pair_of_words_on_a_gpu():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 3 * 64)

        def forward(self, words):
            query, key, value = self.layer(words).chunk(3, -1)
            attend = functional.scaled_dot_product_attention
            return attend(query, key, value, dropout_p=0.1) + attend(query, key, value, None, 0.1)

    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.zeros(1, 1, 2048, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    pairs = 4 * 2048 * 2048
    assert account(model, optimizer, step).peak < pairs
    assert account(model, optimizer, step, device="cpu").peak > pairs


def test_scaled_steps_are_taken():
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(model(torch.zeros(ROWS, WIDTH)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert "moments" in account(model, optimizer, step, device="cpu").kinds


def test_numbers_that_the_program_prints_are_zeros():
    model = two_layers()
    optimizer = ampfuse.AdamW(model.parameters())
    seen = []
    account(model, optimizer, stepper(model, optimizer, sees=seen))
    assert seen == [0.0, 0.0]


def test_arguments_that_cannot_be_are_refused():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="device: expected 'cuda' or 'cpu', got 'mps'"):
        account(model, optimizer, lambda: None, device="mps")
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got SGD"):
        account(optimizer, model, lambda: None)
    with pytest.raises(TypeError, match="optimizer: expected an Optimizer, got function"):
        account(model, lambda: None, optimizer)
    with pytest.raises(ValueError, match="expected parameters on the CPU, got them on meta"):
        account(model.to("meta"), optimizer, lambda: None)


def test_data_that_is_not_moved_to_the_gpu_does_not_count():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = torch.zeros(50 * ROWS, WIDTH)
    device = torch.device("cpu")  # as a program chooses it where there is no GPU

    def step():
        model(dataset[:ROWS].to(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert account(model, optimizer, step).kinds["data"] < 2 * ACTIVATION
    assert account(model, optimizer, step, device="cpu").kinds["data"] >= 50 * ACTIVATION


def test_compiled_functions_are_compiled_after_an_account():
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    model = two_layers()
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        compiled(torch.zeros(ROWS, WIDTH)).sum().backward()
        optimizer.step()

    account(model, optimizer, step)
    assert not graphs
    step()
    assert graphs


def test_step_without_the_optimizer_and_uninitialized_model_are_refused():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"step: expected a call of optimizer.step\(\)"):
        account(model, optimizer, lambda: model(torch.zeros(1, WIDTH)).sum().backward())
    lazy = nn.LazyLinear(3)
    with pytest.raises(ValueError, match="expected initialized parameters"):
        account(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1), lambda: None)


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


PARTS = {
    "sparse gradients": nn.Embedding(1000, WIDTH, sparse=True),
    "GRU": nn.GRU(WIDTH, WIDTH, batch_first=True),
    "attention": nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_unusual_parts_are_accounted(part):
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    is_embedding = isinstance(part, nn.Embedding)
    batch = torch.randint(1000, (4, 8)) if is_embedding else torch.zeros(4, 8, WIDTH)

    def step():
        result = part(batch)
        (result[0] if isinstance(result, tuple) else result).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for device in ("cpu", "cuda"):
        assert account(part, optimizer, step, device=device).peak > 0


def test_masks_of_dropout_are_bools_on_a_gpu():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = stepper(model, optimizer)
    activations = {
        device: account(model, optimizer, step, device=device).kinds["activations"]
        for device in ("cpu", "cuda")
    }
    assert activations["cpu"] - activations["cuda"] == pytest.approx(0.75 * ACTIVATION, rel=0.01)


def test_optimizer_takes_lists_of_tensors_on_a_gpu():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    peaks = {}
    for foreach in (None, True):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)

        def step(optimizer=optimizer):
            model(torch.zeros(1, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        peaks[foreach] = account(model, optimizer, step).peak
    assert peaks[None] == peaks[True]


def test_functions_of_cuda_do_nothing_on_a_gpu_that_is_not_there():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        torch.cuda.set_device(0)
        torch.cuda.reset_peak_memory_stats()
        loss = model(torch.zeros(ROWS, WIDTH).pin_memory().to(0)).sum()
        assert torch.isfinite(loss).all()
        torch.distributions.Normal(loss, loss)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() == 0

    account(model, optimizer, step)


def test_text_shows_kinds_and_what_changes_would_save():
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        logits = model(torch.randint(1000, (512,)))
        functional.cross_entropy(logits, torch.randint(1000, (512,))).backward()
        optimizer.step()
        optimizer.zero_grad()

    made = account(model, optimizer, step)
    lines = str(made).splitlines()
    assert lines[0].startswith("peak of a training step on a GPU: ")
    assert any(line.split()[:1] == ["moments"] for line in lines)
    assert any("ampfuse.linear_cross_entropy" in line for line in lines)
    assert made.as_dict()["savings"][0]["name"] == "bfloat16 weights, masters"


def test_picture_and_terminal_show_the_account(tmp_path, capsys, monkeypatch):
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    made = account(model, optimizer, stepper(model, optimizer))
    made.plot(tmp_path / "account.png")
    assert (tmp_path / "account.png").stat().st_size > 10_000
    made.show()
    assert capsys.readouterr().out == str(made) + "\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    made.show()
    shown = capsys.readouterr().out
    assert "moments" in shown
    assert "█" in shown
