"""`python -m ampfuse env`: what is installed, what works, and what to change."""

import ampfuse
import pytest
import torch
from ampfuse import env
from ampfuse.env import Installation, advice


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


FITS = Installation(
    cuda_archs="80-real 90",
    built_with="13.0",
    torchs_cuda="13.0",
    driver=13000,
    gpus=[(9, 0)],
)
CPU_BUILD = {"cuda_archs": "", "built_with": ""}
NO_GPU = {"gpus": []}


def advised(**changes):
    """Return the advice for an installation in which all fits but these."""
    return list(advice(FITS._replace(**changes)))


@pytest.fixture(autouse=True)
def _no_hidden_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gpus": [(8, 0), (8, 6), (12, 0)]},  # 8.6 runs code of 8.0, 12.0 compiles PTX
        {"cuda_archs": "90a-real"},
        {"built_with": "13.1"},
        NO_GPU | {"torchs_cuda": None, "driver": 0},
    ],
)
def test_nothing_is_advised_where_kernels_run_or_are_not_wanted(changes):
    assert advised(**changes) == []


@pytest.mark.parametrize(
    ("build", "gpu", "named"),
    [
        ({"cuda_archs": "80-real 90-real"}, (12, 0), "12.0"),
        ({"cuda_archs": "90"}, (8, 0), "8.0"),
        ({"cuda_archs": "86-real"}, (8, 0), "8.0"),
        ({"cuda_archs": "90a-real"}, (9, 1), "9.1"),
        ({"built_with": "12.8"}, (9, 0), "9.0"),  # another major version than torch's
        (CPU_BUILD, (9, 0), "9.0"),
    ],
)
def test_architecture_of_a_gpu_without_kernels_is_named_with_the_command(build, gpu, named):
    (text,) = advised(**build, gpus=[gpu])
    assert text.startswith(f"compile kernels for {named}: ")
    assert f'TORCH_CUDA_ARCH_LIST="{named}" pip install' in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"driver": 12000}, "update the NVIDIA driver to 530"),
        (NO_GPU | {"driver": 0}, "the NVIDIA driver was not found, torch needs CUDA 13"),
        (
            NO_GPU | {"driver": 12040},
            "driver supports CUDA 12.4, torch needs CUDA 13, and CUDA_VIS",
        ),
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
