"""The command `python -m ampfuse`: runs an unchanged program, or describes this installation."""

import atexit
import importlib
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from ampfuse._arguments import suggestion
from ampfuse.env import describe
from ampfuse.patching import patch
from ampfuse.tools.command import charts, options, program, report, show
from ampfuse.tools.diagnosis.diagnosis import Diagnosis


def main(arguments: Sequence[str]) -> NoReturn:
    """Run `python -m ampfuse` with these arguments."""
    if arguments and arguments[0] in options.COMMANDS:
        importlib.import_module(f"ampfuse.tools.command.{arguments[0]}").main(arguments[1:])
    chosen = options.parse(arguments)
    if chosen.words[0] == "env" and not chosen.is_module:
        show.table(describe())
        sys.exit()
    if chosen.parts:
        patch(*(part.name for part in chosen.parts))
    ending = Ending(chosen)
    # At exit Python joins the program's threads, and then calls the registered functions in reverse
    # order. This one is registered before the program runs, so it is called after the program's.
    atexit.register(ending.write_report)
    try:
        raised = program.run(chosen.words, chosen.is_module)
    except program.NoProgramError as error:
        atexit.unregister(ending.write_report)
        options.refuse(f"{error}{suggestion(chosen.words[0], [*options.COMMANDS, 'env'])}")
    ending.note(raised)
    program.report_exception(raised)
    if chosen.plot is not None:
        charts.import_matplotlib()
    program.end_as_after(raised)


class Ending:
    """Reports how a program ended, in the ways that the command line requests."""

    def __init__(self, chosen: Namespace) -> None:
        self.chosen = chosen
        self.diagnosis = Diagnosis(self._print_hint)
        self._ended = "while it ran"  # remains if exit handlers run before note()
        self._raised: type = type(None)
        self._process = os.getpid()
        # Read the launcher's rank now: the program may set another one for its own use.
        self._is_first_rank = os.environ.get("RANK", "0") == "0"
        self._start = time.perf_counter()

    def note(self, raised: BaseException | None) -> None:
        """Record how the program ended: the exception that it raised, or None."""
        self._ended = report.how_it_ended(raised)
        self._raised = type(raised)

    def _speaks(self) -> bool:
        return os.getpid() == self._process and self._is_first_rank  # not in a forked process

    def _print_hint(self, hint: str) -> None:
        """Print a hint while the program runs."""
        if self._speaks() and not self.chosen.quiet:
            show.say(f"hint: {hint}")

    def write_report(self) -> None:
        """Report in all requested ways, even if one of them fails. The exit code stays the same."""
        if not self._speaks():
            return
        chosen = self.chosen
        with _printing_errors():
            self.diagnosis.stop()
            seconds = time.perf_counter() - self._start
            summary = report.report(
                chosen.words[0], chosen.parts, self.diagnosis, seconds, self._ended
            )
            with _printing_errors():
                if chosen.json is not None:
                    report.write(summary, chosen.json)
            with _printing_errors():
                if not chosen.quiet:
                    has_failed = issubclass(self._raised, Exception)
                    (show.failure if has_failed else show.summary)(summary)
            with _printing_errors():
                if chosen.plot is not None:
                    charts.plot(summary, chosen.plot)
        if issubclass(self._raised, KeyboardInterrupt):
            # Python ends by SIGINT if this ended the last text that it executed. Modules that
            # were imported for the report may have executed other text.
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")


@contextmanager
def _printing_errors() -> Iterator[None]:
    """Print an error that is raised in this block, and continue after the block."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        show.say(str(error) or type(error).__name__)


if __name__ == "__main__":
    main(sys.argv[1:])
