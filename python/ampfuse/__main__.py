"""`python -m ampfuse train.py`: a program as it is, with ampfuse; `python -m ampfuse env`."""

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from ampfuse.command import options, program, report, show
from ampfuse.env import describe
from ampfuse.patching import patch
from ampfuse.patching._parts import PARTS
from ampfuse.patching._scalers import RECORDING


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a command of `python -m ampfuse`."""
    chosen = options.parse(arguments)
    if chosen.name == "env":
        show.table(describe())
        sys.exit()
    parts = [PARTS[name] for name in chosen.parts]
    if parts:
        RECORDING.history = report.REMEMBERED
        patch(*chosen.parts)
    pid, start = os.getpid(), time.perf_counter()
    run = program.run_module if chosen.is_module else program.run_script
    try:
        raised = run(chosen.name, chosen.arguments)
    except program.NoProgramError as error:
        options.refuse(str(error))
    program.tell(raised)
    if report.is_for_this_process(pid):
        try:
            program.await_threads()
            told = report.report(chosen.name, parts, time.perf_counter() - start, raised)
            tell(chosen, told)
        except (Exception, KeyboardInterrupt) as error:  # which is not the program's
            print(f"python -m ampfuse: {str(error) or type(error).__name__}", file=sys.stderr)
    program.end_as_after(raised)


def tell(chosen: options.Options, told: dict[str, Any]) -> None:
    """In the ways that were asked for."""
    if not chosen.quiet:
        show.table(show.rows(told), show.title(told), sys.stderr)
    if chosen.json is not None:
        text = json.dumps(report.in_json(told), indent=2, allow_nan=False)
        chosen.json.write_text(text + "\n")
    if chosen.plot is not None:
        show.plot(told, chosen.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
