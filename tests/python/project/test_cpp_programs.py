"""The C++ programs of examples/cpp_trainer and docs/cpp.md."""

import re
import subprocess
import time

import ampfuse
import pytest
from packaging_tools import ROOT, built_program, environment, run
from pages import code_block

pytestmark = pytest.mark.slow

# Convolutions on a GPU do not add up in the same order in each run.
ON_CPU = environment(CUDA_VISIBLE_DEVICES="")


@pytest.fixture(scope="module")
def trainer():
    folder = ROOT / "examples" / "cpp_trainer"
    files = ("CMakeLists.txt", "main.cpp", "images.h")
    return (
        built_program("trainer", {file: (folder / file).read_text() for file in files}) / "trainer"
    )


def steps_of(printed):
    """Return the printed lines by their steps."""
    return {int(step): line for line, step in re.findall(r"^(step (\d+): .*)$", printed, re.M)}


def saved_steps(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("run/step-*"))


def test_network_learns_the_made_images_in_bfloat16(trainer, tmp_path):
    env = environment() if ampfuse.has_cuda() else ON_CPU
    printed = run(trainer, "--precision", "bfloat16", "--steps", "100", cwd=tmp_path, env=env)
    accuracy = re.search(r"bfloat16 +100 +([0-9.]+) %", printed)
    assert accuracy, printed
    assert float(accuracy[1]) > 80  # chance is 10, 95.3 to 96.1 were measured
    assert len(steps_of(printed)) == 5


def test_network_trains_with_a_scaler_in_float16(trainer, tmp_path):
    # It is the default. A step takes ten times as long as in bfloat16 on a CPU.
    printed = run(trainer, "--steps", "2", cwd=tmp_path, env=ON_CPU)
    # Its loss begins at log(10), and the largest gradient that is allowed does not overflow.
    assert re.fullmatch(r"step 2: loss 2\.\d+, scale 65536, norm \d+\.\d+", steps_of(printed)[2])
    assert re.search(r"float16 +2 +([0-9.]+) %", printed)


def test_killed_run_goes_on_with_the_losses_of_an_uninterrupted_one(trainer, tmp_path):
    command = [trainer, "--precision", "float32", "--steps"]
    killed = subprocess.Popen([*command, "100000"], cwd=tmp_path, env=ON_CPU)
    try:
        while not saved_steps(tmp_path):
            assert killed.poll() is None
            time.sleep(0.01)
    finally:
        killed.kill()
        killed.wait()
    saved = saved_steps(tmp_path)[-1]

    command.append(str(saved + 10))
    resumed = run(*command, cwd=tmp_path, env=ON_CPU)
    whole = run(*command, "--out", "whole", cwd=tmp_path, env=ON_CPU)
    assert resumed.startswith(f"resumed from step {saved}\n")
    assert saved + 10 in steps_of(resumed)
    expected = {step: line for step, line in steps_of(whole).items() if step > saved}
    assert steps_of(resumed) == expected

    again = run(*command, cwd=tmp_path, env=ON_CPU)
    assert again.startswith(f"resumed from step {saved + 10}\n")
    assert again.endswith("no step taken\n")
    device_to_accuracy = again.splitlines()[-1].split()[:4]
    assert device_to_accuracy == resumed.splitlines()[-1].split()[:4]


def test_wrong_flags_print_the_usage(trainer, tmp_path):
    for flags in ("--steps many", "--precision half", "--epochs 3", "--out"):
        command = [trainer, *flags.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2, flags
        assert done.stdout.startswith("usage: "), flags


def test_page_about_cpp_has_a_program_that_goes_on_from_its_own_files(tmp_path):
    page = "docs/cpp.md"
    files = {"main.cpp": code_block("cpp", page), "CMakeLists.txt": code_block("cmake", page)}
    program = built_program("page", files) / "train"
    for _ in range(2):  # the second run goes on from the files of the first
        printed = run(program, cwd=tmp_path, env=ON_CPU)
        figures = r"scale 65536, norm .*\nloss (.*)\nnorm before clipping .*\n"
        # It begins at log(5000), which is 8.52. Inputs are random; 8.04 to 8.06 were measured.
        assert 7.5 < float(re.fullmatch(figures, printed)[1]) < 8.4
