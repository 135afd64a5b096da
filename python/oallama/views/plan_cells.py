"""What a cell of a plan's picture shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from ..data.plan import HOST, PlacementPlan


@dataclass(frozen=True)
class Symbols:
    """What a cell of the picture shows; `devices` are used in the order of the plan's accelerators."""

    devices: tuple[str, ...] = ("█", "▓", "▒")
    host: str = "·"
    upload: str = "^"
    stream: str = "»"
    split: str = "/"
    absent: str = " "


UNICODE = Symbols()
ASCII = Symbols(devices=("#", "%", "@"), host=".", stream=">")
_STYLES = ("bold green", "bold cyan", "bold magenta")


def cell(home: str, plan: PlacementPlan, symbols: Symbols) -> Text:
    """What a home looks like: a device, "upload", "stream", "split", or "" for what is not there."""
    if home == "":
        return Text(symbols.absent)
    if home == "split":
        return Text(symbols.split, style="bold yellow")
    if home == "upload":
        return Text(symbols.upload, style="yellow")
    if home == "stream":
        return Text(symbols.stream, style="yellow")
    if home == HOST:
        return Text(symbols.host, style="dim")
    at = [device for device in plan.devices if device != HOST].index(home)
    return Text(symbols.devices[at % len(symbols.devices)], style=_STYLES[at % len(_STYLES)])


def span(values: Sequence[int] | Sequence[str]) -> str:
    """ "3" or "3 to 7": the least and the greatest of some."""
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"
