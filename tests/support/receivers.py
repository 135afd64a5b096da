"""Receivers in processes of their own, which tests may kill."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import AbstractContextManager

from support.processes import program

_RECEIVE = """if True:
    import sys, time
    from oallama.weave import Receiver
    path, quota_nbytes, slot_nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    slots = {"task_nbytes": slot_nbytes, "result_nbytes": slot_nbytes} if slot_nbytes else {}
    receiver = Receiver(path, quota_nbytes, **slots)
    print("ready", flush=True)
    time.sleep(1000)
"""


def receiver(
    path: str, quota_nbytes: int = 1 << 26, slot_nbytes: int = 0
) -> AbstractContextManager[subprocess.Popen[str]]:
    """slot_nbytes: of a task and of a result; 0 takes the receiver's own."""
    return program(_RECEIVE, path, quota_nbytes, slot_nbytes)


def strike(process: subprocess.Popen[str], number: int) -> None:
    """Kill or stop a program, and wait until it is: the threads of one that is being stopped run on for a moment."""
    os.kill(process.pid, number)
    if number == signal.SIGKILL:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
