"""The devices of a cluster, all started at once and ended together."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from oallama.base.environment import RPC_HASH_BYTES, RPC_NO_TOKEN, RPC_TIMEOUT, RPC_TOKEN_FILE
from oallama.errors import OallamaError

from ..allocation.devices import DeviceEntry
from .agent import TIMEOUT_S
from .foreign import ForeignMember
from .member import Member

# Smaller tensors are sent faster than asked for (ggml's own limit is 10 MiB).
HASH_BYTES = "65536"


@contextmanager
def members(
    entries: Iterable[DeviceEntry], agent: str | None = None, missing: Callable[[str, OallamaError], None] | None = None
) -> Iterator[list[Member]]:
    """Agents on all hosts, started at once; all end with the block. Within it this process and those it starts know
    their servers' token.

    missing: is told of devices that cannot be used, which are then left out.

    Raises:
        OallamaError: for the first device, in order, that cannot be used, unless there is `missing`.
    """
    token = os.urandom(32)
    entries = list(entries)
    found: list[Member] = []
    with ThreadPoolExecutor(max(1, len(entries))) as pool, ExitStack() as stack:
        _know(token, [entry for entry in entries if not entry.has_agent], stack)
        errors: dict[str, OallamaError] = {}
        for entry, start in [(entry, pool.submit(_member, entry, token, agent)) for entry in entries]:
            try:
                found.append(stack.enter_context(start.result()))
            except OallamaError as error:
                errors[entry.name] = error
        for name, why in errors.items():
            if missing is None:
                raise why
            missing(name, why)
        yield found


def _member(entry: DeviceEntry, token: bytes, agent: str | None) -> Member:
    return Member(entry, token, agent) if entry.has_agent else ForeignMember(entry)


def _know(token: bytes, open_entries: Sequence[DeviceEntry], stack: ExitStack) -> None:
    """Until the stack unwinds this process and those it starts know the token, and who is spoken to without it."""
    file = tempfile.NamedTemporaryFile(prefix="oallama-")  # noqa: SIM115 (readable by its owner alone)
    stack.enter_context(file)
    file.write(token.hex().encode())
    file.flush()
    without = [RPC_NO_TOKEN.get(), *(f"{entry.address[0]}:{entry.address[1]}" for entry in open_entries)]
    for variable, value in (
        (RPC_TOKEN_FILE, file.name),
        (RPC_NO_TOKEN, ",".join(filter(None, without))),
        (RPC_TIMEOUT, TIMEOUT_S),
        (RPC_HASH_BYTES, HASH_BYTES),
    ):
        stack.callback(_restore, variable.name, os.environ.get(variable.name))
        os.environ[variable.name] = value


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
