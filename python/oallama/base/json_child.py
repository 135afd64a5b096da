"""A process that is told lines of JSON and says lines of JSON: the parent's side of all such pairs.

The child reads commands from standard input and writes what it has to say to standard output, one object a line.
Standard error is kept for its last words. It has a session of its own, so that a terminal's Ctrl-C is for the parent
alone, and it ends when the thread that made it does.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from .children import die_with_parent, last_words


class JsonChild:
    """Starts the process; a context manager that ends it.

    command: program and arguments. environment: default this process's. events: gets each object that it says, and None
    when it has ended; default a queue of its own, for `hear`. Other lines are left out: a login shell may greet.

    Raises:
        FileNotFoundError: there is no such program.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        events: queue.Queue[Any] | None = None,
    ) -> None:
        self._events: queue.Queue[Any] = queue.Queue() if events is None else events
        self._writing = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the object)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> JsonChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def tell(self, content: Mapping[str, Any]) -> None:
        """Send an object. When the process has ended nothing happens: that is heard."""
        self._write(json.dumps(content).encode() + b"\n")

    def show_life(self) -> None:
        """Send an empty line, for a child that ends when its parent falls silent."""
        self._write(b"\n")

    def hear(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next object; None when it has ended, again and again. Raises TimeoutError."""
        try:
            said: dict[str, Any] | None = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"nothing was said within {timeout_s:g} s") from None
        if said is None:
            self._events.put(None)
        return said

    def last_words(self, n: int = 1) -> str:
        """The last n lines of standard error."""
        return last_words(self._log, n)

    def death(self) -> str:
        """How it has ended: "ended with exit code 1", "was killed by SIGKILL, out of memory?"; waits for it."""
        code = self.process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        hint = ", out of memory?" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def end(self, patience_s: float = 0.0) -> None:
        """End it; may be called twice. patience_s: that long after the end of its standard input it ends by itself."""
        assert self.process.stdin is not None
        if patience_s:
            with suppress(OSError):
                self.process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with suppress(OSError):  # what the dead process has not read
            self.process.stdin.close()

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError), self._writing:  # ValueError: it is closed
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with suppress(ValueError):
                    if isinstance(said := json.loads(line), dict):
                        self._events.put(said)
        self._events.put(None)
