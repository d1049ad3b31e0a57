"""The command `python -m ampfuse memory`: what the memory of an unchanged program is for.

The program runs until its optimizer has stepped two or three times. Its operators compute shapes,
but no numbers, as if there were no GPU.
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
import warnings
import weakref
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ampfuse import checkpoint
from ampfuse._texts import bytes_of, size_text
from ampfuse.tools.command import program
from ampfuse.tools.command.options import Parser, refuse
from ampfuse.tools.hooks import hook_functions
from ampfuse.tools.memory.account import Account, account_of
from ampfuse.tools.memory.batch import MOST, search
from ampfuse.tools.memory.record import Record
from ampfuse.tools.memory.recorder import Recorder
from ampfuse.tools.memory.under_autocast import is_in_float32, under_autocast

USAGE = """python -m ampfuse memory [options] script.py [arguments of the script]
       python -m ampfuse memory [options] -m module [arguments of the module]"""
EPILOG = """The script runs until its optimizer has stepped two or three times. No numbers
are computed: losses are 0, and torch.save writes nothing; other files that the script
writes are written. So no GPU is needed, and a step of a large model takes seconds.

examples:
  python -m ampfuse memory train.py --model large
  python -m ampfuse memory --batch 64 --plot memory.png train.py
  python -m ampfuse memory --fit 24GiB train.py"""
WRONG_OPTIONS = 2  # the status with which argparse ends a program
TRIALS = 3  # after batches were doubled


class Batch(NamedTuple):
    """A batch of a loader: its size, and the number of samples that all batches together have."""

    size: int
    samples: int


class DoneError(BaseException):
    """Ends the program after its last step. Programs catch Exception, but not this."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Run `python -m ampfuse memory` with these arguments."""
    chosen = parse(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the program then chooses the CPU
    warnings.filterwarnings("ignore", ".*CUDA is not available.*")
    folder = os.getcwd()
    with loaders(chosen.batch) as batches, nothing_saved():
        account = run(chosen, batches)
    if chosen.batch is not None and not batches:
        refuse("--batch: no torch.utils.data.DataLoader makes the program's batches")
    if chosen.json is not None:
        report = asdict(account) | {"batch": batches[-1].size if batches else None}
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    print()  # the program may have left a line open
    print(account)
    if chosen.fit is not None:
        print(largest_batch(chosen, account, batches, folder))
    if chosen.plot is not None:
        account.plot(chosen.plot)
    sys.exit(0)


def run(chosen: Namespace, batches: list[Batch]) -> Account:
    """Run two steps of the program, and a third one under autocast if it computes in float32.

    `batches`: those that its loaders have given so far.
    """
    steps = 0
    records: list[Record] = []

    def after_step() -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            recorder.begin()
            return
        if steps <= 3:
            records.append(recorder.record())
        if steps > 2 or not is_in_float32(records[0]):
            raise DoneError
        recorder.begin()
        exits.enter_context(under_autocast(chosen.device, recorder))

    with Recorder(chosen.device, after_step) as recorder, ExitStack() as exits:
        try:
            raised = program.run(chosen.words, chosen.is_module)
        except program.NoProgramError as error:
            refuse(str(error))
    if records:  # also if the program has caught the error, or cannot run under autocast
        return account_of(*records)
    if isinstance(raised, SystemExit) and raised.code == WRONG_OPTIONS:
        raise raised  # the program has said what is wrong
    if raised is None or isinstance(raised, SystemExit):
        text = f"memory: expected two steps of an optimizer, but the program has taken {steps}"
        if size := batches[-1].size if batches else chosen.batch:
            count = f"{len(batches)} whole batch{'' if len(batches) == 1 else 'es'}"
            text += f": its data have {count} of {size} samples"
        refuse(text)
    program.report_exception(raised)
    refuse(
        "memory: the program failed. It ran without a GPU, and its operators computed no numbers, "
        "but zeros. If it cannot run like this, call ampfuse.memory.account for its step alone"
    )


@contextmanager
def loaders(batch: int | None) -> Iterator[list[Batch]]:
    """Make loaders load in this process, with another batch size if one is given.

    Return a list to which each batch that a loader gives is added.
    """
    signature = inspect.signature(DataLoader.__init__)
    original_init, original_next = DataLoader.__init__, _BaseDataLoaderIter.__next__
    seen: list[Batch] = []
    of_samplers: weakref.WeakKeyDictionary[Any, Batch] = weakref.WeakKeyDictionary()

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        for name in ("multiprocessing_context", "persistent_workers", "prefetch_factor", "timeout"):
            given.pop(name, None)
        given |= {"num_workers": 0, "pin_memory": False}
        own_size = given.get("batch_size", 1)
        if given.get("batch_sampler") is not None or own_size is None:
            original_init(**given)
            return
        given["batch_size"] = size = own_size if batch is None else batch
        source = given["dataset"] if given.get("sampler") is None else given["sampler"]
        samples = MOST
        with suppress(TypeError):  # of an iterable dataset, which has no length
            samples = len(source)
        # A smaller batch would have another account. Only a program's own batch may be larger than
        # its dataset, since a trial must not count samples that are not there.
        if batch is None:
            size = min(size, samples)
        given["drop_last"] = size == given["batch_size"]
        original_init(**given)
        of_samplers[self.batch_sampler] = Batch(size, samples)

    def follow(self: Any) -> Any:
        result = original_next(self)
        if self._index_sampler in of_samplers:
            seen.append(of_samplers[self._index_sampler])
        return result

    with ExitStack() as exits:
        hook_functions(exits, make_loader=lambda _: init, next_batch=lambda _: follow)
        yield seen


@contextmanager
def nothing_saved() -> Iterator[None]:
    """Make functions that save do nothing: weights have no meaning, and would overwrite others."""

    def save(path: Any, **_: Any) -> checkpoint.Saving:
        return checkpoint.Saving(Path(path))

    with ExitStack() as exits:
        hook_functions(exits, save=lambda _: lambda *_, **__: None, save_checkpoint=lambda _: save)
        yield


def largest_batch(chosen: Namespace, account: Account, batches: list[Batch], folder: str) -> str:
    """Return a sentence about the largest batch that fits, from accounts of other batches."""
    if not batches:
        refuse(
            "--fit: no torch.utils.data.DataLoader makes the program's batches. For other "
            "programs there is ampfuse.memory.largest_batch"
        )
    if chosen.words[0] == "-":
        refuse("--fit: expected a script in a file, which can run again")
    batch, samples = batches[-1]
    peaks = {batch: account.peak}
    failures: list[str] = []
    trying = "python -m ampfuse: trying batches of"
    print(trying, end="", file=sys.stderr)

    def peak_of(batch: int) -> int | None:
        print(f" {batch}", end="", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as own:
            file = Path(own) / "account.json"
            words = ["-m", *chosen.words] if chosen.is_module else ["--", *chosen.words]
            options = ["--device", chosen.device, "--batch", str(batch), "--json", str(file)]
            command = [sys.executable, "-m", "ampfuse", "memory", *options, *words]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                why = done.stderr.strip().rpartition("\n")[2]
                why = why.removeprefix("python -m ampfuse: ").removeprefix("memory: ")
                failures.append(f"with batches of {batch} the program fails: {why}")
                if len(failures) == 1:
                    print(f"\n{failures[0]}\n{trying}", end="", file=sys.stderr, flush=True)
                return None
            return int(json.loads(file.read_text())["peak"])

    largest = search(peak_of, chosen.fit, TRIALS, peaks, samples)
    print(file=sys.stderr)
    room = size_text(chosen.fit)
    found = f"no batch fits in {room}"
    if largest:
        at_least = "at least " if failures else ""  # something else than memory was the limit
        size = size_text(peaks[largest])
        found = f"largest batch in {room}: {at_least}{largest}, which takes {size}"
        if largest >= samples:
            found += "; the data have no more samples"
    return "\n".join([found, *failures[:1]])


def parse(arguments: Sequence[str]) -> Namespace:
    """Parse the command line."""
    parser = Parser(
        usage=USAGE,
        description="Print what the memory of a program's training step is for.",
        epilog=EPILOG,
        json="write the account to it",
        plot="draw the account into it",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="the device the account is about; cuda unless given",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="the batch size of every DataLoader")
    parser.add_argument(
        "--fit",
        metavar="SIZE",
        help="find the largest batch that fits, for example into 24GiB",
    )
    given = parser.read(arguments)
    if given.batch is not None and given.batch < 1:
        refuse(f"--batch: expected at least 1, got {given.batch}")
    try:
        given.fit = given.fit and bytes_of(given.fit)
    except ValueError as error:
        refuse(f"--fit: {error}")
    return given
