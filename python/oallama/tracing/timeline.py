"""A timeline as data: spans on lanes, how busy each lane was, and its file format (Chrome's trace events).

Pure functions; nothing here runs a model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..base.jsonfile import write_text_atomic
from ..views.timeline import render_timeline

if TYPE_CHECKING:
    from rich.console import RenderableType

Intervals = list[tuple[float, float]]
_LANES = {
    "compute": "{device}",
    "stream": "weights to {device}",
    "upload": "weights to {device}",
    "data": "data to {device}",
    "wait": "waiting for {device}",
}


@dataclass(frozen=True)
class Span:
    """Something that took from `begin` to `end`, in seconds of time.monotonic().

    device: that computed, or that was copied to. what: "compute"; "stream" (copied ahead), "upload" (by llama.cpp when
    it was needed) and "data" (activations, masks) are copies of `nbytes`; "wait" is the computing thread's, for a
    streamed weight. name: of the first operator, or of what was copied.
    """

    device: str
    what: str
    name: str
    nbytes: int
    begin: float
    end: float

    @property
    def lane(self) -> str:
        return _LANES[self.what].format(device=self.device)


@dataclass(frozen=True)
class Stage:
    """A part of the run: "prefill" or "decode"."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class LaneUse:
    """One lane in one stage: seconds busy, bytes copied, and the seconds of it in which some device computed.

    A device's own computing is not beside itself: there `overlapped_s` counts the other devices'.
    """

    lane: str
    busy_s: float
    idle_s: float
    nbytes: int
    overlapped_s: float

    @property
    def gb_per_s(self) -> float | None:
        """Bytes over busy seconds, in 1e9; None for lanes that copy nothing."""
        return self.nbytes / self.busy_s / 1e9 if self.nbytes and self.busy_s else None

    @property
    def overlap(self) -> float:
        """Share of the busy time in which some device, for a device's own lane some other, computed."""
        return self.overlapped_s / self.busy_s if self.busy_s else 0.0


@dataclass(frozen=True)
class Timeline:
    """Spans and stages of one run; print it with rich for a table."""

    spans: tuple[Span, ...]
    stages: tuple[Stage, ...]

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Devices first, then what is copied to them, then waiting."""
        order = [*dict.fromkeys(_LANES.values())]
        templates = {span.lane: order.index(_LANES[span.what]) for span in self.spans}
        return tuple(sorted(templates, key=lambda lane: (templates[lane], lane)))

    def use(self, stage: Stage) -> tuple[LaneUse, ...]:
        """How each lane spent the stage."""
        inside = [s for s in self.spans if s.end > stage.begin and s.begin < stage.end]
        result = []
        for lane in self.lanes:
            spans = [s for s in inside if s.lane == lane]
            busy = clip(union((s.begin, s.end) for s in spans), stage.begin, stage.end)
            busy_s = length(busy)
            computing = union((s.begin, s.end) for s in inside if s.what == "compute" and s.lane != lane)
            nbytes = sum(s.nbytes for s in spans if s.begin >= stage.begin)
            result.append(LaneUse(lane, busy_s, stage.seconds - busy_s, nbytes, length(intersection(busy, computing))))
        return tuple(result)

    # ---- output ---------------------------------------------------------------------------------------------------

    def to_chrome(self) -> dict[str, Any]:
        """Chrome's trace event format (chrome://tracing, ui.perfetto.dev): a thread per lane, microseconds."""
        zero = min([s.begin for s in self.spans] + [s.begin for s in self.stages], default=0.0)
        thread = {name: i for i, name in enumerate(("stages", *self.lanes))}

        def event(name: str, lane: str, begin: float, end: float, **args: object) -> dict[str, Any]:
            times = {"ts": (begin - zero) * 1e6, "dur": (end - begin) * 1e6}
            return {"name": name, "ph": "X", "pid": 0, "tid": thread[lane], **times, "args": args}

        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
            for name, tid in thread.items()
        ]
        stages = [event(s.name, "stages", s.begin, s.end) for s in self.stages]
        spans = [event(s.name, s.lane, s.begin, s.end, what=s.what, bytes=s.nbytes) for s in self.spans]
        return {"traceEvents": [*names, *stages, *spans], "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace events. Raises OallamaError when the path cannot be written."""
        write_text_atomic(path, json.dumps(self.to_chrome()) + "\n", "trace")

    def summary(self) -> list[dict[str, Any]]:
        """Every lane of every stage as JSON-able values."""
        return [
            {
                "stage": stage.name,
                "stage_s": stage.seconds,
                "lane": use.lane,
                "busy_s": use.busy_s,
                "idle_s": use.idle_s,
                "bytes": use.nbytes,
                "gb_per_s": use.gb_per_s,
                "overlap": use.overlap,
            }
            for stage in self.stages
            for use in self.use(stage)
        ]

    def __rich__(self) -> RenderableType:
        return render_timeline(self)


# ---- intervals -----------------------------------------------------------------------------------------------------


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Disjoint intervals, in order, that cover the same time."""
    result: Intervals = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def intersection(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> Intervals:
    """What two lists of disjoint intervals have in common."""
    result: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            result.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def clip(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> Intervals:
    return intersection(intervals, [(begin, end)])


def length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)
