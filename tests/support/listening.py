"""Who can reach the processes of a test: their sockets, as /proc shows them."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

End = tuple[str, str, int]  # tcp or udp, address, port
LISTENS = {"tcp": "0A", "udp": "07"}  # the state of a socket that waits for whoever comes


def descendants(pid: int) -> set[int]:
    """The process and all that it and those started, but for those whose parents have ended."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: Iterable[int]) -> dict[End, str]:
    """Where processes wait for connections and datagrams, and the name of one that does."""
    found: dict[End, str] = {}
    for pid in pids:
        with suppress(OSError):  # it has ended
            own, name = _sockets(pid), Path(f"/proc/{pid}/comm").read_text().strip()
            found |= {end: name for inode, end in _waiting(pid) if inode in own}
    return found


def beyond_loopback(found: Iterable[End]) -> set[End]:
    """Those that other machines may reach."""
    return {end for end in found if not ipaddress.ip_address(end[1]).is_loopback}


def _sockets(pid: int) -> set[str]:
    """Their inodes."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it is closed
            found.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    return found


def _waiting(pid: int) -> Iterator[tuple[str, End]]:
    """(inode, where) of all sockets that wait in the network of a process."""
    for kind, state in LISTENS.items():
        tables = (Path(f"/proc/{pid}/net/{kind}{version}") for version in ("", "6"))
        for table in filter(Path.exists, tables):
            for line in table.read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == state:
                    address, port = words[1].split(":")
                    yield words[9], (kind, _address(address), int(port, 16))


def _address(digits: str) -> str:
    """Of hexadecimal digits: words of 32 bits, each in the machine's order of bytes."""
    words = (int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8))
    return str(ipaddress.ip_address(b"".join(words)))
