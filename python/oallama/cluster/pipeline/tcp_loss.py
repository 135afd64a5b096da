"""Loss on the way that a TCP connection takes, from the kernel's counters of the packets it had to send again.

The kernel's sock_diag tells the counters of every connection of this network namespace, also of other processes, to
whoever asks. A connection to a port of `ssh -L` ends at the ssh process here; ssh's own connection is the one that
crosses the network.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and linux/tcp.h
_SOCK_DIAG, _BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_ERROR, _DONE = 2, 3
_INFO = 2
_ESTABLISHED, _LISTEN = 1, 10
_HEADER, _ASKED = struct.Struct("=IHHII"), struct.Struct("=BBBxI48x")
_ATTRIBUTE, _NUMBER = struct.Struct("=HH"), struct.Struct("=I")
_FOUND = struct.Struct("=BBxx2s2s16s16s12x16xI")  # inet_diag_msg
_AGAIN, _WITH_DATA, _NEEDLESS = 100, 156, 216  # of tcp_info; kernels before 4.6 lack the second, before 4.19 the third
_WAIT_S = 2.0


class Sent(NamedTuple):
    """Packets with data that a connection has sent, repeated ones among them, and how many of all were lost."""

    packets: int = 0
    lost: int = 0


class _Socket(NamedTuple):
    inode: int
    is_listening: bool
    address: bytes  # of this end, 4 bytes or 16
    port: int
    peer_port: int
    sent: Sent | None


class TcpLoss:
    """Counts what is sent and lost on the way of `connection` within its `with` blocks, one after another.

    Where the connection leads to another host, that is its own way. Where it leads to a process of this host, an ssh
    say, it is the way of the one TCP connection that this process has besides those of the ports it listens on.

    Only packets from here are counted, because the other end keeps its own counters. A packet counts as lost when it
    was sent again, unless the other end says that it came twice (D-SACK): then it was late, not lost.

    Nothing is counted where the counters cannot be read: without the kernel's module tcp_diag, for a process of another
    user, and for an ssh that has no TCP connection of its own (ProxyJump, ProxyCommand, a shared ControlMaster).

    Attributes:
        counted: so far.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._inode: int | None = None
        self._before: Sent | None = None
        self.counted = Sent()
        with suppress(OSError):
            self._inode = _crossing(connection)

    def __enter__(self) -> TcpLoss:
        self._before = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        now, before, so_far = self._read(), self._before, self.counted
        if now and before:
            self.counted = Sent(so_far.packets + now.packets - before.packets, so_far.lost + now.lost - before.lost)

    @property
    def share(self) -> float:
        """Lost packets over sent ones, in [0, 1); 0 where nothing was counted."""
        packets, lost = self.counted
        return min(max(0, lost), packets - 1) / packets if packets else 0.0

    def _read(self) -> Sent | None:
        with suppress(OSError):
            return next((s.sent for s in _sockets() if s.inode == self._inode), None)
        return None


def _crossing(connection: socket.socket) -> int | None:
    """The inode of the socket whose connection crosses the network; None: it is not known."""
    here, there = connection.getsockname(), connection.getpeername()
    if not ipaddress.ip_address(there[0]).is_loopback:
        return os.fstat(connection.fileno()).st_ino
    sockets = list(_sockets())
    end = (socket.inet_pton(connection.family, there[0]), there[1], here[1])
    theirs = next((_beside(s.inode) for s in sockets if (s.address, s.port, s.peer_port) == end), set())
    listening = {s.port for s in sockets if s.is_listening and s.inode in theirs}
    onward = [s.inode for s in sockets if s.inode in theirs and s.port not in listening]
    return onward[0] if len(onward) == 1 else None


def _beside(inode: int) -> set[int]:
    """Inodes of all sockets of the process that has this one; none where that is this process, or is not found."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        found = set()
        with suppress(OSError):  # of another user, or it has ended
            for entry in os.scandir(folder):
                with suppress(OSError):  # closed meanwhile
                    target = os.readlink(entry.path)
                    if target.startswith("socket:["):
                        found.add(int(target[8:-1]))
        if inode in found and folder.parent.name != str(os.getpid()):
            return found
    return set()


def _sockets() -> Iterator[_Socket]:
    """TCP sockets of this network namespace that listen or are connected. Raises OSError where none can be told."""
    states = 1 << _ESTABLISHED | 1 << _LISTEN
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.settimeout(_WAIT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            asked = _ASKED.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), states)
            netlink.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST_DUMP, 0, 0) + asked)
            yield from _answers(netlink)


def _answers(netlink: socket.socket) -> Iterator[_Socket]:
    while True:
        data = netlink.recv(1 << 16)
        while len(data) >= _HEADER.size:
            size, kind, *_ = _HEADER.unpack_from(data)
            if kind == _DONE:
                return
            if kind == _ERROR:
                raise OSError("the kernel does not tell its sockets")
            yield _socket(data[_HEADER.size : size])
            data = data[(size + 3) & ~3 :]


def _socket(message: bytes) -> _Socket:
    family, state, port, peer_port, address, _, inode = _FOUND.unpack_from(message)
    return _Socket(
        inode,
        state == _LISTEN,
        address[: 4 if family == socket.AF_INET else 16],
        int.from_bytes(port, "big"),
        int.from_bytes(peer_port, "big"),
        _sent(message[_FOUND.size :]),
    )


def _sent(attributes: bytes) -> Sent | None:
    while len(attributes) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(attributes)
        info = attributes[_ATTRIBUTE.size : size]
        if kind == _INFO and len(info) > _WITH_DATA:
            again, packets, needless = (_number(info, at) for at in (_AGAIN, _WITH_DATA, _NEEDLESS))
            return Sent(packets, again - needless)
        attributes = attributes[max(_ATTRIBUTE.size, (size + 3) & ~3) :]
    return None


def _number(info: bytes, at: int) -> int:
    """0 where the kernel does not have it."""
    return int(_NUMBER.unpack_from(info, at)[0]) if len(info) >= at + _NUMBER.size else 0
