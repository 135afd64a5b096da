"""Two processes of bench/weave_soak.py: one starts receivers, the other injects faults into them.

python bench/weave_fault_processes.py spawner|injector
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from oallama.base.json_child import JsonChild

HANG_S = 10.0
N_SLOTS, TASK_NBYTES, RESULT_NBYTES = 4, 1 << 19, 1 << 18  # with a header of 128 bytes each
SLOTS: dict[str, Any] = {"task_nbytes": TASK_NBYTES - 128, "result_nbytes": RESULT_NBYTES - 128, "n_slots": N_SLOTS}


class Helper(JsonChild):
    """This program in a process of its own; it answers a line of JSON with lines of JSON."""

    def __init__(self, role: str) -> None:
        super().__init__([sys.executable, __file__, role])

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(command)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Raises TimeoutError after HANG_S, RuntimeError when the process has ended."""
        said = self.hear(HANG_S)
        if said is None:
            raise RuntimeError(f"a helper {self.death()}: {self.last_words()}")
        return said


def say(**answer: Any) -> None:
    os.write(1, (json.dumps(answer) + "\n").encode())


def spawner() -> None:
    """Helper: forks receivers, which takes milliseconds where a new Python takes a second.

    {path, model, quota, serves} -> {pid, crashed}: a new one, in place of the last; {path} -> {lives}.
    """
    from oallama.engine import runtime

    runtime.llama_cpp()
    from oallama import _core  # noqa: F401  its children have it then

    children: dict[str, int] = {}
    for text in sys.stdin:
        command = json.loads(text)
        pid = children.get(command["path"], 0)
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if pid else None
        if "quota" not in command:
            say(lives=status is None)
            continue
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        children[command["path"]] = child = os.fork()
        if child == 0:
            receive(command, crashed=status is not None and status.si_status != signal.SIGKILL)


def receive(command: Mapping[str, Any], crashed: bool) -> None:
    """A receiver, which may compute a cold model meanwhile; SIGUSR1 drains it, SIGUSR2 ends it."""
    from oallama.weave import Receiver
    from oallama.weave.sequences import Sequences

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    orders = {signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, orders)  # of the threads of the receiver, too
    with ExitStack() as stack:
        receiver = stack.enter_context(Receiver(command["path"], command["quota"], **SLOTS))
        cold = None
        if command["serves"]:
            stack.enter_context(receiver.serving())
            cold = stack.enter_context(Sequences(Path(command["model"]), n_ctx=512, n_seq=2))
        say(pid=os.getpid(), crashed=crashed)
        while True:
            order = signal.sigtimedwait(orders, 0 if cold else 1000)
            if order:
                receiver.drain(order.si_signo == signal.SIGUSR1)
                say(drains=order.si_signo == signal.SIGUSR1)
            if cold:
                cold.step({0: [500], 1: [600]})
                if cold.lengths[0] > 200:
                    cold.remove(0)
                    cold.remove(1)


def injector() -> None:
    """Helper: {path, kind, seconds, seed} -> {begin} and, when it is done, {what}."""
    for text in sys.stdin:
        command = json.loads(text)
        rng = np.random.default_rng(command["seed"])
        with open(command["path"], "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            begin = time.monotonic()
            say(begin=begin)
            if command["kind"] == "hog":
                what = hog(begin + 4 * command["seconds"])
            else:
                what = scribble(memory, command["kind"], begin + command["seconds"], rng)
        say(what=what)


def hog(end: float) -> str:
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            while time.monotonic() < end:
                pass
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return ""


def scribble(memory: mmap.mmap, kind: str, end: float, rng: np.random.Generator) -> str:
    """Garbage into a word, or into the slots of tasks or of results until `end`. Returns the word."""
    from oallama.weave.channel import layout

    channel = layout()
    if kind == "word":
        places = {**channel.words, **channel.header}
        name = str(rng.choice(list(places)))
        at, size = places[name]
        form = {4: "<I", 8: "<Q"}[size]
        (value,) = struct.unpack_from(form, memory, at)
        flipped, anything = value ^ (1 << int(rng.integers(8 * size))), int(rng.integers(1 << 63))
        garbage = (value + 1, value - 1, value - 5, flipped, anything, 0)[rng.integers(6)]
        struct.pack_into(form, memory, at, garbage % (1 << 8 * size))
        return name
    first, nbytes = channel.first_slot, TASK_NBYTES
    if kind == "result":
        first, nbytes = first + N_SLOTS * TASK_NBYTES, RESULT_NBYTES
    while time.monotonic() < end:
        at = first + int(rng.integers(N_SLOTS)) * nbytes + int(rng.integers(64 if rng.random() < 0.3 else 4096))
        memory[at : at + 8] = rng.bytes(8)
    return ""


if __name__ == "__main__":
    {"spawner": spawner, "injector": injector}[sys.argv[1]]()
