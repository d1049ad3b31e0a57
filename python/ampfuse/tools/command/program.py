"""Runs a program as Python itself would: as `__main__`, with its own arguments and path."""

import builtins
import importlib.util
import os
import sys
import traceback
from contextlib import suppress
from importlib.abc import InspectLoader
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn

# True if Python was started with -P, which keeps the script's folder off sys.path (3.11 and newer).
SAFE_PATH = getattr(sys.flags, "safe_path", False)


class NoProgramError(Exception):
    """There is no program to run; the message gives the reason."""


def run_script(name: str, arguments: list[str]) -> BaseException | None:
    """Run `python name arguments...`; return the exception that it raised, or None."""
    if name == "-":
        return _run_standard_input(arguments)
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


def _run_standard_input(arguments: list[str]) -> BaseException | None:
    """Run `python - arguments...`. Python reads the whole program before it runs it."""
    source = sys.stdin.buffer.read() if sys.stdin else b""  # None if stdin was closed
    sys.argv = ["-", *arguments]
    if not SAFE_PATH:
        sys.path[0] = ""
    return _run(source, "<stdin>", __file__="<stdin>", __loader__=BuiltinImporter)


def run_module(name: str, arguments: list[str]) -> BaseException | None:
    """Run `python -m name arguments...`; return the exception that it raised, or None."""
    sys.argv = ["-m", *arguments]  # for parent packages, which are imported first
    try:
        spec = _found(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = _found(name)
    except _RaisedByPackageError as error:
        return error.__cause__
    except (ImportError, ValueError) as error:
        raise NoProgramError(f"cannot find module {name}: {error}") from None
    code = spec.loader.get_code(name) if spec and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise NoProgramError(f"there is no module {name}")
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


class _RaisedByPackageError(Exception):
    """A module's parent package raised the exception `__cause__` while it was imported."""


def _found(name: str) -> ModuleSpec | None:
    """Import a module's parent package, and return the module's spec or None."""
    package = name.rpartition(".")[0]
    if package:
        try:
            importlib.import_module(package)
        except BaseException as error:
            missing = error.name if isinstance(error, ImportError) else None
            if missing is not None and f"{package}.".startswith(f"{missing}."):
                raise
            raise _RaisedByPackageError from error
    return importlib.util.find_spec(name)


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
        return SystemExit(error.code)  # a new one, without the program's frames
    except BaseException as error:  # any exception is passed on
        traceback = error.__traceback__
        assert traceback is not None  # its first frame is this one
        return error.with_traceback(traceback.tb_next)
    return None


def report_exception(raised: BaseException | None) -> None:
    """Report an uncaught exception as Python does: set `sys.last_*` and call `sys.excepthook`."""
    if raised is None or isinstance(raised, SystemExit):
        return
    found = (type(raised), raised, raised.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = found
    if sys.version_info >= (3, 12):
        sys.last_exc = raised
    try:
        sys.excepthook(*found)
    except SystemExit:
        raise
    except BaseException as failed:
        print("Error in sys.excepthook:", file=sys.stderr)
        hooks_own = failed.__traceback__ and failed.__traceback__.tb_next
        traceback.print_exception(failed.with_traceback(hooks_own))
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(*found)


def end_by_interrupt() -> None:
    """Make Python end the process by SIGINT.

    Python does this if KeyboardInterrupt ended the last source text that it executed. After the
    program, imported modules may have executed other text, for example to define named tuples.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def end_as_after(raised: BaseException | None) -> NoReturn:
    """End the process as Python does after this exception, which was reported already."""
    if isinstance(raised, SystemExit):
        raise raised
    if isinstance(raised, KeyboardInterrupt):  # raised again, so that SIGINT ends the process
        sys.excepthook = lambda *_: None
        raise raised
    sys.exit(0 if raised is None else 1)
