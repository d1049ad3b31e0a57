"""Parameters that other code than the optimizer writes: their masters take over the new values.

Programs load, average, mask and swap models, also through other tensors of the same memory.
"""

import copy
import warnings
import weakref

import ampfuse
import pytest
import torch
from optim_models import (
    DTYPES_16_BIT,
    assert_same_bits,
    assert_same_state,
    clones,
    feed,
    parameters,
    state_values,
    train,
    trained,
)
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector, vector_to_parameters

EVERY_HALF = pytest.mark.parametrize("dtype", DTYPES_16_BIT)


def no_grad_copy(param, value):
    with torch.no_grad():
        param.copy_(value)


def loaded_model(param, value):
    model = torch.nn.ParameterDict({"param": param})
    model.load_state_dict({"param": value})


def vector(param, value):
    assert parameters_to_vector([param]).numel() == value.numel()
    vector_to_parameters(value.flatten(), [param])


WRITES = {
    "copy_ under no_grad": no_grad_copy,
    "load_state_dict of the model": loaded_model,
    "data.copy_": lambda param, value: param.data.copy_(value),
    "data = value": lambda param, value: setattr(param, "data", value.clone()),
    "a view of a flat buffer": lambda param, value: setattr(
        param, "data", torch.cat([value.flatten(), value.flatten()])[value.numel() :].view_as(value)
    ),
    "vector_to_parameters": vector,
    "detach().copy_": lambda param, value: param.detach().copy_(value),
}
EVERY_WRITE = pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))


@pytest.fixture
def quiet():
    """Turn warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def still(params, **options):
    """Return an optimizer after one real step; lr is 0 then, so later steps keep the parameters."""
    optimizer = ampfuse.AdamW(params, lr=0.01, weight_decay=0, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    return optimizer


def step_in_silence(optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()


@EVERY_HALF
@EVERY_WRITE
@pytest.mark.parametrize("master_weights", ["auto", "remainder"])
def test_value_written_into_a_parameter_survives_the_next_step(
    device, dtype, write, master_weights
):
    if master_weights == "remainder" and dtype == torch.float16:
        pytest.skip("only bfloat16 has a remainder")
    param = Parameter(torch.randn(300, device=device).to(dtype))
    optimizer = still([param], master_weights=master_weights)
    value = torch.randn(300, device=device).to(dtype)

    write(param, value)
    step_in_silence(optimizer)

    torch.testing.assert_close(param.detach(), value, rtol=torch.finfo(dtype).eps, atol=0)
    if master_weights == "auto":
        (master,) = optimizer.master_params()
        assert_same_bits([param, master.to(dtype)], [value, value])


@EVERY_HALF
@EVERY_WRITE
def test_each_of_several_writes_survives_the_next_step(device, dtype, write):
    param = Parameter(torch.randn(300, device=device).to(dtype))
    optimizer = still([param])

    for seed in range(3):
        value = torch.full((300,), float(seed), device=device, dtype=dtype)
        write(param, value)
        step_in_silence(optimizer)
        assert_same_bits([param], [value])


@EVERY_WRITE
def test_writes_visible_on_the_host_warn_once(device, write):
    if write is WRITES["data.copy_"]:
        pytest.skip("it shows to the kernel alone")
    param = Parameter(torch.ones(300, device=device, dtype=torch.bfloat16))
    optimizer = still([param])

    write(param, torch.full_like(param, 3.0).detach())
    with pytest.warns(UserWarning, match="written by code other") as caught:
        train(optimizer, [param], range(2))

    assert len(caught) == 1
    assert caught[0].filename == train.__code__.co_filename  # the file that called step()
    write(param, torch.full_like(param, 5.0).detach())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, [param], range(2))


@EVERY_HALF
@pytest.mark.parametrize("through_data", [False, True])
def test_only_written_elements_lose_the_extra_bits_of_their_masters(
    device, dtype, through_data, quiet
):
    if through_data and device.type == "cuda":
        pytest.skip("a GPU compares some elements of each chunk")
    table = Parameter(torch.randn(20, 64, device=device).to(dtype))
    optimizer = still([table])
    (before,) = clones(optimizer.master_params())

    if through_data:
        table.data[7].zero_()
        optimizer.step()
    else:
        with torch.no_grad():
            table[7].zero_()
        step_in_silence(optimizer)

    (master,) = optimizer.master_params()
    before[7] = 0
    assert_same_bits([master], [before])


@EVERY_HALF
def test_weights_swapped_out_and_put_back_keep_their_masters(device, dtype, quiet):
    """Swap weights as programs do that evaluate averaged weights."""
    params, others = parameters(device, dtype), parameters(device, dtype)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    expected = trained(ampfuse.AdamW, others, range(4))
    with torch.no_grad():
        saved = clones(params)
        for param in params:
            param.fill_(1.0)
        for param, value in zip(params, saved, strict=True):
            param.copy_(value)

    train(optimizer, params, range(2, 4))

    assert_same_bits(params, others)
    assert_same_state(optimizer, state_values(expected))


def test_step_after_a_write_and_a_sync_of_masters_does_not_warn(device, quiet):
    param = Parameter(torch.ones(300, device=device, dtype=torch.bfloat16))
    optimizer = still([param])

    no_grad_copy(param, torch.full_like(param, 3.0))
    optimizer.sync_masters_from_model()

    optimizer.step()


def test_written_value_survives_a_skipped_step_and_the_next_one(device):
    param = Parameter(torch.ones(300, device=device, dtype=torch.bfloat16))
    optimizer = still([param])
    value = torch.full_like(param, 3.0).detach()
    param.data.copy_(value)

    optimizer.found_inf = torch.ones((), device=device)
    step_in_silence(optimizer)
    assert_same_bits([param], [value])
    optimizer.found_inf = None
    step_in_silence(optimizer)

    assert_same_bits([param, *optimizer.master_params()], [value, value.float()])


@EVERY_HALF
def test_nan_written_into_a_parameter_is_taken_over_by_its_master(device, dtype):
    param = Parameter(torch.ones(300, device=device, dtype=dtype))
    optimizer = still([param])

    for _ in range(2):
        param.data.fill_(torch.nan)
        step_in_silence(optimizer)
        (master,) = optimizer.master_params()
        assert master.isnan().all()


def test_rewriting_a_parameter_with_its_own_value_keeps_its_master(device, quiet):
    param = Parameter(torch.full((300,), 1e-42, device=device, dtype=torch.bfloat16))
    optimizer = still([param])
    (before,) = clones(optimizer.master_params())
    param.data.mul_(1)

    optimizer.step()

    assert_same_bits(optimizer.master_params(), [before])


def test_compiled_step_takes_over_a_written_value(device, fresh_compiler):
    param = Parameter(torch.ones(300, device=device, dtype=torch.bfloat16))
    optimizer = still([param])
    step = torch.compile(optimizer.step, backend="aot_eager")
    step()
    value = torch.full_like(param, 3.0).detach()

    param.data.copy_(value)
    step()

    assert_same_bits([param, *optimizer.master_params()], [value, value.float()])


@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf])
@pytest.mark.parametrize("through_data", [False, True])
def test_parameters_with_remainders_may_be_set_to_zero_or_infinity(device, value, through_data):
    torch.manual_seed(0)
    param = Parameter(torch.randn(1000, device=device, dtype=torch.bfloat16))
    optimizer = ampfuse.AdamW([param], lr=1e-2, weight_decay=0, master_weights="remainder")
    param.grad = torch.randn(1000, device=device).bfloat16()
    optimizer.step()
    assert (optimizer.state[param]["master_param"] < 0).any()

    with torch.no_grad():
        (param.data if through_data else param)[:500] = value
    assert not any(master.isnan().any() for master in optimizer.master_params())
    param.grad = torch.randn(1000, device=device).bfloat16()
    optimizer.step()

    assert not param.isnan().any()
    if value == 0:
        assert (param[:500].abs() <= 0.011).all()


@pytest.mark.parametrize("sign", [0, -0x8000])
@pytest.mark.parametrize("upper", [0x0000, 0x7F80, 0x0001, 0x3F80, 0x7F7F])
def test_no_remainder_turns_a_number_or_infinity_into_nan(upper, sign):
    bits = torch.full((65536,), upper + sign, dtype=torch.int32).to(torch.int16)
    param = Parameter(bits.view(torch.bfloat16))
    optimizer = ampfuse.AdamW([param], lr=0.0, weight_decay=0, master_weights="remainder")
    param.grad = torch.zeros_like(param)
    optimizer.step()
    remainders = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)

    optimizer.state[param]["master_param"].copy_(remainders)

    (master,) = optimizer.master_params()
    assert not master.isnan().any()
    optimizer.step()
    assert not param.isnan().any()


def test_loaded_masters_set_their_parameters(device):
    params = parameters(device, torch.bfloat16)
    saved = trained(ampfuse.AdamW, params, range(3))
    others = parameters(device, torch.bfloat16, seed=9)
    optimizer = ampfuse.AdamW(others)

    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))

    assert_same_bits(others, params)
    train(saved, params, range(3, 5))
    train(optimizer, others, range(3, 5))
    assert_same_bits(others, params)


def test_model_loaded_after_the_optimizer_keeps_its_values(device):
    params = parameters(device, torch.bfloat16)
    saved = trained(ampfuse.AdamW, params, range(3)).state_dict()
    others = parameters(device, torch.bfloat16, seed=9)
    optimizer = ampfuse.AdamW(others, lr=0.0, weight_decay=0)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0)
    values = clones(parameters(device, torch.bfloat16, seed=5))

    for param, value in zip(others, values, strict=True):
        no_grad_copy(param, value)
    feed(others, 0)
    step_in_silence(optimizer)

    assert_same_bits(others, values)


def test_dropped_gradients_and_replaced_state_are_not_kept_alive(device):
    param = Parameter(torch.ones(300, device=device, dtype=torch.bfloat16))
    optimizer = still([param])
    saved = copy.deepcopy(optimizer.state_dict())
    state = optimizer.state[param]
    alive = [weakref.ref(tensor) for tensor in (param.grad, *state.values())]

    optimizer.zero_grad()
    del state
    optimizer.load_state_dict(saved)

    assert [reference() for reference in alive] == [None] * len(alive)


def test_parameters_that_share_a_version_counter_are_compared_only_if_written(device, monkeypatch):
    flat = torch.ones(4, 300, device=device, dtype=torch.bfloat16)
    alone = Parameter(torch.ones(300, device=device, dtype=torch.bfloat16))
    params = [alone, *(Parameter(flat[i]) for i in range(4))]
    optimizer = still(params)
    compared = []
    monkeypatch.setattr(optimizer._written, "_adopt", compared.append)

    train(optimizer, params, range(5))

    assert compared == []


class LateCopy:
    """A copy of a flag that has not arrived when it is first looked at, as on a busy GPU."""

    def send(self, tensor):
        self.value, self.looks = tensor, 0

    def latest(self):
        self.looks += 1
        return self.value if self.looks > 1 else None


def test_writes_before_every_step_are_warned_about_although_copies_arrive_late(device, monkeypatch):
    monkeypatch.setattr("ampfuse.optim._written.HostCopy", LateCopy)
    param = Parameter(torch.ones(3, dtype=torch.bfloat16, device=device))
    optimizer = still([param])
    no_grad_copy(param, 2 * torch.ones_like(param))
    optimizer.step()
    no_grad_copy(param, 3 * torch.ones_like(param))

    with pytest.warns(UserWarning, match="written by code other than the optimizer"):
        optimizer.step()
