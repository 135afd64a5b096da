"""Starts programs on the hosts of a cluster: here, by ssh, or by what stands in for ssh."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from oallama.base.children import die_with_parent, last_words
from oallama.base.json_child import JsonChild
from oallama.base.ports import free_port
from oallama.errors import OallamaError

from ..allocation.devices import DeviceEntry

CONNECT_S = 5
TUNNEL_S = 10.0
# A link that says nothing for three beats is gone.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=2")
_ALIVE = ("-o", "ServerAliveCountMax=2")


def start(entry: DeviceEntry, arguments: Sequence[str], agent: str | None = None) -> JsonChild:
    """Start `python ARGUMENTS` on the device's host; it ends with this process or when its standard input does.

    agent: a program that is called as `AGENT HOST COMMAND` in place of ssh.

    Raises:
        OallamaError: when there is no ssh here.
    """
    command = [entry.python or sys.executable, *arguments]
    if not entry.is_local:
        way = [agent] if agent else [*_SSH, *_ALIVE, *entry.ssh_options, "--"]
        command = [*way, entry.host, shlex.join(command)]
    try:
        return JsonChild(command)
    except FileNotFoundError:
        raise OallamaError(f"there is no {command[0]} here, which starts programs on {entry.host}") from None


def advised(entry: DeviceEntry, words: str) -> str:
    """What ssh has said last, and what the entry says of that."""
    refused = any(text in words for text in ("Permission denied", "verification failed"))
    return f"{words.rstrip('.')}; {entry.if_refused}" if refused and entry.if_refused else words


class Tunnel:
    """`ssh -L`: a port of this host that leads to a port of the device's own loopback; encrypted.

    Raises OallamaError when ssh does not bring it up.
    """

    def __init__(self, entry: DeviceEntry, port: int) -> None:
        self.address = ("127.0.0.1", free_port())
        forward = f"{self.address[0]}:{self.address[1]}:127.0.0.1:{port}"
        command = [*_SSH, *_ALIVE, *entry.ssh_options, "-o", "ExitOnForwardFailure=yes", "-N", "-L", forward]
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the tunnel)
        try:
            self._process = subprocess.Popen(
                [*command, "--", entry.host],
                stdin=subprocess.DEVNULL,
                stderr=self._words,
                preexec_fn=die_with_parent,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise OallamaError(f"there is no ssh here, which reaches the loopback addresses of {entry.host}") from None
        end = time.monotonic() + TUNNEL_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise OallamaError(f"ssh cannot make a tunnel to {entry.host}: {last_words(self._words)}")
            try:
                socket.create_connection(self.address, timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        self.close()
        raise OallamaError(f"ssh made no tunnel to {entry.host} within {TUNNEL_S:g} s")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._words.close()
