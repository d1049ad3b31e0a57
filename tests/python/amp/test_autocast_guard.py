"""AutocastGuard of C++ behaves like torch.autocast: one suite tests both, also nested together."""

import threading

import pytest
import torch
from ampfuse_cpp import AutocastGuard
from torch.utils._python_dispatch import TorchDispatchMode

CONTEXTS = {"torch.autocast": torch.autocast, "AutocastGuard": AutocastGuard}
EVERY_CONTEXT = pytest.mark.parametrize("autocast", CONTEXTS.values(), ids=list(CONTEXTS))
PAIRS = pytest.mark.parametrize(
    ("outer", "inner"),
    [(a, b) for a in CONTEXTS.values() for b in CONTEXTS.values()],
    ids=[f"{b} in {a}" for a in CONTEXTS for b in CONTEXTS],
)


def settings():
    """Return the autocast settings of this thread."""
    devices = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    ]
    return [*devices, torch.is_autocast_cache_enabled()]


def dtype_of_product(device):
    x = torch.ones(2, 2, device=device)
    return (x @ x).dtype


class Casts(TorchDispatchMode):
    """Mode that counts the casts between dtypes."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def casts(call):
    with Casts() as counted:
        call()
    return counted.count


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Check that each test leaves the settings and the nesting depth as it found them."""
    before = settings()
    yield
    assert settings() == before
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


@pytest.fixture
def weight(device):
    return torch.nn.Parameter(torch.ones(4, 4, device=device))


@pytest.fixture
def inputs(device):
    return torch.ones(1, 4, device=device, dtype=torch.bfloat16)


@EVERY_CONTEXT
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_dtype_defaults_to_the_autocast_dtype_of_the_device(device, autocast, dtype):
    expected = dtype or {"cpu": torch.bfloat16, "cuda": torch.float16}[device.type]

    with autocast(device.type, dtype=dtype):
        assert dtype_of_product(device) == expected
        assert torch.get_autocast_dtype(device.type) == expected
    assert dtype_of_product(device) == torch.float32


@PAIRS
def test_nested_scopes_restore_the_settings_of_the_outer_scope(device, outer, inner):
    with outer(device.type, dtype=torch.bfloat16):
        before = settings()
        with inner(device.type, dtype=torch.float16, cache_enabled=False):
            assert dtype_of_product(device) == torch.float16
            assert not torch.is_autocast_cache_enabled()
            with outer(device.type, enabled=False):
                assert dtype_of_product(device) == torch.float32
            assert dtype_of_product(device) == torch.float16
        assert settings() == before
        assert dtype_of_product(device) == torch.bfloat16


@PAIRS
def test_settings_are_restored_after_an_exception(device, outer, inner):
    with (
        pytest.raises(RuntimeError, match="thrown"),
        outer(device.type),
        inner(device.type, dtype=torch.float16, cache_enabled=False),
    ):
        raise RuntimeError("thrown")


@EVERY_CONTEXT
def test_a_weight_is_cast_once_in_a_scope(autocast, weight, inputs, device):
    with autocast(device.type, dtype=torch.bfloat16):
        assert casts(lambda: inputs @ weight) == 1
        assert casts(lambda: inputs @ weight) == 0
    with autocast(device.type, dtype=torch.bfloat16):
        assert casts(lambda: inputs @ weight) == 1


@EVERY_CONTEXT
def test_a_weight_is_cast_at_each_use_without_the_cache(autocast, weight, inputs, device):
    with autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
        assert casts(lambda: (inputs @ weight, inputs @ weight)) == 2


@PAIRS
def test_cached_casts_survive_the_end_of_an_inner_scope(outer, inner, weight, inputs, device):
    with outer(device.type, dtype=torch.bfloat16):
        with inner(device.type, dtype=torch.bfloat16):
            assert casts(lambda: inputs @ weight) == 1
        assert casts(lambda: inputs @ weight) == 0
        with inner(device.type, enabled=False):
            pass
        assert casts(lambda: inputs @ weight) == 0


@PAIRS
def test_a_weight_changed_between_scopes_is_cast_again(outer, inner, weight, inputs, device):
    with outer(device.type, dtype=torch.bfloat16):
        before = inputs @ weight
    with torch.no_grad():
        weight.mul_(2)
    with inner(device.type, dtype=torch.bfloat16):
        assert torch.equal(inputs @ weight, 2 * before)


@EVERY_CONTEXT
def test_a_weight_changed_within_a_scope_is_cast_again_after_clear_cache(
    autocast, weight, inputs, device
):
    with autocast(device.type, dtype=torch.bfloat16):
        before = inputs @ weight
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(inputs @ weight, before)
        AutocastGuard.clear_cache()
        assert torch.equal(inputs @ weight, 2 * before)


@EVERY_CONTEXT
def test_weight_grad_is_not_none_if_a_no_grad_forward_came_first(autocast, weight, inputs, device):
    with autocast(device.type, dtype=torch.bfloat16):
        with torch.no_grad():
            inputs @ weight
        (inputs @ weight).sum().backward()
    assert weight.grad is not None


@EVERY_CONTEXT
def test_a_weight_gets_a_gradient_after_a_forward_in_inference_mode(
    autocast, weight, inputs, device
):
    with autocast(device.type, dtype=torch.bfloat16):
        with torch.inference_mode():
            inputs @ weight
        (inputs @ weight).sum().backward()
    assert weight.grad is not None


@EVERY_CONTEXT
def test_autocast_stays_off_in_other_threads(device, autocast):
    found = []
    with autocast(device.type):
        thread = threading.Thread(target=lambda: found.append(dtype_of_product(device)))
        thread.start()
        thread.join()
    assert found == [torch.float32]


@EVERY_CONTEXT
def test_gradients_equal_those_of_16_bit_products(device, autocast, weight, inputs):
    with autocast(device.type, dtype=torch.bfloat16):
        loss = (inputs @ weight).float().square().sum()
    loss.backward()

    half = weight.detach().bfloat16().requires_grad_()
    (inputs @ half).float().square().sum().backward()
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, half.grad.float())


@EVERY_CONTEXT
def test_a_scope_of_one_device_leaves_autocast_of_another_unchanged(autocast):
    with autocast("cpu", dtype=torch.float16):
        cuda = torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cpu") == torch.float16
    assert torch.is_autocast_enabled("cuda") == cuda


def enabled_with_warning(make, words):
    """Return True if autocast is on in a context that warns when it is made or entered."""
    with pytest.warns(UserWarning, match=words), make():
        return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@EVERY_CONTEXT
def test_a_cpu_scope_with_an_unsupported_dtype_warns_and_is_off(autocast):
    assert not enabled_with_warning(lambda: autocast("cpu", dtype=torch.float64), "Disabling")


@EVERY_CONTEXT
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_scope_without_a_gpu_warns_and_is_off(autocast):
    assert not enabled_with_warning(lambda: autocast("cuda"), "CUDA is not available.*Disabling")


@EVERY_CONTEXT
def test_an_unknown_device_is_refused(autocast):
    with pytest.raises(RuntimeError):
        autocast("toaster").__enter__()
