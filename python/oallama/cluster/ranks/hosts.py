"""The hosts that run ranks: a hosts file, or this machine alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from oallama.errors import OallamaError

from .mpi import Host

LOCAL = "localhost"
_LINE = re.compile(r"^(?P<name>[A-Za-z0-9_.:@-]+)(\s+slots\s*=\s*(?P<slots>\S+))?$")


def load_hosts(path: Path) -> list[Host]:
    """Hosts of a file as Open MPI's hostfiles have them: `name [slots=N]` a line, `#` begins a comment.

    The first host runs rank 0. Without slots a host takes an equal share of the ranks (`place`).

    Raises:
        OallamaError: naming the file and line, for a malformed line, a host listed twice, or no host at all.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise OallamaError(f"cannot read the hosts file {path}: {err}") from err
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.match(text)
        slots = match["slots"] or "0" if match else ""
        if not match or not slots.isdecimal() or (match["slots"] and int(slots) < 1):
            raise OallamaError(f"{path}, line {number}: expected 'name' or 'name slots=N', N at least 1; got {text!r}")
        if any(host.name == match["name"] for host in hosts):
            raise OallamaError(f"{path}, line {number}: host {match['name']!r} is listed twice; give it more slots")
        hosts.append(Host(match["name"], int(slots)))
    if not hosts:
        raise OallamaError(f"{path} lists no host; expected 'name slots=N' lines")
    return hosts


def place(hosts: Sequence[Host], n_ranks: int | None) -> list[Host]:
    """How many ranks each host runs; hosts without slots share what the others leave, the first ones taking more.

    n_ranks: None takes all slots, and one rank on a host without slots.

    Raises:
        OallamaError: when the hosts have fewer slots than ranks were asked for.
    """
    if n_ranks is None:
        return [Host(h.name, h.slots or 1) for h in hosts]
    open_hosts = [h for h in hosts if not h.slots]
    rest = max(0, n_ranks - sum(h.slots for h in hosts))
    each, more = divmod(rest, len(open_hosts)) if open_hosts else (0, 0)
    extra = {h.name for h in open_hosts[:more]}
    placed, left = [], n_ranks
    for host in hosts:
        slots = min(left, host.slots or each + (host.name in extra))
        left -= slots
        placed += [Host(host.name, slots)] if slots else []
    if left:
        raise OallamaError(f"{n_ranks} ranks were asked for, the hosts have {n_ranks - left} slots: {_listed(hosts)}")
    return placed


def _listed(hosts: Sequence[Host]) -> str:
    return ", ".join(f"{h.name} ({h.slots})" for h in hosts)
