"""The command line: one file per command; errors, options and progress bars are shared."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; ends the process with the command's exit code. `arguments`: default those of the process."""
    sys.unraisablehook = _again_outside
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


def _again_outside(failure: Any) -> None:
    """A Ctrl-C that comes while the engine calls back (its log, a progress) is dropped there: it comes once more."""
    if failure.exc_type is KeyboardInterrupt:
        main_thread = threading.main_thread().ident or 0
        threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(failure)


def _say_interrupted() -> None:
    print("interrupted", file=sys.stderr)
