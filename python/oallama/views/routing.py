"""A routing trace as tables: what k experts of a layer hit, and how many experts batches use. 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..data.expert_hits import POLICIES
from ..data.routing import STAGES
from .style import table

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import RenderableType

    from ..data.routing import RoutingTrace

NAMES = {"static": "static", "lru": "LRU", "lfru": "LFRU", "belady": "bound"}
_ORDER = STAGES[::-1]  # decode first: there the policies matter


def default_ks(n_experts: int) -> tuple[int, ...]:
    """Numbers of experts that a table shows."""
    return tuple(sorted({max(1, n_experts * sixteenths // 16) for sixteenths in (1, 2, 4, 6, 8, 12, 16)}))


def render_trace(trace: RoutingTrace, ks: Sequence[int]) -> RenderableType:
    """Tables of the mean layer by k and by tokens of a batch, and of each layer at the k next to a quarter."""
    quarter = min(ks, key=lambda k: abs(k - trace.n_experts / 4))
    return Group(
        Text(headline(trace)), "", _by_k(trace, ks), _unions(trace), _by_layer(trace, quarter), _explained(trace)
    )


def headline(trace: RoutingTrace) -> str:
    """The model, and how many experts it has and uses."""
    used = "/".join(map(str, sorted(set(trace.n_used))))
    return f"{trace.model}: {used} of {trace.n_experts} experts per token in {len(trace.layers)} layers"


def _by_k(trace: RoutingTrace, ks: Sequence[int]) -> Table:
    shown = table("uses that hit if a device has k of a layer's experts, mean of the layers")
    _columns(shown, "\nk", "\nuniform", *(name for stage in _ORDER for name in _headed(stage, NAMES.values())))
    for k in ks:
        rates = [trace.hit_rate(stage, policy, k).mean() for stage in _ORDER for policy in POLICIES]
        shown.add_row(str(k), _percent(k / trace.n_experts), *map(_percent, rates))
    return shown


def _unions(trace: RoutingTrace) -> Table:
    """As far as a micro-batch goes."""
    shown = table("distinct experts of n tokens")
    _columns(shown, "n", "uniform", *_ORDER)
    unions = {name: dict(zip(s.widths, s.unions.mean(axis=0), strict=True)) for name, s in trace.stages.items()}
    for n in sorted({n for found in unions.values() for n in found if n <= trace.n_ubatch}):
        cells = [f"{unions[stage][n]:.1f}" if n in unions[stage] else "-" for stage in _ORDER]
        shown.add_row(str(n), f"{trace.uniform_union(n):.1f}", *cells)
    return shown


def _by_layer(trace: RoutingTrace, k: int) -> Table:
    shown = table(f"by layer, k = {k} (hottest: the most used expert's share)")
    cells: list[NDArray[Any]] = []
    names = ["\nlayer"]
    for stage, policies in (("decode", POLICIES), ("prefill", ("static", "belady"))):
        counts = trace.counts(stage)
        cells += [counts.max(axis=1) / counts.sum(axis=1), *(trace.hit_rate(stage, p, k) for p in policies)]
        names += _headed(stage, ["hottest", *(NAMES[p] for p in policies)])
    _columns(shown, *names)
    for layer, *row in zip(trace.layers, *cells, strict=True):
        shown.add_row(str(layer), *map(_percent, row))
    return shown


def _explained(trace: RoutingTrace) -> Text:
    prefill, decode = (trace.stages[name] for name in STAGES)
    lines = [
        f"{trace.text}: {prefill.n_tokens} tokens in micro-batches of {trace.n_ubatch}, "
        f"{decode.n_tokens} tokens generated behind parts of it.",
        "The first half of each stage's tokens is learned from, uses of the second half count.",
        "Uniform: what random choices would give. Distinct experts: means of the layers, too.",
    ]
    for name in _ORDER:
        stage = trace.stages[name]
        if stage.judged < stage.n_tokens:
            lines.append(f"Of {name} the first {stage.judged} tokens are judged, {stage.n_tokens} are kept.")
    return Text("\n".join(lines), style="dim")


def _headed(stage: str, names: Iterable[str]) -> list[str]:
    """Names of columns, with the stage above the first."""
    return [f"{'' if number else stage}\n{name}" for number, name in enumerate(names)]


def _columns(shown: Table, *names: str) -> None:
    shown.collapse_padding = True
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)


def _percent(share: float) -> str:
    return f"{share:.1%}"
