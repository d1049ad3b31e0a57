"""GradScaler with gradients of every kind, and the hooks that other libraries rely on."""

from functools import partial, wraps
from math import inf, nan

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits, clones
from reference import gradients
from scaler_languages import EVERY_LANGUAGE, LANGUAGES, ready, step_by
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter
from torch.optim import SGD

pytestmark = pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dupl")

PYTHON = LANGUAGES["Python"]
GRADIENTS = {
    "float32": lambda: torch.tensor([2.0, 8.0]),
    "float64": lambda: torch.tensor([2.0, 8.0], dtype=torch.float64),
    "bfloat16": lambda: torch.tensor([2.0, 8.0], dtype=torch.bfloat16),
    "complex64": lambda: torch.tensor([2.0 + 4j, 8.0]),
    "strided": lambda: torch.tensor([2.0, 0.0, 8.0, 0.0])[::2],
    "sparse": lambda: torch.tensor([2.0, 8.0]).to_sparse(),
}


@EVERY_LANGUAGE
@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_of_every_kind_are_unscaled_and_checked(language, device, kind):
    for overflow in (False, True):
        grad = GRADIENTS[kind]().to(device)
        first = grad.to_dense()[0].item()
        if overflow:
            (grad._values() if grad.is_sparse else grad)[1] = nan
        param = Parameter(torch.zeros(2, dtype=grad.dtype, device=device))
        param.grad = grad
        scaler = language.scaler(device, 4.0)
        scaler.scale(torch.ones((), device=device))
        optimizer = language.sgd([param], lr=1.0)

        scaler.unscale_(optimizer)
        scaler.step(optimizer)

        assert scaler.was_skipped() == overflow
        unscaled = param.grad.to_dense()
        assert unscaled[0] == first / 4
        expected = torch.zeros_like(unscaled) if overflow else -unscaled
        assert torch.equal(param.detach(), expected)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
# Dense, transposed and strided gradients of 33 × 5 elements: no vector width divides 165.
LAYOUTS = [lambda x: x[:33, :5].contiguous(), lambda x: x[:5, :33].t(), lambda x: x[:33, 1:15:3]]


def mixture(device):
    """Return parameters of all dtypes with gradients of all layouts, and these gradients / 4."""
    numbers = torch.arange(40 * 40).reshape(40, 40) % 255 - 127  # exact in bfloat16 up to ±256
    params = [Parameter(torch.zeros(33, 5, device=device).to(d)) for d in DTYPES for _ in LAYOUTS]
    for param, layout in zip(params, LAYOUTS * len(DTYPES), strict=True):
        param.grad = layout(numbers.to(param))
    return params, [grad / 4 for grad in gradients(params)]


def unscale(params, allow_fp16=True):
    """Divide gradients by 4, which rounds nothing, and return the overflow flag of the device."""
    device = params[0].device
    scaler, optimizer = ampfuse.GradScaler(device.type), SGD(params, lr=1.0)
    inv_scale, found_inf = (torch.tensor(value, device=device) for value in (0.25, 0.0))
    flags = scaler._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
    assert found_inf == 0  # the flag is set in the device's copy, not here
    return flags[device].item()


def test_gradients_are_unscaled_exactly_or_not_at_all_if_float16_is_refused(device):
    params, quarters = mixture(device)
    before = clones(gradients(params))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        unscale(params[::-1], allow_fp16=False)  # float16 gradients come last
    assert_same_bits(gradients(params), before)
    assert unscale(params) == 0.0
    assert_same_bits(gradients(params), quarters)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_element_is_found_and_the_rest_is_unscaled(device, dtype):
    first = DTYPES.index(dtype) * len(LAYOUTS)
    for broken in range(first, first + len(LAYOUTS)):
        for index in ((0, 0), (16, 2), (32, 4)):  # the first, the middle and the last
            for value in (inf, nan):
                params, quarters = mixture(device)
                grad = params[broken].grad
                grad[index] = complex(1.0, value) if grad.is_complex() else value
                assert unscale(params) == 1.0, (broken, index, value)
                assert not grad[index].isfinite()
                grad[index] = quarters[broken][index]
                assert_same_bits(gradients(params), quarters)


def sparse(device, dtype, values):
    """Return a parameter of 3 elements; its sparse gradient has `values` at indices 0, 2 and 0."""
    param = Parameter(torch.zeros(3, dtype=dtype, device=device))
    indices = torch.tensor([[0, 2, 0][: len(values)]])
    param.grad = torch.sparse_coo_tensor(indices, values, (3,), dtype=dtype, device=device)
    return param


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_duplicates_are_unscaled_then_added_except_in_float16(device, dtype):
    for values in ([inf], [8.0, nan], [2.0, 8.0, -inf], [inf, 8.0, -inf]):
        broken = [sparse(device, dtype, values), sparse(device, dtype, [2.0])]
        assert unscale(broken) == 1.0, values
    largest = torch.finfo(dtype).max
    params = [sparse(device, dtype, values) for values in ([], [2, 8, 4], [largest, 8, largest])]
    assert unscale(params[:2]) == 0.0
    assert unscale(params[2:]) == (dtype == torch.float16)
    assert params[1].grad.to_dense().tolist() == [1.5, 0.0, 2.0]
    assert params[2].grad.to_dense()[0] == (inf if dtype == torch.float16 else largest / 2)


def test_conjugate_gradients_are_unscaled():
    """Autograd makes them of complex parameters."""
    param = Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer, scaler = SGD([param]), ampfuse.GradScaler("cpu", init_scale=4.0)
    weight = torch.tensor([1 - 2j, 2 + 1j, -3j])
    scaler.scale((param.conj() * weight).real.sum()).backward()
    assert param.grad.is_conj()
    scaler.unscale_(optimizer)
    assert torch.equal(param.grad.resolve_conj(), weight)


def test_parameters_of_a_group_may_be_a_tuple(device):
    param, optimizer, scaler = ready(PYTHON, device)
    optimizer.param_groups[0]["params"] = tuple(optimizer.param_groups[0]["params"])
    scaler.unscale_(optimizer)
    assert (param.grad == 1).all()


@pytest.mark.parametrize("kind", ["twice", "view", "sparse"])
def test_gradients_that_share_memory_are_unscaled_as_in_torch(device, kind):
    def unscaled(scaler, device):
        embedding = torch.nn.Embedding(4, 1, sparse=kind == "sparse").to(device)
        torch.nn.init.ones_(embedding.weight)
        params, other = [embedding.weight] * 2, Parameter(torch.ones(4, device=device))
        loss = scaler.scale(embedding(torch.tensor([1, 2, 2], device=device)).sum())
        loss.backward()
        if kind == "view":
            params = [embedding.weight, other]
            other.grad = embedding.weight.grad.view(4)
        optimizer = SGD(params, lr=0.1)
        scaler.unscale_(optimizer)
        told = embedding.weight.grad.to_dense().flatten().tolist()
        step_by(scaler, optimizer)
        return told, embedding.weight.tolist(), scaler.get_scale()

    # On a GPU, torch's kernels race if a list names a tensor twice: use the CPU.
    torchs = unscaled(torch.amp.GradScaler("cpu", init_scale=4.0), torch.device("cpu"))
    assert unscaled(ampfuse.GradScaler(device.type, init_scale=4.0), device) == torchs


# --- private methods of torch's scaler, and what it gives optimizers ------------------------------


def test_check_inf_per_device_changes_neither_gradients_nor_stage(device):
    param, optimizer, scaler = ready(PYTHON, device)
    version = param.grad._version
    flags = scaler._check_inf_per_device(optimizer)
    assert {d.type: flag.item() for d, flag in flags.items()} == {device.type: 0.0}
    assert (param.grad == 4).all()
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    assert scaler._found_inf_per_device(optimizer) is flags
    assert param.grad._version <= version + 1


def test_a_derived_class_may_override_what_steps_and_what_scale_is_read(device):
    class Never(ampfuse.GradScaler):
        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            return "never"

    class Double(ampfuse.GradScaler):
        def _get_scale_async(self):
            return super()._get_scale_async() * 2

    param = Parameter(torch.ones(1, device=device))
    never, double = Never(device.type), Double(device.type, 4.0)
    never.scale(param.sum()).backward()
    optimizers = SGD([param], lr=1.0), ampfuse.AdamW([param], unscale="before")
    assert [never.step(optimizer) for optimizer in optimizers] == ["never"] * 2
    assert param.item() == 1

    param.grad = None
    double.scale(param.sum()).backward()
    optimizer = ampfuse.AdamW([param], max_grad_norm=1.0)
    double.step(optimizer)
    assert optimizer.grad_norm.item() == pytest.approx(0.5)


class WithTorchsUnscaling(ampfuse.GradScaler):
    """A scaler whose gradients are unscaled by torch's method."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        unscale = torch.amp.GradScaler._unscale_grads_
        return unscale(self, optimizer, inv_scale, found_inf, True)


@pytest.mark.parametrize("make", [ampfuse.Adam, partial(torch.optim.Adam, fused=True), SGD])
def test_a_derived_class_may_unscale_as_torch_does(make):
    param = Parameter(torch.ones(4))
    optimizer, scaler = make([param], lr=0.1), WithTorchsUnscaling("cpu")
    step_by(scaler, optimizer, param.sum())
    assert (param < 1).all()
    param.grad = None
    scaler.scale(param.sum()).backward()
    assert scaler.clip_grad_norm_(optimizer, 1.0) == 2.0


def test_a_step_with_a_grad_scaler_argument_gets_the_scaler_and_may_unscale(device):
    class Asking(SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            self.got = grad_scaler
            grad_scaler.unscale_(self)
            if not any(grad_scaler._found_inf_per_device(self).values()):
                super().step()

    for grad, outcome in ((1.0, (0.5, 1024.0)), (inf, (1.0, 512.0))):
        param = Parameter(torch.ones(1, device=device))
        optimizer, scaler = Asking([param], lr=0.5), ampfuse.GradScaler(device, 1024.0, history=1)
        scaler.scale(grad * param.sum()).backward()
        with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
            scaler.step(optimizer)
        scaler.update()

        assert optimizer.got is scaler
        assert (param.item(), scaler.get_scale()) == outcome
        assert scaler.history()[0].norm == grad


class Taking(SGD):
    """An optimizer that takes scale and flag as attributes."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        self.got = (self.grad_scale, self.found_inf)


def test_optimizer_has_scale_and_flag_attributes_only_during_step(device):
    param = Parameter(torch.ones(1, device=device))
    optimizer, scaler = Taking([param], lr=1.0), ampfuse.GradScaler(device.type, 4.0)
    for unscale in (False, True):
        optimizer.zero_grad()
        step_by(scaler, optimizer, param.sum(), unscale=unscale)
        grad_scale, found_inf = optimizer.got
        assert grad_scale is None if unscale else grad_scale == 4
        assert found_inf == 0
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()

    optimizer.zero_grad()  # even without gradients it gets both
    scaler.step(optimizer)
    assert optimizer.got == (4.0, 0.0)


@EVERY_LANGUAGE
def test_a_grad_scale_set_by_the_user_is_multiplied_in(language, device):
    param, _, scaler = ready(language, device)
    optimizer = language.adamw([param], lr=0.5, max_grad_norm=1.0)
    optimizer.grad_scale = torch.tensor(2.0, device=device)
    scaler.step(optimizer)
    assert optimizer.grad_norm.item() == pytest.approx(2**0.5 / 2)
    assert getattr(optimizer, "grad_scale", None) is None
    assert getattr(optimizer, "found_inf", None) is None


@pytest.mark.parametrize("compiled", [False, True])
def test_hook_that_replaces_the_arguments_of_a_step_keeps_scale_and_flag(device, compiled):
    param = Parameter(torch.ones(2, device=device))
    optimizer = ampfuse.AdamW([param], lr=0.1)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, {}))
    scaler = ampfuse.GradScaler(device.type, 1024.0)
    step = scaler.step
    if compiled:
        step = torch.compile(step, backend="eager")
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((factor * param).sum()).backward()
        step(optimizer)
        scaler.update()
    assert optimizer.state[param]["step"] == 1
    torch.testing.assert_close(
        optimizer.state[param]["exp_avg"], torch.full((2,), 0.1, device=device)
    )


def test_step_that_a_wrapped_function_replaces_gets_no_further_arguments(device):
    class Counted(ampfuse.AdamW):
        calls = 0

        @wraps(ampfuse.AdamW.step)
        def step(self, closure=None):
            self.calls += 1
            return ampfuse.AdamW.step(self, closure)

    param = Parameter(torch.ones(2, device=device))
    optimizer, scaler = Counted([param]), ampfuse.GradScaler(device.type, 4.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.calls == 1
    torch.testing.assert_close(
        optimizer.state[param]["exp_avg"], torch.full((2,), 0.1, device=device)
    )
