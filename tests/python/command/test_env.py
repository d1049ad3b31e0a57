"""`python -m ampfuse env`, and the build information behind it."""

import subprocess
import sys

import ampfuse
import torch
from ampfuse import env
from ampfuse.command import show


def command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ampfuse", *arguments], text=True, capture_output=True, **options
    )


def test_env_shows_versions_kernels_and_what_works():
    done = command("env")

    assert done.returncode == 0, done.stderr
    for fact in (ampfuse.__version__, torch.__version__, ampfuse.build_info()["cpu_capability"]):
        assert fact in done.stdout
    assert "works on CPU" in done.stdout
    assert "norm, unscale, unscale_norm, clip, fused_adam" in done.stdout
    assert "cross_entropy, linear_cross_entropy" in " ".join(done.stdout.split())


def test_table_aligns_texts_below_the_title(capsys):
    show.table([("torch", "2.11.0"), ("works on CPU", "norm"), ("", "clip")], "env")

    lines = ("env", "  torch         2.11.0", "  works on CPU  norm", "                clip")
    assert capsys.readouterr().out.splitlines() == [*lines]


def test_scales_are_drawn_by_their_logarithm_and_a_scale_of_0_is_the_lowest():
    assert show.sparkline([2.0**16, 2.0**8, 1.0]) == "█▅▁"
    assert show.sparkline([2.0**16, 2.0**-149, 0.0]) == "█▁▁"
    assert show.sparkline([4.0, 4.0]) == "▅▅"


def test_env_reports_the_error_of_an_op_that_fails(monkeypatch):
    def broken(tensors):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(ampfuse.ops, "multi_tensor_norm", broken)

    assert dict(env.describe())["works on CPU"] == "no: no kernel image"


def test_has_cuda_agrees_with_the_build_information():
    info = ampfuse.build_info()

    assert ampfuse.has_cuda() == bool(info["cuda_version"]) == bool(info["cuda_archs"])
