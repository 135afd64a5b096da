"""A mixture's experts in a plan: a row of the picture, and the uses that are expected to hit and did, layer by layer.

The row has one character per layer and needs no colour. 64 layers fit a line of 80 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..data.layer_experts import MIXED, ExpectedExperts, LayerExperts, layer_experts
from ..data.plan import PlacementPlan
from .plan_cells import cell, span
from .style import table

if TYPE_CHECKING:
    from ..loading.expert_hits import ExpertHits

_LINE, _GROUP = 64, 8  # layers
_BESIDE = 3  # layers beside each other in the table
_MIXED, _NONE = "+", "-"
_PART = "bold yellow"


def render_experts(plan: PlacementPlan) -> list[Text]:
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
            line.append_text(_symbol(found.get(layer), plan))
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


def render_hits(hits: ExpertHits) -> list[Table | Text]:
    """What was counted while the model ran, in all and layer by layer, beside what was expected."""
    layers = hits.expected.layers if hits.expected else {}
    cells = [
        (
            str(count.layer),
            f"{count.hits / max(1, count.uses):.0%}",
            f"{layers[count.layer].decode:.0%}" if count.layer in layers else "-",
            str(count.uploads),
        )
        for count in hits.counts
    ]
    title = "experts' uses that hit, and the plan's, layer by layer"
    shown = _beside(title, ("layer", "hit", "plan", "uploads"), cells)
    fewer = hits.fewer()
    return [Text(hits.describe()), shown, *([Text(fewer)] if fewer else [])]


def _symbol(place: LayerExperts | None, plan: PlacementPlan) -> Text:
    if place is None:
        return Text(_NONE, style="dim")
    if place.home == MIXED:
        return Text(_MIXED, style=_PART)
    if place.held:
        return Text(_digit(place), style=_PART)
    return cell(place.home, plan)


def _digit(place: LayerExperts) -> str:
    """Tenths of the experts: a digit, for slots a letter."""
    tenths = min(max(round(10 * place.held / place.total), 1), 9)
    return "abcdefghi"[tenths - 1] if place.slots else str(tenths)


def _legend(places: Sequence[LayerExperts], last: int) -> list[Text]:
    """Lines for digits and letters, layers whose matrices differ, and layers without experts."""
    lines = []
    if parts := [place for place in places if place.held and not place.slots]:
        there, total = parts[0].device, parts[0].total
        digits, held = span([*map(_digit, parts)]), span([place.held for place in parts])
        lines.append(Text(f"{digits}: so many tenths of a layer's {total} experts are on {there}, too ({held})"))
    if parts := [place for place in places if place.slots]:
        there, total, held = parts[0].device, parts[0].total, span([place.held for place in parts])
        lines.append(Text(f"a to i: slots on {there} for 1 to 9 tenths of a layer's {total} experts ({held})"))
    if any(place.home == MIXED for place in places):
        lines.append(Text(f"{_MIXED}: the matrices of the layer's experts are on different devices"))
    if len(places) <= last:
        lines.append(Text(f"{_NONE}: a layer without experts"))
    return lines


def _by_layer(expected: ExpectedExperts) -> Table:
    title = f"layers with some of their {expected.n_experts} experts there, and expected shares of their uses"
    cells = [
        (str(layer), str(hits.held), f"{hits.decode:.0%}", f"{hits.prefill:.0%}")
        for layer, hits in sorted(expected.divided().items())
    ]
    return _beside(title, ("layer", "has", "decode", "prompt"), cells)


def _beside(title: str, names: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    """A row of cells per layer, as many layers beside each other as 80 columns hold; to be read in columns."""
    shown = table(title)
    shown.padding = (0, 0, 0, 0)  # the box has a space between columns
    for name in [*names] * _BESIDE:
        shown.add_column(name, justify="right", no_wrap=True)
    height = -(-len(cells) // _BESIDE)
    for row in range(height):
        shown.add_row(*(text for layer in cells[row::height] for text in layer))
    return shown
