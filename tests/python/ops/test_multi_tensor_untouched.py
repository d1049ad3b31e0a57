"""At factor 1 the ops write nothing: here memory is read-only, and a store ends the process."""

import os
import signal
import subprocess
import sys

import pytest

SCRIPT = """
import mmap
import resource
import warnings
import torch
from ampfuse.ops import multi_tensor_clip, multi_tensor_unscale, multi_tensor_unscale_norm

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
warnings.filterwarnings("ignore", message="The given buffer is not writable")
zeros = mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ)
tensors = [torch.frombuffer(zeros, dtype=dtype)[{cut}] for dtype in
           (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)]
for tensor in tensors:
    {call}
    print(tensor.dtype)
"""
CALLS = {
    "unscale": "multi_tensor_unscale([tensor], torch.zeros(()), torch.tensor({factor}))",
    "unscale_norm": "multi_tensor_unscale_norm([tensor], torch.zeros(()), torch.tensor({factor}))",
    "clip": "multi_tensor_clip([tensor], torch.tensor(1.0), 2 * {factor})",
}


def survives(call, factor, cut):
    """Return True if a process survives a call on read-only memory."""
    script = SCRIPT.format(call=CALLS[call].format(factor=factor), cut=cut)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, -signal.SIGSEGV), done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("cut", [":", "::2"])
@pytest.mark.parametrize("call", CALLS)
def test_factor_one_writes_nothing(call, cut):
    assert survives(call, 1.0, cut)


def test_factor_one_half_writes_and_ends_the_process():
    assert not survives("unscale", 0.5, ":")
