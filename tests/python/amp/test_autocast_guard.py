"""AutocastGuard of C++ behaves like torch.autocast, also where one is nested in the other."""

import pytest
import torch
from ampfuse_cpp import AutocastGuard
from torch.utils._python_dispatch import TorchDispatchMode

PAIRS = {
    "AutocastGuard in AutocastGuard": (AutocastGuard, AutocastGuard),
    "AutocastGuard in torch.autocast": (torch.autocast, AutocastGuard),
    "torch.autocast in AutocastGuard": (AutocastGuard, torch.autocast),
}
EVERY_PAIR = pytest.mark.parametrize(("outer", "inner"), PAIRS.values(), ids=PAIRS)


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


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_settings_are_those_of_torch_and_the_dtype_defaults_to_that_of_the_device(device, dtype):
    with torch.autocast(device.type, dtype=dtype):
        expected, product = settings(), dtype_of_product(device)
    with AutocastGuard(device.type, dtype=dtype):
        assert settings() == expected
        assert dtype_of_product(device) == product
    assert dtype_of_product(device) == torch.float32


@EVERY_PAIR
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


def test_a_weight_is_cast_once_in_a_scope_or_at_each_use_without_the_cache(weight, inputs, device):
    for _ in range(2):
        with AutocastGuard(device.type, dtype=torch.bfloat16):
            assert casts(lambda: inputs @ weight) == 1
            assert casts(lambda: inputs @ weight) == 0
    with AutocastGuard(device.type, dtype=torch.bfloat16, cache_enabled=False):
        assert casts(lambda: (inputs @ weight, inputs @ weight)) == 2


@EVERY_PAIR
def test_cached_casts_survive_the_end_of_an_inner_scope(outer, inner, weight, inputs, device):
    with outer(device.type, dtype=torch.bfloat16):
        with inner(device.type, dtype=torch.bfloat16):
            assert casts(lambda: inputs @ weight) == 1
        assert casts(lambda: inputs @ weight) == 0
        with inner(device.type, enabled=False):
            pass
        assert casts(lambda: inputs @ weight) == 0


@EVERY_PAIR
def test_a_weight_changed_between_scopes_is_cast_again(outer, inner, weight, inputs, device):
    with outer(device.type, dtype=torch.bfloat16):
        before = inputs @ weight
    with torch.no_grad():
        weight.mul_(2)
    with inner(device.type, dtype=torch.bfloat16):
        assert torch.equal(inputs @ weight, 2 * before)


def test_a_weight_changed_within_a_scope_is_cast_again_after_clear_cache(weight, inputs, device):
    with AutocastGuard(device.type, dtype=torch.bfloat16):
        before = inputs @ weight
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(inputs @ weight, before)
        AutocastGuard.clear_cache()
        assert torch.equal(inputs @ weight, 2 * before)


def test_a_scope_of_one_device_leaves_autocast_of_another_unchanged():
    of_cuda = settings()[1]
    with AutocastGuard("cpu", dtype=torch.float16):
        assert settings()[:2] == [(True, torch.float16), of_cuda]


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [
        ("cpu", torch.float64, "Disabling"),  # a dtype that autocast does not support
        pytest.param("cuda", None, "CUDA is not available.*Disabling", marks=NO_GPU),
    ],
)
def test_a_scope_that_is_not_supported_warns_and_is_off(device, dtype, words):
    with pytest.warns(UserWarning, match=words), AutocastGuard(device, dtype=dtype):
        enabled = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    assert enabled == [False, False]
