"""torch.compile(optimizer.step, fullgraph=True) of ampfuse.Adam and AdamW gives the eager bits."""

import copy
import math

import ampfuse
import pytest
import torch
from optim_models import (
    assert_same_bits,
    assert_same_state,
    clipped_adamw,
    feed,
    parameters,
    state_values,
    trained,
)
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.nn import Parameter

pytestmark = pytest.mark.usefixtures("fresh_compiler")

KINDS = {
    "float32": (torch.float32, {"weight_decay": 0.1}),
    "float32, clipped": (torch.float32, {"max_grad_norm": 1.0}),
    "amsgrad": (torch.float32, {"amsgrad": True, "maximize": True}),
    "bf16": (torch.bfloat16, {}),
    "bf16, clipped": (torch.bfloat16, {"max_grad_norm": 1.0, "decoupled_weight_decay": True}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder", "state_dtype": torch.bfloat16}),
    "fp16, written back": (torch.float16, {"max_grad_norm": 1.0, "write_back_grads": True}),
}


class Twins:
    """Two equal models with equal optimizers; the first has a compiled step."""

    def __init__(self, make, device, *dtypes, backend="aot_eager"):
        self.params, self.others = (
            [param for dtype in dtypes for param in parameters(device, dtype)] for _ in range(2)
        )
        self.optimizer, self.reference = make(self.params), make(self.others)
        self.optimizers = self.optimizer, self.reference
        self.compiled_step = torch.compile(self.optimizer.step, fullgraph=True, backend=backend)

    def step(self, step, without=(), scale=1.0):
        """Step both models with new gradients, except for those at the indices `without`."""
        for params in (self.params, self.others):
            feed(params, step, scale)
            for index in without:
                params[index].grad = None
        self.compiled_step()
        self.reference.step()
        self.assert_same()

    def assert_same(self):
        assert_same_bits(self.params, self.others)
        assert_same_state(self.optimizer, state_values(self.reference))
        if self.reference.grad_norm is not None:
            assert_same_bits([self.optimizer.grad_norm], [self.reference.grad_norm])


@pytest.mark.parametrize(("dtype", "options"), KINDS.values(), ids=KINDS)
def test_compiled_steps_give_the_bits_of_eager_ones_in_one_graph(device, dtype, options):
    counter = CompileCounterWithBackend("inductor")
    twins = Twins(lambda params: ampfuse.Adam(params, **options), device, dtype, backend=counter)
    for step in range(5):
        twins.step(step)
        gradients = [[param.grad for param in params] for params in (twins.params, twins.others)]
        assert_same_bits(*gradients)
    assert counter.frame_count == 1


def test_rate_scale_and_flag_in_tensors_may_change_without_a_new_graph(device):
    counter = CompileCounter()

    def make(params):
        return ampfuse.AdamW(params, lr=torch.tensor(1e-3, device=device), max_grad_norm=1.0)

    twins = Twins(make, device, torch.bfloat16, backend=counter)
    for step, (lr, found, scale) in enumerate(
        [(1e-3, 1.0, 4.0), (0.5, 0.0, 4.0), (1e-2, 0.0, 8.0), (0.0, 0.0, 8.0), (0.5, 2.0, 8.0)]
    ):
        for optimizer in twins.optimizers:
            optimizer.param_groups[0]["lr"].fill_(lr)
            optimizer.found_inf = torch.tensor(found, device=device)
            optimizer.grad_scale = torch.tensor(scale, device=device)
        twins.step(step, scale=scale)

    assert twins.optimizer.state[twins.params[0]]["step"] == 3
    assert counter.frame_count == 1


def test_learning_rate_that_is_a_number_is_not_baked_into_the_graph(device):
    twins = Twins(ampfuse.AdamW, device, torch.float32)
    for step, lr in enumerate((1e-3, 0.5, 1e-2, 0.25)):
        for optimizer in twins.optimizers:
            optimizer.param_groups[0]["lr"] = lr
        twins.step(step)


@pytest.mark.parametrize(("dtype", "clip"), [(torch.float32, None), (torch.bfloat16, 1.0)])
def test_step_is_recompiled_when_gradients_appear_or_vanish(device, dtype, clip):
    counter = CompileCounter()
    twins = Twins(
        lambda params: ampfuse.AdamW(params, max_grad_norm=clip), device, dtype, backend=counter
    )
    frames = []
    for step, without in enumerate([(1, 2), (1, 2), (), (), (0,), (0,)]):
        twins.step(step, without)
        frames.append(counter.frame_count)
    assert frames == [1, 1, 2, 2, 3, 3]


def test_groups_of_mixed_dtypes_with_own_options_give_the_bits_of_eager_steps(device):
    def make(params):
        groups = [
            {"params": params[:7]},
            {"params": params[7:8], "max_grad_norm": 0.5, "lr": 0.1, "state_dtype": torch.bfloat16},
            {"params": params[8:], "max_grad_norm": float("inf"), "betas": (0.1, 0.25)},
        ]
        return ampfuse.Adam(groups, max_grad_norm=1.0)

    twins = Twins(make, device, torch.float16, torch.bfloat16, torch.float32)
    for step in range(3):
        twins.step(step)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_complex_parameters_give_the_bits_of_eager_steps(device, clip):
    models = [
        [Parameter(torch.tensor([3 + 4j, 1 - 2j], device=device)), *parameters(device)]
        for _ in range(2)
    ]
    optimizers = [ampfuse.AdamW(params, max_grad_norm=clip) for params in models]
    compiled = torch.compile(optimizers[0].step, fullgraph=True, backend="aot_eager")

    for number in range(3):
        for params, step in zip(models, [compiled, optimizers[1].step], strict=True):
            feed(params[1:], number)
            params[0].grad = torch.tensor([1 - 1j, number + 2j], device=device)
            step()
            assert params[0].grad._version == 0

    assert_same_bits(*models)


def test_torchs_grad_scaler_drives_a_compiled_step(device):
    twins = Twins(ampfuse.AdamW, device, torch.float32)
    twins.optimizer.step = twins.compiled_step
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    for step in range(3):
        feed(twins.params, step, scale=4.0)
        feed(twins.others, step)
        scaler.step(twins.optimizer)
        scaler.update()
        twins.reference.step()
    twins.assert_same()


def test_eager_and_compiled_steps_may_alternate(device, recwarn):
    twins = Twins(clipped_adamw, device, torch.bfloat16)
    eager, compiled = twins.optimizer.step, twins.compiled_step
    for number, step in enumerate([eager, compiled, compiled, eager, eager, compiled]):
        twins.compiled_step = step
        twins.step(number)
    assert not [w for w in recwarn if "sync_masters_from_model" in str(w.message)]


def test_many_parameters_are_compiled_with_three_threads(device, set_threads):
    """No thread may look at the compiler's tensors, which ask Python for their sizes."""
    params = [Parameter(torch.ones(3, device=device)) for _ in range(130)]
    for param in params:
        param.grad = torch.ones(3, device=device)
    optimizer = ampfuse.AdamW(params, lr=0.25, weight_decay=0, max_grad_norm=1.0)
    set_threads(3)
    torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")()
    torch.testing.assert_close(torch.stack(params), torch.full((130, 3), 0.75, device=device))


@pytest.mark.parametrize("master_weights", [True, "remainder"])
def test_masters_missing_from_a_checkpoint_are_made_from_the_current_model(device, master_weights):
    params = parameters(device, torch.bfloat16)
    optimizer = ampfuse.AdamW(params, lr=0.0, master_weights=master_weights)
    compiled = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    feed(params, 0)
    compiled()
    saved = trained(torch.optim.AdamW, parameters(device, torch.bfloat16), range(1)).state_dict()

    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        for param in params:
            param.fill_(3.0)
    compiled()

    assert all((param == 3).all() for param in params)


def test_loaded_state_is_stepped_by_the_same_graph(device):
    counter = CompileCounter()
    twins = Twins(ampfuse.AdamW, device, torch.bfloat16, backend=counter)
    for step in range(2):
        twins.step(step)
    saved = copy.deepcopy(twins.reference.state_dict())
    twins.step(2)
    for optimizer in twins.optimizers:
        optimizer.load_state_dict(saved)
    twins.step(3)
    assert twins.optimizer.state[twins.params[0]]["step"] == 3
    assert counter.frame_count == 1


def test_invalid_max_grad_norm_is_refused_by_a_compiled_step(device):
    param = Parameter(torch.ones(4, device=device))
    optimizer = clipped_adamw([param])
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    param.grad = torch.ones_like(param)
    step()
    before = param.detach().clone()
    for limit in (-1.0, math.nan):
        optimizer.max_grad_norm = limit
        with pytest.raises(ValueError, match="max_grad_norm: expected None or at least 0"):
            step()
        assert torch.equal(param, before)


def test_step_of_an_optimizer_that_has_a_scheduler_is_compiled(device):
    twins = Twins(lambda params: ampfuse.AdamW(params, lr=torch.tensor(0.1)), device, torch.float32)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in twins.optimizers]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step():
        ampfuse.AdamW.step(twins.optimizer)

    twins.compiled_step = step
    for number in range(3):
        twins.step(number)
        for scheduler in schedulers:
            scheduler.step()
    assert twins.optimizer.param_groups[0]["lr"] == 0.0125
