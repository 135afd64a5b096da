"""Ports that are held until a server listens on them."""

import errno
import socket

import pytest

from oallama.base import ports as ports_of
from oallama.base.ports import free_port
from support.servers import is_open


def listen(port: int, *options: int) -> socket.socket:
    server = socket.socket()
    for option in options:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        server.bind(("127.0.0.1", port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_the_server_that_it_is_for_can_listen(option: int) -> None:
    port = free_port()
    assert not is_open(port)
    with listen(port, option):
        assert is_open(port)


def test_the_last_hundred_are_held() -> None:
    ports = [free_port() for _ in range(101)]
    assert len(set(ports)) == 101
    for port in ports[1:]:
        with pytest.raises(OSError) as raised:
            listen(port)
        assert raised.value.errno == errno.EADDRINUSE
    assert [holder.getsockname()[1] for holder in ports_of._held] == ports[1:]
