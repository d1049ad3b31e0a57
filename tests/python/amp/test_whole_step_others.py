"""A whole step in torch.compile whose optimizer is derived, hooked or changed between steps."""

import math

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits
from whole_step import Training, Twins, batch

pytestmark = pytest.mark.usefixtures("traced_backward")


class WritesGradients(ampfuse.AdamW):
    """An AdamW whose overridden step changes gradients before it calls AdamW.step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.125)
        return super().step(closure)


def test_norm_is_computed_after_a_derived_step_changes_gradients(device):
    twins = Twins(device, max_grad_norm=0.25, optimizer=WritesGradients)
    for seed in range(3):
        twins.step(seed)
        twins.assert_same()
        twins.assert_same_norms()


def test_gradients_that_a_hook_changes_are_clipped_as_in_eager_steps(device):
    def halve(optimizer, args, kwargs):
        for param in optimizer._traced.param_groups[0]["params"]:
            param.grad.mul_(0.125)

    twins = Twins(device, max_grad_norm=0.25)
    for side in twins.sides:
        side.optimizer.register_step_pre_hook(halve)
    for seed in range(3):
        twins.step(seed)
        twins.assert_same()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.filterwarnings("ignore")
def test_training_is_unchanged_if_a_hook_breaks_the_graph(device, kind, traced):
    calls = []

    def hook(optimizer, args, kwargs):
        torch._dynamo.graph_break()
        calls.append(optimizer)

    sides = [Training(device), Training(device)]
    for side in sides:
        getattr(side.optimizer, f"register_step_{kind}_hook")(hook)
    with torch._dynamo.config.patch(trace_autograd_ops=traced):
        compiled = torch.compile(sides[0].step, backend="aot_eager")
        for seed in range(3):
            inputs = batch(device, seed)
            assert_same_bits([compiled(*inputs)], [sides[1].step(*inputs)])
    assert_same_bits(*(side.model.parameters() for side in sides))
    assert len(calls) == 6
    traced = sides[0].optimizer._traced
    assert (traced.grad_scale, traced.found_inf, traced.known_norms) == (None, None, {})


def test_a_parameter_that_replaces_another_gets_state_of_its_own(device):
    twins = Twins(device)
    twins.step(0)
    for side in twins.sides:
        new = torch.nn.Parameter(torch.ones_like(side.model.head.bias))
        params = side.optimizer.param_groups[0]["params"]
        params[-1] = side.params[-1] = side.model.head.bias = new
    for seed in range(1, 4):
        twins.step(seed)
        twins.assert_same()
    assert twins.compiled.model.head.bias in twins.compiled.optimizer.state


def test_grad_norm_is_the_eager_one_if_every_group_has_its_own_limit(device):
    twins = Twins(device)
    for side in twins.sides:
        side.optimizer.param_groups[0]["max_grad_norm"] = 0.5
    for seed in range(2):
        twins.step(seed)
        twins.assert_same()
    twins.assert_same_norms()


def test_limit_of_a_group_may_change_between_steps(device):
    twins = Twins(device)
    for seed, limit in enumerate((0.5, 0.25, 0.75, 0.125, float("inf"))):
        for side in twins.sides:
            side.optimizer.param_groups[0]["max_grad_norm"] = limit
        twins.step(seed)
        twins.assert_same()


class StepsEagerly(ampfuse.AdamW):
    """An optimizer whose step is never compiled."""

    @torch._dynamo.disable
    def step(self, closure=None):
        return super().step(closure)


def test_eager_step_gets_scale_and_flag_of_a_compiled_scaler(fresh_compiler):
    def trained(is_compiled):
        param = torch.nn.Parameter(torch.ones(4))
        optimizer = StepsEagerly([param], lr=0.1, max_grad_norm=1.0)
        scaler = ampfuse.GradScaler("cpu", init_scale=8.0)

        def step(factor):
            optimizer.zero_grad()
            scaler.scale((param * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        run = torch.compile(step, backend="eager") if is_compiled else step
        for factor in (1.0, math.inf, 2.0):
            run(torch.tensor(factor))
        return param.tolist(), scaler.get_scale()

    assert trained(is_compiled=True) == trained(is_compiled=False)
