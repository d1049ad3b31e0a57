"""`ampfuse.memory.read_snapshot`: what was live at the peak of a recorded history."""

import pickle

import pytest
from ampfuse.memory import read_snapshot

SITE = "/usr/lib/python3/site-packages"


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


FORWARD = [
    frame("??", 0, "at::native::linear"),
    frame(f"{SITE}/torch/nn/modules/linear.py", 125, "forward"),
    frame("/home/me/model.py", 12, "forward"),
    frame("/home/me/train.py", 30, "<module>"),
]
STEP = [
    frame(f"{SITE}/torch/optim/adamw.py", 90, "step"),
    frame("/home/me/train.py", 33, "<module>"),
]
BACKWARD = [frame("??", 0, "torch::autograd::Engine::thread_main")]
FROM_PYTHON = [
    frame(f"{SITE}/torch/autograd/__init__.py", 300, "backward"),
    frame("/home/me/train.py", 32, "<module>"),
]


def event(action, address, size, frames=()):
    return {"action": action, "addr": address, "size": size, "frames": list(frames)}


def segment(address, blocks, device=0):
    return {
        "address": address,
        "device": device,
        "total_size": sum(size for size, _ in blocks),
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


HISTORY = [
    event("alloc", 1000, 300, FORWARD),
    event("alloc", 2000, 200, FORWARD),
    event("free_requested", 1000, 300),
    event("free_completed", 1000, 300),
    event("alloc", 3000, 500, BACKWARD),
    event("alloc", 3500, 50, FROM_PYTHON),
    event("free_completed", 9000, 70),  # allocated before the history
    event("alloc", 4000, 10, STEP),
    event("segment_alloc", 5000, 5000),
]
# The block of 100 bytes was allocated before the history, and the free one does not count.
SEGMENTS = [
    segment(0, [(100, "active_allocated"), (900, "inactive")]),
    segment(2000, [(200, "active_allocated")]),
    segment(3000, [(500, "active_allocated"), (50, "active_allocated")]),
    segment(7000, [(4000, "active_allocated")], device=1),
]


@pytest.fixture
def read(tmp_path):
    """Return a function that reads some content as a snapshot."""

    def read(content, **options):
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
        return read_snapshot(path, **options)

    return read


def test_peak_is_divided_by_phase_and_line(read):
    content = {"segments": SEGMENTS, "device_traces": [HISTORY, []]}
    found = read(content)
    assert found.peak == 100 + 70 + 200 + 500 + 50
    assert found.places == {
        ("before", ""): 170,
        ("forward", "model.py:12 forward"): 200,
        ("backward", "outside Python"): 500,
        ("backward", "train.py:32 <module>"): 50,
    }
    assert found.reserved == 1000 + 200 + 550
    lines = str(found).splitlines()
    assert lines[0].startswith("peak 0.9 KiB; reserved at the end 1.7 KiB")
    assert lines[1].split()[:3] == ["backward", "outside", "Python"]
    assert read(content, device=1).places == {("before", ""): 4000}  # each GPU has its own peak


def test_step_of_the_optimizer_is_a_phase(read):
    content = {"segments": [], "device_traces": [[event("alloc", 1, 8, STEP)]]}
    assert read(content).places == {("optimizer step", "train.py:33 <module>"): 8}


class Code:
    def __reduce__(self):
        return (print, ("executed",))


def test_files_with_code_and_other_content_are_refused(read, capsys):
    with pytest.raises(pickle.UnpicklingError, match=r"found builtins.print"):
        read(Code())
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="is not a snapshot of torch's memory"):
        read({"a": 1})
    for content in (b"", b"Import numpy", b"Footer"):  # no pickles
        with pytest.raises(pickle.UnpicklingError):
            read(content)
