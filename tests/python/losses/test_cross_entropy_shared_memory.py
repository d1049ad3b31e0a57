"""Tests of rows that need all the shared memory that CUDA gives a block by default: 48 KiB.

Once a kernel has requested more, it keeps that limit, so each case is the first launch of a new
process.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs_cuda

# 48 KiB in packs of 16 bytes: the rows of eight warps, the row of a block, a position per thread.
SHAPES = {
    "float16": [(9, 3072), (2, 24576), (2, 96, 300)],
    "bfloat16": [(9, 3072), (2, 24576), (2, 96, 300)],
    "float32": [(9, 1536), (2, 12288), (2, 48, 300)],
    "float64": [(9, 768), (2, 6144), (2, 24, 300)],
}

FIRST_LAUNCH = """
import ampfuse, torch
from torch.nn import functional

torch.manual_seed(0)
logits = torch.randn({shape}, device="cuda").to(torch.{dtype}).requires_grad_()
target = torch.randint({classes}, logits[:, 0].shape, device="cuda")
wide = logits.detach().double().requires_grad_()
for options in ({{}}, {{"label_smoothing": 0.125}}):  # kernels of their own
    loss = ampfuse.cross_entropy(logits, target, **options)
    expected = functional.cross_entropy(wide, target, **options)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    ours, = torch.autograd.grad(loss, logits)
    torchs, = torch.autograd.grad(expected, wide)
    torch.testing.assert_close(ours.double(), torchs, rtol=1e-2, atol=1e-6)
"""


@pytest.mark.parametrize(
    ("dtype", "shape"), [(dtype, shape) for dtype, shapes in SHAPES.items() for shape in shapes]
)
def test_first_launch_with_48_kib_of_shared_memory_gives_torchs_results(dtype, shape):
    program = FIRST_LAUNCH.format(dtype=dtype, shape=shape, classes=shape[1])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
