"""Ports for servers that another program starts."""

from __future__ import annotations

import socket
from collections import deque

_MOST = 100
_held: deque[socket.socket] = deque()


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens, and that the system gives to nobody else.

    A socket of this process is bound to it and does not listen. The last 100 ports are held so. A server that sets
    SO_REUSEADDR or SO_REUSEPORT can listen there beside it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    if len(_held) > _MOST:
        _held.popleft().close()
    return int(holder.getsockname()[1])
