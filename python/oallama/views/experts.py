"""A mixture's experts in a plan: a row of the picture, and the uses that are expected to hit, layer by layer.

The row has one character per layer and needs no colour. 64 layers fit a line of 80 columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ..data.layer_experts import MIXED, ExpectedExperts, LayerExperts, layer_experts
from ..data.plan import PlacementPlan
from .plan_cells import Symbols, cell
from .style import table

_LINE, _GROUP = 64, 8  # layers
_BESIDE = 3  # layers beside each other in the table
_MIXED, _NONE = "+", "-"
_PART = "bold yellow"


def render_experts(plan: PlacementPlan, symbols: Symbols) -> list[Text]:
    """The row, with its legend for what the picture does not have; nothing for a dense model."""
    places = layer_experts(plan)
    if not places:
        return []
    found = {place.layer: place for place in places}
    last = places[-1].layer
    lines = [Text("experts, layer by layer")]
    for first in range(0, last + 1, _LINE):
        line = Text(f"{first:4d}")
        for layer in range(first, min(first + _LINE, last + 1)):
            line.append(" " if layer % _GROUP == 0 else "")
            line.append_text(_symbol(found.get(layer), plan, symbols))
        lines.append(line)
    return lines + _legend(places, last)


def render_expected(plan: PlacementPlan) -> list[Table | Text]:
    """What accelerators are expected to compute: in all, and of each layer whose experts are on both sides."""
    expected, places = plan.predicted.experts, layer_experts(plan)
    if expected is None or not places:
        return []
    layers = [place.layer for place in places]
    decode, prefill = (f"{expected.share(stage, layers):.0%}" for stage in ("decode", "prefill"))  # type: ignore[arg-type]
    known = {"trace": "by the routing trace", "uniform": "routing taken as uniform, there is no trace"}
    words = f"experts' uses expected on accelerators: {decode} of a generated token's, {prefill} of a prompt's"
    parts: list[Table | Text] = [Text(f"{words}, all {len(layers)} layers together; {known[expected.routing]}")]
    return [*parts, _by_layer(expected)] if expected.divided() else parts


def _symbol(place: LayerExperts | None, plan: PlacementPlan, symbols: Symbols) -> Text:
    if place is None:
        return Text(_NONE, style="dim")
    if place.home == MIXED:
        return Text(_MIXED, style=_PART)
    if place.held:
        return Text(str(_tenths(place)), style=_PART)
    return cell(place.home, plan, symbols)


def _tenths(place: LayerExperts) -> int:
    return min(max(round(10 * place.held / place.total), 1), 9)


def _legend(places: Sequence[LayerExperts], last: int) -> list[Text]:
    """Lines for digits, layers whose matrices differ, and layers without experts."""
    lines = []
    if parts := [place for place in places if place.held]:
        digits, held = (_range(sorted(numbers)) for numbers in (map(_tenths, parts), (p.held for p in parts)))
        there, total = parts[0].device, parts[0].total
        lines.append(Text(f"{digits}: so many tenths of a layer's {total} experts are on {there}, too ({held})"))
    if any(place.home == MIXED for place in places):
        lines.append(Text(f"{_MIXED}: the matrices of the layer's experts are on different devices"))
    if len(places) <= last:
        lines.append(Text(f"{_NONE}: a layer without experts"))
    return lines


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{first}" if first == last else f"{first} to {last}"


def _by_layer(expected: ExpectedExperts) -> Table:
    """As many layers beside each other as 80 columns hold, in columns."""
    shown = table(f"layers with some of their {expected.n_experts} experts there, and expected shares of their uses")
    shown.collapse_padding = True
    for _ in range(_BESIDE):
        for name in ("layer", "has", "decode", "prompt"):
            shown.add_column(name, justify="right", no_wrap=True)
    cells = [
        (str(layer), str(hits.held), f"{hits.decode:.0%}", f"{hits.prefill:.0%}")
        for layer, hits in sorted(expected.divided().items())
    ]
    height = -(-len(cells) // _BESIDE)
    for row in range(height):
        shown.add_row(*(text for layer in cells[row::height] for text in layer))
    return shown
