"""Processes of tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def process_of(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with text pipes that does not outlive the block, whatever happens in it."""
    with subprocess.Popen([str(word) for word in command], text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()
