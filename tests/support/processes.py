"""Processes of tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any


def ran(
    *command: str | Path, env: Mapping[str, str] | None = None, timeout: float = 300.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A program that has ended well. env: beside this process's variables."""
    options |= {"capture_output": True, "text": True, "timeout": timeout, "env": os.environ | (env or {})}
    done = subprocess.run([str(word) for word in command], **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def ran_python(source: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """As ran()."""
    return ran(sys.executable, "-c", source, *arguments, **options)


@contextmanager
def process_of(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with text pipes that does not outlive the block, whatever happens in it."""
    with subprocess.Popen([str(word) for word in command], text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def busy_cpus(n: int) -> Iterator[None]:
    """Within the block n processes compute all the time."""
    with ExitStack() as stack:
        for _ in range(n):
            stack.enter_context(program("print('ready', flush=True)\nwhile True: pass"))
        yield


@contextmanager
def program(source: str, *arguments: str | int, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has said "ready"."""
    words = [sys.executable, "-c", source, *map(str, arguments)]
    with process_of(words, stdout=subprocess.PIPE, **options) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process


def until(happens: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what happens in other processes."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """A zombie, which waits for whoever inherited it, does not run."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
