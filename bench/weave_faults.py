"""What bench/weave_soak.py writes down of a fault, and how it sums up many."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KINDS = ("kill", "stop", "slow", "hog", "task", "result", "word", "quota", "drain", "replace")
CERTAIN = ("kill", "stop", "quota", "drain", "replace")  # of these kinds every one has to be noticed
NMSE, NMSE_ROW = 1e-6, 1e-5  # of all rows of a fault; of one, where roundings fell otherwise
TIE = 0.005  # standard deviations of the logits between two tokens: either may come out


@dataclass
class Likeness:
    """How logits are like those that they should be. wrong: rows; ties: rows of another token that was as good."""

    error: float = 0.0
    power: float = 0.0
    worst_row: float = 0.0
    wrong: int = 0
    ties: int = 0

    def add(self, found: np.ndarray, expected: np.ndarray) -> None:
        a, b = found.astype(np.float64), expected.astype(np.float64)
        error, power = ((a - b) ** 2).sum(axis=1), (b**2).sum(axis=1)
        worse = (b.max(axis=1) - np.take_along_axis(b, a.argmax(axis=1)[:, None], axis=1)[:, 0]) / b.std(axis=1)
        wrong = ~(error < NMSE_ROW * power) | (worse >= TIE)
        self.error += error.sum()
        self.power += power.sum()
        self.worst_row = max(self.worst_row, float((error / power).max()))
        self.wrong += int(wrong.sum())
        self.ties += int(((worse > 0) & ~wrong).sum())

    @property
    def nmse(self) -> float:
        return self.error / self.power


@dataclass
class Fault:
    """What was done and what came of it. begins: moments at which it struck; calls: (begin, end) of the hot model's."""

    number: int
    kind: str
    detail: str = ""
    begins: list[float] = field(default_factory=list)
    calls: list[tuple[float, float]] = field(default_factory=list, repr=False)
    noticed_s: float | None = None
    reason: str = ""
    back_s: float | None = None  # from the receiver's return until guests are there
    back_limit_s: float = 0.0  # by the pauses between tries
    likeness: Likeness = field(default_factory=Likeness)
    n_failed: int = 0  # steps that raised
    n_lost: int = 0
    n_crashed: int = 0  # receivers that ended by themselves
    alarms: list[str] = field(default_factory=list)  # of receivers that failed although nothing befell them
    over: bool = False
    attached: bool = False  # as it struck
    stuck: bool = False  # a receiver that lives does not answer

    @property
    def unnoticed(self) -> bool:
        return self.kind in CERTAIN and self.attached and self.noticed_s is None

    @property
    def bad(self) -> bool:
        gone = self.stuck or self.n_crashed > 0 or self.back_s is None
        return gone or self.unnoticed or self.wrong or self.n_failed > 0

    @property
    def wrong(self) -> bool:
        return self.likeness.wrong > 0 or not self.likeness.nmse < NMSE

    @property
    def longest_s(self) -> float:
        return max(end - begin for begin, end in self.calls)

    def inside(self, begin: float, end: float) -> float:
        """Seconds in calls between two moments."""
        return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.calls)


def summary(kind: str, faults: list[Fault], deadline_s: float) -> dict[str, Any]:
    noticed = [fault.noticed_s for fault in faults if fault.noticed_s is not None]
    alarms = [reason for fault in faults for reason in fault.alarms]
    back = [fault.back_s for fault in faults if fault.back_s is not None]
    return {
        "kind": kind,
        "faults": len(faults),
        "noticed": len(noticed),
        "noticed_ms": spread(noticed),
        "reasons": dict(Counter(fault.reason for fault in faults if fault.reason)),
        "noticed_late": sum(seconds > deadline_s for seconds in noticed),
        "unnoticed": sum(fault.unnoticed for fault in faults),
        "guests_lost": sum(fault.n_lost for fault in faults),
        "calls": sum(len(fault.calls) for fault in faults),
        "longest_call_ms": round(1e3 * max(fault.longest_s for fault in faults), 1),
        "wrong": sum(fault.wrong for fault in faults),
        "wrong_rows": sum(fault.likeness.wrong for fault in faults),
        "ties": sum(fault.likeness.ties for fault in faults),
        "worst_nmse": max(fault.likeness.nmse for fault in faults),
        "worst_row_nmse": max(fault.likeness.worst_row for fault in faults),
        "failed_steps": sum(fault.n_failed for fault in faults),
        "hangs": sum(fault.stuck for fault in faults),
        "crashed_receivers": sum(fault.n_crashed for fault in faults),
        "false_alarms": len(alarms),
        "alarms": dict(Counter(alarms)),
        "back": len(back),
        "back_ms": spread(back),
        "back_late": sum(fault.back_s is not None and fault.back_s > fault.back_limit_s for fault in faults),
        "bad": [fault.number for fault in faults if fault.bad],
    }


def spread(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = dict(zip(("median", "p99", "max"), np.quantile(seconds, [0.5, 0.99, 1.0]), strict=True))
    return {name: round(1e3 * float(value), 2) for name, value in values.items()}


def show(lines: list[dict[str, Any]], deadline_s: float) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=f"deadline {1e3 * deadline_s:.0f} ms; times in ms: median / 99 % / max")
    columns = {"kind": "fault", "faults": "n", "noticed": "noticed", "noticed_ms": "in"}
    columns |= {"longest_call_ms": "longest call"}
    columns |= {"guests_lost": "guests lost", "wrong": "wrong", "failed_steps": "failed", "hangs": "hangs"}
    columns |= {"crashed_receivers": "crashed", "false_alarms": "alarms", "back": "back", "back_ms": "in"}
    for name in columns.values():
        table.add_column(name, justify="left" if name == "fault" else "right")
    for of in lines:
        found = [of[name] for name in columns]
        table.add_row(*(" / ".join(f"{v:.0f}" for v in x.values()) if isinstance(x, dict) else str(x) for x in found))
    Console(width=140).print(table)
