"""The command line: one file per command; errors, options and progress bars are shared."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; ends the process with the command's exit code. `arguments`: default those of the process."""
    try:
        from .app import app  # takes half a second, in which a Ctrl-C is as welcome as later

        app(arguments, prog_name="oallama")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
