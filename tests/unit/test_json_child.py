"""The parent's side of a process that speaks lines of JSON."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from oallama.base.json_child import JsonChild
from support.processes import is_running, until

PROGRAM = """
import json, os, sys
print("welcome to this host")
print(json.dumps([1, 2]))
for line in sys.stdin:
    if not line.strip():
        print(json.dumps({"heard": "life"}), flush=True)
        continue
    told = json.loads(line)
    if "words" in told:
        print("............", told["words"], "...", sep="\\n", file=sys.stderr, flush=True)
    if "exit" in told:
        sys.exit(told["exit"])
    print(json.dumps({"pid": os.getpid(), **told}), flush=True)
"""
COMMAND = [sys.executable, "-c", PROGRAM]
LONG_S = 60.0


@pytest.fixture
def child() -> Iterator[JsonChild]:
    with JsonChild(COMMAND) as made:
        yield made


def test_an_answer_for_a_line(child: JsonChild) -> None:
    """Lines that are no objects, as a login shell's greeting, are left out."""
    child.tell({"n": 1})
    assert child.hear(LONG_S) == {"pid": child.process.pid, "n": 1}
    child.show_life()
    assert child.hear(LONG_S) == {"heard": "life"}
    with pytest.raises(TimeoutError, match="nothing was said within 0 s"):
        child.hear(0.0)


def test_its_end_is_heard_again_and_again(child: JsonChild) -> None:
    child.tell({"words": "no such file", "exit": 3})
    assert child.hear(LONG_S) is None and child.hear(LONG_S) is None
    assert child.death() == "ended with exit code 3"
    assert child.last_words() == "no such file" and child.last_words(3) == "no such file"
    child.tell({"n": 2})  # nobody reads it
    child.end()


def test_a_kill_is_named(child: JsonChild) -> None:
    os.kill(child.process.pid, signal.SIGKILL)
    assert child.hear(LONG_S) is None
    assert child.death() == "was killed by SIGKILL, out of memory?" and child.last_words() == "it says nothing"


def test_events_may_go_to_a_queue_of_others() -> None:
    events: queue.Queue[Any] = queue.Queue()
    with JsonChild(COMMAND, events=events) as child:
        events.put("from elsewhere")
        child.tell({"n": 1})
        assert [events.get(timeout=LONG_S), events.get(timeout=LONG_S)["n"]] == ["from elsewhere", 1]
    assert events.get(timeout=LONG_S) is None


def test_it_may_end_by_itself() -> None:
    child = JsonChild(COMMAND, {"PATH": os.environ["PATH"]})
    child.end(LONG_S)
    assert child.death() == "ended with exit code 0"
    child.end()


def test_it_ends_with_its_parent() -> None:
    program = (
        "import sys; from oallama.base.json_child import JsonChild\n"
        "child = JsonChild([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.process.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    until(lambda: not is_running(pid), LONG_S)
