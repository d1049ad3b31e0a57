"""The process in which a program runs in one precision."""

import inspect
import os
import random
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

import torch

from ampfuse.patching import patch
from ampfuse.tools.command.program import NoProgramError, RefusedError, run
from ampfuse.tools.hooks import hook_functions
from ampfuse.tools.precision.trial import Program, Trial
from ampfuse.tools.program_lines import file_name, is_of_program

SEED = 1


def main(folder: Path) -> None:
    """Run the trial that is ordered in a folder, and write its outcome there."""
    program: Program = torch.load(folder / "program.pt", weights_only=False)
    patch()
    seed()
    save = torch.save

    def finish(failure: str | None = None) -> NoReturn:
        """Write the outcome, and end the process at once.

        Nothing that the program would do at its end runs, nor do threads that it would wait for.
        """
        save(trial.outcome(failure), folder / "outcome.pt")
        sys.stdout.flush()
        os._exit(0)

    with ExitStack() as exits:
        keep_saved_files_apart(exits, folder)
        trial = Trial(exits, finish, program)
        try:
            raised = run(program.words, program.is_module)
        except NoProgramError as error:
            sys.exit(str(error))
        finish(how_it_failed(raised))


def seed() -> None:
    """Seed the random numbers of programs that do not seed them, alike in all runs."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(SEED)


def keep_saved_files_apart(exits: ExitStack, folder: Path) -> None:
    """Let torch and `ampfuse.checkpoint` save into a folder, and find these files there again.

    Otherwise the weights of a measurement would overwrite others. Earlier files of the program are
    found until it saves.
    """
    moved: dict[str, Path] = {}

    def move(function: Callable[..., Any], writes: bool = False) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @wraps(function)
        def run_there(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            name = "f" if "f" in given.arguments else "path"
            path = given.arguments[name]
            if isinstance(path, str | os.PathLike):
                key = os.path.abspath(path)
                if writes:
                    moved.setdefault(key, folder / f"saved{len(moved)}")
                given.arguments[name] = moved.get(key, path)
            return function(*given.args, **given.kwargs)

        return run_there

    save = partial(move, writes=True)
    hook_functions(exits, save=save, load=move, save_checkpoint=save)


def how_it_failed(error: BaseException | None) -> str | None:
    """Describe an exception and the program's line that raised it; None if nothing failed."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    if isinstance(error, RefusedError):
        names = " ".join(error.arguments)
        return f"unrecognized arguments: {names} (options of ampfuse stand before the script)"
    frames = list(traceback.walk_tb(error.__traceback__))
    frames = [pair for pair in frames if is_of_program(pair[0].f_code)]
    lines = [f" ({file_name(frame.f_code)}:{line})" for frame, line in frames]
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, FileNotFoundError):
        text += "; only torch.load finds here what torch.save has written"
    return f"{type(error).__name__}: {text}{lines[-1] if lines else ''}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
