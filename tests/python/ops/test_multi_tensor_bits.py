"""Bits of the multi-tensor ops do not depend on threads, list neighbours or instruction set."""

import ast
import hashlib
import os
import subprocess
import sys

import pytest
import torch
from ampfuse.ops import multi_tensor_norm, multi_tensor_unscale, multi_tensor_unscale_norm
from reference import (
    DTYPES,
    EVERY_DTYPE,
    LONG_AND_SHORT,
    ORDERS,
    SIZES,
    bits,
    heavy_tailed,
    same_bits,
)


def tensor_list(dtype, device):
    return [heavy_tailed(shape, dtype, device, seed=i) for i, shape in enumerate(LONG_AND_SHORT)]


@EVERY_DTYPE
def test_results_do_not_depend_on_the_number_of_threads(set_threads, dtype):
    given = tensor_list(dtype, torch.device("cpu"))

    def results():
        norms = [x for ord in ORDERS for x in multi_tensor_norm(given, ord)[:3]]
        unscaled = [x.clone() for x in given]
        multi_tensor_unscale(unscaled, torch.zeros(()), torch.tensor(1 / 3))
        return [*norms, *unscaled]

    set_threads(1)
    expected = results()
    for threads in (2, 3):
        set_threads(threads)
        assert all(map(same_bits, results(), expected)), threads


@EVERY_DTYPE
def test_norm_of_a_tensor_is_the_same_again_and_among_any_neighbours(device, dtype):
    tensors = tensor_list(dtype, device)
    for ord in ORDERS:
        first = multi_tensor_norm(tensors, ord)
        together = first.norms
        backwards = multi_tensor_norm(tensors[::-1], ord).norms.flip(0)
        alone = [multi_tensor_norm([tensor], ord) for tensor in tensors]
        in_two_lists = [multi_tensor_norm(part, ord).norms for part in (tensors[:4], tensors[4:])]
        after_itself = multi_tensor_norm(tensors + tensors, ord).norms[len(tensors) :]

        assert same_bits(backwards, together)
        assert same_bits(torch.cat([result.norms for result in alone]), together)
        assert same_bits(torch.stack([result.total_norm for result in alone]), together)
        assert same_bits(torch.cat(in_two_lists), together)
        assert same_bits(after_itself, together)
        for _ in range(5):
            assert all(map(same_bits, multi_tensor_norm(tensors, ord)[:3], first[:3]))


def test_norm_of_a_tensor_does_not_depend_on_neighbours_of_other_dtypes(device):
    tensors = tensor_list(torch.bfloat16, device)
    narrow_neighbours = [heavy_tailed(8193, torch.float16, device) for _ in tensors]
    mixed = [tensor for pair in zip(narrow_neighbours, tensors, strict=True) for tensor in pair]

    for ord in ORDERS:
        among, alone = (multi_tensor_norm(x, ord).norms for x in (mixed, tensors))
        assert same_bits(among[1::2], alone)


@pytest.mark.vectorised
def test_norm_of_a_dense_tensor_on_the_cpu_does_not_depend_on_its_alignment():
    for dtype in DTYPES:
        numbers = heavy_tailed(8193, dtype, torch.device("cpu"))
        shifted = torch.cat([numbers[:1], numbers])[1:]  # one element further in its storage

        assert same_bits(multi_tensor_norm([shifted])[0], multi_tensor_norm([numbers])[0]), dtype


def report():
    """Return the instruction set, and the norms and digests of unscaled tensors of each dtype."""
    sizes = [*SIZES, *range(8000, 8150)]  # many: a difference in rounding shows in few norms
    reports = {}
    for dtype in DTYPES:
        given = [heavy_tailed(size, dtype, torch.device("cpu"), seed=size) for size in sizes]
        for ord in ORDERS:
            tensors = [x.clone() for x in given]
            after = multi_tensor_unscale_norm(tensors, torch.zeros(()), torch.tensor(1 / 3), ord)
            written = b"".join(bits(tensor).numpy().tobytes() for tensor in tensors)
            results = (multi_tensor_norm(given, ord), after)
            norms = [x.item().hex() for result in results for x in (result[0], *result[1])]
            reports[f"{dtype} {ord}"] = norms, hashlib.sha256(written).hexdigest()
    return torch.backends.cpu.get_cpu_capability().lower(), reports


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="this processor has one instruction set only",
)
def test_instruction_sets_give_the_same_bits():
    _, expected = report()
    for capability in ("avx2", "default"):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", f"import {__name__} as it\nprint(it.report())"],
            env=environment | {"ATEN_CPU_CAPABILITY": capability},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ast.literal_eval(done.stdout) == (capability, expected)
