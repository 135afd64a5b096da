"""The command line: one file per command; errors, options and progress bars are shared."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ..base.printing import print_in_ascii
from ..base.processor import refuse_old_processor
from ..errors import OallamaError

__all__ = ["main"]

INTERRUPTED = 130

_was_interrupted = threading.Event()


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; ends the process with the command's exit code. `arguments`: default those of the process."""
    sys.unraisablehook = _not_raised
    print_in_ascii()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, _interrupt)
    try:
        refuse_old_processor()
    except OallamaError as error:
        sys.exit(f"error: {error}")
    try:
        _imported_app()(arguments, prog_name="oallama")
    except KeyboardInterrupt:
        _say_interrupted()
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _say_interrupted()
        raise


def _imported_app() -> Any:
    """Takes half a second. A Ctrl-C meanwhile comes afterwards: a native module may turn it into an ImportError."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        from .app import app
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return app


def _interrupt(number: int, frame: Any) -> None:
    _was_interrupted.set()
    signal.default_int_handler(number, frame)


def _not_raised(failure: Any) -> None:
    """What Python cannot raise: a Ctrl-C while the engine calls back, or an error of an object's end.

    The engine's callbacks (its log, a progress) drop a Ctrl-C, so it comes once more. An object whose beginning was
    interrupted lacks what its end asks for: nobody wants to read that.
    """
    if failure.exc_type is KeyboardInterrupt:
        main_thread = threading.main_thread().ident or 0
        threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    elif not _was_interrupted.is_set():
        sys.__unraisablehook__(failure)


def _say_interrupted() -> None:
    print("interrupted", file=sys.stderr)
