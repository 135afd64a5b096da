"""Processes of tests."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
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


def until(happens: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what happens in other processes."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
