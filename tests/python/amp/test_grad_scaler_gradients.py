"""GradScaler with gradients of every dtype and layout, and the hooks other libraries rely on."""

from functools import partial

import ampfuse
import pytest
import torch
from scaler_languages import EVERY_LANGUAGE, LANGUAGES, ready
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter

GRADIENTS = {
    "float32": lambda: torch.tensor([2.0, 8.0]),
    "float64": lambda: torch.tensor([2.0, 8.0], dtype=torch.float64),
    "bfloat16": lambda: torch.tensor([2.0, 8.0], dtype=torch.bfloat16),
    "complex64": lambda: torch.tensor([2.0 + 4j, 8.0]),
    "strided": lambda: torch.tensor([2.0, 0.0, 8.0, 0.0])[::2],
    "sparse": lambda: torch.tensor([2.0, 8.0]).to_sparse(),
}


@EVERY_LANGUAGE
@pytest.mark.parametrize("make", GRADIENTS.values(), ids=list(GRADIENTS))
@pytest.mark.parametrize("overflow", [False, True])
def test_gradients_of_every_kind_are_unscaled_and_checked(language, device, make, overflow):
    grad = make().to(device)
    if overflow:
        (grad._values() if grad.is_sparse else grad)[1] = float("nan")
    param = Parameter(torch.zeros(2, dtype=grad.dtype, device=device))
    param.grad = grad
    scaler = language.scaler(device, 4.0)
    scaler.scale(torch.ones((), device=device))
    optimizer = language.sgd([param], lr=1.0)

    scaler.unscale_(optimizer)
    scaler.step(optimizer)

    assert scaler.was_skipped() == overflow
    unscaled = param.grad.to_dense()
    assert unscaled[0] == make().to_dense()[0] / 4
    if not overflow:
        assert torch.equal(param.detach(), -unscaled)


@EVERY_LANGUAGE
def test_float16_gradients_are_refused_unless_allowed(language, device):
    param = Parameter(torch.ones(2, 3, dtype=torch.float16, device=device))
    param.grad = torch.full_like(param, 8.0)
    optimizer = language.sgd([param], lr=1.0)
    scaler = language.scaler(device, 4.0)
    scaler.scale(torch.ones((), device=device))

    with pytest.raises(ValueError, match=r"FP16 gradients. Parameter 0 of group 0.*[(\[]2, 3"):
        scaler.unscale_(optimizer)

    kinder = language.scaler(device, 4.0, allow_fp16_grads=True)
    kinder.scale(torch.ones((), device=device))
    kinder.unscale_(optimizer)
    assert (param.grad == 2).all()


@EVERY_LANGUAGE
def test_a_grad_scale_set_by_the_user_is_multiplied_in(language, device):
    param, _, scaler = ready(language, device)
    optimizer = language.adamw([param], lr=0.5, max_grad_norm=1.0)
    optimizer.grad_scale = torch.tensor(2.0, device=device)

    scaler.step(optimizer)

    assert optimizer.grad_norm.item() == pytest.approx(2**0.5 / 2)
    assert getattr(optimizer, "grad_scale", None) is None
    assert getattr(optimizer, "found_inf", None) is None


def test_step_is_skipped_if_duplicate_sparse_float16_values_overflow_when_added(device):
    indices = torch.tensor([[0, 0]])
    values = torch.tensor([65504.0, 65504.0], dtype=torch.float16)
    param = Parameter(torch.zeros(2, dtype=torch.float16, device=device))
    param.grad = torch.sparse_coo_tensor(indices, values, (2,)).to(device)
    scaler = ampfuse.GradScaler(device.type, 4.0, allow_fp16_grads=True)
    scaler.scale(torch.ones((), device=device))

    scaler.step(torch.optim.SGD([param], lr=1.0))

    assert scaler.was_skipped()


def test_check_inf_per_device_changes_neither_gradients_nor_stage(device):
    param, optimizer, scaler = ready(LANGUAGES["Python"], device)
    version = param.grad._version

    flags = scaler._check_inf_per_device(optimizer)

    assert {d.type: flag.item() for d, flag in flags.items()} == {device.type: 0.0}
    assert (param.grad == 4).all()
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    assert scaler._found_inf_per_device(optimizer) is flags
    assert param.grad._version <= version + 1


def test_unscale_grads_hook_unscales_and_returns_flags(device):
    param, optimizer, scaler = ready(LANGUAGES["Python"], device)
    inverse, found_inf = torch.tensor(0.5, device=device), torch.zeros((), device=device)

    flags = scaler._unscale_grads_(optimizer, inverse, found_inf, True)

    assert [flag.item() for flag in flags.values()] == [0.0]
    assert (param.grad == 2).all()


def test_a_subclass_may_override_maybe_opt_step(device):
    class Never(ampfuse.GradScaler):
        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            return "never"

    param = Parameter(torch.ones(1, device=device))
    scaler = Never(device.type)
    scaler.scale(param.sum()).backward()

    assert scaler.step(torch.optim.SGD([param], lr=1.0)) == "never"
    assert param.item() == 1


def test_step_with_a_grad_scaler_argument_receives_the_scaler(device):
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            self.got = grad_scaler

    param = Parameter(torch.ones(1, device=device))
    optimizer, scaler = Old([param], lr=1.0), ampfuse.GradScaler(device.type)
    scaler.scale(param.sum()).backward()

    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        scaler.step(optimizer)

    assert optimizer.got is scaler


def test_optimizer_has_scale_and_flag_attributes_only_during_step(device):
    class Taking(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            self.got = (self.grad_scale, self.found_inf)

    param = Parameter(torch.ones(1, device=device))
    optimizer, scaler = Taking([param], lr=1.0), ampfuse.GradScaler(device.type, 4.0)
    for unscale in (False, True):
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        grad_scale, found_inf = optimizer.got
        assert grad_scale is None if unscale else grad_scale == 4
        assert found_inf == 0
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


def test_two_optimizers_share_a_scale_and_only_one_is_skipped(device):
    params = [Parameter(torch.ones(1, device=device)) for _ in range(2)]
    optimizers = [
        cls([param], lr=0.5)
        for cls, param in zip((torch.optim.SGD, ampfuse.AdamW), params, strict=True)
    ]
    scaler = ampfuse.GradScaler(device.type, 4.0)
    for param in params:
        scaler.scale(param.sum()).backward()
    params[1].grad.fill_(float("nan"))

    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()

    assert (params[0].item(), params[1].item()) == (0.5, 1.0)
    assert scaler.get_scale() == 2.0


def test_nested_outputs_are_scaled_and_other_types_are_refused(device):
    scaler = ampfuse.GradScaler(device.type, 4.0)
    one = torch.ones((), device=device)

    outputs = scaler.scale([one, (one, [one])])

    assert outputs == [4, (4, [4])]
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable"):
        scaler.scale([1.0])


@EVERY_LANGUAGE
def test_a_step_without_gradients_is_not_skipped(language, device):
    """This holds even if the previous step, of another optimizer, was skipped."""
    param, spoiled, scaler = ready(language, device, allow_no_grads=True)
    param.grad[0] = float("inf")
    scaler.step(spoiled)
    assert scaler.was_skipped()

    without = [
        make([Parameter(torch.ones(1, device=device))], lr=0.1)
        for make in (language.sgd, language.adamw)
    ]
    for optimizer in without:
        scaler.step(optimizer)
        assert not scaler.was_skipped()


def test_an_optimizer_without_gradients_still_receives_scale_and_flag(device):
    class Taking(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            return self.grad_scale.item(), self.found_inf.item()

    scaler = ampfuse.GradScaler(device.type, 4.0)
    scaler.scale(torch.ones((), device=device))

    assert scaler.step(Taking([Parameter(torch.ones(1, device=device))], lr=1.0)) == (4.0, 0.0)


def test_parameters_of_a_group_may_be_a_tuple(device):
    param, optimizer, scaler = ready(LANGUAGES["Python"], device)
    optimizer.param_groups[0]["params"] = tuple(optimizer.param_groups[0]["params"])

    scaler.unscale_(optimizer)

    assert (param.grad == 1).all()


def test_step_unscales_by_the_scale_that_a_subclass_returns(device):
    class Other(ampfuse.GradScaler):
        def _get_scale_async(self):
            return super()._get_scale_async() * 2

    param = Parameter(torch.ones(1, device=device))
    optimizer = ampfuse.AdamW([param], max_grad_norm=1.0)
    scaler = Other(device.type, 4.0)
    scaler.scale(param.sum()).backward()

    scaler.step(optimizer)

    assert optimizer.grad_norm.item() == pytest.approx(0.5)


@EVERY_LANGUAGE
def test_gradients_are_clipped_if_their_scaled_norm_overflows_float32(language, device):
    """No scaled element overflows float32, but the norm of the scaled gradients would."""
    outcomes = []
    for scale in (1.0, 2.0**120):
        param = Parameter(torch.zeros(1_000_000, device=device))
        optimizer = language.adamw([param], lr=0.5, max_grad_norm=1000.0)
        scaler = language.scaler(device, scale, history=1)
        scaler.scale((param * 5.0).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.grad_norm.item() == pytest.approx(5000.0)
        assert scaler.history()[0].norm == pytest.approx(5000.0)
        outcomes.append(param.detach())
    torch.testing.assert_close(*outcomes)
    assert (outcomes[0] != 0).all()


@EVERY_LANGUAGE
def test_overflow_report_omits_large_finite_gradients(language, device):
    network = torch.nn.ParameterDict(
        {"finite": torch.zeros(4, device=device), "nan": torch.zeros(4, device=device)}
    )
    params = list(network.parameters())
    scaler = language.scaler(device, 1.0)
    scaler.scale(torch.ones((), device=device))
    params[0].grad = torch.full((4,), 3e38, device=device)
    params[1].grad = torch.full((4,), float("nan"), device=device)

    scaler.step(language.sgd(params, lr=0.1))

    assert scaler.overflow_report(network) == ["nan"]


@EVERY_LANGUAGE
def test_history_norm_of_sparse_gradients_is_nan(language, device):
    indices = torch.tensor([[0, 0]], device=device)
    param = Parameter(torch.zeros(2, device=device))
    param.grad = torch.sparse_coo_tensor(indices, torch.tensor([2.0, 2.0], device=device), (2,))
    scaler = language.scaler(device, 1.0, history=1)
    scaler.scale(torch.ones((), device=device))

    scaler.step(language.sgd([param], lr=0.1))
    scaler.update()

    assert scaler.history()[0].norm != scaler.history()[0].norm  # NaN


@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, fused=True), ampfuse.AdamW])
def test_a_compiled_iteration_equals_an_eager_one(device, make):
    """A step that gets scale and flag as attributes cannot be traced: the graph breaks there."""

    def train(compiler):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, device=device)
        optimizer, scaler = make(model.parameters(), lr=0.1), ampfuse.GradScaler(device.type, 4.0)

        def iteration(inputs):
            optimizer.zero_grad()
            scaler.scale(model(inputs).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        step = compiler(iteration)
        for _ in range(3):
            step(torch.ones(2, 4, device=device))
        return model.weight.detach(), scaler.state_dict()

    torch._dynamo.reset()
    weight, state = train(partial(torch.compile, backend="eager"))
    expected_weight, expected_state = train(lambda iteration: iteration)
    assert torch.equal(weight, expected_weight)
    assert state == expected_state


def test_conjugate_gradients_are_unscaled():
    """Autograd makes them of complex parameters."""
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([param]), ampfuse.GradScaler("cpu", init_scale=4.0)
    weight = torch.tensor([1 - 2j, 2 + 1j, -3j])
    scaler.scale((param.conj() * weight).real.sum()).backward()
    assert param.grad.is_conj()
    scaler.unscale_(optimizer)
    assert torch.equal(param.grad.resolve_conj(), weight)
