"""Two builds of the library in one process, and drivers that are too old for the kernels."""

import shutil
import subprocess
import sys

import ampfuse
import pytest
import warm
from ampfuse import _library
from packaging_tools import KERNELS, LIBRARY


def run(program, start=warm.run):
    return start([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.fixture
def other(tmp_path):
    """Return a copy of the library in another folder."""
    folder = tmp_path / "torch"
    folder.mkdir()
    if KERNELS is not None:
        shutil.copy(KERNELS, tmp_path)
    return shutil.copy(LIBRARY, folder / "libampfuse.so")


@pytest.mark.slow
def test_import_beside_another_build_fails_and_names_both(other):
    program = f"import torch; torch.ops.load_library({str(other)!r}); import ampfuse"
    done = run(program, start=subprocess.run)

    assert done.returncode == 1
    assert "ImportError: another build of ampfuse is loaded" in done.stderr
    assert str(other) in done.stderr
    assert str(LIBRARY.parent) in done.stderr


def test_second_build_keeps_the_operators_of_the_first_and_prints_a_warning(other):
    done = run(
        f"import torch, ampfuse; torch.ops.load_library({str(other)!r}); "
        "print(ampfuse.ops.multi_tensor_norm([torch.tensor([3.0, 4.0])]).total_norm.item())"
    )

    assert (done.returncode, done.stdout) == (0, "5.0\n")
    assert "two builds of ampfuse are loaded in one process" in done.stderr
    assert str(other) in done.stderr


def test_same_build_may_be_loaded_twice():
    done = run(f"import torch, ampfuse; torch.ops.load_library({str(LIBRARY)!r})")

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("version", "kernels", "is_old"),
    [
        (0, "13.0", False),
        (12000, "12.6", True),
        (12010, "12.6", False),
        (12080, "13.0", True),
        (13000, "13.1", False),
    ],
)
def test_warning_is_given_only_for_a_driver_that_is_too_old(
    version, kernels, is_old, monkeypatch, recwarn, tmp_path
):
    source = tmp_path / "driver.c"
    source.write_text(f"int cuDriverGetVersion(int* v) {{ *v = {version}; return 0; }}")
    driver = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-x", "c", "-shared", "-o", driver, source], check=True)
    monkeypatch.setattr(_library, "DRIVER", str(driver) if version else "no driver")

    _library.warn_of_old_driver(kernels)

    texts = [str(warning.message) for warning in recwarn]
    assert any("update the NVIDIA driver" in text for text in texts) == is_old


def test_check_targets_raises_nothing_before_any_loss():
    """A replayed graph checks no target itself. On a CPU every target is checked before its use."""
    assert ampfuse.check_targets() is None
