"""Changes to a running optimizer, and the effects of a step or a load that is refused."""

import copy

import ampfuse
import pytest
import torch
from ampfuse.optim import _columns
from optim_models import assert_same_bits


def linear(device, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3, device=device, dtype=dtype)


def give_gradients(params, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)


def two_groups(device, **options):
    """Return two parameters and their optimizer after a step, which calls the op for each group."""
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer = ampfuse.AdamW([{"params": [param]} for param in params], **options)
    give_gradients(params)
    optimizer.step()
    return params, optimizer


def everything(params, optimizer):
    """Return copies of all tensors that a step writes."""
    state = [tensor for param in params for tensor in optimizer.state[param].values()]
    return [tensor.detach().clone() for tensor in [*params, *state]]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_model_cast_to_16_bits_gets_masters_at_its_next_step(device, half):
    model = linear(device)
    optimizer = ampfuse.AdamW(model.parameters())
    give_gradients(model.parameters())
    optimizer.step()

    model.to(half)
    give_gradients(model.parameters())
    optimizer.step()

    for param in model.parameters():
        assert optimizer.state[param]["master_param"].dtype == torch.float32


@pytest.mark.parametrize("before", [True, "remainder"])
def test_model_cast_to_float32_drops_masters_and_takes_over_float32_ones(device, before):
    model = linear(device, torch.bfloat16)
    optimizer = ampfuse.AdamW(model.parameters(), master_weights=before)
    give_gradients(model.parameters())
    optimizer.step()
    masters = [master.clone() for master in optimizer.master_params()]

    model.float()
    give_gradients(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()

    assert all("master_param" not in state for state in optimizer.state.values())
    if before is True:  # a remainder is worthless without the 16 bits of its bfloat16 parameter
        assert_same_bits(model.parameters(), masters)


@pytest.mark.parametrize(
    ("before", "after"), [(True, "remainder"), ("remainder", True), (True, False)]
)
def test_masters_are_converted_or_dropped_when_master_weights_changes(device, before, after):
    model = linear(device, torch.bfloat16)
    optimizer = ampfuse.AdamW(model.parameters(), lr=1e-4, master_weights=before)
    give_gradients(model.parameters())
    optimizer.step()
    masters = [master.clone() for master in optimizer.master_params()]

    optimizer.param_groups[0].update(master_weights=after, lr=0.0)
    optimizer.step()

    expected = {"remainder": torch.int16, True: torch.float32}.get(after)
    for state in optimizer.state.values():
        assert getattr(state.get("master_param"), "dtype", None) == expected
    if after is not False:
        assert_same_bits(optimizer.master_params(), masters)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_moments_are_converted_when_state_dtype_changes(device, dtype):
    model = linear(device)
    optimizer = ampfuse.AdamW(model.parameters())
    give_gradients(model.parameters())
    optimizer.step()

    optimizer.param_groups[0]["state_dtype"] = dtype
    optimizer.step()

    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def test_refused_step_names_the_parameter_and_its_group(device):
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(4)]
    optimizer = ampfuse.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    give_gradients(params)
    params[1].grad = None
    params[3].grad.data = torch.ones(3, device=device, dtype=torch.float64)

    with pytest.raises(TypeError, match=r"\(parameter 2 of group 1, torch.float32 of shape \(3,\)"):
        optimizer.step()


def test_refused_first_step_leaves_no_state(device):
    params = [torch.nn.Parameter(torch.ones(3, device=device, dtype=torch.bfloat16))]
    optimizer = ampfuse.AdamW(params)
    params[0].grad = torch.ones(3, device=device, dtype=torch.bfloat16)
    params[0].grad.data = torch.ones(3, device=device, dtype=torch.float64)

    with pytest.raises(TypeError, match="got float64"):
        optimizer.step()

    assert not optimizer.state


def test_first_step_during_graph_capture_is_refused(device, monkeypatch):
    model = linear(device)
    optimizer = ampfuse.AdamW(model.parameters())
    give_gradients(model.parameters())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    with pytest.raises(RuntimeError, match="take one step before"):
        optimizer.step()

    assert not optimizer.state


def test_masters_switched_on_later_are_created_at_the_next_step(device):
    model = linear(device, torch.bfloat16)
    optimizer = ampfuse.AdamW(model.parameters(), master_weights=False)
    give_gradients(model.parameters())
    optimizer.step()

    optimizer.param_groups[0]["master_weights"] = True
    optimizer.step()

    assert "master_param" in optimizer.state[model.weight]


def set_betas(param, group):
    group["betas"] = (0.9, 1.5)


def set_nan_weight_decay(param, group):
    group["weight_decay"] = float("nan")


def set_double_gradient(param, group):
    param.grad = None
    param.grad_dtype = None
    param.grad = torch.ones(3, dtype=torch.float64, device=param.device)


def set_sparse_gradient(param, group):
    param.grad = torch.ones(3, device=param.device).to_sparse()


@pytest.mark.parametrize(
    "spoil", [set_betas, set_nan_weight_decay, set_double_gradient, set_sparse_gradient]
)
def test_step_refused_for_its_second_group_does_not_step_the_first(device, spoil):
    params, optimizer = two_groups(device)
    before = everything(params, optimizer)
    spoil(params[1], optimizer.param_groups[1])

    with pytest.raises((ValueError, TypeError, RuntimeError)):
        optimizer.step()

    assert_same_bits(everything(params, optimizer), before)


def test_norm_is_computed_when_the_first_group_is_empty(device):
    param = torch.nn.Parameter(torch.zeros(2, device=device))
    optimizer = ampfuse.AdamW([{"params": []}, {"params": [param]}], max_grad_norm=1.0)
    param.grad = torch.tensor([3.0, 4.0], device=device)

    optimizer.step()

    assert optimizer.grad_norm.item() == 5.0


def test_step_with_negative_max_grad_norm_is_refused_before_any_write(device):
    params, optimizer = two_groups(device, max_grad_norm=1.0)
    before = everything(params, optimizer)
    optimizer.max_grad_norm = -1.0

    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.step()

    assert_same_bits(everything(params, optimizer), before)


@pytest.mark.filterwarnings("error")
def test_parameters_that_share_memory_cause_no_warning_of_stale_masters(device):
    buffer = torch.zeros(8, dtype=torch.bfloat16, device=device)
    params = [torch.nn.Parameter(part) for part in buffer.split(4)]
    optimizer = ampfuse.AdamW(params)

    for seed in range(4):
        give_gradients(params, seed)
        optimizer.step()


def test_parameters_created_in_inference_mode_are_stepped(device):
    with torch.inference_mode():
        param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16, device=device))
        param.grad = torch.ones_like(param)
        optimizer = ampfuse.AdamW([param], lr=0.25, weight_decay=0.0)
        optimizer.step()

    assert param.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_state_of_another_shape_is_refused_and_nothing_is_loaded(device, name):
    params, optimizer = two_groups(device)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1][name] = torch.ones(1, device=device)
    saved["state"][0]["exp_avg"] += 1
    saved["param_groups"][0]["lr"] = 0.5
    before = everything(params, optimizer)

    with pytest.raises(ValueError, match=rf"{name} of parameter 0: expected shape \(3,\)"):
        optimizer.load_state_dict(saved)

    assert_same_bits(everything(params, optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_loading_bare_remainders_as_masters_is_refused(device):
    model = linear(device, torch.bfloat16)
    optimizer = ampfuse.AdamW(model.parameters(), master_weights="remainder")
    give_gradients(model.parameters())
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0] = {
        **saved["state"][0],
        "master_param": optimizer.state[model.weight]["master_param"],
    }

    with pytest.raises(ValueError, match="master_param of parameter 0: expected a floating-point"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_invalid_values_of_master_weights_are_refused(value):
    with pytest.raises(ValueError, match="master_weights"):
        ampfuse.AdamW([torch.zeros(2)], master_weights=value)


def test_adamw_group_with_decoupled_weight_decay_off_is_refused():
    group = {"params": [torch.zeros(2)], "decoupled_weight_decay": False}

    with pytest.raises(ValueError, match="decoupled_weight_decay: expected True"):
        ampfuse.AdamW([group])


@pytest.mark.parametrize(
    ("device_type", "waits"), [("cpu", True), ("cuda", False), ("meta", False)]
)
def test_on_device_waits_only_for_copies_to_the_cpu(device_type, waits):
    class Scalar:
        device = torch.device("xla")  # differs from every target device

        def to(self, device, non_blocking):
            return device, non_blocking

    device = torch.device(device_type)

    assert _columns.on_device(Scalar(), device) == (device, not waits)
