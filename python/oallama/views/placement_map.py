"""A plan as a map: a row per kind of matrix, a column per layer, and what is to be said of every cell. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..base.printing import seconds
from ..data.budget import format_bytes
from ..data.operators import kind_of, layer_of
from ..data.plan import HOST, PlacementPlan, TensorPlacement
from .plan_cells import drawn, home_of, kinds_of, short_kind

if TYPE_CHECKING:
    from ..planning.tensor_seconds import TensorSeconds

KV_CACHE = "KV cache"
_DIGITS = 9  # of seconds per GB: matrices of one shape take the same
OUTSIDE = ("token_embd.weight", "output.weight")  # of all layers


@dataclass(frozen=True)
class MapCell:
    """One weight, or one layer's KV cache.

    name: of the weight, or "KV cache of layer 3". column: its layer, None outside of all. row: its kind. home: a
    device, "upload" or "stream" (it lives on the CPU), "split". share: of its bytes that an accelerator has, 0 to 1.
    device: of that share, the CPU where it is 0. facts: lines for people.
    """

    name: str
    column: int | None
    row: str
    home: str
    device: str
    share: float
    facts: tuple[str, ...]


@dataclass(frozen=True)
class PlacementMap:
    """devices: accelerators first. rows: kinds of matrices in the order a layer computes them, the KV cache first."""

    devices: tuple[str, ...]
    rows: tuple[str, ...]
    n_layers: int
    cells: tuple[MapCell, ...]

    @property
    def labels(self) -> list[str]:
        """Of the rows: short, unless two kinds would have the same one ("gate" of attention and of feed-forwards)."""
        short = [short_kind(row) for row in self.rows]
        return [label if short.count(label) == 1 else row for label, row in zip(short, self.rows, strict=True)]

    @property
    def homes(self) -> list[str]:
        """What a legend names: the devices that hold something, then the other homes there are."""
        used = {cell.home for cell in self.cells}
        return [home for home in (*self.devices, "upload", "stream", "split") if home in used]


def placement_map(plan: PlacementPlan, times: Mapping[str, TensorSeconds] | None = None) -> PlacementMap:
    """The map of a plan. times: what weights take on every device; None: not known, as of a plan in a file."""
    shown = drawn(plan)
    kinds = kinds_of(name for name in shown if layer_of(name) is not None)
    said = _Facts(plan, times or {})
    cells = [*_caches(plan), *(_cell(name, tensor, said) for name, tensor in shown.items() if _has_place(name))]
    n_layers = 1 + max((cell.column for cell in cells if cell.column is not None), default=-1)
    return PlacementMap(plan.devices, (KV_CACHE, *kinds), n_layers, tuple(cells))


def _has_place(name: str) -> bool:
    return layer_of(name) is not None or name in OUTSIDE


def _caches(plan: PlacementPlan) -> Iterator[MapCell]:
    loaded = {layer_of(name) for name in plan.tensors}  # MTP heads that are not have no cache either
    for layer, home in enumerate(plan.layers[:-1]):
        if home and layer in loaded:
            name, share = f"{KV_CACHE} of layer {layer}", float(home != HOST)
            where = f"with its attention on {home}"
            if plan.stream_caches and home == HOST:
                where = f"on {HOST}, copied for attention on {plan.devices[0]}"
            yield MapCell(name, layer, KV_CACHE, home, home, share, (name, where))


def _cell(name: str, tensor: TensorPlacement, said: _Facts) -> MapCell:
    there = [segment for segment in tensor.segments if segment.device != HOST]
    own = sum(segment.nbytes for segment in there)
    share = min(1.0, own / tensor.nbytes) if tensor.nbytes else 0.0
    device = there[0].device if there else HOST
    return MapCell(name, layer_of(name), kind_of(name), home_of(tensor), device, share, said.of(name, tensor, share))


class _Facts:
    """What is said of a weight."""

    def __init__(self, plan: PlacementPlan, times: Mapping[str, TensorSeconds]) -> None:
        self._plan, self._times = plan, times
        self._accelerator = next((device for device in plan.devices if device != HOST), "")
        saved = {name: self._saved(name) for name in times if name in plan.tensors} if self._accelerator else {}
        self._saved_s = saved
        self._equal = Counter(round(s, _DIGITS) for s in saved.values())

    def of(self, name: str, tensor: TensorPlacement, share: float) -> tuple[str, ...]:
        lines = [f"{name}, {tensor.type}, {format_bytes(tensor.nbytes)}", self._where(tensor, share)]
        if times := self._times.get(name):
            n = self._plan.planner["params"].get("n_parallel", 1)
            lines.append(f"{'one token' if n == 1 else f'a token of each of {n}'}: {_times(times.decode)}")
            if times.prefill:
                lines.append(f"{self._plan.context.n_ubatch} tokens: {_times(times.prefill)}")
        if name in self._saved_s:
            saved = seconds(max(0.0, self._saved_s[name]))
            lines.append(f"saves {saved} of the request per GB on {self._accelerator}, {self._rank(name)}")
        if tensor.affinity is not None:
            lines.append(f"OATO's affinity {tensor.affinity:.2f}")
        return tuple(lines)

    def _where(self, tensor: TensorPlacement, share: float) -> str:
        first = tensor.segments[0]
        how = f", {first.realisation}" if first.realisation not in ("", "plain") else ""
        home = home_of(tensor)
        if home == "split":
            return f"{share:.0%} on {tensor.segments[1].device}, the rest on {HOST}{how}: both compute at once"
        if home == "upload":
            return f"on {HOST}{how}, uploaded for large batches"
        if home == "stream":
            begin = f"from {first.stream_from} tokens on" if first.stream_from > 1 else "always"
            return f"on {HOST}{how}, streamed {begin}"
        return f"on {home}{how if home == HOST else ''}"

    def _saved(self, name: str) -> float:
        """Seconds of the planned request that 1e9 bytes of it save on the first accelerator."""
        n_prompt, n_generate = self._plan.predicted.workload
        batches = n_prompt / self._plan.context.n_ubatch
        times = self._times[name]
        gained = (n_generate - 1) * self._gain(times.decode) + batches * self._gain(times.prefill)
        return 1e9 * gained / max(1, self._plan.tensors[name].nbytes)

    def _rank(self, name: str) -> str:
        own = round(self._saved_s[name], _DIGITS)
        before = sum(count for saved, count in self._equal.items() if saved > own)
        others = f" with {self._equal[own] - 1} others" if self._equal[own] > 1 else ""
        return f"rank {before + 1} of {self._equal.total()}{others}"

    def _gain(self, times: Mapping[str, float]) -> float:
        return times[HOST] - times[self._accelerator] if times else 0.0


def _times(times: Mapping[str, float]) -> str:
    return ", ".join(f"{device} {seconds(s)}" for device, s in times.items())
