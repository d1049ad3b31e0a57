"""The text of the summary of `python -m ampfuse`."""

from ampfuse.command import show


def part(used=0, waits_avoided=0, **left_to_torch):
    return {"used": used, "waits_avoided": waits_avoided, "left_to_torch": left_to_torch}


def report(parts, **changes):
    plain = {
        "program": "train.py",
        "ampfuse": "1.0",
        "ended": "normally",
        "seconds": 2.0,
        "steps": None,
        "step_count": 0,
        "scalers": [],
        "earlier_scalers": 0,
        "peak_memory": {},
        "hints": [],
    }
    return {**plain, "parts": parts, **changes}


def test_parts_that_were_not_used_share_one_row():
    parts = {"scaler": part(), "optimizers": part(3), "clip_grad_norm": part(0, sparse=1)}
    assert show.rows(report({**parts, "cross_entropy": part()})) == [
        ("ended", "normally, after 2.0 s"),
        ("optimizers", "used 3 times"),
        ("clip_grad_norm", "left to torch once: sparse"),
        ("not used", "scaler, cross_entropy"),
    ]


def test_program_that_uses_no_part_gets_a_reason():
    _, (name, text) = show.rows(report({"scaler": part(), "optimizers": part()}))
    assert name == "not used"
    assert text.startswith("scaler, optimizers: the program calls none of them, or only in")


def test_no_row_of_parts_is_printed_if_none_was_replaced():
    assert show.rows(report({})) == [("ended", "normally, after 2.0 s")]


def test_avoided_host_waits_are_a_row_of_the_part():
    _, used, waits = show.rows(report({"optimizers": part(10, 9)}))
    assert used == ("optimizers", "used 10 times")
    assert waits == ("", "the host did not wait in 9 steps, but would with torch's scaler")


def test_updates_of_a_history_are_counted_from_1():
    assert show.first_update({"updates": 5, "history": [0] * 5}) == 1
    assert show.first_update({"updates": 5, "history": [0] * 2}) == 4


def test_failure_is_one_line_and_the_hints(monkeypatch):
    said = []
    monkeypatch.setattr(show, "say", said.append)
    failed = report({"scaler": part()}, ended="by OSError", step_count=1200, hints=["look here"])
    show.failure(failed)
    assert said == ["train.py ended by OSError, after 2.0 s and 1,200 steps", "hint: look here"]
