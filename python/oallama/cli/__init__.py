"""The command line: one file per command; errors, options and progress bars are shared."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; ends the process with the command's exit code. `arguments`: default those of the process."""
    try:
        from .app import app  # takes half a second, in which a Ctrl-C is as welcome as later

        app(arguments, prog_name="oallama")
    except KeyboardInterrupt:
        _say_interrupted()
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _say_interrupted()
        raise


def _say_interrupted() -> None:
    print("interrupted", file=sys.stderr)
