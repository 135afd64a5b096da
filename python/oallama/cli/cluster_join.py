"""`oallama cluster join`, `add` and `hosts`: hosts that join by a token."""

from __future__ import annotations

import asyncio
import getpass
import ipaddress
import socket
import sys
from typing import Annotated

import typer

from oallama.base.printing import say
from oallama.cluster.join import known
from oallama.cluster.join.host import JoinedHost
from oallama.cluster.join.keys import own_keys
from oallama.cluster.join.token import Token
from oallama.cluster.pipeline.agent import Offer
from oallama.cluster.pipeline.members import members
from oallama.data.budget import format_bytes, parse_budget
from oallama.engine import device_list
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError
from oallama.views.style import table

from .terminal import out

_ANYWHERE = ("192.0.2.1", 9)  # nothing is sent there (RFC 5737)


def join(
    listen: Annotated[
        str | None, typer.Option(help="Address that clients reach; default: this host's in its private network.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65534, help="Port that clients reach.")] = known.DEFAULT_PORT,
    memory: Annotated[str | None, typer.Option(help="Memory to lend, 8GiB; default: 80 % of what is free.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device to lend; default: the first accelerator, else the CPU.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads to lend, 0: all.")] = 0,
    new_token: Annotated[bool, typer.Option("--new-token", help="Make a new token; the old one is refused.")] = False,
) -> None:
    """Lend this host to others: waits for clients that have the token which it prints. Ctrl-C ends it."""
    quiet()
    offer = Offer(
        device=device_list.device(device).name if device else None,
        threads=threads,
        memory_bytes=parse_budget(memory, weights_bytes=0, free_bytes=0).limit if memory else 0,
    )
    address = known.parse_address(f"{listen or _own_address()}:{port}")
    keys = own_keys(new_token)
    name = socket.gethostname().split(".")[0]

    def ready() -> None:
        say(f"{name} waits for clients at {address[0]}:{port}. On the host that has the model:\n")
        print(f"  oallama cluster add {name} {address[0]}:{port} {keys.token}", flush=True)
        say(f'  oallama cluster run MODEL "Hello" --hosts {name}\n\nWho has the token can use this host.')

    asyncio.run(JoinedHost(address, keys, offer, say).serve(ready))


def add(
    name: Annotated[str, typer.Argument(help="What to call the host here.")],
    address: Annotated[str, typer.Argument(help="What `oallama cluster join` printed there: address and port.")],
    token: Annotated[str, typer.Argument(help="The token that it printed; left out: asked for.")] = "",
) -> None:
    """Write down a host that joined, and try it."""
    if not token:
        token = getpass.getpass(f"token of {name}: ") if sys.stdin.isatty() else sys.stdin.readline()
    host = known.write_down(name, known.parse_address(address), Token.parse(token))
    with members([host.entry()]) as (member,):
        hello = member.hello
        what = hello["device"] if hello["device"] != "CPU" else f"CPU with {hello['threads']} threads"
        known.keep(host)
        say(f"{name} lends {format_bytes(member.entry.memory_bytes)} and {hello['description']} ({what})")


def hosts(
    remove: Annotated[str | None, typer.Option(help="Forget this host.")] = None,
) -> None:
    """List the hosts that were added."""
    if remove:
        known.remove(remove)
        say(f"{remove} is forgotten")
        return
    shown = table("hosts")
    for column in ("name", "address"):
        shown.add_column(column, overflow="fold")
    for host in known.known_hosts():
        shown.add_row(host.name, f"{host.address}:{host.port}")
    out.print(shown if shown.row_count else "no host was added; run `oallama cluster join` on one")


def _own_address() -> str:
    """This host's address in its private network. Raises OallamaError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANYWHERE)
            address = str(probe.getsockname()[0])
        except OSError:
            address = ""
    if not address or not ipaddress.IPv4Address(address).is_private:
        found = f"its address is {address}, which the world may reach" if address else "it has no route to one"
        raise OallamaError(f"no private network is known on this host: {found}; name an address by --listen")
    return address
