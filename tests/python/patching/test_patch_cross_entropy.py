"""torch.nn.functional.cross_entropy while it is patched."""

import sys
from concurrent.futures import ThreadPoolExecutor

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

USAGE = PARTS["cross_entropy"].usage
torchs = functional.cross_entropy

pytestmark = pytest.mark.usefixtures("patched")


def batch(device, dtype=torch.float32, rows=6):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, 11, generator=generator).to(device, dtype).requires_grad_()
    return logits, torch.randint(11, (rows,), generator=generator).to(device)


def results(loss_of, logits, *arguments, **options):
    loss = loss_of(logits, *arguments, **options)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    return loss, grad


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_patched_losses_have_torchs_values_and_dtypes(device, dtype, autocast):
    logits, target = batch(device, dtype)
    for reduction in ("mean", "sum", "none"):
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            loss, grad = results(functional.cross_entropy, logits, target, reduction=reduction)
            expected = torchs(logits, target, reduction=reduction)
        wide = logits.detach().double().requires_grad_()
        exact, exact_grad = results(torchs, wide, target, reduction=reduction)
        tolerance = torch.finfo(min(loss.dtype, dtype, key=lambda x: x.itemsize)).eps * 2
        assert loss.dtype == expected.dtype, reduction
        assert grad.dtype == dtype
        assert_close(loss.double(), exact, rtol=tolerance, atol=tolerance)
        assert_close(grad.double(), exact_grad, rtol=tolerance, atol=tolerance / 8)
    assert USAGE.uses == 3


def test_cross_entropy_loss_module_uses_the_patched_function(device):
    logits, target = batch(device)
    weight = torch.linspace(0.5, 2, 11, device=device)
    criterion = torch.nn.CrossEntropyLoss(weight, label_smoothing=0.1, ignore_index=3)
    expected = results(torchs, logits, target, weight, label_smoothing=0.1, ignore_index=3)
    assert_close(results(criterion, logits, target), expected)
    assert USAGE.uses == 1


def test_unsupported_arguments_are_left_to_torch(device):
    logits, target = batch(device)
    probabilities = torch.rand(6, 11, device=device).softmax(1).requires_grad_()
    cases = [
        ((logits, target), {"size_average": False}),
        ((logits, target), {"reduce": False}),
        ((logits, probabilities), {}),
        ((logits.to("meta"), target.to("meta")), {}),
    ]
    for arguments, options in cases:
        loss = functional.cross_entropy(*arguments, **options)
        expected = torchs(*arguments, **options)
        assert loss.shape == expected.shape
        assert loss.is_meta or torch.equal(loss, expected)
    assert USAGE.uses == 0
    assert sum(USAGE.fallbacks.values()) == len(cases)


def test_errors_of_the_patched_loss_equal_those_of_torch(device):
    logits, target = batch(device)
    for arguments, options in (
        ((logits, target[:3]), {}),
        ((logits, target), {"reduction": "median"}),
        ((logits, target), {"label_smoothing": 2.0}),
        ((logits, target.float()), {}),
        ((logits, target, torch.ones(3, device=device)), {}),
        ((logits,), {}),
    ):
        errors = []
        for loss_of in (torchs, functional.cross_entropy):
            with pytest.raises(Exception, match=r".") as error:
                loss_of(*arguments, **options)
            errors.append((error.type, str(error.value)))
        assert errors[0] == errors[1]
    if device.type == "cpu":  # a GPU reports it later
        with pytest.raises(IndexError, match="Target 11 is out of bounds") as error:
            functional.cross_entropy(logits, torch.full((6,), 11))
        assert error.value.__context__ is None
        if sys.version_info >= (3, 11):
            assert "in row 0, expected a class in " in error.value.__notes__[0]


def test_second_derivatives_match_torch(device):
    logits, target = batch(device, torch.float64)
    found = []
    for loss_of in (functional.cross_entropy, torchs):
        (grad,) = torch.autograd.grad(loss_of(logits, target), logits, create_graph=True)
        found += torch.autograd.grad(grad.square().sum(), logits)
    assert_close(*found)


def test_functional_transforms_and_forward_mode_match_torch(device):
    logits, target = batch(device)
    wide = logits.detach()
    grad = torch.func.grad(functional.cross_entropy)(wide, target)
    assert_close(grad, torch.func.grad(torchs)(wide, target))
    each = torch.func.vmap(functional.cross_entropy)(wide, target)
    assert_close(each, torchs(wide, target, reduction="none"))
    _, slope = torch.func.jvp(lambda x: functional.cross_entropy(x, target), (wide,), (wide,))
    assert_close(slope, torch.func.jvp(lambda x: torchs(x, target), (wide,), (wide,))[1])


class Tagged(torch.Tensor):
    """A tensor subclass that has its own `functional.cross_entropy`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is functional.cross_entropy:
            return "told"
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensor_subclasses_receive_functional_cross_entropy(device):
    logits, target = batch(device)
    tagged = logits.detach().as_subclass(Tagged)
    assert functional.cross_entropy(tagged, target) == "told"
    assert functional.cross_entropy(logits, target, tagged[0]) == "told"
    ampfuse.unpatch()
    assert functional.cross_entropy(tagged, target) == "told"


class Plain(torch.Tensor):
    """A tensor subclass that overrides no operation."""


def test_loss_of_a_tensor_subclass_keeps_the_class(device):
    logits, target = batch(device)
    loss = functional.cross_entropy(logits.detach().as_subclass(Plain), target)
    assert type(loss) is Plain
    assert_close(loss.as_subclass(torch.Tensor), torchs(logits.detach(), target))


class Seen(TorchFunctionMode):
    """A mode that records the called functions."""

    functions = ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions += (func,)
        return func(*args, **(kwargs or {}))


def test_torch_function_modes_see_torchs_loss(device):
    logits, target = batch(device)
    with Seen() as seen:
        loss = functional.cross_entropy(logits, target)
    assert functional.cross_entropy in seen.functions
    assert_close(loss, torchs(logits, target))


def test_patched_loss_is_used_under_a_default_device(device):
    logits, target = batch(device)
    with torch.device(device):
        loss = functional.cross_entropy(logits, target)
    assert_close(loss, torchs(logits, target))
    assert USAGE.uses == 1


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_graphs_that_may_run_without_ampfuse_contain_none_of_its_operators(device):
    """They are those of TorchScript, torch.export and make_fx."""
    logits, target = batch(device)
    criterion, expected = torch.nn.CrossEntropyLoss(), torchs(logits, target)
    assert_close(torch.jit.script(criterion)(logits, target), expected)
    traced = torch.jit.trace(criterion, (logits, target))
    # The graph's text names source files, whose folder may be called ampfuse.
    assert not any("ampfuse" in node.kind() for node in traced.inlined_graph.nodes())

    exported = torch.export.export(criterion, (logits.detach(), target))
    graphs = [exported.graph_module]
    for pre_dispatch in (False, True):
        made = make_fx(lambda x: functional.cross_entropy(x, target), pre_dispatch=pre_dispatch)
        graphs.append(made(logits))
        assert_close(graphs[-1](logits), expected)
    for graph in graphs:
        assert "ampfuse" not in graph.code


def test_compiled_loss_keeps_ampfuse_ops_in_the_graphs(device, fresh_compiler):
    logits, target = batch(device)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(torch.nn.CrossEntropyLoss(), fullgraph=True, backend=backend)
    assert_close(results(compiled, logits, target), results(torchs, logits, target))
    for graph in graphs:
        assert any("ampfuse" in str(node.target) for node in graph.graph.nodes)


# --- scalers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [2.0**4, 2.0**16, 3.0, 2.0**24])
def test_gradients_are_correct_with_and_without_a_scaler(device, dtype, scale):
    """Scale the divided loss by the scaler that was used last, by another one, and not at all."""
    logits, target = batch(device, dtype, rows=64)
    scaler, other = (torch.amp.GradScaler(device.type, s) for s in (scale, 2.0**9))
    for one in (other, scaler):
        one.scale(torch.ones((), device=device))
    exact = logits.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(torchs(exact, target), exact)
    finfo = torch.finfo(dtype)
    for divisor in (1, 3, 4):
        for through, times in ((scaler, scale), (other, 2.0**9), (None, 1.0)):
            with torch.autocast(device.type, torch.bfloat16):
                loss = functional.cross_entropy(logits, target) / divisor
            (grad,) = torch.autograd.grad(loss if through is None else through.scale(loss), logits)
            expected = right * times / divisor
            fits = expected.abs() < finfo.max
            tolerances = {"rtol": 2 * finfo.eps, "atol": finfo.tiny * finfo.eps * 2}
            assert_close(grad.double()[fits], expected[fits], **tolerances)
            assert torch.isinf(grad[~fits]).all()


def test_gradients_are_correct_on_threads_with_their_own_scalers(device):
    logits, target = batch(device)
    expected = results(torchs, logits, target)[1]

    def work(number):
        for _ in range(20):
            scaler = torch.amp.GradScaler(device.type, 2.0**number)
            loss = scaler.scale(functional.cross_entropy(logits, target))
            (grad,) = torch.autograd.grad(loss, logits)
            assert_close(grad, expected * 2.0**number)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4, 12)))


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_of_class_probabilities_have_torchs_dtype(device, dtype, is_autocast):
    logits = torch.randn(4, 5, device=device, dtype=dtype, requires_grad=True)
    probabilities = torch.rand(4, 5, device=device).softmax(1)
    for wide in DTYPES:
        weight = torch.ones(5, device=device, dtype=wide)
        with torch.autocast(logits.device.type, torch.bfloat16, is_autocast):
            for other, options in (
                (wide, {}),
                (wide, {"reduction": "none", "label_smoothing": 0.1}),
                (dtype, {"weight": weight}),
            ):
                target = probabilities.to(other)
                loss = functional.cross_entropy(logits, target, **options)
                assert loss.dtype == torchs(logits, target, **options).dtype, wide
                loss.sum().backward()
                assert logits.grad.dtype == dtype
