"""`oallama devices`: what this machine can compute on."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from oallama.base.printing import print_json
from oallama.engine import device_list
from oallama.engine.device_list import Device
from oallama.planning import format_bytes
from oallama.views.style import table

from .options import Json, LocalRpc, Rpc, connect
from .terminal import out


def devices(rpc: Rpc = None, local_rpc: LocalRpc = False, json: Json = False) -> None:
    """List the devices, accelerators and CPU alike."""
    connect(rpc, local_rpc)
    found = device_list.devices()
    if json:
        print_json([asdict(device) for device in found])
        return
    out.print(devices_table(found))


def devices_table(found: list[Device]) -> Table:
    view = table()
    for column in ("device", "type", "backend", "description"):
        view.add_column(column, overflow="fold")
    for column in ("free", "total"):
        view.add_column(column, justify="right", no_wrap=True)
    for d in found:
        sizes = (format_bytes(d.memory_free), format_bytes(d.memory_total))
        view.add_row(d.name, d.type, d.backend, d.description, *sizes)
    return view
