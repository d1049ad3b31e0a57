"""The CUDA runtime inside the library of kernels, beside that of torch."""

import subprocess
import sys

import pytest

CAPTURED = """
import ampfuse, torch
ones = [torch.ones(1000, device="cuda")]
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    norm = ampfuse.ops.multi_tensor_norm(ones, 1).total_norm
graph.replay()
print(norm.item())
"""


@pytest.mark.needs_cuda
def test_first_call_of_a_process_may_be_captured():
    """So the runtime starts, and loads the kernels, during a capture that torch's has begun."""
    done = subprocess.run([sys.executable, "-c", CAPTURED], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1000.0\n", "")
