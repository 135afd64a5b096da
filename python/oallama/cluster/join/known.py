"""The joined hosts that this host knows: `oallama cluster add` writes them down, `--hosts a,b` finds them."""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from oallama.base.jsonfile import read_json_object
from oallama.errors import OallamaError

from ..allocation.devices import LOCAL, DeviceEntry
from .keys import config_folder, write_private
from .token import Token, private_key_file

DEFAULT_PORT = 50051
USER = "oallama"  # of the SSH login; the token is what counts
_ALIAS = "oallama-joined-host"  # in known_hosts, so that a host may change its address
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
_TAKEN = ("client", "local", "localhost")
_REMEDY = "add the host again"


def rpc_port(port: int) -> int:
    """Where the RPC server listens, on the loopback of a host that joined at `port`."""
    return port + 1


def echo_port(port: int) -> int:
    """Where the agent's echo listens there."""
    return DeviceEntry("", "", ("127.0.0.1", rpc_port(port)), 0).echo_port


@dataclass(frozen=True)
class KnownHost:
    """A host that was added. folder: has the client's key and what ssh knows the host by."""

    name: str
    address: str
    port: int
    folder: Path

    def entry(self) -> DeviceEntry:
        """As a device of a cluster, with the memory that the host offers when it is asked."""
        options = {
            "UserKnownHostsFile": self.folder / "known_hosts",
            "HostKeyAlias": _ALIAS,
            "StrictHostKeyChecking": "yes",
            "IdentitiesOnly": "yes",
            "Ciphers": "aes128-gcm@openssh.com",
        }
        ssh = ["-F", "none", "-p", str(self.port), "-l", USER, "-i", str(self.folder / "key")]
        ssh += [word for option, value in options.items() for word in ("-o", f"{option}={value}")]
        return DeviceEntry(
            *(self.name, self.address, ("127.0.0.1", rpc_port(self.port)), 0),
            ssh_options=tuple(ssh),
            if_refused="its token is wrong or old: add the host again with what `oallama cluster join` prints there",
        )


def parse_address(text: str) -> tuple[str, int]:
    """An IPv4 address with or without a port. Raises OallamaError."""
    host, colon, port = text.partition(":")
    number = int(port) if port.isascii() and port.isdigit() else 0 if colon else DEFAULT_PORT
    try:
        if 0 < number < 65535 and not ipaddress.IPv4Address(host).is_unspecified:
            return host, number
    except ValueError:
        pass
    raise OallamaError(f"{text!r} is no address of a host; expected 192.168.1.20 or 192.168.1.20:{DEFAULT_PORT}")


def write_down(name: str, address: tuple[str, int], token: Token) -> KnownHost:
    """A host that is not known yet: it is tried first, and then kept.

    Raises:
        OallamaError: for a name that cannot be used, a host that is known by another name, a folder that cannot be
            written.
    """
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise OallamaError(f"{name!r} is no name for a host; expected letters, digits, dots, - and _, not {_TAKEN[0]}")
    known = f"{_ALIAS} {token.host_public()}\n"
    for other in known_hosts():
        if other.name != name and (other.folder / "known_hosts").read_text() == known:
            again = f"oallama cluster hosts --remove {other.name}"
            raise OallamaError(f"this host is known as {other.name}; run `{again}` first")
    folder = _folder() / f".{name}"
    with _explained(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(folder / "key", private_key_file(token.client_key))
        write_private(folder / "known_hosts", known)
        write_private(folder / "host.json", json.dumps({"address": address[0], "port": address[1]}) + "\n")
    return KnownHost(name, *address, folder)


def keep(host: KnownHost) -> None:
    """A host that was written down is known from now on, in place of one of the same name. Raises OallamaError."""
    folder = _folder() / host.name
    with _explained(folder):
        if folder.exists():
            shutil.rmtree(folder)
        host.folder.rename(folder)


def remove(name: str) -> None:
    """Forget a host. Raises OallamaError for one that is not known."""
    (host,) = named([name])
    with _explained(host.folder):
        shutil.rmtree(host.folder)


def known_hosts() -> list[KnownHost]:
    """All that were added, by name."""
    found = []
    for file in sorted(_folder().glob("[!.]*/host.json")):
        content = read_json_object(file, "joined host", _REMEDY)
        found.append(KnownHost(file.parent.name, str(content["address"]), int(content["port"]), file.parent))
    return found


def named(names: Sequence[str]) -> list[KnownHost]:
    """Those of the names, in this order. Raises OallamaError for one that is unknown."""
    known = {host.name: host for host in known_hosts()}
    for name in names:
        if name not in known:
            listed = ", ".join(known) or "none is"
            raise OallamaError(f"no host {name!r} is known ({listed}), nor a hosts file; see `oallama cluster join`")
    return [known[name] for name in names]


def entries_of(names: Sequence[str]) -> list[DeviceEntry]:
    """Devices of known hosts, and of RPC servers that are named by address and port.

    Raises OallamaError for a host that is unknown or named twice, and for what is no address.
    """
    for at, name in enumerate(names):
        if name in names[:at]:
            raise OallamaError(f"host {name} is named twice")
    hosts = {host.name: host.entry() for host in named([name for name in names if ":" not in name])}
    return [hosts.get(name) or DeviceEntry(name, LOCAL, parse_address(name), 0, has_agent=False) for name in names]


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OallamaError(f"cannot write {folder}: {error.strerror}") from None


def _folder() -> Path:
    return config_folder() / "hosts"
