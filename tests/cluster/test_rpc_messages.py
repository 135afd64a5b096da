"""Messages that lie about sizes, offsets and shapes: the server refuses them and serves the next client."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from support import rpc_wire
from support.rpc_wire import F16, F32, I32, Server, allocate, ask, graph, is_served, message, receive, tensor

OP = rpc_wire.operators()
SIZE = 1 << 16  # of the buffer
BIG = 2**64 - 1


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--isolate") as running:
        yield running


class Client:
    """A client with a buffer of SIZE zeros."""

    def __init__(self, server: Server) -> None:
        self.socket = server.connect()
        assert is_served(self.socket)
        self.buffer, self.base = allocate(self.socket, SIZE)
        self.socket.sendall(message(rpc_wire.BUFFER_CLEAR, struct.pack("<QB", self.buffer, 0)))

    def tensor(self, ident: int, kind: int, ne: tuple[int, ...], at: int = 0, **more: object) -> bytes:
        return tensor(ident, kind, ne, self.buffer, self.base + at, **more)  # type: ignore[arg-type]

    def lives(self) -> bool:
        return len(ask(self.socket, rpc_wire.GET_ALIGNMENT, bytes(4))) == 8


@pytest.fixture()
def client(server: Server) -> Iterator[Client]:
    one = Client(server)
    yield one
    one.socket.close()
    with server.connect() as following:
        assert is_served(following)
    assert "signal" not in server.log()  # refused, not crashed


def refuses(client: Client, command: int, body: bytes, size: int | None = None) -> None:
    client.socket.sendall(message(command, body, size))
    assert receive(client.socket, 1) == b""


SET = struct.Struct("<BQ")
TWO = struct.Struct("<QQ")


def test_what_is_right_is_accepted(client: Client) -> None:
    data = struct.pack("<4f", 1, 2, 3, 4)
    client.socket.sendall(message(rpc_wire.SET_TENSOR, client.tensor(1, F32, (4,)) + SET.pack(0, 0) + data))
    client.socket.sendall(message(rpc_wire.MEMSET_TENSOR, client.tensor(1, F32, (4,)) + TWO.pack(4, 4) + b"\0"))
    copy = client.tensor(1, F32, (4,)) + client.tensor(2, F32, (4,), 64)
    assert ask(client.socket, rpc_wire.COPY_TENSOR, copy) == b"\1"
    got = ask(client.socket, rpc_wire.GET_TENSOR, client.tensor(2, F32, (4,), 64) + TWO.pack(0, 16))
    assert struct.unpack("<4f", got) == (1, 0, 3, 4)
    tensors = (client.tensor(1, F32, (4,)), client.tensor(2, F32, (4,), 64))
    total = client.tensor(3, F32, (4,), 128, op=OP["ADD"], src=(1, 2))
    client.socket.sendall(message(rpc_wire.GRAPH_COMPUTE, graph((3,), (*tensors, total))))
    client.socket.sendall(message(rpc_wire.GRAPH_RECOMPUTE, bytes(4)))
    got = ask(client.socket, rpc_wire.GET_TENSOR, client.tensor(3, F32, (4,), 128) + TWO.pack(0, 16))
    assert struct.unpack("<4f", got) == (2, 0, 6, 8)


RANGES = [(1, 16), (16, 1), (17, 0), (0, 17), (BIG, 1), (BIG - 3, 8), (2**63, 2**63), (0, BIG)]


@pytest.mark.parametrize(("offset", "size"), RANGES)
@pytest.mark.parametrize(("command", "value"), [(rpc_wire.GET_TENSOR, b""), (rpc_wire.MEMSET_TENSOR, b"\7")])
def test_ranges_outside_of_a_tensor(client: Client, command: int, value: bytes, offset: int, size: int) -> None:
    refuses(client, command, client.tensor(1, F32, (4,), 64) + TWO.pack(offset, size) + value)


@pytest.mark.parametrize("offset", [1, 16, BIG, BIG - 15, 2**63])
def test_set_outside_of_a_tensor(client: Client, offset: int) -> None:
    refuses(client, rpc_wire.SET_TENSOR, client.tensor(1, F32, (4,), 64) + SET.pack(0, offset) + bytes(16))


BAD_TENSORS: dict[str, dict[str, object]] = {
    "behind the buffer": {"at": SIZE - 8},
    "before the buffer": {"at": -8},
    "far away": {"at": 2**40},
    "wraps around": {"at": -(2**20), "ne": (2**18 + 4,)},
    "strides leave the buffer": {"nb": (4, 2**20, 4, 4), "ne": (2, 2)},
    "strides overflow": {"nb": (2**32 - 1,) * 4, "ne": (2**32 - 1,) * 4},
    "too many elements": {"ne": (2**32 - 1,) * 4, "nb": (0, 0, 0, 0)},
    "nearly too many elements": {"ne": (2**31, 2**31, 2, 1), "nb": (0, 0, 0, 0)},
    "not aligned": {"at": 2},
    "strides not aligned": {"ne": (2, 2), "nb": (4, 6, 8, 8)},
    "type of the future": {"kind": 200},
    "type that was removed": {"kind": 4},
    "operator of the future": {"op": 2**31},
    "half a block": {"kind": 8, "ne": (33,), "nb": (34, 34, 34, 34)},
}


@pytest.mark.parametrize("name", BAD_TENSORS)
@pytest.mark.parametrize("command", ["GET_TENSOR", "COPY_TENSOR", "GRAPH_COMPUTE", "INIT_TENSOR", "GET_ALLOC_SIZE"])
def test_tensors_that_cannot_be(client: Client, name: str, command: str) -> None:
    values = {"kind": F32, "ne": (4,), "at": 0, **BAD_TENSORS[name]}
    bad = client.tensor(1, values.pop("kind"), values.pop("ne"), values.pop("at"), **values)  # type: ignore[arg-type]
    good = client.tensor(2, F32, (4,))
    body = {
        "GET_TENSOR": bad + TWO.pack(0, 4),
        "COPY_TENSOR": good + bad,
        "GRAPH_COMPUTE": graph((2,), (bad, good)),
        "INIT_TENSOR": bad,
        "GET_ALLOC_SIZE": bytes(4) + bad + tensor(0, F32, (1,)) * 10,
    }[command]
    refuses(client, getattr(rpc_wire, command), body)


def test_buffers_that_are_not_the_clients(client: Client) -> None:
    stranger = tensor(1, F32, (4,), 0x1234560, client.base)
    refuses(client, rpc_wire.GET_TENSOR, stranger + TWO.pack(0, 16))


@pytest.mark.parametrize("command", ["BUFFER_GET_BASE", "FREE_BUFFER"])
def test_unknown_buffers(client: Client, command: str) -> None:
    refuses(client, getattr(rpc_wire, command), struct.pack("<Q", client.buffer + 8))


def test_a_buffer_that_was_freed(client: Client) -> None:
    add = client.tensor(2, F32, (4,), 64, op=OP["SQR"], src=(1,))
    client.socket.sendall(message(rpc_wire.GRAPH_COMPUTE, graph((2,), (client.tensor(1, F32, (4,)), add))))
    client.socket.sendall(message(rpc_wire.FREE_BUFFER, struct.pack("<Q", client.buffer)))
    assert client.lives()
    refuses(client, rpc_wire.GRAPH_RECOMPUTE, bytes(4))


@pytest.mark.parametrize("size", [BIG, 2**63, 2**48, 2**40])
def test_buffers_larger_than_the_device(client: Client, size: int) -> None:
    assert ask(client.socket, rpc_wire.ALLOC_BUFFER, struct.pack("<IQ", 0, size)) == bytes(16)
    assert client.lives()


def test_empty_buffers(client: Client) -> None:
    buffer, base = allocate(client.socket, 0)
    assert base == 0
    empty = tensor(1, F32, (0,), buffer, 0)
    refuses(client, rpc_wire.GET_TENSOR, empty + TWO.pack(0, 1))


@pytest.mark.parametrize("command", ["ALLOC_BUFFER", "GET_ALIGNMENT", "GET_MAX_SIZE", "GET_DEVICE_MEMORY"])
def test_devices_that_are_not_there(client: Client, command: str) -> None:
    refuses(client, getattr(rpc_wire, command), struct.pack("<I", 1) + bytes(8 if command == "ALLOC_BUFFER" else 0))


@pytest.mark.parametrize("command", range(18))
@pytest.mark.parametrize("size", [0, 3, 2**31, 2**40, BIG])
def test_lengths_that_are_not_those_of_the_command(client: Client, command: int, size: int) -> None:
    if (command, size) == (rpc_wire.DEVICE_COUNT, 0):
        return
    client.socket.sendall(message(command, b"", size) + bytes(64))
    client.socket.shutdown(1)  # what is waited for does not come
    assert receive(client.socket, 1) == b""


def test_commands_of_the_future(client: Client) -> None:
    refuses(client, 200, b"")


def test_copies_onto_themselves_and_of_other_sizes(server: Server) -> None:
    for at, ne in ((8, (4,)), (0, (4,)), (64, (5,)), (64, (3,))):
        one = Client(server)
        refuses(one, rpc_wire.COPY_TENSOR, one.tensor(1, F32, (4,)) + one.tensor(2, F32, ne, at))


def test_padding_that_has_no_room(client: Client) -> None:
    """CUDA clears behind quantized tensors; the CPU asks for nothing, so the last ones are accepted here."""
    blocks = client.tensor(1, 8, (32,), SIZE - 34, nb=(34, 34, 34, 34))
    client.socket.sendall(message(rpc_wire.INIT_TENSOR, blocks))
    assert client.lives()
    refuses(client, rpc_wire.INIT_TENSOR, client.tensor(1, 8, (32,), 0, nb=(36, 34, 34, 34)))


# ---- graphs ---------------------------------------------------------------------------------------------------------


def a(client: Client, *ne: int, kind: int = F32, ident: int = 1, at: int = 0) -> bytes:
    return client.tensor(ident, kind, ne, at)


def bad_graphs(c: Client) -> dict[str, bytes]:
    one, two = a(c, 4), a(c, 4, ident=2, at=64)

    def node(op: str, *src: int, ne: tuple[int, ...] = (4,), **more: object) -> bytes:
        return c.tensor(9, more.pop("kind", F32), ne, more.pop("at", 1024), op=OP[op], src=src, **more)  # type: ignore[arg-type]

    add = node("ADD", 1, 2)
    head = struct.Struct("<II")
    return {
        "no nodes": graph((), (one,)),
        "an empty node": graph((0,), (one,)),
        "an unknown node": graph((7,), (one,)),
        "a node twice": graph((9, 9), (one, two, add)),
        "more nodes than bytes": head.pack(0, 1000) + bytes(64),
        "more tensors than bytes": graph((9,), (one, two, add))[:-8],
        "2^32 nodes": head.pack(0, 2**32 - 1) + bytes(64),
        "2^32 tensors": head.pack(0, 1) + struct.pack("<QI", 9, 2**32 - 1) + one,
        "cut off": head.pack(0, 1)[:7],
        "no device": graph((9,), (one, two, add), device=1),
        "a source that is not there": graph((9,), (one, add)),
        "sources after their tensor": graph((9,), (add, one, two)),
        "a circle": graph((9,), (c.tensor(1, F32, (4,), op=OP["SQR"], src=(9,)), node("SQR", 1))),
        "a view of nothing": graph((9,), (one, two, node("ADD", 1, 2, view=(7, 0)))),
        "a view elsewhere": graph((9,), (one, two, node("ADD", 1, 2, view=(1, 2**30)))),
        "one source is missing": graph((9,), (one, node("ADD", 1))),
        "the first source is missing": graph((9,), (one, node("ADD", 0, 1))),
        "no buffer": graph((9,), (one, two, tensor(9, F32, (4,), op=OP["ADD"], src=(1, 2)))),
        "data without a buffer": graph((9,), (one, two, tensor(9, F32, (4,), 0, c.base, op=OP["ADD"], src=(1, 2)))),
        "a source without a buffer": graph((9,), (one, tensor(2, F32, (4,)), add)),
        "a function in the message": graph((9,), (one, node("MAP_CUSTOM1", 1, params=(0x41414141, 0x4141, 1)))),
        "another function": graph((9,), (one, node("CUSTOM", 1, params=(0x41414141, 0x4141, 1)))),
        "training": graph((9,), (one, two, node("SILU_BACK", 1, 2))),
        "larger than its source": graph((9,), (one, node("SQR", 1, ne=(1024,)))),
        "of another type": graph((9,), (one, node("SQR", 1, kind=F16))),
        "not repeatable": graph((9,), (one, a(c, 3, ident=2), add)),
        "packed outside of the buffer": graph(
            (9,), (one, node("SQR", 1, ne=(4,), nb=(0, 0, 0, 0), at=SIZE - 4)),
        ),
        **{
            f"{op} of rows that step outside": graph(
                (9,), (a(c, 4, 1, 4), node(op, 1, ne=(width, 1, 4), nb=(4, 2**30, 4 * width, 16 * width))),
            )
            for op, width in {"SCALE": 4, "CLAMP": 4, "LEAKY_RELU": 4, "GLU": 2}.items()
        },
        "an unknown function of one argument": graph((9,), (one, node("UNARY", 1, params=(999,)))),
        "a matrix that does not fit": graph((9,), (a(c, 8, 4), two, node("MUL_MAT", 1, 2))),
        "a matrix of integers": graph((9,), (a(c, 4, 4, kind=I32), two, node("MUL_MAT", 1, 2))),
        "keys of integers": graph(
            (9,),
            (
                a(c, 4), a(c, 4, kind=I32, ident=2), a(c, 4, ident=3),
                node("FLASH_ATTN_EXT", 1, 2, 3, params=(0x3E000000,)),
            ),
        ),
        "a product of other shape": graph((9,), (a(c, 4, 4), two, node("MUL_MAT", 1, 2, ne=(4, 64)))),
        "rows by floats": graph((9,), (a(c, 4, 4), two, node("GET_ROWS", 1, 2, ne=(4, 4)))),
        "a set outside": graph((9,), (one, two, node("SET", 1, 2, params=(4, 4, 4, 2**30)))),
        "a set before": graph((9,), (one, two, node("SET", 1, 2, params=(4, 4, 4, -64)))),
        "mask too small": graph(
            (9,), (a(c, 8, 8), a(c, 8, 2, ident=2), node("SOFT_MAX", 1, 2, ne=(8, 8)))
        ),
        "rope beyond the row": graph(
            (9,), (a(c, 4), a(c, 1, kind=I32, ident=2), node("ROPE", 1, 2, params=(0, 64, 0)))
        ),
        "a turn around nothing": graph(
            (9,), (a(c, 4, 0), node("PAD", 1, ne=(4, 1), params=(0, 0, 0, 1, 0, 0, 0, 0, 1)))
        ),
        "a reach of windows": graph((9,), (a(c, 8), node("POOL_1D", 1, ne=(8,), params=(0, 2, 0, 0)))),
    }  # fmt: skip


def test_graphs_that_cannot_be(server: Server) -> None:
    names = list(bad_graphs(Client(server)))
    assert len(names) > 30
    for name in names:
        one = Client(server)
        one.socket.sendall(message(rpc_wire.GRAPH_COMPUTE, bad_graphs(one)[name]))
        one.socket.sendall(message(rpc_wire.GET_ALIGNMENT, bytes(4)))
        assert receive(one.socket, 1) == b"", name
        one.socket.close()
        assert "signal" not in server.log(), name


def test_rows_behind_nothing(client: Client) -> None:
    """llama.cpp adds one to the logits that it samples from, of which there may be none."""
    added = client.tensor(9, F32, (4, 1), 1024, op=OP["PAD"], src=(1,), params=(0, 0, 0, 1))
    client.socket.sendall(message(rpc_wire.GRAPH_COMPUTE, graph((9,), (a(client, 4, 0), added))))
    assert client.lives()


def test_a_deep_graph(client: Client) -> None:
    """200 000 nodes in a chain, in order and in reverse: neither overflows the stack."""
    n = 200_000
    chain = [client.tensor(1, F32, (4,))]
    chain += [client.tensor(i, F32, (4,), 64 * (i % 2), op=OP["SQR"], src=(i - 1,)) for i in range(2, n)]
    client.socket.settimeout(60)
    client.socket.sendall(message(rpc_wire.GRAPH_COMPUTE, graph((n - 1,), tuple(chain))))
    assert client.lives()
    client.socket.sendall(message(rpc_wire.GRAPH_COMPUTE, graph((n - 1,), tuple(reversed(chain)))))
    assert receive(client.socket, 1) == b""


def test_an_upstream_server_without_switches_checks_too() -> None:
    with Server() as plain:
        one = Client(plain)
        refuses(one, rpc_wire.GET_TENSOR, one.tensor(1, F32, (4,), SIZE - 8) + TWO.pack(0, 16))
        assert is_served(plain.connect())
