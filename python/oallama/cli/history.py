"""`oallama history`: what plans took when they ran, and what was learned from it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from oallama.base.printing import print_json, say
from oallama.errors import OallamaError
from oallama.loading.learning import history_file, learned_factors, read_history
from oallama.views.history import render_history

from .options import Json, Threads
from .terminal import out


def history(
    threads: Threads = 0,
    forget: Annotated[bool, typer.Option("--forget", help="Drop the history of this machine.")] = False,
    json: Json = False,
) -> None:
    """Show what plans took when they ran beside what was predicted, and what later predictions learn from it."""
    path = history_file(threads)
    if forget:
        _forget(path)
        return
    found = read_history(path)
    profile = found.runs[-1].profile if found.runs else ""
    learned = learned_factors(found, profile)
    if json:
        print_json({"file": str(path), "runs": [asdict(run) for run in found.runs], "learned": learned})
    else:
        out.print(render_history(found, learned))


def _forget(path: Path) -> None:
    known = path.exists()
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OallamaError(f"cannot remove the history {path}: {error.strerror}") from error
    say(f"dropped {path}" if known else f"there is no history at {path}")
