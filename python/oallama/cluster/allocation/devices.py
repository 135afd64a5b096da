"""devices.toml: the hosts of a cluster as a user writes them down.

[client]
memory = "6GiB"                   # for layers, embedding and head; left out: embedding and head only

[[device]]
name = "desk"
host = "me@desk.lan"              # ssh host, or "local"
address = "127.0.0.1:50052"       # its RPC server's there: loopback is reached through ssh, another one with a token
memory = "8GiB"
# device = "CUDA0"                # of that host; default: its first accelerator, else the CPU
# threads = 4                     # of its CPU; default: all
# python = "/opt/oallama/bin/python"                # default: where it is here
# flops, prefill_flops: per second, instead of measuring; bandwidth: bytes per second to and from the client
# ssh_options = ["-p", "2222"]
# agent = false                   # its RPC server runs already, a llama.cpp's of anybody: nothing is started there

[settings]                        # all optional
E_p = 1.0
first_layer = "client"            # who computes the first layer, where a pipeline is chosen; default: any
"""

from __future__ import annotations

import ipaddress
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ...data.budget import parse_budget
from ...errors import OallamaError
from .problem import LINK_MODELS, LinkModel, Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCAL = "local"
# E_p where the file does not say: bandwidths are measured with payload (the patent's 0.3 is of the nominal rate).
PAYLOAD_SHARE = 1.0
_DEVICE_KEYS = (
    *("name", "host", "address", "memory", "device", "threads", "python"),
    *("flops", "prefill_flops", "bandwidth", "ssh_options", "agent"),
)
_CLIENT_KEYS = ("name", "memory", "flops", "prefill_flops")
# As the file (and the patent) spells them, and as Settings does.
_WEIGHTS = {"w_c": "w_c", "wq1": "wq1", "wq2": "wq2", "wq3": "wq3", "E_p": "e_p", "beta": "beta"}
_SIZE = 'bytes or a size such as "8GiB"'


@dataclass(frozen=True)
class ClientEntry:
    """The client's section. memory_bytes 0: embedding and head only. Rates are per second; None: measure them."""

    name: str = "client"
    memory_bytes: int = 0
    flops: float | None = None
    prefill_flops: float | None = None


@dataclass(frozen=True)
class DeviceEntry:
    """A device's section. host: where it is started, by ssh unless "local". address: (host, port) of its RPC server.

    device: ggml's name of it there, None: the first accelerator, else the CPU. threads: of the CPU, 0: all. python: the
    program that runs oallama there, None: the same path as here. memory_bytes: 0: what the host offers (joined hosts).
    if_refused: what to do when ssh is refused there. has_agent: False: its RPC server runs already, alone.
    flops, prefill_flops: per second, at one token and at a full micro-batch. bandwidth: bytes per second. None: measure
    """

    name: str
    host: str
    address: tuple[str, int]
    memory_bytes: int
    flops: float | None = None
    prefill_flops: float | None = None
    bandwidth: float | None = None
    ssh_options: tuple[str, ...] = ()
    device: str | None = None
    threads: int = 0
    python: str | None = None
    if_refused: str = ""
    has_agent: bool = True

    @property
    def is_local(self) -> bool:
        """Whether its server runs on the client's host, without ssh."""
        return self.host == LOCAL

    @property
    def is_loopback(self) -> bool:
        """Whether its server can be reached on its own host alone."""
        return ipaddress.IPv4Address(self.address[0]).is_loopback

    @property
    def echo_port(self) -> int:
        """Where the agent's probe listens: 10000 above the RPC server, or below where there is no such port."""
        return self.address[1] + (10000 if self.address[1] + 10000 < 65536 else -10000)


@dataclass(frozen=True)
class ClusterFile:
    """A devices.toml: the client, its devices in the order of the file, the weights of the objective."""

    client: ClientEntry
    devices: tuple[DeviceEntry, ...]
    settings: Settings = field(default_factory=lambda: Settings(e_p=PAYLOAD_SHARE))
    links: LinkModel = "via-client"


def load_devices(path: str | os.PathLike[str]) -> ClusterFile:
    """Read a devices.toml.

    Raises OallamaError, one line naming file, key, what was expected and what came: for a file that is missing or no
    TOML, unknown or missing keys, values of the wrong kind, names or addresses used twice.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OallamaError(f"{path} does not exist; expected a devices.toml with a [[device]] for every host") from None
    except (OSError, UnicodeDecodeError) as e:
        raise OallamaError(f"cannot read {path}: {e}; expected a devices.toml") from None
    except tomllib.TOMLDecodeError as e:
        raise OallamaError(f"{path} is not TOML: {e}") from None
    return _Reader(str(path)).cluster(content)


class _Reader:
    """Checks every value; `path` begins every message."""

    def __init__(self, path: str) -> None:
        self.path = path

    def cluster(self, content: Mapping[str, Any]) -> ClusterFile:
        self._keys("the file", content, ("client", "device", "settings"))
        entries = content.get("device", [])
        if not isinstance(entries, list) or not entries:
            self._fail("device", "at least one [[device]]", entries)
        client = self._client(self._table("client", content.get("client", {})))
        devices = tuple(self._device(f"device[{at}]", entry) for at, entry in enumerate(entries))
        self._unique("name", [client.name, *(device.name for device in devices)])
        self._unique("address", [f"{device.address[0]}:{device.address[1]} on {_home(device)}" for device in devices])
        names = [client.name, *(device.name for device in devices)]
        settings, links = self._settings(self._table("settings", content.get("settings", {})), names)
        return ClusterFile(client, devices, settings, links)

    def _client(self, entry: Mapping[str, Any]) -> ClientEntry:
        self._keys("client", entry, _CLIENT_KEYS)
        return ClientEntry(
            name=self._text("client.name", entry.get("name", "client")),
            memory_bytes=self._size("client.memory", entry["memory"]) if "memory" in entry else 0,
            flops=self._rate("client.flops", entry.get("flops")),
            prefill_flops=self._rate("client.prefill_flops", entry.get("prefill_flops")),
        )

    def _device(self, where: str, given: Any) -> DeviceEntry:
        entry = self._table(where, given)
        if isinstance(entry.get("name"), str):
            where = f"{where} ({entry['name']})"
        self._keys(where, entry, _DEVICE_KEYS)
        for key in ("name", "address", "memory"):
            if key not in entry:
                self._fail(f"{where}.{key}", "a value", "none")
        options = entry.get("ssh_options", [])
        if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
            self._fail(f"{where}.ssh_options", "a list of texts", options)
        has_agent = entry.get("agent", True)
        if not isinstance(has_agent, bool):
            self._fail(f"{where}.agent", "true or false", has_agent)
        for key in () if has_agent else ("host", "device", "threads", "python", "ssh_options"):
            if key in entry:
                self._fail(where, f"no {key} beside agent = false, with which nothing is started there", entry[key])
        bandwidth = entry.get("bandwidth")
        return DeviceEntry(
            name=self._text(f"{where}.name", entry["name"]),
            host=self._text(f"{where}.host", entry.get("host", LOCAL)),
            address=self._address(f"{where}.address", entry["address"]),
            memory_bytes=self._size(f"{where}.memory", entry["memory"]),
            flops=self._rate(f"{where}.flops", entry.get("flops")),
            prefill_flops=self._rate(f"{where}.prefill_flops", entry.get("prefill_flops")),
            bandwidth=None if bandwidth is None else float(self._size(f"{where}.bandwidth", bandwidth)),
            ssh_options=tuple(options),
            device=self._text(f"{where}.device", entry["device"]) if "device" in entry else None,
            threads=self._count(f"{where}.threads", entry["threads"]) if "threads" in entry else 0,
            python=self._text(f"{where}.python", entry["python"]) if "python" in entry else None,
            has_agent=has_agent,
        )

    def _settings(self, entry: Mapping[str, Any], names: list[str]) -> tuple[Settings, LinkModel]:
        """names: of the client and the devices."""
        self._keys("settings", entry, (*_WEIGHTS, "links", "first_layer"))
        for key in _WEIGHTS.keys() & entry.keys():
            if not _is_number(entry[key]):
                self._fail(f"settings.{key}", "a number", entry[key])
        links = entry.get("links", "via-client")
        if links not in LINK_MODELS:
            self._fail("settings.links", " or ".join(LINK_MODELS), links)
        first = entry.get("first_layer")
        if first is not None and first not in names:
            self._fail("settings.first_layer", f"one of {', '.join(names)}", first)
        try:
            given = {name: float(entry[key]) for key, name in _WEIGHTS.items() if key in entry}
            return Settings(**{"e_p": PAYLOAD_SHARE, **given}, first_layer=first), links
        except OallamaError as e:
            raise OallamaError(f"{self.path}: settings: {e}") from None

    # ---- values ------------------------------------------------------------------------------------------------------

    def _table(self, where: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            self._fail(where, "a table", value)
        return value

    def _keys(self, where: str, entry: Mapping[str, Any], known: Iterable[str]) -> None:
        for key in entry:
            if key not in known:
                self._fail(where, f"only the keys {', '.join(known)}", key)

    def _text(self, where: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            self._fail(where, "a text that is not empty", value)
        if value.startswith("-"):  # ssh would take it for an option
            self._fail(where, "a text that does not begin with a dash", value)
        return value

    def _count(self, where: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._fail(where, "a number from 1 on", value)
        return value

    def _size(self, where: str, value: Any) -> int:
        if not isinstance(value, (str, int)) or isinstance(value, bool) or str(value).strip().endswith(("%", "auto")):
            self._fail(where, _SIZE, value)
        try:
            return parse_budget(value, weights_bytes=0, free_bytes=0).limit
        except OallamaError:
            self._fail(where, f"{_SIZE}, above 0", value)

    def _rate(self, where: str, value: Any) -> float | None:
        if value is None:
            return None
        if not _is_number(value) or value <= 0:
            self._fail(where, "a number above 0 per second", value)
        return float(value)

    def _address(self, where: str, value: Any) -> tuple[str, int]:
        host, _, port = str(value).rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host
        try:
            usable = isinstance(value, str) and not ipaddress.IPv4Address(host).is_unspecified
        except ValueError:
            usable = False
        if not usable or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            self._fail(where, "an IPv4 address and a port from 1 to 65535, as 192.168.1.20:50052", value)
        return host, int(port)

    def _unique(self, key: str, values: list[str]) -> None:
        for value in values:
            if values.count(value) > 1:
                self._fail(f"device.{key}", f"every {key} once", f"{value} {values.count(value)} times")

    def _fail(self, where: str, expected: str, came: object) -> NoReturn:
        raise OallamaError(f"{self.path}: {where}: expected {expected}, got {came!r}")


def _home(device: DeviceEntry) -> str:
    """Where an address is one: loopback on its host, others everywhere."""
    return device.host if device.is_loopback else "the network"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
