"""`python -m ampfuse` names the fault of a program, and finds none in other programs."""

from pathlib import Path

import pytest
from ampfuse.tools.diagnosis import advice

PROGRAM = Path(__file__).parents[1] / "support" / "faulty_program.py"
EXAMPLES = Path(__file__).parents[3] / "examples" / "plain_torch"

pytestmark = pytest.mark.slow


def line_of(text):
    lines = PROGRAM.read_text().splitlines()
    return f"{PROGRAM.name}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def diagnosed(programs, *arguments):
    done, told = programs.reported(*arguments)
    assert done.returncode == 0, done.stderr
    assert all(hint in done.stderr for hint in told["hints"])
    return told["hints"], done.stderr


CORES = advice.usable_cores()
SLEEP = line_of("time.sleep(0.002")
# A batch of 16 takes 32 or 320 ms, and the rest of a step more than 20 ms.
SHOWN = {
    "no workers": ["waits for input with num_workers=0: DataLoader(num_workers=", SLEEP],
    "transform": ["waits for input", "more workers help", SLEEP],
    "restarts": ["Starting the workers of a DataLoader takes", "persistent_workers=True"],
    "item": ["The host waits for the GPU", line_of("loss.item()")],
    "logits": ["Logits of torch.bfloat16 are converted to float32", "2,048 KiB"],
    "leak": ["Memory grows by ", line_of("kept.append"), "kept of faulty_program.py"],
    "collapse": ["The last 10 steps were skipped", "gradients are not finite at any scale"],
    "growth": ["of the last 20 steps were skipped", "growth_interval"],
    "kept gradients": ["No gradient is set to zero between steps", "zero_grad()"],
    "anomaly checks": ["set_detect_anomaly(True)", "remove it"],
    "compilations": ["torch.compile compiled again in", "shapes change"],
    "saving": ["passes outside of forward, backward and optimizer", line_of("torch.save(")],
}


@pytest.mark.parametrize("fault", SHOWN)
def test_fault_is_named(programs, fault):
    if fault == "no workers" and CORES < 2:
        pytest.skip("there is one core")
    if fault == "transform" and CORES > 8:
        pytest.skip("these cores could hide it")
    hints, _ = diagnosed(programs, PROGRAM, fault)
    # On a busy machine, something else may take more than a tenth of the time, too.
    assert [all(text in hint for text in SHOWN[fault]) for hint in hints].count(True) == 1, hints


def test_scaled_gradients_that_are_clipped_cause_a_warning_and_a_hint(programs):
    hints, text = diagnosed(programs, PROGRAM, "clipping")
    warning = "gradients were clipped to max_norm=1 while they were still multiplied"
    assert [hint.startswith(warning) for hint in hints if "clip" in hint] == [True]
    assert f"UserWarning: {warning}" in text


@pytest.mark.parametrize("example", sorted(file.stem for file in EXAMPLES.glob("*.py")))
def test_example_gets_no_hint(programs, example):
    # Convolutions in float16 are slow on a CPU, and on some CPUs float16 is slow altogether.
    options = ["--dtype", "bfloat16"] if example == "image_classifier" else []
    hints, _ = diagnosed(programs, EXAMPLES / f"{example}.py", *options)
    assert [hint for hint in hints if "slow in float16" not in hint] == []
