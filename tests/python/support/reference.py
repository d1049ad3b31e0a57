"""Inputs of the multi-tensor tests, and the exact results in float64, without ampfuse."""

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies

DTYPES_16_BIT = [torch.float16, torch.bfloat16]
REAL = [*DTYPES_16_BIT, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*REAL, *COMPLEX]
ORDERS = [1.0, 2.0, math.inf]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
EVERY_ORDER = pytest.mark.parametrize("ord", ORDERS)

SIZES = [
    *(0, 1),
    *(31, 32, 33),  # the CPU adds up in 32 lanes, and a warp has 32 lanes
    *(255, 256, 257),  # a warp loads 256 16-bit elements at once, 16 bytes per lane
    *(8191, 8192, 8193),  # a chunk, the unit of work
    *(65535, 65536, 65537),  # several chunks, and the limit of a 16-bit index
]

# Sizes of a list that three threads share: none is woken for less than 32768 elements. The cuts
# between shares depend on the number of threads. Tensors without one are in between.
LONG_AND_SHORT = [65537, 1, 8193, 33, 257, 40_000, 8192, 0, 100_000]

# A shape and a view for each kind of memory layout. Sizes are odd, so that rows start at all
# alignments.
VIEWS = {
    "contiguous": ((37, 41), lambda x: x),
    "scalar": ((3,), lambda x: x[1]),
    "empty": ((0, 5), lambda x: x),
    "transposed": ((37, 41), lambda x: x.t()),
    "permuted": ((5, 7, 11), lambda x: x.permute(2, 0, 1)),
    "channels_last": ((2, 5, 3, 7), lambda x: x.to(memory_format=torch.channels_last)),
    "offset by one element": ((8194,), lambda x: x[1:]),
    "every second column": ((37, 41), lambda x: x[:, ::2]),
    "every second row": ((401, 41), lambda x: x[::2]),
}


def scalar(value, device, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, device=device)


def heavy_tailed(shape, dtype, device, seed=0):
    """Return signed, log-uniform numbers of 1e-4 … 1e4, which are normal in every dtype."""
    random = np.random.default_rng(seed)  # torch's could vary with the instruction set

    def numbers():
        return random.choice([-1.0, 1.0], shape) * 10 ** random.uniform(-4, 4, shape)

    values = numbers() + 1j * numbers() if dtype.is_complex else numbers()
    return torch.from_numpy(np.asarray(values)).to(device=device, dtype=dtype)


def random_bits(size, dtype, device):
    """Return random bits: NaNs with payloads, infinities, subnormals, and -0.0 at both ends."""
    noise = bytearray(np.random.default_rng(0).bytes(size * dtype.itemsize))
    numbers = torch.frombuffer(noise, dtype=dtype).to(device)
    numbers[0] = numbers[-1] = -0.0
    return numbers


def view(name, dtype, device, seed=0):
    """Return heavy-tailed numbers with the memory layout of this name in VIEWS."""
    shape, take = VIEWS[name]
    return take(heavy_tailed(shape, dtype, device, seed))


def memory_between(tensor):
    """Return the storage of a view, and a mask of its elements that are not in the view."""
    storage = tensor if tensor._base is None else tensor._base
    between = torch.ones_like(storage, dtype=torch.bool)
    between.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return storage, between


def parameters_with_gradients(device, dtypes=(torch.float32,) * 4, seed=0):
    """Return four parameters, one 0-dim and one longer than a chunk, with gradients."""
    parameters = []
    for i, (shape, dtype) in enumerate(zip([(33, 5), (), (8193,), (2, 3)], dtypes, strict=True)):
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        parameter.grad = heavy_tailed(shape, dtype, device, seed + i)
        parameters.append(parameter)
    return parameters


def gradients(parameters):
    """Return the gradients of parameters that all have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


# Recipes of lists that mix dtypes and views, for hypothesis.
mixtures = strategies.lists(
    strategies.tuples(
        strategies.sampled_from(list(VIEWS)),
        strategies.sampled_from(DTYPES),
        strategies.integers(0, 2**16),
    ),
    max_size=6,
)


def mixture(recipe, device):
    """Return the list that a recipe describes."""
    return [view(name, dtype, device, seed) for name, dtype, seed in recipe]


def real_parts(x):
    """Return the real numbers in `x`: two for a complex number."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def exact_norm(tensors, ord):
    """Return the norm of the list as one vector, exact to about an ulp of a double if finite."""
    if ord == 2:
        parts = [real_parts(x).flatten().double().tolist() for x in tensors]
        return math.hypot(*(number for part in parts for number in part))
    magnitudes = [abs(number) for x in tensors for number in x.flatten().tolist()]
    return math.fsum(magnitudes) if ord == 1 else max(magnitudes, default=0.0)


def norm_dtype(tensors):
    """Return the dtype of the norm of a list."""
    double = any(x.dtype in (torch.float64, torch.complex128) for x in tensors)
    return torch.float64 if double else torch.float32


def norm_tolerance(norm, tensors):
    """Return the allowed relative error of the norm of a list.

    The CPU adds in double, so a float32 norm has one rounding, 2⁻²⁴. On a GPU a lane adds its 256
    elements of a chunk, in float32 (doubles in float64), and then lanes are joined: fewer than 300
    roundings. A float64 norm has fewer roundings than that, too. But a chunk whose squares leave
    the range is read again, its 8192 elements one after the other: 2¹³·2⁻⁵³.
    """
    if norm.is_cuda and any(norm_dtype([x]) == torch.float32 for x in tensors):
        return 300 * 2.0**-24
    return 2.0**-40 if norm.dtype == torch.float64 else 2.0**-24 + 2.0**-44


def assert_norm(norm, tensors, ord):
    """Compare a 0-dim norm with the exact norm of the list."""
    expected = exact_norm(tensors, ord)
    subnormal_step = torch.finfo(norm.dtype).smallest_normal * torch.finfo(norm.dtype).eps
    assert norm.item() == pytest.approx(
        expected, rel=norm_tolerance(norm, tensors), abs=subnormal_step
    )


def exact_product(x, factor):
    """Return x · factor, rounded as the contract defines it.

    The product is rounded to float32, or to float64 for doubles, and 16-bit results are rounded
    once more. A double holds the product of two floats exactly, so `.float()` rounds it once.
    """
    numbers = real_parts(x)
    product = numbers.double() * factor.double()
    if numbers.dtype != torch.float64:
        product = product.float().to(numbers.dtype)
    return torch.view_as_complex(product) if x.is_complex() else product


def bits(x):
    """Return the bits of `x` as integers, to compare NaN payloads and the sign of zero, too."""
    numbers = real_parts(x)
    return numbers.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.element_size()]
    )


def same_bits(a, b):
    """Return True if two tensors agree in dtype, shape and every bit."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def freed(like):
    """Return a copy of a tensor in a storage that was freed, as some frameworks do between uses.

    Its address is an offset, and so not null.
    """
    copy = torch.stack([like, like])[1]
    copy.untyped_storage().resize_(0)
    return copy


def assert_call_refused(call, arguments, error, message):
    """Check that a call raises exactly this error and changes no value and no version."""
    items = [x for value in arguments.values() for x in (value if type(value) is list else [value])]
    tensors = [
        x
        for x in items
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and x.device.type != "meta"
        if x.untyped_storage().nbytes() > 0
    ]
    before = [(x.detach().clone(), x._version) for x in tensors]

    with pytest.raises(error, match=message) as raised:
        call(**arguments)

    assert raised.type is error
    for tensor, (values, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values)
        assert tensor._version == version


def free_gib(device):
    """Return the free memory of the device, in GiB."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0] / 2**30
    with open("/proc/meminfo") as file:
        available = next(line for line in file if line.startswith("MemAvailable"))
    return int(available.split()[1]) / 2**20
