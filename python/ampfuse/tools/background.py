"""Runs a function beside the program, in a thread that the program does not notice."""

import _thread
import signal
import threading
from collections.abc import Callable


class Background:
    """A function that runs in a thread until it is stopped.

    The thread is not among those of `threading.enumerate()`, on which a program may wait, and gets
    no signals, which a program may have blocked to wait for them.
    """

    def __init__(self, function: Callable[[threading.Event], None]) -> None:
        """Start the function, which must return soon after the event that it receives is set."""
        self._function = function
        self._done = threading.Event()
        self._ended = threading.Event()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _thread.start_new_thread(self._run, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def stop(self) -> None:
        """Set the function's event, and wait until the function has returned."""
        self._done.set()
        self._ended.wait()

    def _run(self) -> None:
        try:
            self._function(self._done)
        finally:
            self._ended.set()
