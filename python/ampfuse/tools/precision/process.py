"""The process in which a program runs in one precision."""

import json
import os
import random
import sys
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from ampfuse.patching import patch
from ampfuse.patching.scalers import RECORDING
from ampfuse.tools.command import program
from ampfuse.tools.command.report import RECORDED_UPDATES
from ampfuse.tools.precision.precisions import PRECISIONS
from ampfuse.tools.precision.saving import checkpoints_in, saved_in_memory
from ampfuse.tools.precision.trial import Trial
from ampfuse.tools.program_lines import file_name, is_of_program

SEED = 1


def seed() -> None:
    """Seed the random numbers of programs that do not seed them, alike in all runs."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(SEED)


def main(order: dict[str, Any]) -> None:
    """Run one trial, and write its results to files in a folder."""
    RECORDING.history = RECORDED_UPDATES
    patch()
    seed()
    folder = Path(order["folder"])
    run = program.run_module if order["is_module"] else program.run_script
    name, *arguments = order["words"]

    def finish(failure: str | None = None) -> NoReturn:
        """Write the result, and end the process at once.

        Nothing that the program would do at its end runs, nor do threads that it would wait for.
        """
        trial.watch.is_paused = True
        result = trial.result() | {"failure": failure}
        torch_save([trial.samples.gradients, trial.samples.outputs], folder / "samples.pt")
        (folder / "result.json").write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)

    torch_save = torch.save
    with ExitStack() as exits:
        exits.enter_context(saved_in_memory())
        exits.enter_context(checkpoints_in(folder / "checkpoints"))
        precision = PRECISIONS[order["precision"]].keeping(order["kept"])
        limits = order["steps"], order["backwards"], order["scale"], order["slowest"]
        trial = Trial(exits, finish, precision, *limits)
        try:
            raised = run(name, arguments)
        except program.NoProgramError as error:
            sys.exit(str(error))
        finish(how_it_failed(raised))


def how_it_failed(error: BaseException | None) -> str | None:
    """Describe an exception and the program's line that raised it; None if nothing failed."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    frames = [pair for pair in frames if is_of_program(pair[0].f_code)]
    lines = [f" ({file_name(frame.f_code)}:{line})" for frame, line in frames]
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, FileNotFoundError):
        text += "; torch.save writes no files here, and only torch.load reads what it has written"
    return f"{type(error).__name__}: {text}{lines[-1] if lines else ''}"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
