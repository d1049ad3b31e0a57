"""Bits of the multi-tensor ops do not depend on threads, list neighbours or instruction set."""

import functools
import os
import subprocess
import sys

import pytest
import torch
from ampfuse.ops import multi_tensor_norm, multi_tensor_unscale
from reference import DTYPES, ORDERS, heavy_tailed, same_bits

# Three threads get a share each: no thread is woken for less than 32768 elements. The cuts between
# shares depend on the number of threads. Small tensors are in between.
SHAPES = [65537, 1, 8193, 33, 257, 40_000, 8192, 0, 100_000]


def tensor_list(dtype, device):
    return [heavy_tailed(shape, dtype, device, seed=i) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [2, 3])
def test_norm_does_not_depend_on_the_number_of_threads(set_threads, dtype, ord, threads):
    tensors = tensor_list(dtype, torch.device("cpu"))
    set_threads(1)
    expected = multi_tensor_norm(tensors, ord)

    set_threads(threads)
    result = multi_tensor_norm(tensors, ord)

    assert all(map(same_bits, result[:3], expected[:3]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [2, 3])
def test_unscaled_values_do_not_depend_on_the_number_of_threads(set_threads, dtype, threads):
    alone, shared = tensor_list(dtype, torch.device("cpu")), tensor_list(dtype, torch.device("cpu"))
    third = torch.tensor(1 / 3)

    set_threads(1)
    multi_tensor_unscale(alone, torch.zeros(()), third)
    set_threads(threads)
    multi_tensor_unscale(shared, torch.zeros(()), third)

    assert all(map(same_bits, alone, shared))


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_tensor_does_not_depend_on_its_neighbours(device, dtype, ord):
    tensors = tensor_list(dtype, device)

    together = multi_tensor_norm(tensors, ord).norms
    backwards = multi_tensor_norm(tensors[::-1], ord).norms.flip(0)
    alone = torch.cat([multi_tensor_norm([tensor], ord).norms for tensor in tensors])
    in_two_lists = torch.cat([multi_tensor_norm(part, ord).norms for part in halves(tensors)])
    after_itself = multi_tensor_norm(tensors + tensors, ord).norms[len(tensors) :]

    assert same_bits(backwards, together)
    assert same_bits(alone, together)
    assert same_bits(in_two_lists, together)
    assert same_bits(after_itself, together)


def halves(tensors):
    return tensors[:4], tensors[4:]


@pytest.mark.parametrize("ord", ORDERS)
def test_norm_of_a_tensor_does_not_depend_on_neighbours_of_other_dtypes(device, ord):
    tensors = tensor_list(torch.bfloat16, device)
    narrow_neighbours = [heavy_tailed(8193, torch.float16, device) for _ in tensors]
    mixed = [tensor for pair in zip(narrow_neighbours, tensors, strict=True) for tensor in pair]

    assert same_bits(multi_tensor_norm(mixed, ord).norms[1::2], multi_tensor_norm(tensors, ord)[1])


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_call_gives_the_same_bits_again(device, dtype, ord):
    tensors = tensor_list(dtype, device)
    first = multi_tensor_norm(tensors, ord)

    for _ in range(5):
        assert all(map(same_bits, multi_tensor_norm(tensors, ord)[:3], first[:3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_dense_tensor_on_the_cpu_does_not_depend_on_its_alignment(dtype):
    numbers = heavy_tailed(8193, dtype, torch.device("cpu"))
    shifted = torch.cat([numbers[:1], numbers])[1:]  # one element further in its storage

    assert same_bits(multi_tensor_norm([shifted])[0], multi_tensor_norm([numbers])[0])


# A program that prints a line for each dtype: norms, and a digest of the unscaled tensors.
REPORT = """
import hashlib
import torch
from reference import DTYPES, ORDERS, SIZES, bits, heavy_tailed
from ampfuse.ops import multi_tensor_norm, multi_tensor_unscale_norm

print(torch.backends.cpu.get_cpu_capability())
for dtype in DTYPES:
    for ord in ORDERS:
        sizes = [*SIZES, *range(8000, 8150)]  # many: a difference in rounding shows in few norms
        tensors = [heavy_tailed(size, dtype, torch.device("cpu"), seed=size) for size in sizes]
        norms = multi_tensor_norm(tensors, ord)
        after = multi_tensor_unscale_norm(tensors, torch.zeros(()), torch.tensor(1 / 3), ord)
        written = b"".join(bits(tensor).numpy().tobytes() for tensor in tensors)
        for result in (norms, after):
            numbers = [result.total_norm.item(), *result.norms.tolist()]
            print(*(number.hex() for number in numbers), end=" ")
        print(hashlib.sha256(written).hexdigest(), end=" ")
    print()
"""


@pytest.fixture(scope="module")
def report_of():
    """Return a function that runs REPORT with an instruction set and returns a line per dtype."""

    @functools.cache
    def run(capability):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        environment["ATEN_CPU_CAPABILITY"] = capability
        done = subprocess.run(
            [sys.executable, "-c", REPORT],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        used, *lines = done.stdout.splitlines()
        assert used.lower() == capability
        return dict(zip(DTYPES, lines, strict=True))

    return run


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="this processor has one instruction set only",
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_instruction_sets_give_the_same_bits(report_of, capability, dtype):
    best = torch.backends.cpu.get_cpu_capability().lower()

    assert report_of(capability)[dtype] == report_of(best)[dtype]
