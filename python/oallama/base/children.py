"""Processes that this one starts: they end with it, and get the signals that are meant for them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


# The command line of this installation, for processes of its own.
OALLAMA = (sys.executable, "-c", "from oallama.cli import main; main()")


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel ends this child when the thread that started it does."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def forwarded_signals(process: subprocess.Popen[Any]) -> Iterator[list[int]]:
    """Within the block SIGINT and SIGTERM go to `process`, in a session of its own, and not to this one.

    Yields the list of those that came.
    """
    came: list[int] = []

    def forward(number: int, _: Any) -> None:
        came.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_words(output: IO[bytes], n: int = 1) -> str:
    """The last n lines that a process has written to a file, as one; llama.cpp's progress, dots alone, is left out."""
    text = os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0)  # the place to write at is the process's
    lines = [line.strip() for line in text.decode("utf-8", "replace").split("\n")]
    return " | ".join([line for line in lines if line.strip(".")][-n:]) or "it says nothing"


class Ended(NamedTuple):
    """asked: whether SIGINT or SIGTERM came before."""

    code: int
    asked: bool


def run_server(command: list[str], environment: dict[str, str]) -> Ended:
    """Run a server until it ends; SIGINT and SIGTERM are passed on once, so that it can finish its requests."""
    # A session of its own: else a Ctrl-C reaches it twice, and the second one kills it at once.
    server = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=die_with_parent)
    with forwarded_signals(server) as came:
        try:
            return Ended(server.wait(), bool(came))
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
