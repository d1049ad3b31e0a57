"""`python -m ampfuse env`: what is installed, what works, and what to change."""

import ampfuse
import pytest
import torch
from ampfuse import env
from ampfuse.env import advice


def test_env_shows_versions_kernels_and_what_works(programs):
    done = programs.ours("env")
    assert done.returncode == 0, done.stderr
    for fact in (ampfuse.__version__, torch.__version__, ampfuse.build_info()["cpu_capability"]):
        assert fact in done.stdout
    assert "works on CPU" in done.stdout
    assert "norm, unscale, unscale_norm, clip, fused_adam" in done.stdout
    assert "cross_entropy, linear_cross_entropy" in " ".join(done.stdout.split())


def test_env_reports_the_error_of_an_op_that_fails(monkeypatch):
    def broken(tensors):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(ampfuse.ops, "multi_tensor_norm", broken)
    assert dict(env.describe())["works on CPU"] == "no: no kernel image"


def test_has_cuda_agrees_with_the_build_information():
    info = ampfuse.build_info()
    assert ampfuse.has_cuda() == bool(info["cuda_version"]) == bool(info["cuda_archs"])


def advised(torchs_cuda="13.0", kernels="13.0", driver=13000, gpus=((9, 0),), works=True):
    return list(advice(torchs_cuda, kernels, driver, gpus, works=works))


@pytest.mark.parametrize("changes", [{}, {"torchs_cuda": None, "driver": 0, "gpus": ()}])
def test_nothing_is_advised_where_kernels_run_or_are_not_wanted(changes):
    assert advised(**changes) == []


def test_architectures_of_gpus_on_which_kernels_fail_are_named_with_the_command():
    (text,) = advised(gpus=[(9, 0), (8, 0), (9, 0)], works=False)
    assert text.startswith("compile kernels for 8.0 9.0: ")
    assert 'TORCH_CUDA_ARCH_LIST="8.0 9.0" pip install' in text


NO_GPU = {"gpus": ()}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"driver": 12080, "works": False}, "which supports CUDA 12.8, to one for CUDA 13.0"),
        ({"kernels": "12.6", "driver": 12000}, "to one for CUDA 12.1 (530 or newer)"),
        (NO_GPU | {"driver": 0}, "the NVIDIA driver was not found, torch needs CUDA 13"),
        (NO_GPU | {"driver": 12040}, "driver supports CUDA 12.4, torch needs CUDA 13, and CUDA"),
        (NO_GPU | {"torchs_cuda": None}, "torch is a CPU build, but there is an NVIDIA driver"),
    ],
)
def test_what_does_not_fit_is_named_with_the_remedy(changes, expected):
    (text,) = advised(**changes)
    assert expected in text


def test_variable_that_hides_gpus_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (text,) = advised(**NO_GPU)
    assert text.endswith("CUDA_VISIBLE_DEVICES is -1")
