"""What a hand-written profile must not say. Every message names the entry; the caller adds file and remedy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

from .entries import CHAINS, REALISATIONS, SwitchTime

if TYPE_CHECKING:
    from .profile import Profile

Entry = TypeVar("Entry")

# Smallest value of each whole number an entry may have.
_SMALLEST = {
    "memory_total": 0,  # 0: unknown
    "n_tokens": 1,
    "n_used": 1,
    "repeats": 1,
    "n_head": 1,
    "n_head_kv": 1,
    "head_dim_k": 1,
    "head_dim_v": 1,
    "depth": 0,
    "bytes": 1,
}
_CHOICES = {
    "direction": ("h2d", "d2h"),
    "memory": ("pageable", "pinned"),
    "realisation": REALISATIONS,
    "kind": CHAINS,
}
_SECTIONS = (
    "operators",
    "attention",
    "links",
    "switches",
    "overlaps",
    "concurrency",
    "chains",
    "shapes",
    "notes",
    "loads",
)


def check_entry(where: str, row: Mapping[str, Any], *, may_be_zero: bool) -> None:
    """Raises ValueError for a field of `row` that no measurement can give; absent fields are the caller's matter.

    where: the entry's place in the file, "operators[3]". may_be_zero: whether its time may be.
    """
    here = f"{where} ({', '.join(str(v) for k, v in row.items() if k not in ('median_s', 'spread_s', 'description'))})"
    if "median_s" in row and not _is_time(row["median_s"], may_be_zero):
        least = "0 or more" if may_be_zero else "more than 0"
        raise ValueError(f"{here}: median_s is {row['median_s']!r}, expected {least} finite seconds")
    for name in ("spread_s", "best_s"):
        if name in row and not _is_time(row[name], True):
            raise ValueError(f"{here}: {name} is {row[name]!r}, expected 0 or more finite seconds")
    if "cpus" in row and not _is_time(row["cpus"], True):
        raise ValueError(f"{here}: cpus is {row['cpus']!r}, expected 0 or more")
    for name in ("share", "clean"):
        if name in row and not (_is_time(row[name], True) and row[name] <= 1):
            raise ValueError(f"{here}: {name} is {row[name]!r}, expected a number from 0 to 1")
    for name, least_value in _SMALLEST.items():
        if name in row and not _is_count(row[name], least_value):
            raise ValueError(f"{here}: {name} is {row[name]!r}, expected a whole number of at least {least_value}")
    if "ne" in row and not (len(row["ne"]) >= 2 and all(_is_count(n, 1) for n in row["ne"])):
        raise ValueError(f"{here}: ne is {row['ne']!r}, expected (k, m) or (k, m, n_expert), each at least 1")
    for name, choices in _CHOICES.items():
        if name in row and row[name] not in choices:
            raise ValueError(
                f"{here}: {name} is {row[name]!r}, expected {' or '.join(c or 'nothing' for c in choices)}"
            )


def entries(kind: type[Entry], section: str, rows: Sequence[Mapping[str, Any]]) -> tuple[Entry, ...]:
    """Rows of the file as dataclasses; unknown keys are dropped so that newer writers may add notes.

    Raises ValueError for a row that lacks a field, or that no measurement can give.
    """
    known: dict[str, Any] = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    found = []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"{section}[{i}] is {row!r}, expected an object")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items() if k in known}
        check_entry(f"{section}[{i}]", values, may_be_zero=kind is SwitchTime)
        if missing := [f.name for f in known.values() if f.default is MISSING and f.name not in values]:
            raise ValueError(f"{section}[{i}] has no {', '.join(missing)}")
        found.append(kind(**values))
    return tuple(found)


def check_profile(profile: Profile) -> None:
    """Raises ValueError for a device that is listed twice, or that an entry names but the list does not."""
    names = [device.name for device in profile.devices]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"device {twice[0]!r} is listed {names.count(twice[0])} times, expected once")
    for section in _SECTIONS:
        for i, entry in enumerate(getattr(profile, section)):
            if entry.device not in names:
                raise ValueError(
                    f"{section}[{i}] is for the device {entry.device!r}, which is not listed under devices "
                    f"({', '.join(names) or 'none'})"
                )


def _is_time(value: object, may_be_zero: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value >= 0 if may_be_zero else value > 0


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
