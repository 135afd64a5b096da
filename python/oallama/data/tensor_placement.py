"""Where one weight of a plan lives: as a whole, or in two parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Mode = Literal["resident", "host", "upload", "stream"]


@dataclass(frozen=True)
class Segment:
    """A part of a tensor in one buffer. `rows` is (first, end) of a divided tensor's rows (of the columns, where
    `is_divided_by_columns`), None for the whole tensor. `experts` are those that a tensor divided by experts has there,
    rising; () for others. `slots`, of the accelerator's part of a tensor whose experts are cached there: how many it
    can hold; `experts` are then those that it has at the beginning, at most so many. 0 for others.

    Modes: "resident" is computed on the device that holds it, "host" is computed on the CPU, "upload" lives on the CPU
    and is uploaded for large batches, "stream" lives on the CPU and is copied to the first accelerator ahead of its
    operator for batches of `stream_from` tokens and more (0 for all other modes).

    realisation, of a weight on the CPU: "plain", as in the file, "repacked" for the CPU's faster kernels (in memory of
    its own; streams are copied from the file), "tiled", as in the file with our kernels for many tokens,
    "repacked+tiled", in memory as both, or "" for llama.cpp's own choice.
    """

    device: str
    mode: Mode
    rows: tuple[int, int] | None
    nbytes: int
    stream_from: int = 0
    realisation: str = ""
    experts: tuple[int, ...] = ()
    slots: int = 0


@dataclass(frozen=True)
class TensorPlacement:
    """A weight and its segments: one, or, for a divided weight, the host's part (with the mode of large batches) and
    then the accelerator's. The host keeps the whole of a divided weight; `nbytes` of its segment are what it computes.
    `affinity` is OATO's G in [0, 1], None for tensors no planner weighed."""

    type: str
    nbytes: int
    segments: tuple[Segment, ...]
    affinity: float | None = None

    @classmethod
    def whole(
        cls,
        type: str,
        nbytes: int,
        device: str,
        mode: Mode,
        affinity: float | None = None,
        stream_from: int = 0,
        realisation: str = "",
    ) -> TensorPlacement:
        """A tensor in one piece."""
        return cls(type, nbytes, (Segment(device, mode, None, nbytes, stream_from, realisation),), affinity)

    @classmethod
    def divided(cls, whole: TensorPlacement, device: str, count: int, width: int) -> TensorPlacement:
        """`whole`, which lives on the host, with the first `count` of its `width` rows (columns) on `device`, too."""
        (host,) = whole.segments
        there = whole.nbytes * count // width
        parts = (
            replace(host, rows=(count, width), nbytes=whole.nbytes - there),
            Segment(device, "resident", (0, count), there),
        )
        return replace(whole, segments=parts)

    @classmethod
    def by_experts(
        cls, whole: TensorPlacement, device: str, experts: tuple[int, ...], n_experts: int
    ) -> TensorPlacement:
        """`whole`, which lives on the host, with some of its experts on `device`, too, and one of zeros behind them."""
        (host,) = whole.segments
        each = whole.nbytes // n_experts
        others = tuple(e for e in range(n_experts) if e not in set(experts))
        parts = (
            replace(host, experts=others, nbytes=each * len(others)),
            Segment(device, "resident", None, each * (len(experts) + 1), experts=experts),
        )
        return replace(whole, segments=parts)

    @classmethod
    def by_slots(
        cls, whole: TensorPlacement, device: str, slots: int, n_experts: int, experts: tuple[int, ...] = ()
    ) -> TensorPlacement:
        """`whole`, which lives on the host, with slots for some of its experts on `device`, and zeros behind them.

        The host keeps all experts and may compute any. experts: those in the slots at the beginning, rising.
        """
        (host,) = whole.segments
        there = whole.nbytes // n_experts * (slots + 1)
        return replace(whole, segments=(host, Segment(device, "resident", None, there, experts=experts, slots=slots)))

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> TensorPlacement:
        """From the content of a plan file."""
        segments = tuple(
            Segment(
                s["device"],
                s["mode"],
                None if s["rows"] is None else (s["rows"][0], s["rows"][1]),
                s["nbytes"],
                s.get("stream_from", 0),
                s.get("realisation", ""),
                tuple(s.get("experts", ())),
                s.get("slots", 0),
            )
            for s in content["segments"]
        )
        return cls(content["type"], content["nbytes"], segments, content["affinity"])

    @property
    def device(self) -> str:
        """Device of the first segment: the home of the tensor."""
        return self.segments[0].device

    @property
    def mode(self) -> Mode:
        """Mode of the first segment."""
        return self.segments[0].mode

    @property
    def stream_from(self) -> int:
        """Tokens from which the first segment is streamed; 0 when it never is."""
        return self.segments[0].stream_from

    @property
    def realisation(self) -> str:
        """Realisation of the first segment."""
        return self.segments[0].realisation
