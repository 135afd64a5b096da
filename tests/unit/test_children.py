"""Servers that this process runs, and the signals that it passes on to them."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from oallama.base.children import Ended, run_server
from support.processes import until

WAITS = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os.abort() if sys.argv[2] == "aborts" else sys.exit(3))
pathlib.Path(sys.argv[1]).touch()
signal.pause()
"""


@pytest.mark.parametrize(("does", "code"), [("aborts", -signal.SIGABRT), ("ends", 3)])
def test_a_server_that_was_asked_to_end(tmp_path: Path, does: str, code: int) -> None:
    started, before = tmp_path / "started", signal.getsignal(signal.SIGTERM)

    def ask() -> None:
        until(lambda: started.exists() and signal.getsignal(signal.SIGTERM) is not before)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    assert run_server([sys.executable, "-c", WAITS, str(started), does], dict(os.environ)) == Ended(code, True)
    asking.join()


def test_a_server_that_aborts_by_itself() -> None:
    command = [sys.executable, "-c", "import os; os.abort()"]
    assert run_server(command, dict(os.environ)) == Ended(-signal.SIGABRT, False)
