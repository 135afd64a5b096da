"""Thresholds of one device, recorded by `oallama tune`: which kernel or layout is faster from how many tokens on.

Data, file format and choices; `tuner.py` measures. A table holds for one fingerprint (fingerprint.py) and is kept
beside the profiles; another machine, driver, engine or number of threads does not find it. Times are seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.jsonfile import read_json_object, write_text_atomic
from ..errors import OallamaError
from .curves import log_log

SCHEMA = "oallama.tuning/1"
REMEDY = "record one with `oallama tune`"
# What is compared: (slower to prepare or simpler, its rival).
KINDS = {"repack": ("plain", "repacked"), "mmvq": ("mmvq", "mmq")}
Point = tuple[int, float, float]  # tokens, seconds of the first, seconds of the second


@dataclass(frozen=True)
class Crossover:
    """Two ways to multiply with a weight of one type. kind: of KINDS. ne: (k, m) measured. points: by tokens."""

    kind: str
    type: str
    ne: tuple[int, int]
    points: tuple[Point, ...]

    @property
    def threshold(self) -> int | None:
        """kind "repack": tokens from which repacked wins; None: never. "mmvq": most columns at which MMVQ wins."""
        return second_wins_from(self.points) if self.kind == "repack" else first_wins_to(self.points)

    def ratio(self, n_tokens: int) -> float:
        """Seconds of the second for each second of the first."""
        first, second = ([(p[0], p[i]) for p in self.points] for i in (1, 2))
        return log_log(second, n_tokens) / log_log(first, n_tokens)


def second_wins_from(points: Sequence[Point]) -> int | None:
    """The fewest tokens from which the second is faster at every measured count; None when it is not at the last.

    >>> second_wins_from([(1, 1.0, 1.1), (8, 2.0, 1.5), (32, 8.0, 4.0)])
    8
    """
    found = None
    for n, first, second in reversed(points):
        if second >= first:
            break
        found = n
    return found


def first_wins_to(points: Sequence[Point]) -> int:
    """The most tokens up to which the first is at least as fast at every measured count; at least 1.

    >>> first_wins_to([(1, 1.0, 3.0), (4, 2.0, 3.0), (5, 3.2, 3.0), (8, 2.9, 3.0)])
    4
    """
    found = 1
    for n, first, second in points:
        if first > second:
            break
        found = n
    return found


@dataclass(frozen=True)
class Tuning:
    """The table of one device."""

    created: str
    device: str
    fingerprint: Mapping[str, Any]
    crossovers: tuple[Crossover, ...]

    def of(self, kind: str) -> dict[str, Crossover]:
        """By weight type."""
        return {c.type: c for c in self.crossovers if c.kind == kind}

    def save(self, folder: Path) -> Path:
        """Write the table to its place in `folder`. Raises OallamaError when that cannot be written."""
        path = tuning_file(self.fingerprint, folder)
        write_text_atomic(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n", "tuning")
        return path

    @classmethod
    def load(cls, path: Path) -> Tuning:
        """Raises OallamaError when the file is missing, corrupt or of another version."""
        content = read_json_object(path, "tuning", REMEDY)
        if content.get("schema") != SCHEMA:
            raise OallamaError(f"tuning {path} has schema {content.get('schema')!r}, expected {SCHEMA!r}; {REMEDY}")
        try:
            crossovers = tuple(_crossover(row) for row in content["crossovers"])
            return cls(content["created"], content["device"], dict(content["fingerprint"]), crossovers)
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise OallamaError(f"tuning {path} is not a valid {SCHEMA} ({e}); {REMEDY}") from None


def tuning_file(fingerprint: Mapping[str, Any], folder: Path) -> Path:
    """Where the table of this fingerprint lies."""
    short = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"tuning-{short}.json"


def find_tuning(fingerprint: Mapping[str, Any], folder: Path) -> Tuning | None:
    """The table recorded for exactly this fingerprint; None without one."""
    path = tuning_file(fingerprint, folder)
    if path.is_file():
        with suppress(OallamaError):  # a damaged table is as good as none
            tuning = Tuning.load(path)
            if tuning.fingerprint == fingerprint:
                return tuning
    return None


def mmvq_limits(tunings: Sequence[Tuning]) -> str:
    """The tables' limits as OALLAMA_MMVQ_LIMITS takes them, "CUDA0:q4_K=5;CUDA1:q4_0=4"; empty without any."""
    parts = []
    for tuning in tunings:
        limits = [f"{c.type}={c.threshold}" for c in tuning.of("mmvq").values()]
        parts += [f"{tuning.device}:{','.join(limits)}"] if limits else []
    return ";".join(parts)


def _crossover(row: Mapping[str, Any]) -> Crossover:
    if row["kind"] not in KINDS:
        raise ValueError(f"kind is {row['kind']!r}, expected one of {', '.join(KINDS)}")
    points = tuple((int(p[0]), float(p[1]), float(p[2])) for p in row["points"])
    if not points or any(n < 1 or a <= 0 or b <= 0 for n, a, b in points) or sorted(points) != list(points):
        raise ValueError(f"points of {row['type']} are {row['points']!r}, expected (tokens, seconds, seconds) in order")
    return Crossover(row["kind"], row["type"], (row["ne"][0], row["ne"][1]), points)
