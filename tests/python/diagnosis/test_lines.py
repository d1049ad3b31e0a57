"""The lines in which a program spends its time, found by sampling."""

import inspect
import json
import random
import sys
import threading
import time

import pytest
import torch
from ampfuse.tools import program_lines
from ampfuse.tools.diagnosis.lines import LineSampler
from ampfuse.tools.diagnosis.phases import FORWARD, INPUT, OTHER
from ampfuse.tools.program_lines import file_name, is_of_program, place


@pytest.fixture
def sampler():
    made = LineSampler()
    yield made
    made.stop()


def end(sampler, phase):
    sampler.read([(phase, time.perf_counter())])


def slow():
    time.sleep(0.3)


def quick():
    time.sleep(0.1)


def test_lines_have_the_share_of_their_time(sampler):
    for _ in range(2):
        slow()
        end(sampler, FORWARD)
        quick()
        end(sampler, OTHER)
    first, second = sampler.lines()[:2]
    assert (first.phase, second.phase) == (FORWARD, OTHER)
    number = inspect.getsourcelines(slow)[1] + 1
    assert first.place.where == f"test_lines.py:{number}"
    assert first.place.text == "time.sleep(0.3)"
    assert first.share == pytest.approx(0.75, abs=0.2)
    assert sum(line.share for line in sampler.lines()) == pytest.approx(1)


def test_line_that_keeps_pythons_lock_has_the_share_of_its_time(sampler):
    text = "[" + ",".join(["0.123456789"] * 10**6) + "]"
    sampler.drop()
    begin = time.perf_counter()
    for _ in range(3):
        json.loads(text)
    seconds = time.perf_counter() - begin
    time.sleep(seconds)
    end(sampler, FORWARD)
    share = sum(line.share for line in sampler.lines() if "json" in line.place.text)
    assert share > 0.3


def test_samples_of_a_program_without_steps_take_bounded_memory(sampler):
    assert sampler._recent.maxlen == 1000


def test_samples_belong_to_the_interval_of_their_time(sampler):
    begin = time.perf_counter()
    slow()
    quick()
    ends = [begin, begin + 0.3, time.perf_counter()]
    sampler.read(list(zip((OTHER, INPUT, FORWARD), ends, strict=True)))
    assert [line.phase for line in sampler.lines()][:2] == [INPUT, FORWARD]


def test_samples_of_no_phase_and_of_the_first_steps_do_not_count(sampler):
    quick()
    sampler.drop()
    end(sampler, INPUT)
    assert sampler.lines() == []
    quick()
    end(sampler, INPUT)
    sampler.forget()
    assert sampler.lines() == []


def test_sampling_uses_no_random_numbers_of_the_program():
    random.seed(0)
    expected = [random.random() for _ in range(3)]
    random.seed(0)
    sampler = LineSampler()
    quick()
    sampler.stop()
    assert [random.random() for _ in range(3)] == expected


def test_line_outside_of_torch_and_the_standard_library_is_shown(sampler):
    event = threading.Event()
    event.wait(0.2)  # sleeps in threading.py
    end(sampler, FORWARD)
    assert "event.wait(0.2)" in sampler.lines()[0].place.text


def test_files_of_packages_are_named_from_the_package_on():
    def code(file):
        return compile("x = 1", file, "exec")

    trainer = "/usr/lib/python3.11/site-packages/transformers/trainer.py"
    for file in (trainer, "train.py", "/home/user/torch/train.py", "<stdin>"):
        assert is_of_program(code(file)), file
    numpy = "/usr/lib/python3/dist-packages/numpy/core/numeric.py"
    frozen = "<frozen importlib._bootstrap>"
    wrapper = "/usr/lib/python3.11/site-packages/typing_extensions.py"  # of deprecated functions
    for file in (torch.__file__, program_lines.__file__, inspect.__file__, numpy, frozen, wrapper):
        assert not is_of_program(code(file)), file
    assert file_name(code(trainer)) == "transformers/trainer.py"
    assert file_name(code("/home/user/train.py")) == "train.py"


class Loss:
    def item(self):
        """Return the code and the instruction from which this is called."""
        frame = sys._getframe(1)
        return frame.f_code, frame.f_lasti


def test_line_that_is_long_is_shortened():
    found, _ = place(*Loss().item()), "a text, with which this line has over sixty characters"
    assert len(found.text) == 60
    assert found.text.startswith("found, _ = place(*Loss().item()), ")
    assert found.text.endswith("…")


def test_instruction_that_does_not_exist_has_the_functions_line():
    for instruction in (-1, 10**6):
        assert place(slow.__code__, instruction).where.startswith("test_lines.py:")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python knows no columns")
def test_function_that_is_called_is_known():
    assert place(*Loss().item()).call == "item"
