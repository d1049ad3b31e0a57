"""The rows that are printed of a report."""

from ampfuse.tools.command import show


def part(used=0, waits_avoided=0, **left_to_torch):
    return {"used": used, "waits_avoided": waits_avoided, "left_to_torch": left_to_torch}


REPORT = {
    "program": "train.py",
    "ampfuse": "1.0",
    "ended": "normally",
    "seconds": 2.0,
    "steps": None,
    "error": None,
    "step_count": 0,
    "optimizers_of_torch": [],
    "scalers": [],
    "scaler_disabled": False,
    "autocast": None,
    "peak_memory": {},
    "hints": [],
}


def rows(**parts):
    ended, *others = show.rows(REPORT | {"parts": parts})
    assert ended == ("ended", "normally, after 2.0 s")
    return others


def test_rows_of_parts_state_how_often_they_were_used():
    left = part(0, sparse=1)
    parts = {"scaler": part(), "optimizers": part(10, 9), "clip_grad_norm": left}
    assert rows(**parts, cross_entropy=part()) == [
        ("optimizers", "used 10 times"),
        ("", "host waits avoided: 9"),
        ("clip_grad_norm", "left to torch once: sparse"),
        ("not replaced", "scaler, cross_entropy, since the program does not call torch's"),
    ]
    assert rows() == []
    ((name, reason),) = rows(scaler=part(), optimizers=part())
    assert name == "not replaced"
    assert reason.startswith("scaler, optimizers, since the program does not call torch's, or only")


def test_rows_name_an_autocast_and_a_scaler_that_do_nothing():
    parts = {"scaler": part()}
    told = REPORT | {"parts": parts, "autocast": "does nothing", "scaler_disabled": True}
    assert show.rows(told)[1:] == [
        ("autocast", "does nothing"),
        ("scaler", "disabled: no loss is scaled"),
    ]


def test_optimizers_left_to_torch_are_not_called_unused_as_well():
    told = REPORT | {"parts": {"optimizers": part()}, "optimizers_of_torch": ["RMSprop"]}
    ((name, text),) = show.rows(told)[1:]
    assert name == "optimizers"
    assert text == "left to torch: RMSprop, since ampfuse has only Adam, AdamW and SGD"


def test_steps_are_called_too_few_only_without_an_error():
    few = REPORT | {"parts": {}, "step_count": 20}
    assert [name for name, _ in show.rows(few)] == ["ended", "a step"]
    assert [name for name, _ in show.rows(few | {"error": "IndexError()"})] == ["ended"]


def test_optimizer_without_parameters_is_measured(programs):
    programs.write(
        "empty.py",
        "import torch\nempty = torch.optim.SGD([{'params': []}])\n"
        "for _ in range(9):\n    empty.step()\n",
    )
    _, told = programs.reported("empty.py")
    assert told["error"] is None
    assert told["steps"] is not None


def test_failure_is_one_line_and_the_hints(monkeypatch):
    said = []
    monkeypatch.setattr(show, "say", said.append)
    show.failure(REPORT | {"ended": "by OSError", "step_count": 1200, "hints": ["look here"]})
    assert said == ["train.py ended by OSError, after 2.0 s and 1,200 steps", "hint: look here"]


def test_table_aligns_texts_below_the_title(capsys):
    show.table([("torch", "2.11.0"), ("works on CPU", "norm"), ("", "clip")], "env")
    lines = ("env", "  torch         2.11.0", "  works on CPU  norm", "                clip")
    assert capsys.readouterr().out.splitlines() == [*lines]


def test_scales_are_drawn_by_their_logarithm_and_a_scale_of_0_is_the_lowest():
    assert show.sparkline([2.0**16, 2.0**8, 1.0]) == "█▅▁"
    assert show.sparkline([2.0**16, 2.0**-149, 0.0]) == "█▁▁"
    assert show.sparkline([4.0, 4.0]) == "▅▅"
