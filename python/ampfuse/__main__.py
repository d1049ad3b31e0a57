"""`python -m ampfuse train.py`: a program as it is, with ampfuse; `python -m ampfuse env`."""

import atexit
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ampfuse.command import options, program, report, show
from ampfuse.env import describe
from ampfuse.patching import patch
from ampfuse.patching._parts import PARTS
from ampfuse.patching._scalers import RECORDING


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a command of `python -m ampfuse`."""
    chosen = options.parse(arguments)
    if chosen.name == "env" and not chosen.is_module:
        show.table(describe())
        sys.exit()
    if chosen.parts:
        RECORDING.history = report.REMEMBERED
        patch(*chosen.parts)
    ending = Ending(chosen)
    # Behind all that Python does when a program has ended: it awaits threads, and then calls what
    # was registered, the last first.
    atexit.register(ending.tell)
    run = program.run_module if chosen.is_module else program.run_script
    try:
        ending.raised = run(chosen.name, chosen.arguments)
    except program.NoProgramError as error:
        atexit.unregister(ending.tell)
        options.refuse(str(error))
    program.tell(ending.raised)
    program.end_as_after(ending.raised)


class Ending:
    """Of a program, to be told in the ways that were asked for."""

    def __init__(self, chosen: options.Options) -> None:
        self.chosen = chosen
        self.raised: BaseException | None = None
        self._process = os.getpid()
        self._start = time.perf_counter()

    def tell(self) -> None:
        """Whatever goes wrong is not the program's fault."""
        if not report.is_for_this_process(self._process):
            return
        chosen = self.chosen
        with _apart():
            parts = [PARTS[name] for name in chosen.parts]
            seconds = time.perf_counter() - self._start
            told = report.report(chosen.name, parts, seconds, self.raised)
            with _apart():
                if chosen.json is not None:
                    report.write(told, chosen.json)
            with _apart():
                if not chosen.quiet:
                    show.summary(told)
            with _apart():
                if chosen.plot is not None:
                    show.plot(told, chosen.plot)
        if isinstance(self.raised, KeyboardInterrupt):
            program.end_by_interrupt()


@contextmanager
def _apart() -> Iterator[None]:
    """What fails in it is told, and fails alone."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        show.say(str(error) or type(error).__name__)


if __name__ == "__main__":
    main(sys.argv[1:])
