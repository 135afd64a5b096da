"""What commands write to the terminal: tables on stdout, progress on stderr, JSON for programs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from oallama.base.printing import say
from oallama.data.entries import QUIET_CPUS
from oallama.loading.autoplan import Progress as Report
from oallama.loading.autoplan import announce_once
from oallama.profiling.fingerprint import cpu_set, is_quick
from oallama.profiling.other_work import cpus_of_others

out = Console(highlight=False, soft_wrap=False)
err = Console(highlight=False, soft_wrap=False, stderr=True)
GRACE_S = 0.5
EVERY_S = 10.0


def warn_if_busy() -> None:
    """Tell people when other programs use the CPU: threads that wait actively for each other then lose most."""
    if is_quick():  # times are inexact anyhow
        return
    busy, cpus = cpus_of_others(), len(cpu_set())
    if busy > QUIET_CPUS:
        say(f"note: other programs keep {busy:.1f} of {cpus} CPUs busy; what is measured now may be far off")


@contextmanager
def progress_bar(title: str, announces: bool = False) -> Iterator[Report]:
    """A bar on stderr, shown from the first call on and gone afterwards.

    When stderr is no terminal, a line says every `EVERY_S` seconds how far it is; announces: one with the first call.
    """
    what_next = TextColumn("[dim]{task.fields[what]}")
    columns = (TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn(), what_next)
    console = Console(stderr=True)
    if not console.is_terminal:
        yield in_lines(title, announce_once() if announces else None)
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, what="", visible=False)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total or 1, what=what[:34], visible=total > 0
        )


def in_lines(title: str, first: Report | None = None) -> Report:
    """Progress for a file or a pipe. first: is called, too."""
    latest = time.monotonic()

    def report(done: float, total: float, what: str) -> None:
        nonlocal latest
        if first:
            first(done, total, what)
        now = time.monotonic()
        if total > 0 and now - latest >= EVERY_S:
            latest = now
            say(f"{title}: {done / total:.0%}, {what}")

    return report


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process during a long call into the engine, which Python alone would wait for.

    Inside the block nothing may be under way that must be finished: the process ends where it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # The engine's loader sends file descriptor 2 to /dev/null, so the message needs one of its own.
    stderr = os.dup(2)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    finished = threading.Event()

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGINT and not finished.wait(GRACE_S):
                os.write(stderr, b"interrupted\n")
                os._exit(130)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        signal.set_wakeup_fd(before)
        os.close(writer)
        watcher.join()
        os.close(reader)
        os.close(stderr)
