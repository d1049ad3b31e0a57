"""The advice of `python -m ampfuse env`."""

import os

import pytest
from ampfuse._build_advice import Installation, advice, nvcc_version

FITS = Installation(
    cuda_archs="80-real 90",
    built_with="13.0",
    torchs_cuda="13.0",
    driver=13000,
    gpus=[(9, 0)],
    nvcc="13.0",
)
NO_GPU = FITS._replace(gpus=[])


@pytest.fixture(autouse=True)
def _no_hidden_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    "fitting",
    [
        FITS,
        FITS._replace(gpus=[(8, 0), (8, 6), (12, 0)]),  # 8.6 runs code of 8.0, 12.0 compiles PTX
        FITS._replace(cuda_archs="90a-real"),
        FITS._replace(built_with="13.1", nvcc=None),
        NO_GPU._replace(torchs_cuda=None, driver=0),
    ],
)
def test_nothing_is_advised_where_kernels_run_or_are_not_wanted(fitting):
    assert list(advice(fitting)) == []


@pytest.mark.parametrize(
    ("archs", "gpu", "named"),
    [
        ("80-real 90-real", (12, 0), "12.0"),
        ("90", (8, 0), "8.0"),
        ("86-real", (8, 0), "8.0"),
        ("90a-real", (9, 1), "9.1"),
        ("", (9, 0), "9.0"),  # a CPU build
    ],
)
def test_architecture_of_a_gpu_without_kernels_is_named_with_the_command(archs, gpu, named):
    built_with = "13.0" if archs else ""
    (text,) = advice(FITS._replace(cuda_archs=archs, built_with=built_with, gpus=[gpu]))
    assert f"compile kernels for {named}: " in text
    assert f'TORCH_CUDA_ARCH_LIST="{named}" pip install' in text
    assert "nvcc" not in text


@pytest.mark.parametrize(
    ("torchs", "nvcc", "expected"),
    [
        ("13.0", "12.4", "the nvcc on PATH is 12.4, and torch's CUDA is 13.0: set AMPFUSE_FETCH"),
        ("13.0", None, "nvcc is not on PATH, and torch's CUDA is 13.0: set AMPFUSE_FETCH_NVCC=ON"),
        ("12.8", "13.0", "torch's CUDA is 12.8: install the toolkit of CUDA 12"),
    ],
)
def test_nvcc_of_another_major_version_is_named_with_the_remedy(torchs, nvcc, expected):
    (text,) = advice(FITS._replace(cuda_archs="", built_with="", torchs_cuda=torchs, nvcc=nvcc))
    assert expected in text


def test_kernels_of_another_major_version_than_torchs_are_compiled_again():
    (text,) = advice(FITS._replace(built_with="12.8"))
    assert text.startswith("compile kernels for 9.0: ")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"driver": 0}, "install its driver"),
        ({"driver": 12040}, "the driver supports CUDA 12.4, torch needs 13: update the"),
        ({"driver": 13000}, "nvidia-smi shows whether the driver does"),
        ({"torchs_cuda": None}, "this torch is a CPU build, but there is an NVIDIA driver"),
    ],
)
def test_reason_why_torch_sees_no_gpu_is_given(changes, expected):
    (text,) = advice(NO_GPU._replace(**changes))
    assert expected in text


def test_variable_that_hides_gpus_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (text,) = advice(NO_GPU)
    assert text == "CUDA_VISIBLE_DEVICES='-1' may hide the GPUs from torch: unset it"


def test_version_of_nvcc_is_read_from_its_output(monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert nvcc_version() == "12.4"
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert nvcc_version() is None
