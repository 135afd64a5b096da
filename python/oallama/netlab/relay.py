"""The relay (csrc/netlab/relay.cpp) as a child process: compiled on first use, told what to do line by line."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from oallama.netlab.hosts import NetLabError

_PACKAGE = Path(__file__).resolve().parents[3]  # the checkout, if it is one
_FOLDER = Path("csrc/netlab")


def sources() -> Path:
    """Folder csrc/netlab of the checkout: an installed package has no sources. Raises NetLabError without one."""
    for checkout in (_PACKAGE, Path.cwd()):
        if (checkout / _FOLDER).is_dir():
            return checkout / _FOLDER
    raise NetLabError(f"no {_FOLDER}: emulated networks need a checkout of oallama as the current folder")


def build() -> Path:
    """The program, compiled into build/netlab/ unless it is there. Raises NetLabError with the compiler's text."""
    folder = sources()
    source = folder / "relay.cpp"
    content = b"".join(path.read_bytes() for path in [*sorted(folder.glob("*.h")), source])
    digest = hashlib.sha256(content).hexdigest()[:12]
    program = folder.parents[1] / "build" / "netlab" / f"relay-{digest}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        part = program.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        command = ["c++", "-std=c++17", "-O2", "-o", str(part), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise NetLabError(f"{' '.join(command)}: {done.stderr.strip()}")
        os.replace(part, program)  # parallel builders each put the whole program there
    return program


class Relay:
    """Connects the namespaces, each by a device eth0, until `close`, or until this process dies.

    Raises NetLabError if the devices cannot be made.
    """

    def __init__(self, namespaces: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [build(), *namespaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # no Ctrl-C
        )
        try:
            self._expect_ok("start")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id, e.g. to see how busy the relay is."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """Send one command (see Switch::obey in the source); it holds on return. Raises NetLabError."""
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise NetLabError("the relay has died") from None
            self._expect_ok(line)

    def close(self) -> None:
        """End the process and with it the devices."""
        self._process.kill()
        self._process.communicate()

    def _expect_ok(self, what: str) -> None:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if answer != "ok":
            raise NetLabError(f"relay: {what}: {answer or 'it has died'}")
