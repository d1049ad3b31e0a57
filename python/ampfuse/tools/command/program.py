"""Runs a program as Python itself would: as `__main__`, with its own arguments and path."""

import builtins
import os
import runpy
import sys
from argparse import ArgumentParser
from importlib.machinery import BuiltinImporter, SourceFileLoader
from traceback import walk_tb
from types import CodeType, ModuleType
from typing import Any, NoReturn

# True if Python was started with -P, which keeps the script's folder off sys.path (3.11 and newer).
SAFE_PATH = getattr(sys.flags, "safe_path", False)


class NoProgramError(Exception):
    """There is no program to run; the message gives the reason."""


class RefusedError(SystemExit):
    """The program has ended by an error of argparse, which did not know these arguments."""

    def __init__(self, code: Any, arguments: list[str]) -> None:
        super().__init__(code)
        self.arguments = arguments


def run(words: list[str], is_module: bool) -> BaseException | None:
    """Run `python [-m] words...`; return the exception that it raised, or None."""
    return (run_module if is_module else run_script)(words[0], words[1:])


def run_script(name: str, arguments: list[str]) -> BaseException | None:
    """Run `python name arguments...`; return the exception that it raised, or None."""
    if name == "-":  # Python reads the whole program before it runs it
        source = sys.stdin.buffer.read() if sys.stdin else b""  # None if stdin was closed
        sys.argv = ["-", *arguments]
        if not SAFE_PATH:
            sys.path[0] = ""
        return _run(source, "<stdin>", __file__="<stdin>", __loader__=BuiltinImporter)
    if os.path.isdir(name):
        raise NoProgramError(f"{name} is a folder, not a script")
    try:
        with open(name, "rb") as script:
            source = script.read()
    except OSError as error:
        raise NoProgramError(f"cannot read {name}: {error.strerror}") from None
    file = os.path.abspath(name)
    sys.argv = [name, *arguments]
    if not SAFE_PATH:
        sys.path[0] = os.path.dirname(os.path.realpath(file))
    return _run(source, file, __file__=file, __loader__=SourceFileLoader("__main__", file))


def run_module(name: str, arguments: list[str]) -> BaseException | None:
    """Run `python -m name arguments...`; return the exception that it raised, or None."""
    sys.argv = ["-m", *arguments]  # for parent packages, which are imported first
    try:
        _, spec, code = runpy._get_module_details(name, NoProgramError)  # type: ignore[attr-defined]
    except NoProgramError:
        raise
    except BaseException as error:  # raised by a parent package
        return drop_first_frame(error)
    sys.argv = [str(spec.origin), *arguments]
    return _run(
        code,
        str(spec.origin),
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )


def _run(code: CodeType | bytes, file: str, **attributes: Any) -> BaseException | None:
    """Run code as module `__main__`, which stays for threads, pickles and exit handlers."""
    main = ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    vars(main).update({"__builtins__": builtins, "__cached__": None, **attributes})
    sys.modules["__main__"] = main
    try:
        if isinstance(code, bytes):
            code = compile(code, file, "exec", dont_inherit=True)
        exec(code, vars(main))
    except SystemExit as error:
        return without_frames(error)
    except BaseException as error:  # any exception is passed on
        return drop_first_frame(error)
    return None


def without_frames(error: SystemExit) -> SystemExit:
    """Return an equal exception that does not keep the program's frames."""
    *_, (last, _) = walk_tb(error.__traceback__)
    message = last.f_locals.get("message") if last.f_code is ArgumentParser.exit.__code__ else None
    arguments = str(message).partition("unrecognized arguments: ")[2].split()
    if arguments:
        return RefusedError(error.code, arguments)
    return SystemExit(error.code)


def drop_first_frame(error: BaseException) -> BaseException:
    """Return an exception without the frame that has caught it, which is ours."""
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def report_exception(raised: BaseException | None) -> None:
    """Report an uncaught exception as Python does: set `sys.last_*` and call `sys.excepthook`."""
    if raised is None or isinstance(raised, SystemExit):
        return
    found = (type(raised), raised, raised.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = found
    if sys.version_info >= (3, 12):
        sys.last_exc = raised
    sys.excepthook(*found)


def end_as_after(raised: BaseException | None) -> NoReturn:
    """End the process as Python does after this exception, which was reported already."""
    if isinstance(raised, SystemExit):
        raise raised
    if isinstance(raised, KeyboardInterrupt):  # raised again, so that SIGINT ends the process
        sys.excepthook = lambda *_: None
        raise raised
    sys.exit(0 if raised is None else 1)
