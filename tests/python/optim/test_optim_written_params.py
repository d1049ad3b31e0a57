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
    overwrite,
    parameters,
    random_param,
    state_values,
    still,
    train,
    trained,
)
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector, vector_to_parameters

EVERY_HALF = pytest.mark.parametrize("dtype", DTYPES_16_BIT)


def no_grad_copy(param, value):
    overwrite([param], [value])


def loaded_model(param, value):
    model = torch.nn.ParameterDict({"param": param})
    model.load_state_dict({"param": value})


def vector(param, value):
    assert parameters_to_vector([param]).numel() == value.numel()
    vector_to_parameters(value.flatten(), [param])


WRITES = {
    "copy_ under no_grad": no_grad_copy,
    "load_state_dict of the model": loaded_model,
    "data = value": lambda param, value: setattr(param, "data", value.clone()),
    "a view of a flat buffer": lambda param, value: setattr(
        param, "data", torch.cat([value.flatten(), value.flatten()])[value.numel() :].view_as(value)
    ),
    "vector_to_parameters": vector,
    "detach().copy_": lambda param, value: param.detach().copy_(value),
    "data.copy_": lambda param, value: param.data.copy_(value),  # only the kernel sees it
}
# The host detects most writes, the kernel of each dtype those through `.data`.
WRITTEN = [
    *((write, torch.bfloat16, "auto") for write in WRITES),
    *(
        (write, *kind)
        for write in ("copy_ under no_grad", "data.copy_")
        for kind in ((torch.float16, "auto"), (torch.bfloat16, "remainder"))
    ),
]


@pytest.fixture
def quiet():
    """Turn warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def step_in_silence(optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()


@pytest.mark.vectorised
@pytest.mark.parametrize(("write", "dtype", "master_weights"), WRITTEN)
def test_each_value_written_into_a_parameter_survives_the_next_step(
    device, write, dtype, master_weights
):
    param = random_param(device, dtype)
    optimizer = still(param, master_weights=master_weights)
    for value in torch.randn(3, 300, device=device).to(dtype):
        WRITES[write](param, value)
        step_in_silence(optimizer)
        torch.testing.assert_close(param.detach(), value, rtol=torch.finfo(dtype).eps, atol=0)
        if master_weights == "auto":
            (master,) = optimizer.master_params()
            assert_same_bits([param, master.to(dtype)], [value, value])


@pytest.mark.parametrize("write", [name for name in WRITES if name != "data.copy_"])
def test_writes_visible_on_the_host_warn_once(device, write):
    param = random_param(device)
    optimizer = still(param)
    WRITES[write](param, torch.full_like(param, 3.0).detach())
    with pytest.warns(UserWarning, match="written by code other") as caught:
        train(optimizer, [param], range(2))
    assert len(caught) == 1
    assert caught[0].filename == train.__code__.co_filename  # the file that called step()
    WRITES[write](param, torch.full_like(param, 5.0).detach())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, [param], range(2))


@pytest.mark.vectorised
@EVERY_HALF
@pytest.mark.parametrize("through_data", [False, True])
def test_only_written_elements_lose_the_extra_bits_of_their_masters(device, dtype, through_data):
    if through_data and device.type == "cuda":
        pytest.skip("a GPU compares some elements of each chunk")
    table = random_param(device, dtype, (20, 64))
    optimizer = still(table)
    (before,) = clones(optimizer.master_params())

    with torch.no_grad():
        (table.data if through_data else table)[7].zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error" if through_data else "ignore")
        optimizer.step()

    before[7] = 0
    assert_same_bits(optimizer.master_params(), [before])


def test_weights_swapped_out_and_put_back_keep_their_masters(device, quiet):
    """Swap weights as programs do that evaluate averaged weights."""
    params, others = parameters(device, torch.bfloat16), parameters(device, torch.bfloat16)
    optimizer = trained(ampfuse.AdamW, params, range(2))
    expected = trained(ampfuse.AdamW, others, range(4))
    saved = clones(params)
    overwrite(params, map(torch.ones_like, saved))
    overwrite(params, saved)
    train(optimizer, params, range(2, 4))
    assert_same_bits(params, others)
    assert_same_state(optimizer, state_values(expected))


def test_step_after_a_write_and_a_sync_of_masters_does_not_warn(device, quiet):
    param = random_param(device)
    optimizer = still(param)
    no_grad_copy(param, torch.full_like(param, 3.0))
    optimizer.sync_masters_from_model()
    optimizer.step()


def test_written_value_survives_a_skipped_step_and_the_next_one(device):
    param = random_param(device)
    optimizer = still(param)
    value = torch.full_like(param, 3.0).detach()
    param.data.copy_(value)
    optimizer.found_inf = torch.ones((), device=device)
    step_in_silence(optimizer)
    assert_same_bits([param], [value])
    optimizer.found_inf = None
    step_in_silence(optimizer)
    assert_same_bits([param, *optimizer.master_params()], [value, value.float()])


@pytest.mark.vectorised
@EVERY_HALF
def test_nan_written_into_a_parameter_is_taken_over_by_its_master(device, dtype):
    param = random_param(device, dtype)
    optimizer = still(param)
    for _ in range(2):
        param.data.fill_(torch.nan)
        step_in_silence(optimizer)
        (master,) = optimizer.master_params()
        assert master.isnan().all()


@pytest.mark.vectorised
def test_rewriting_a_parameter_with_its_own_value_keeps_its_master(device, quiet):
    param = Parameter(torch.full((300,), 1e-42, device=device, dtype=torch.bfloat16))
    optimizer = still(param)
    before = clones(optimizer.master_params())
    param.data.mul_(1)
    optimizer.step()
    assert_same_bits(optimizer.master_params(), before)


def test_compiled_step_takes_over_a_written_value(device, fresh_compiler):
    param = random_param(device)
    optimizer = still(param)
    step = torch.compile(optimizer.step, backend="aot_eager")
    step()
    value = torch.full_like(param, 3.0).detach()
    param.data.copy_(value)
    step()
    assert_same_bits([param, *optimizer.master_params()], [value, value.float()])


@pytest.mark.vectorised
@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf])
@pytest.mark.parametrize("through_data", [False, True])
def test_parameters_with_remainders_may_be_set_to_zero_or_infinity(device, value, through_data):
    param = random_param(device, size=1000)
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


@pytest.mark.vectorised
def test_no_remainder_turns_a_number_or_infinity_into_nan_and_each_may_be_loaded():
    # Zero, infinity, the smallest subnormal number, one, and the largest number, of both signs.
    uppers = [sign + bits for sign in (0, -0x8000) for bits in (0, 0x7F80, 1, 0x3F80, 0x7F7F)]
    remainders = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    bits = torch.tensor(uppers, dtype=torch.int16).repeat_interleave(65536)
    param = Parameter(bits.view(torch.bfloat16))
    optimizer = ampfuse.AdamW([param], lr=0.0, weight_decay=0, master_weights="remainder")
    param.grad = torch.zeros_like(param)
    optimizer.step()

    optimizer.state[param]["master_param"].copy_(remainders.repeat(len(uppers)))

    (master,) = optimizer.master_params()
    assert not master.isnan().any()
    loaded = ampfuse.AdamW([Parameter(torch.zeros_like(param))], master_weights="remainder")
    loaded.load_state_dict(optimizer.state_dict())
    assert_same_bits(loaded.master_params(), [master])  # every remainder survives a checkpoint
    optimizer.step()
    assert not param.isnan().any()


def test_dropped_gradients_and_replaced_state_are_not_kept_alive(device):
    param = random_param(device)
    optimizer = still(param)
    saved = copy.deepcopy(optimizer.state_dict())
    state = optimizer.state[param]
    alive = [weakref.ref(tensor) for tensor in (param.grad, *state.values())]
    optimizer.zero_grad()
    del state
    optimizer.load_state_dict(saved)
    assert [reference() for reference in alive] == [None] * len(alive)


def test_parameters_that_share_a_version_counter_are_compared_only_if_written(device, monkeypatch):
    flat = torch.ones(4, 300, device=device, dtype=torch.bfloat16)
    params = [random_param(device), *(Parameter(flat[i]) for i in range(4))]
    optimizer = still(*params)
    compared = []
    monkeypatch.setattr(optimizer._written, "_adopt", compared.append)
    train(optimizer, params, range(5))
    assert compared == []


class LateCopy:
    """A copy of a flag that arrives two steps after it was sent, as on a busy GPU."""

    def send(self, tensor):
        self.value, self.looks = tensor, 0

    def latest(self):  # is called twice per step that follows a write
        self.looks += 1
        return self.value if self.looks > 3 else None


def test_writes_before_every_step_are_warned_about_although_copies_arrive_late(
    device, monkeypatch, recwarn
):
    monkeypatch.setattr("ampfuse.optim._written.HostCopy", LateCopy)
    param = random_param(device)
    optimizer = still(param)
    for number in range(4):
        no_grad_copy(param, torch.full_like(param, number))
        optimizer.step()
    assert any("written by code other than the optimizer" in str(w.message) for w in recwarn)


def test_write_is_noticed_by_a_step_that_is_checked_before(device):
    params = [Parameter(torch.ones(256, device=device, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = ampfuse.AdamW([{"params": [param]} for param in params], lr=0.0, weight_decay=0.0)
    for count in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        if count == 2:
            with torch.no_grad():
                params[0][5] = 7
            optimizer.state["other"] = {}  # so everything is checked again
            with pytest.warns(UserWarning, match="parameters were written by code other than"):
                optimizer.step()
        else:
            optimizer.step()
    assert params[0][5] == 7
    assert optimizer.state[params[0]]["master_param"][5] == 7


def test_write_after_a_step_without_gradients_is_adopted(device):
    """A GPU's step would not compare the one element that is written here."""
    params = [torch.nn.Parameter(torch.zeros(300, dtype=torch.bfloat16, device=device))]
    optimizer = ampfuse.SGD(params, 0.0)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    with torch.no_grad():
        params[0][77] = 5.0
    params[0].grad = torch.ones_like(params[0])
    with pytest.warns(UserWarning, match="written by code other than the optimizer"):
        optimizer.step()
    assert params[0][77] == 5.0
