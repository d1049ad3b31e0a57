"""Capture of a step in a CUDA graph."""

import torch


def capture(step):
    """Return a graph of `step` and the results that replays overwrite.

    The step runs once before, so that torch allocates what it keeps.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
