"""Steps with moments in 8 bits, random rounding and averages: values, errors, compiler.

That the bits are those of their definition is tested in C++, for the CPU and for CUDA kernels.
"""

import pytest
import torch
from adam_reference import OPTIONS
from ampfuse.ops import decode_moment, encode_moment, fused_adam, fused_sgd
from reference import heavy_tailed, same_bits
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DTYPES_16_BIT = [torch.float16, torch.bfloat16]


def coded_step(param, grad, *, count=0, moments=None, lr=0.01, **options):
    """Take a step with 8-bit moments of one parameter; return them, decoded."""
    first, second = moments or (torch.zeros_like(param).float(),) * 2
    m, of_m = encode_moment(first, is_signed=True)
    v, of_v = encode_moment(second, is_signed=False)
    masters = options.pop("masters", ())
    step = torch.tensor(float(count), device=param.device)
    fused_adam(
        [param],
        [grad],
        [m],
        [v],
        [],
        [step],
        masters,
        lr=torch.tensor(lr, dtype=torch.float64),
        units=[of_m, of_v],
        **OPTIONS | options,
    )
    return decode_moment(m, of_m), decode_moment(v, of_v)


@pytest.mark.vectorised
@pytest.mark.parametrize("size", [0, 1, 31, 257, 8193])
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES_16_BIT])
def test_moments_are_within_a_code_of_the_exact_ones(device, dtype, size):
    param = heavy_tailed((size,), dtype, device)
    grad = heavy_tailed((size,), dtype, device, seed=1).clamp(-1, 1)
    old = [decode_moment(*encode_moment(x, is_signed=s)) for x, s in old_moments(size, device)]
    exact = (
        0.9 * old[0].double() + 0.1 * grad.double(),
        0.999 * old[1].double() + 0.001 * grad.double().square(),
    )

    found = coded_step(param, grad, count=3, moments=tuple(old))

    for number, expected, most in zip(found, exact, (127, 255), strict=True):
        roots = [x.double().sign() * x.double().abs().sqrt() for x in (number, expected)]
        for group, of_group in zip(roots[0].split(32), roots[1].split(32), strict=True):
            # Units are rounded up to a bfloat16, by less than 1/128.
            code = of_group.abs().max() / most * (1 + 1 / 127) if group.numel() else 0
            assert ((group - of_group).abs() <= code).all()


def old_moments(size, device):
    first = heavy_tailed((size,), torch.float32, device, seed=2) / 1e4
    return (first, True), (heavy_tailed((size,), torch.float32, device, seed=3).square(), False)


@pytest.mark.vectorised
def test_moments_are_right_on_average(device):
    # A second moment that shrinks by a thousandth, an eighth of a code, shrinks in each step.
    count = 32 * 400
    second = torch.rand(count, device=device)
    param = torch.zeros(count, device=device)
    moments = (torch.zeros(count, device=device), second)
    before = decode_moment(*encode_moment(second, is_signed=False))

    _, after = coded_step(param, torch.zeros_like(param), count=3, moments=moments)

    torch.testing.assert_close(
        after.double().mean() / before.double().mean(),
        torch.tensor(0.999, dtype=torch.float64),
        rtol=1e-4,
        atol=0,
    )


@pytest.mark.vectorised
def test_the_largest_moment_of_a_group_keeps_the_largest_code(device):
    # The root is an ulp above 255 units, so some random numbers would round it to code 256.
    root = float.fromhex("0x1.00fe06p+0")
    grad = torch.full((100_000, 32), 0.5, device=device)
    grad[:, 0] = root

    _, second = coded_step(torch.zeros_like(grad), grad, beta1=0.0, beta2=0.0)

    assert (second[:, 0] > 0.999 * root**2).all()


@pytest.mark.vectorised
@pytest.mark.parametrize("value", [1e21, torch.inf, torch.nan])
def test_a_moment_that_overflows_makes_those_of_its_32_elements_nan(device, value):
    grad = torch.ones(96, device=device)
    grad[40] = value

    _, second = coded_step(torch.zeros_like(grad), grad)

    assert second[32:64].isnan().all()
    assert second[:32].isfinite().all()
    assert second[64:].isfinite().all()


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_averages_are_those_of_torch(device, dtype):
    module = torch.nn.Linear(37, 5).to(device, dtype)
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    params = [param.detach() for param in module.parameters()]
    emas = [torch.full_like(param, torch.nan) for param in params]
    steps = [torch.zeros((), device=device) for _ in params]
    for step in range(5):
        grads = [heavy_tailed(tuple(p.shape), dtype, device, step).clamp(-1, 1) for p in params]
        fused_sgd(
            params,
            grads,
            state_steps=steps,
            lr=torch.tensor(0.1, dtype=torch.float64),
            ema_params=emas,
            ema_decay=0.9,
        )
        averaged.update_parameters(module)
    for ema, expected in zip(emas, averaged.module.parameters(), strict=True):
        eps = torch.finfo(dtype).eps
        assert ((ema - expected).abs() <= 1.01 * eps * expected.abs()).all()


@pytest.mark.vectorised
def test_a_bfloat16_average_follows_small_changes_on_average(device):
    count = 8192
    params = torch.full((count,), 1.0, device=device)
    ema = torch.full((count,), 1.5, dtype=torch.bfloat16, device=device)
    steps = torch.ones((), device=device)
    for _ in range(200):
        fused_sgd(
            [params],
            [torch.zeros_like(params)],
            state_steps=[steps],
            lr=torch.tensor(0.1, dtype=torch.float64),
            ema_params=[ema],
            ema_decay=0.999,
        )
    # Each step changes the average by a tenth of its last place, or less.
    assert abs(ema.float().mean().item() - (1 + 0.5 * 0.999**200)) < 1e-3


def test_a_nan_gradient_makes_its_group_nan_and_no_other(device):
    param = torch.ones(96, device=device)
    grad = torch.ones(96, device=device)
    grad[40] = torch.nan
    first, second = coded_step(param, grad)
    for moment in (first, second):
        assert moment.isnan().sum() == 32
    assert param.isnan().nonzero().flatten().tolist() == [40]


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_skipped_step_writes_neither_codes_nor_units(device, found_inf):
    param = torch.ones(96, device=device, dtype=torch.bfloat16)
    moments = (torch.randn(96, device=device), torch.rand(96, device=device))
    before = [encode_moment(x, is_signed=s) for x, s in zip(moments, (True, False), strict=True)]
    found = torch.tensor(found_inf, device=device)
    after = coded_step(param, param.clone(), moments=moments, round_at_random=True, found_inf=found)
    is_same = [torch.equal(decode_moment(*x), y) for x, y in zip(before, after, strict=True)]
    assert is_same == [bool(found_inf)] * 2
    assert (param == 1).all() == bool(found_inf)


@pytest.mark.vectorised
def test_strided_parameters_step_as_dense_ones(device):
    wide = torch.randn(64, 2, device=device, dtype=torch.bfloat16)
    dense = wide[:, 0].clone()
    grad = torch.randn(64, device=device, dtype=torch.bfloat16)
    found = coded_step(wide[:, 0], grad, round_at_random=True)
    expected = coded_step(dense, grad, round_at_random=True)
    assert same_bits(wide[:, 0], dense)
    assert all(map(same_bits, found, expected))


def arguments(device):
    param = torch.ones(40, 3, device=device, dtype=torch.bfloat16)
    m, of_m = encode_moment(torch.zeros_like(param), is_signed=True)
    v, of_v = encode_moment(torch.zeros_like(param), is_signed=False)
    lists = [[param], [param.clone()], [m], [v], [], [torch.zeros((), device=device)], []]
    keywords = {
        "lr": torch.tensor(0.1, dtype=torch.float64),
        "units": [of_m, of_v],
        "ema_params": [torch.zeros_like(param, dtype=torch.float32)],
        "ema_decay": 0.5,
        "round_at_random": True,
        "seed": 5,
        "first_indices": [8],
    }
    return lists, OPTIONS | keywords


REFUSED = {
    "amsgrad": (lambda a, k: k.update(amsgrad=True) or a[4].append(a[3][0]), "with amsgrad"),
    "too few units": (lambda a, k: k["units"].pop(), "units: expected 2 tensors, one for each"),
    "short units": (
        lambda a, k: k.update(units=[k["units"][0][:3], k["units"][1]]),
        r"units\[0\]: expected a contiguous tensor of shape \[4\]",
    ),
    "float32 units": (
        lambda a, k: k.update(units=[x.float() for x in k["units"]]),
        r"units\[0\]: expected bfloat16, got float32",
    ),
    "signed second moments": (
        lambda a, k: a.__setitem__(3, a[2]),
        r"exp_avg_sqs\[0\]: expected uint8, a code with a unit, got int8",
    ),
    "codes without units": (
        lambda a, k: k.update(units=[]),
        r"exp_avgs\[0\]: expected float32 or bfloat16, got int8",
    ),
    "float64 parameters": (
        lambda a, k: [a.__setitem__(i, [a[i][0].double()]) for i in (0, 1)],
        r"exp_avgs\[0\]: expected no 8-bit moment, since the parameter is float64",
    ),
    "another memory format": (
        lambda a, k: a.__setitem__(2, [a[2][0].t().contiguous().t()]),
        r"exp_avgs\[0\]: expected the strides of params\[0\], \[3, 1\], got \[1, 40\]; 8-bit",
    ),
    "an average of another shape": (
        lambda a, k: k.update(ema_params=[torch.zeros(3)]),
        r"ema_params\[0\]: expected shape",
    ),
    "a decay of 1": (
        lambda a, k: k.update(ema_decay=1.0),
        "ema_decay: expected 0 <= ema_decay < 1",
    ),
    "too many indices": (
        lambda a, k: k.update(first_indices=[0, 8]),
        "first_indices: expected none, or 1, one for each of params, got 2",
    ),
    "no steps": (lambda a, k: a[5].clear(), "state_steps: expected 1 tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_and_nothing_is_written(device, name):
    spoil, message = REFUSED[name]
    lists, keywords = arguments(device)
    spoil(lists, keywords)
    tensors = [x for column in lists for x in column] + keywords["units"] + keywords["ema_params"]
    before = [x.clone() for x in tensors]
    with pytest.raises((TypeError, ValueError), match="fused_adam: .*" + message):
        fused_adam(*lists, **keywords)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


@pytest.mark.parametrize("layout", ["contiguous", "empty"])
def test_opcheck_passes(device, layout):
    lists, keywords = arguments(device)
    if layout == "empty":
        lists = [[x[:0] if x.dim() else x for x in column] for column in lists]
        keywords["units"] = [x[:0] for x in keywords["units"]]
        keywords["ema_params"] = [x[:0] for x in keywords["ema_params"]]
    torch.library.opcheck(torch.ops.ampfuse.fused_adam.default, tuple(lists), keywords)


def test_versions_of_codes_units_and_averages_rise(device):
    lists, keywords = arguments(device)
    tensors = [lists[0][0], lists[2][0], lists[3][0], *keywords["units"], *keywords["ema_params"]]
    before = [x._version for x in tensors]
    fused_adam(*lists, **keywords)
    assert [x._version for x in tensors] == [version + 1 for version in before]


def test_compiled_step_has_the_bits_of_an_eager_one(device):
    lists, keywords = arguments(device)
    others, other_keywords = arguments(device)
    compiled = torch.compile(fused_adam, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        fused_adam(*lists, **keywords)
        compiled(*others, **other_keywords)
    tensors = [x for column in lists for x in column] + keywords["units"] + keywords["ema_params"]
    expected = [x for column in others for x in column]
    expected += other_keywords["units"] + other_keywords["ema_params"]
    assert all(torch.equal(x, y) for x, y in zip(tensors, expected, strict=True))
