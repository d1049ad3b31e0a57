"""The C++ program of examples/cpp_trainer learns its task, and goes on where it was stopped."""

import re
import subprocess
import time
from pathlib import Path

import ampfuse
import pytest
from packaging_tools import ROOT, build_program, environment, run

pytestmark = pytest.mark.slow

# Convolutions on a GPU do not add up in the same order in each run.
ON_CPU = environment(CUDA_VISIBLE_DEVICES="")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("build")
    build_program(ROOT / "examples" / "cpp_trainer", build)
    return build / "trainer"


def step_lines(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("step ")]


# float16 takes ten times as long on a CPU. The other tests take fewer steps in it.
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_network_learns_the_made_images(trainer: Path, tmp_path: Path, precision: str) -> None:
    env = environment() if ampfuse.has_cuda() else ON_CPU
    printed = run(trainer, "--precision", precision, cwd=tmp_path, env=env)
    accuracy = re.search(rf"{precision} +200 +([0-9.]+) %", printed)
    assert accuracy, printed
    assert float(accuracy[1]) > 80  # chance is 10, 95.3 to 96.1 were measured
    assert len(step_lines(printed)) == 10


def test_second_run_takes_no_step_and_has_the_accuracy_of_the_first(
    trainer: Path, tmp_path: Path
) -> None:
    first, second = (
        run(trainer, "--steps", "20", cwd=tmp_path, env=ON_CPU).splitlines() for _ in range(2)
    )
    assert second[0] == "resumed from step 20"
    assert second[-1].endswith("no step taken")
    assert second[-1].split()[:4] == first[-1].split()[:4]


def test_killed_run_goes_on_with_the_losses_of_an_uninterrupted_one(
    trainer: Path, tmp_path: Path
) -> None:
    killed = subprocess.Popen(
        [trainer, "--steps", "100000"], cwd=tmp_path, env=ON_CPU, stdout=subprocess.DEVNULL
    )
    try:
        while not list(tmp_path.glob("run/step-*")):
            assert killed.poll() is None
            time.sleep(0.01)
    finally:
        killed.kill()
        killed.wait()
    saved = max(int(path.name.removeprefix("step-")) for path in tmp_path.glob("run/step-*"))

    steps = str(saved + 10)
    resumed = run(trainer, "--steps", steps, cwd=tmp_path, env=ON_CPU)
    whole = run(trainer, "--steps", steps, "--out", "whole", cwd=tmp_path, env=ON_CPU)
    assert resumed.startswith(f"resumed from step {saved}\n")
    assert step_lines(resumed)[-1].startswith(f"step {steps}: loss ")
    assert step_lines(resumed) == [
        line for line in step_lines(whole) if int(re.findall(r"\d+", line)[0]) > saved
    ]


@pytest.mark.parametrize(
    "arguments", [["--steps", "many"], ["--precision", "half"], ["--epochs", "3"], ["--out"]]
)
def test_wrong_flags_print_the_usage(trainer: Path, tmp_path: Path, arguments: list[str]) -> None:
    done = subprocess.run([trainer, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.startswith("usage: ")
    assert not list(tmp_path.iterdir())
