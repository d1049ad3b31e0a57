"""`python -m ampfuse --html`: a page with charts that needs no other file."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from ampfuse.tools.command import page
from matplotlib.figure import Figure
from programs import Programs

PROGRAM = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu")
step = 0
for inputs, target in DataLoader(TensorDataset(torch.randn(160, 8), torch.arange(160) % 4), 4):
    step += 1
    loss = torch.nn.functional.cross_entropy(model(inputs), target)
    scaler.scale(loss * (float("inf") if step % 16 == 0 else 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
VOID = ("meta",)


class Checker(HTMLParser):
    """Raises if an element is not closed, and collects the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def checked(text):
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert "<script" not in text
    assert not re.search(r'(src|href)="(?!#)', text)  # only to its own elements
    for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(chart)
    return " ".join(checker.text)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the path of a page, beside which is the report."""
    programs = Programs(tmp_path_factory.mktemp("page")).write("train <1>.py", PROGRAM)
    done, _ = programs.reported("--html", "page.html", "train <1>.py")
    assert done.returncode == 0, done.stderr
    return programs.folder / "page.html"


@pytest.fixture
def report(written):
    return json.loads((written.parent / "told.json").read_text())


def test_page_needs_no_other_file_and_shows_all_sections(written):
    shown = checked(written.read_text())
    for title in ("train <1>.py", "Charts", "All numbers", "scale"):
        assert title in shown


def test_chart_of_the_scale_has_its_changes_and_skipped_steps(report):
    axes = Figure().subplots()
    page.draw_scale(report["scalers"][0], axes)
    scale, skipped = axes.lines
    assert scale.get_ydata()[0] == 65536
    assert list(skipped.get_xdata()) == [16, 32]


def test_long_history_makes_a_page_of_bounded_size(report):
    scaler = report["scalers"][0]
    count = 2**16
    scaler["history"] = [[2.0 ** (i // 10_000), i % 3 == 0, 1.0] for i in range(count)]
    scaler["updates"] = count
    steps = report["steps"]
    steps["timeline"] = {phase: [1.0] * 1023 for phase in steps["timeline"]}
    steps["timeline"]["step"] = list(range(1023))
    text = page.page(report)
    checked(text)
    assert len(text) < 1_000_000


@pytest.mark.parametrize("missing", [["steps"], ["memory"], ["steps", "memory"]])
def test_short_programs_have_a_page_too(report, missing):
    for name in missing:
        report[name] = None
    report["scalers"][0]["history"] = [[0.0, True, None]]
    assert "All numbers" in checked(page.page(report))


def test_phases_of_no_time_have_no_share(report):
    steps = report["steps"]
    steps["timeline"] = {phase: [0.0] * 5 for phase in steps["timeline"]}
    steps["timeline"]["step"] = [4, 5, 6, 7, 8]
    checked(page.page(report))


def test_rare_spikes_do_not_flatten_a_chart():
    assert page.ceiling([1.0] * 99 + [100.0]) == pytest.approx(3.15)
    assert page.ceiling([1.0] * 90 + [100.0] * 10) == pytest.approx(105)
    assert page.ceiling([0.0]) == 1.0
